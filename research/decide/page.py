# SPDX-License-Identifier: Apache-2.0
"""The verdicts as the documents have them: python -m research.decide.page --write."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fedplan.sweeps.comparisons import markdown_table
from research.decide.curves import by_bytes
from research.decide.question import QuestionError, QuestionFile, read_question
from research.decide.results import RESULTS, decided, read_results, report
from research.decide.verdicts import power

LAB = Path(__file__).parents[1]
PAGE = LAB / "pages" / "decided.md"
MARK = "## The verdicts\n"
EVIDENCE = LAB.parent / "docs" / "evidence"
PAGES = (
    LAB / "pages" / "claims.md",
    *(EVIDENCE / f"{name}.md" for name in ("fedfrozen", "safl", "pfeddc")),
)
"""Other pages that tell of verdicts, each at its marks."""
BY_BYTES = ("safl-bytes",)
"""Questions whose curves are drawn against bytes."""
END = "<!-- end -->"
NOT_RUN, LEFT_OUT = "asked, not run", "not shown by the log"
_TABLE = re.compile(rf"(<!-- decided: ([\w-]+) -->).*?{END}", re.DOTALL)
_WORD = re.compile(r"(`([\w-]+)` \(([\w.-]+ minus [\w.-]+)\): )\*\*[^*]+\*\*")


def told() -> str:
    """The tables of all questions that were run, and the list of those that were not."""
    files = sorted((LAB / "questions").glob("*.toml"))
    asked = [read_question(file) for file in files]
    there = [each for each in asked if read_results(each.name)]
    parts = [report(each, read_results(each.name)) for each in there]
    left = [each for each in asked if each not in there]
    if left:
        heads = ["question", "it asks", "comparisons", "seeds", "runs", "of them first", "power"]
        parts.append(
            "### Asked, and not run\n\n" + markdown_table(heads, [_row(each) for each in left])
        )
    return MARK + "\n" + "\n\n".join(each.strip() for each in parts) + "\n"


def drawn() -> dict[str, str]:
    """The figures of questions that were run, by the names of their files."""
    run = [name for name in BY_BYTES if (RESULTS / f"{name}.json").is_file()]
    asked = [read_question(LAB / "questions" / f"{name}.toml") for name in run]
    return {each.name: by_bytes(each).svg(alone=True) + "\n" for each in asked}


def filled(text: str) -> str:
    """A page with its tables of verdicts, and the words of single comparisons, as they are now."""
    text = _TABLE.sub(lambda found: f"{found[1]}\n\n{_decided(found[2])}\n\n{END}", text)
    return _WORD.sub(lambda found: f"{found[1]}**{word_of(found[2], found[3])}**", text)


def word_of(name: str, comparison: str) -> str:
    """What became of one comparison of a question."""
    asked = read_question(LAB / "questions" / f"{name}.toml")
    if comparison not in [each.name for each in asked.question.comparisons]:
        raise QuestionError(f"{name} has no comparison {comparison!r}")
    runs = read_results(name)
    verdicts, _ = decided(asked, runs)
    said = {each.asked.name: each for each in verdicts}[comparison]
    return said.word if said.seeds else LEFT_OUT if runs else NOT_RUN


def _decided(name: str) -> str:
    runs = read_results(name)
    if not runs:
        return f"`{name}` is {NOT_RUN}."
    told = report(read_question(LAB / "questions" / f"{name}.toml"), runs)
    return told.strip().replace("### ", "**", 1).replace("\n", "**\n", 1)


def _row(asked: QuestionFile) -> list[str]:
    question = asked.question
    powers = [power(question, each) for each in question.comparisons]
    return [
        f"`{asked.name}`",
        question.asks,
        str(len(question.comparisons)),
        str(len(question.seeds)),
        str(len(question.seeds) * len(question.needed())),
        str(len(question.seeds) * len(question.needed(first=True))),
        f"{min(powers):.2f} to {max(powers):.2f}",
    ]


def main() -> None:
    if "--write" not in sys.argv[1:]:
        sys.stdout.write(told())
        return
    before = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(before + told())
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    for name, drawing in drawn().items():
        (RESULTS / f"{name}.svg").write_text(drawing)


if __name__ == "__main__":
    main()
