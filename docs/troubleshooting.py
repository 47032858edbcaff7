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
from silent_mistakes import MISTAKES as SILENT_MISTAKES  # noqa: E402

from fedplan.reports.plan_warnings import PLAN_WARNINGS  # noqa: E402
from fedplan.reports.run_warnings import RESULT_WARNINGS  # noqa: E402
from fedplan.reports.study_warnings import DATA_WARNINGS  # noqa: E402

START = "<!-- made by docs/troubleshooting.py: all that follows -->"
"""The page above this line is written by hand."""
WARNINGS_HEAD = """

## Warnings of a run

Each of these {count} mistakes runs to its end, and the run has this warning: at the end of `fedplan run`, in `fedplan status`, in the report, in `--json`, and as
`Run.warnings`. With each stands a remedy. `fedplan run --strict` exits with code 1 if there are any, and does not start if some are known before; `fedplan explain`
shows these, too.

| mistake | warning | meaning |
|---|---|---|
"""
HEAD = """

## Messages of the command line

Each of these {count} mistakes ends with exit code 2 and changes no file. `study.toml` is a small study of images; `done` is a finished run of it.
"""


def written(page: str) -> str:
    """The page with its generated part written again."""
    meanings = PLAN_WARNINGS | DATA_WARNINGS | RESULT_WARNINGS
    parts = [page.partition(START)[0].rstrip("\n"), "\n\n", START]
    parts.append(WARNINGS_HEAD.format(count=len(SILENT_MISTAKES)))
    parts += [
        f"| {each.what} | `{each.code}` | {meanings[each.code]} |\n" for each in SILENT_MISTAKES
    ]
    parts.append(HEAD.format(count=len(MISTAKES)).removeprefix("\n"))
    with TemporaryDirectory() as folder:
        made(Path(folder))
        for each in MISTAKES:
            _, output = asked(Path(folder), each.command)
            text = message(output, Path(folder))
            parts.append(f"\n### {each.what}\n\n```text\n$ fedplan {each.command}\n{text}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
