# SPDX-License-Identifier: Apache-2.0
"""Write docs/troubleshooting.md from mistakes that are made here and now."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "kit"))

from mistakes import MISTAKES, asked, made, message  # noqa: E402

HEAD = """# Troubleshooting, by the message

Each error names the thing, the value and the remedy. None is a traceback, and none leaves a file behind that blocks the next try. A message
of the command line ends with exit code 2.

This page is written by `python docs/troubleshooting.py`, which makes these {count} mistakes and writes down what it is told. A test makes them too,
and holds the page to it. `study.toml` is a small study of pictures; `done` is a run of it that has ended.

For what goes wrong while a run goes on, at a server or at a site, see [operation](operations.md).
"""


def written() -> str:
    """The whole page."""
    parts = [HEAD.format(count=len(MISTAKES))]
    with TemporaryDirectory() as folder:
        made(Path(folder))
        for each in MISTAKES:
            _, words = asked(Path(folder), each.command)
            told = message(words, Path(folder))
            parts.append(f"\n## {each.what}\n\n```text\n$ fedplan {each.command}\n{told}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "troubleshooting.md").write_text(written(), encoding="utf-8")
