# SPDX-License-Identifier: Apache-2.0
"""Write docs/commands.md from the commands themselves: python docs/commands.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer

from fedplan.cli import app

FILE = Path(__file__).parent / "commands.md"
HEAD = """# Commands

This page is written by `python docs/commands.py` from the commands themselves, and a test holds it to them. `fedplan COMMAND --help` says
the same in a terminal.

| For all commands | |
| --- | --- |
| `--json` | One JSON document on stdout, and nothing else there. Errors and progress go to stderr. `status` and `logs` print a line of JSON for each thing, so that they can be followed. |
| Exit code | 0: done. 1: it was looked at and is not sound (`verify`, `egress`, `propose`, `attack`, `site doctor`). 2: the question was wrong, and a message says what to mend. 130: stopped by Ctrl-C. |
| Progress | `run` shows how many clients of the open round are done, and the time left, from the first client on. Where stdout is no terminal there is no bar: only the line of each round. |
| `--version` | The version. |
| Completion | `fedplan --install-completion` for bash, zsh, fish and PowerShell; then start a new shell. `--show-completion` prints the script instead. |
"""


def commands(command: click.Command, words: str) -> Iterator[tuple[str, click.Command]]:
    """All commands, those of groups too, in their order."""
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from commands(each, f"{words} {name}")
    else:
        yield words, command


def cell(text: str) -> str:
    """A text within a table."""
    return " ".join(text.split()).replace("|", "\\|")


def default(param: click.Parameter) -> str:
    """What a parameter is without being said; of a switch that is nothing."""
    if param.required:
        return "required"
    value = param.default() if callable(param.default) else param.default
    if value in (None, "", False, ()) or repr(value).startswith("Sentinel"):
        return ""
    return f"`{value}`"


def row(param: click.Parameter) -> str:
    """One parameter in a line of a table."""
    name = ", ".join(param.opts) if isinstance(param, click.Option) else (param.name or "").upper()
    return f"| `{name}` | {cell(getattr(param, 'help', None) or '')} | {default(param)} |"


def section(words: str, command: click.Command) -> str:
    """One command: what it does, what it takes, and an example."""
    examples = "\n".join(re.findall(r"^fedplan .*$", command.epilog or "", flags=re.M))
    rows = "\n".join(row(param) for param in command.params)
    about = " ".join((command.help or "").split())
    table = f"| | | without it |\n| --- | --- | --- |\n{rows}\n\n" if rows else ""
    return f"\n## {words}\n\n{about}\n\n{table}```bash\n{examples}\n```\n"


def written() -> str:
    """The whole page."""
    found = commands(typer.main.get_command(app), "fedplan")
    return HEAD + "".join(section(words, command) for words, command in found)


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
