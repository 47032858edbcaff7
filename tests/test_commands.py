# SPDX-License-Identifier: Apache-2.0
"""Laws over every command: its help shows all, has an example that it takes, and it speaks JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

import fedplan
from fedplan.cli import app
from fedplan.federation.ledger.status import RunState
from fedplan.reports.status import run_snapshot
from fedplan.runners.flower.starter import new_federation

SERVING = "it serves until it is ended, and prints what the node or the SuperLink logs"
NO_JSON = dict.fromkeys(("site serve", "server link", "server edge"), SERVING)
"""Commands that do not take --json, and why."""
LINES = ("status", "logs")
"""Commands that may follow a run: they print a line of JSON for each thing that happens."""


def walked(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from walked(each, (*words, name))
    else:
        yield " ".join(words), command


COMMANDS = dict(walked(typer.main.get_command(app)))


def examples(command: Any) -> list[str]:
    return re.findall(r"^fedplan (.*)$", command.epilog or "", flags=re.M)


def shown(*args: str) -> str:
    """A help screen without its frame, in one line."""
    done = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, [*args, "--help"])
    assert done.exit_code == 0, done.output
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", done.output).split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_shows_every_parameter_and_an_example(name: str) -> None:
    command, screen = COMMANDS[name], shown(*name.split())
    for param in command.params:
        said = getattr(param, "help", "") or ""
        assert said, f"{name} says nothing of {param.name}"
        assert " ".join(said.split()) in screen, (name, param.name, screen)
    assert command.help and examples(command), name
    for each in examples(command):
        assert f"fedplan {each}" in screen, (each, screen)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_commands_that_can_be_typed(name: str) -> None:
    for each in examples(COMMANDS[name]):
        words = shlex.split(each)
        assert words[: len(name.split())] == name.split()
        # Parsed and not run: what the words name is not here.
        COMMANDS[name].make_context(name, words[len(name.split()) :], resilient_parsing=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_speaks_json_or_says_why_not(name: str) -> None:
    takes = "--json" in [opt for param in COMMANDS[name].params for opt in param.opts]
    assert takes != (name in NO_JSON), name


def test_no_module_imports_click_itself() -> None:
    """Some typers stand on click, and newer ones bring one along: both have to do."""
    for file in sorted(Path(fedplan.__file__).parent.rglob("*.py")):
        assert not re.search(r"^\s*(import|from) click\b", file.read_text(), flags=re.M), file


def test_the_version_is_said() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"fedplan {fedplan.__version__}\n")


@pytest.mark.parametrize(
    ("shell", "words", "wanted"),
    [
        ("bash", "fedplan ver", "verify"),
        ("bash", "fedplan site app", "approve"),
        ("bash", "fedplan run --res", "--resume"),
        ("zsh", "fedplan meth", "methods"),
    ],
)
def test_a_shell_completes_commands_and_options(shell: str, words: str, wanted: str) -> None:
    asked = {
        "_FEDPLAN_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_TYPER_COMPLETE_ARGS": words,
    }
    program = "import sys; sys.argv = ['fedplan']; from fedplan.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert wanted in done.stdout, (done.stdout, done.stderr)


def test_the_reference_of_the_commands_is_that_of_the_commands() -> None:
    here = Path(__file__).parent.parent / "docs"
    written = runpy.run_path(str(here / "commands.py"))["written"]
    assert (here / "commands.md").read_text() == written(), "make it anew: python docs/commands.py"


COMMAND = [sys.executable, "-c", "from fedplan.cli import main; main()"]


@pytest.mark.parametrize(("rounds", "code"), [("3", 0), ("none", 2)])
def test_a_run_whose_reader_is_gone_ends_as_any_other(here: Path, rounds: str, code: int) -> None:
    """`fedplan run | head -0`, for stdout and stderr."""
    reads, writes = os.pipe()
    os.close(reads)
    words = [*COMMAND, "run", "study.toml", "--set", f"train.rounds={rounds}"]
    done = subprocess.run(words, stdout=writes, stderr=writes)
    os.close(writes)
    assert done.returncode == code
    if not code:
        assert run_snapshot("runs/tiny").state == RunState.DONE


def test_a_run_whose_terminal_is_closed_goes_on(here: Path) -> None:
    """With a bar that is drawn again and again, and the signal that a closed terminal sends."""
    ours, theirs = pty.openpty()
    words = [*COMMAND, "run", "study.toml", "--set", "train.rounds=20"]
    begun = subprocess.Popen(words, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    while b"round" not in os.read(ours, 4096):
        pass
    os.close(ours)
    begun.send_signal(signal.SIGHUP)
    assert begun.wait(300) == 0
    assert run_snapshot("runs/tiny").round == 20


def test_a_site_whose_reader_and_terminal_are_gone_serves_until_it_is_ended(tmp_path: Path) -> None:
    """`fedplan site serve | head -0`, and the signal that a closed terminal sends."""
    new_federation(tmp_path / "fed", ["north"], insecure=True)
    site, (reads, writes) = tmp_path / "fed/sites/north", os.pipe()
    os.close(reads)
    words = [*COMMAND, "site", "serve", "--site", str(site)]
    begun = subprocess.Popen(words, stdout=writes, stderr=writes, start_new_session=True)
    os.close(writes)
    log, until = site / "state/log.jsonl", time.monotonic() + 120
    while not (log.exists() and "site started" in log.read_text()):
        assert begun.poll() is None and time.monotonic() < until
        time.sleep(0.2)
    begun.send_signal(signal.SIGHUP)
    begun.send_signal(signal.SIGTERM)
    assert begun.wait(60) == 0
    assert "site stopped" in log.read_text()


def test_stdout_is_one_document_and_nothing_else(here: Path) -> None:
    """Of all commands that ask nothing of a federation; a run is made on the way."""
    draft = ("new", "study", "digits.npz", "--model", "vit-tiny-16", "-o", "drafted.toml")
    asked = (
        ("parts", "vit-tiny-16"),
        ("explain", "vit-tiny-16", "share()"),
        ("draw", "vit-tiny-16", "share()", "drawn.svg"),
        ("methods",),
        ("methods", "fedper"),
        ("data", "study.toml"),
        ("digest", "study.toml"),
        draft,
        ("run", "study.toml", "--output", "out", "--set", "train.rounds=1"),
        ("attach", "out"),
        ("status", "out"),
        ("verify", "out"),
        ("export", "out", "model", "--global"),
        ("keys", "ward", "--host", "a.example", "--site", "north"),
        ("new", "federation", "union", "--site", "north", "--insecure"),
        ("new", "site", "west", "--federation", "union"),
    )
    for words in asked:
        done = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*words, "--json"])
        assert done.exit_code == 0, (words, done.output)
        assert json.loads(done.stdout), words
    done = CliRunner().invoke(app, ["logs", "out", "--json"])
    assert all(json.loads(line) for line in done.stdout.splitlines())
    wrong = CliRunner().invoke(app, ["stop", "out", "--json"])
    assert (wrong.exit_code, wrong.stdout) == (2, ""), wrong.output
