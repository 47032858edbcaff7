# SPDX-License-Identifier: Apache-2.0
"""Write docs/commands.md from the commands themselves: python docs/commands.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup, TyperOption

from fedplan.cli import app

CHECKED = "<!-- checked by: tests/test_commands.py, which parses it: its files are not here -->"
FILE = Path(__file__).parent / "commands.md"
HEAD = """# Commands

This page is written by `python docs/commands.py` from the commands themselves, and a test holds it to them. `fedplan COMMAND --help` says
the same in a terminal.

| For all commands | |
| --- | --- |
| `--json` | One JSON document on stdout, and nothing else there. Errors and progress go to stderr. `status`, `logs` and `sweep` print a line of JSON for each thing, so that they can be followed. |
| Exit code | 0: done. 1: it was looked at and is not sound (`verify`, `egress`, `report` of a site, `propose`, `attack`, `site doctor`). 2: the question was wrong, and a message says what to mend. 130: stopped by Ctrl-C. |
| Progress | `run` shows how many clients of the open round are done, and the time left, from the first client on. Where stdout is no terminal there is no bar: only the line of each round. |
| `--version` | The version. |
| Completion | `fedplan --install-completion` for bash, zsh, fish and PowerShell; then start a new shell. `--show-completion` prints the script instead. |

## From a table to a run

<!-- run by: tests/studies/test_starter.py, with a table and a model of its own -->

```bash
fedplan new study reviews.csv --model ./model
fedplan data study.toml
fedplan run study.toml --output run
fedplan verify run
```

`new study` looks at the first 2,000 rows of the table, and writes a study with a comment at each choice. What it found it prints; what it got wrong you say:

| It looks for | By | Say it yourself |
| --- | --- | --- |
| the input | a column of conversations, of words, of pictures, or of texts; of several, one called `text`, `review`, `image`, ..., else the longest | `--input` |
| the label | a column called `label`, `class`, `target`, ...; else one with few different values | `--label` |
| the clients | a column called `client`, `site`, `hospital`, `user`, ...; without one, rows are dealt out by chance, with labels skewed | `--client`, or `--clients` for how many |
| the task | pictures with labels are `image-classification`, texts with labels `text-classification`, with measured numbers `regression`; a prompt and a response, or messages, `instruction`; texts alone `causal-lm` | `--task` |
| a common test | a split called `test`, `validation`, `valid` or `dev` beside one called `train`: a column `split`, files of a folder, a folder of `datasets`, arrays of an `.npz` | edit `[data]` |

It refuses columns with gaps, a model of pictures for texts, and to write over a file. `data` divides the rows as the run will, and draws them: how many each client trains on and is
tested on, and a bar for each label, as high as its share of the client's rows. How unlike clients are is one number: the total variation between a client's labels and those of all,
the mean over rows. It is 0 if all are alike.
"""


def commands(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    """All commands, those of groups too, in their order."""
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from commands(each, f"{words} {name}")
    else:
        yield words, command


def cell(text: str) -> str:
    """A text within a table."""
    return " ".join(text.split()).replace("|", "\\|")


def default(param: Any) -> str:
    """What a parameter is without being said; of a switch that is nothing."""
    if param.required:
        return "required"
    value = param.default() if callable(param.default) else param.default
    if value in (None, "", False, ()) or repr(value).startswith("Sentinel"):
        return ""
    return f"`{value}`"


def row(param: Any) -> str:
    """One parameter in a line of a table."""
    name = ", ".join(param.opts) if isinstance(param, TyperOption) else (param.name or "").upper()
    return f"| `{name}` | {cell(getattr(param, 'help', None) or '')} | {default(param)} |"


def section(words: str, command: Any) -> str:
    """One command: what it does, what it takes, and an example."""
    examples = "\n".join(re.findall(r"^fedplan .*$", command.epilog or "", flags=re.M))
    rows = "\n".join(row(param) for param in command.params)
    about = " ".join((command.help or "").split())
    table = f"| | | without it |\n| --- | --- | --- |\n{rows}\n\n" if rows else ""
    return f"\n## {words}\n\n{about}\n\n{table}{CHECKED}\n\n```bash\n{examples}\n```\n"


def written() -> str:
    """The whole page."""
    found = commands(typer.main.get_command(app), "fedplan")
    return HEAD + "".join(section(words, command) for words, command in found)


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
