# SPDX-License-Identifier: Apache-2.0
"""The verdicts as docs/decided.md has them: python -m lab.decide.page --write."""

from __future__ import annotations

import sys
from pathlib import Path

from fedplan.sweeps.tables import table
from lab.decide.question import QuestionFile, read_question
from lab.decide.results import RESULTS
from lab.decide.verdicts import power

LAB = Path(__file__).parents[1]
PAGE = LAB.parent / "docs" / "decided.md"
MARK = "## The verdicts\n"


def told() -> str:
    """The tables of all questions that were run, and the list of those that were not."""
    files = sorted((LAB / "questions").glob("*.toml"))
    there = [f for f in files if (RESULTS / f"{f.stem}.md").is_file()]
    parts = [(RESULTS / f"{file.stem}.md").read_text().strip() for file in there]
    left = [read_question(file) for file in files if file not in there]
    if left:
        heads = ["question", "it asks", "comparisons", "seeds", "runs", "of them first", "power"]
        parts.append("### Asked, and not run\n\n" + table(heads, [_row(each) for each in left]))
    return MARK + "\n" + "\n\n".join(each.strip() for each in parts) + "\n"


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


if __name__ == "__main__":
    main()
