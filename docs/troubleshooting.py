# SPDX-License-Identifier: Apache-2.0
"""Write the generated part of docs/troubleshooting.md: mistakes, made now, with their messages."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
PAGE = HERE / "troubleshooting.md"
sys.path.insert(0, str(HERE.parent / "tests" / "kit"))

from mistakes import MISTAKES, asked, made, message  # noqa: E402

START = "<!-- made by docs/troubleshooting.py: all that follows -->"
"""The page above this line is written by hand."""
HEAD = """

## Messages of the command line

Each of these {count} mistakes ends with exit code 2 and changes no file. `study.toml` is a small study of images; `done` is a finished run of it.
"""


def written(page: str) -> str:
    """The page with its generated part written again."""
    parts = [page.partition(START)[0].rstrip("\n"), "\n\n", START, HEAD.format(count=len(MISTAKES))]
    with TemporaryDirectory() as folder:
        made(Path(folder))
        for each in MISTAKES:
            _, output = asked(Path(folder), each.command)
            text = message(output, Path(folder))
            parts.append(f"\n### {each.what}\n\n```text\n$ fedplan {each.command}\n{text}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
