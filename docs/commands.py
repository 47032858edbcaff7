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

For everyone who types `fedplan`: each command with its options, their defaults, and an example. `python docs/commands.py` writes this page from the
commands; `fedplan COMMAND --help` prints the same.

| all commands | meaning |
| --- | --- |
| `--json` | One JSON document on stdout and nothing else; errors and progress go to stderr. `status`, `logs` and `sweep` print one line of JSON for each item. |
| Exit code | 0: done. 1: the check failed (`verify`, `egress`, `statistics`, `report` of a site, `propose`, `site doctor`, `site statistics`). 2: invalid arguments or study; the message names the remedy. 130: stopped by Ctrl-C. |
| Progress | `run` shows a bar with the clients done in the open round and the time left. Without a terminal it prints one line for each round. |
| `--version` | Print the version. |
| Completion | `fedplan --install-completion` for bash, zsh, fish and PowerShell; then start a new shell. `--show-completion` prints the script. |

## From a table to a run

<!-- run by: tests/studies/test_starter.py, with a table and a model of its own -->

```bash
fedplan new study reviews.csv --model ./model
fedplan data study.toml
fedplan run study.toml --output run
fedplan verify run
```

`new study` reads the first 2,000 rows of the table and writes a study with a comment for each choice. Options replace a wrong guess:

| choice | found by | option |
| --- | --- | --- |
| input | a column of conversations, tokens, images or texts; of several, one named `text`, `review`, `image`, ..., else the longest | `--input` |
| label | a column named `label`, `class`, `target`, ...; else the only one with few different values, or of numbers. Of several, the command asks for one. Dates, ids and clients are no labels | `--label` |
| clients | a column named `client`, `site`, `hospital`, `user`, ...; without one, a Dirichlet partition with unequal labels | `--client`, or `--clients` for their number |
| task | images with labels: `image-classification`; texts with labels: `text-classification`, with numbers: `regression`; with several labels (lists, or `fever;cough`): `multi-label`, `image-multi-label`; prompt and response, or messages: `instruction`; texts alone: `causal-lm` | `--task` |
| test set | a split named `test`, `validation`, `valid` or `dev` beside `train`: a column `split`, files of a folder, a folder of `datasets`, arrays of an `.npz` | edit `[data]` |

A column such as `patient_id` becomes `data.group`. It counts rows without a value, which a run leaves out, rejects an image model for texts, and never overwrites a file. `data` divides the examples as the run does, and prints for each
client its numbers of training and test examples and a bar for each label. Its last line is the mean total variation distance between a client's labels and all labels: 0
means that all clients are alike.
"""

FUNCTIONS = {
    "run": "fedplan.run_study",
    "status": "fedplan.reports.run_snapshot",
    "stop": "fedplan.reports.stop_run",
    "attach": "fedplan.attach",
    "logs": "fedplan.storage.read_log",
    "sweep": "fedplan.sweep",
    "compare": "fedplan.compare",
    "report": "fedplan.report",
    "explain": "fedplan.explain",
    "parts": "fedplan.params_of",
    "propose": "fedplan.models.propose_layer_map",
    "verify": "fedplan.verify_run",
    "evaluate": "fedplan.studies.evaluate_run",
    "export": "fedplan.export_run",
    "privacy": "fedplan.reports.study_explanation.read_privacy_statement",
    "egress": "fedplan.sites.egress.read_egress_report",
    "faults": "fedplan.federation.ledger.faults.read_faults",
    "digest": "fedplan.studies.build_experiment",
    "methods": "fedplan.methods.registry.method_info",
    "data": "fedplan.reports.data_distribution",
    "draw": "fedplan.reports.draw_roles",
    "keys": "fedplan.runners.flower.keys.make_keys",
    "new study": "fedplan.studies.starter.new_study",
    "new federation": "fedplan.runners.flower.starter.new_federation",
    "new site": "fedplan.runners.flower.starter.new_site",
    "site inbox": "fedplan.sites.Inbox",
    "site show": "fedplan.sites.review_study",
    "site statement": "fedplan.sites.Approvals",
    "site approve": "fedplan.sites.Approvals",
    "site refuse": "fedplan.sites.Approvals",
    "site withdraw": "fedplan.sites.Approvals",
    "site policy": "fedplan.sites.read_policy",
    "site keys": "fedplan.runners.flower.keys.make_site_keys",
    "site peers": "fedplan.runners.site.read_peer_fingerprints",
    "site serve": "fedplan.sites.gateway.serve_site",
    "site rejoin": "fedplan.sites.gateway.allow_rejoin",
    "site doctor": "fedplan.sites.doctor.check_site",
    "site statistics": "fedplan.sites.statistics.site_statistics",
    "statistics": "fedplan.runners.flower.statistics.statistics_on_superlink",
    "server link": "fedplan.runners.flower.superlink.run_superlink",
    "server edge": "fedplan.runners.flower.edge.serve_edge",
    "server register": "fedplan.runners.flower.superlink.SuperLink",
    "server revoke": "fedplan.runners.flower.superlink.SuperLink",
    "server sites": "fedplan.runners.flower.superlink.SuperLink",
}
"""The Python function or class behind each command."""


def commands(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    """All commands with their full names, subcommands included."""
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from commands(each, f"{words} {name}")
    else:
        yield words, command


def cell(text: str) -> str:
    """A text within a table."""
    return " ".join(text.split()).replace("|", "\\|")


def default(param: Any) -> str:
    """The default of a parameter; empty for a switch."""
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
    """One command: description, Python function, parameters and example."""
    examples = "\n".join(re.findall(r"^fedplan .*$", command.epilog or "", flags=re.M))
    rows = "\n".join(row(param) for param in command.params)
    about = " ".join((command.help or "").split())
    table = f"| parameter | meaning | default |\n| --- | --- | --- |\n{rows}\n\n" if rows else ""
    function = FUNCTIONS.get(words.removeprefix("fedplan "), "")
    about += f" In Python: `{function}`." if function else ""
    return f"\n## {words}\n\n{about}\n\n{table}{CHECKED}\n\n```bash\n{examples}\n```\n"


def written() -> str:
    """The whole page."""
    found = commands(typer.main.get_command(app), "fedplan")
    return HEAD + "".join(section(words, command) for words, command in found)


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
