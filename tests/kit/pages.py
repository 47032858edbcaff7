# SPDX-License-Identifier: Apache-2.0
"""The documents as pages of blocks, commands, links and anchors; by itself it counts them.

A block of commands is run by the tests, or a comment before it says who runs it or why nobody does.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITTEN = ("", "tutorials/", "how-to/", "explanation/", "evidence/")
"""Folders of docs/ with pages written by hand; of docs/reference/ only the glossary is."""
GLOSSARY = "docs/reference/glossary.md"
PATTERNS = (*(f"docs/{folder}*.md" for folder in WRITTEN), GLOSSARY)
DOCUMENTS = ["README.md", "AGENTS.md"] + [
    page.relative_to(ROOT).as_posix() for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))
]
GENERATED = [
    f"docs/reference/{page.name}"
    for page in sorted((ROOT / "docs/reference").glob("*.md"))
    if page.name != "glossary.md"
]
RESEARCH = [
    f"research/pages/{page.name}" for page in sorted((ROOT / "research/pages").glob("*.md"))
]
"""Pages of results, written by the scripts of research."""
PROJECT = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/llms.txt"]
PLAYED = "<!-- played"
"""How a page begins that is played whole, from top to bottom in an empty folder."""
SHELL = ("sh", "bash", "console")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
EXCUSE = re.compile(r"<!-- (not run|run by|checked by): ([^>]+?) -->\s*\Z")
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its lines, and what is said before it of who runs it."""

    page: str
    language: str
    text: str
    excuse: str = ""
    why: str = ""

    @property
    def file(self) -> str:
        """The name of the file that a reader saves it as, if its first line says one."""
        found = re.match(r"# ([\w-]+\.\w+)\n", self.text)
        return found[1] if found else ""

    @property
    def done(self) -> str:
        """What becomes of it: run, checked, run elsewhere, not run, or nothing to run."""
        if self.excuse:
            return self.excuse
        if played(self.page) or self.language == "python":
            return "run"
        if self.language == "console":
            return "run" if self.text.startswith("$ fedplan ") else ""
        return {"toml": "checked", "pycon": "run"}.get(self.language, "")


@cache
def canonical_text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def played(page: str) -> bool:
    return canonical_text(page).startswith(PLAYED)


def blocks(page: str) -> list[Block]:
    found = list[Block]()
    for match in FENCE.finditer(canonical_text(page)):
        said = EXCUSE.search(canonical_text(page)[: match.start()])
        words = (said[1], said[2]) if said else ("", "")
        found.append(Block(page, match[2], match[3], *words))
    return found


def commands(page: str) -> Iterator[list[str]]:
    """Every command of fedplan that a page names, in blocks and in lines, as words."""
    for block in blocks(page):
        if block.language in SHELL:
            joined = block.text.replace("\\\n", " ")
            for line in joined.splitlines():
                yield from _words(line.removeprefix("$ "))
    for inline in re.findall(r"`(fedplan [^`\n]+)`", FENCE.sub("", canonical_text(page))):
        yield from _words(inline.replace("\\|", "|"))


def _words(line: str) -> Iterator[list[str]]:
    for piece in re.split(r"&&|;|\$\(|\bdo\b|\bthen\b|\buntil\b|\|\s(?!\w+\))", line):
        try:
            words = shlex.split(piece.rstrip(") &"), comments=True)
        except ValueError:
            continue  # a piece that was cut inside quotes: a plan
        if words and words[0] == "fedplan":
            yield words[1:]


def links(page: str) -> list[str]:
    return LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", canonical_text(page))))


@cache
def anchors(page: str) -> frozenset[str]:
    """Where a link may lead within a page, as GitHub and the site both name it."""
    text, seen, found = FENCE.sub("", canonical_text(page)), Counter[str](), set[str]()
    for heading in re.findall(r"^#+ (.+?)\s*$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}_{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found | set(re.findall(r'<a id="([^"]+)"', text)))


def counted() -> dict[str, int]:
    """How many there are of what, over all documents."""
    all_blocks = [b for page in DOCUMENTS for b in blocks(page)]
    done = Counter(f"blocks {b.done}" if b.done else f"blocks of {b.language}" for b in all_blocks)
    named = sum(1 for page in DOCUMENTS for _ in commands(page))
    led = sum(len(links(page)) for page in [*DOCUMENTS, *GENERATED, *PROJECT, *RESEARCH])
    whole = {"pages": len(DOCUMENTS) + len(GENERATED), "blocks": len(all_blocks)}
    return {**whole, **dict(sorted(done.items())), "commands named": named, "links": led}


if __name__ == "__main__":
    for name, number in counted().items():
        print(f"{number:6} {name}")
