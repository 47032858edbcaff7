# SPDX-License-Identifier: Apache-2.0
"""Whatever a file holds, a command ends in an answer or in a message, and never in a trace."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import STUDY, run, some_digits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from often import often
from typer.testing import CliRunner

from fedplan.cli import app
from fedplan.federation.ledger.egress import EgressEntry, EgressLog

PLAN = STUDY[STUDY.index("plan =") : STUDY.index("[train]")]
PRIVATE = '[privacy]\nunit = "client"\nepsilon = 8.0\nnoise_multiplier = 9.0\n'
SITE = {
    "site": "north",
    "experiment": "tiny/0",
    "plan": "share()",
    "model": "00",
    "fingerprint": "00",
    "compression": "plain",
    "traits": {},
    "limits": {"rounds": 3, "bytes": 0, "epsilon": 0.0},
}
LEFT = EgressEntry(
    "update",
    "north",
    "tiny/0",
    round=1,
    request="r",
    upload_bytes=8,
    other_bytes=4,
    download_bytes=2,
    parts={"mlp": 8},
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study, a run of it, a manifest, a site's record and keys: all that commands read."""
    folder = tmp_path_factory.mktemp("inputs")
    some_digits(folder)
    study = STUDY.replace("dropout_fraction = 0.1", "fraction = 0.9").replace(
        PLAN, 'name = "fedper"\n'
    )
    (folder / "study.toml").write_text(study.replace("rounds = 3", "rounds = 2") + PRIVATE)
    code, out = run("run", str(folder / "study.toml"), "--output", str(folder / "run"))
    assert code == 0, out
    code, out = run("parts", "vit-tiny-16", "--json")
    (folder / "parts.json").write_text(out)
    (folder / "site").mkdir()
    (folder / "site/agreement.json").write_text(json.dumps(SITE))
    for _ in range(2):
        EgressLog(folder / "site").append(LEFT)
    assert run("keys", str(folder / "keys"), "--host", "a.example", "--site", "north")[0] == 0
    return folder


COMMANDS: dict[str, tuple[str, ...]] = {
    "parts": ("parts", "parts.json"),
    "explain": ("explain", "parts.json", "chain(share(), freeze(first(1)), keep(head))"),
    "draw": ("draw", "parts.json", "share()", "drawn.svg"),
    "explain study": ("explain", "study.toml"),
    "digest": ("digest", "study.toml"),
    "privacy study": ("privacy", "study.toml"),
    "verify": ("verify", "run"),
    "privacy": ("privacy", "run"),
    "export": ("export", "run", "out", "--client", "client-00"),
    "resume": ("run", "--resume", "run", "--set", "train.rounds=3"),
    "again": ("run", "study.toml", "--output", "run"),
    "egress": ("egress", "site"),
    "egress json": ("egress", "site", "--json"),
    "keys": ("keys", "keys", "--host", "a.example", "--site", "north", "--site", "south"),
}
READ = {
    "parts": ["parts.json"],
    "explain": ["parts.json"],
    "draw": ["parts.json"],
    "explain study": ["study.toml"],
    "digest": ["study.toml"],
    "privacy study": ["study.toml"],
    "verify": ["run/study.json", "run/manifest.json", "run/ledger.jsonl", "run/global/2.json"],
    "privacy": ["run/study.json", "run/privacy/charges.jsonl"],
    "export": ["run/study.json", "run/manifest.json", "run/task.json", "run/global/2.json"],
    "resume": ["run/study.json", "run/ledger.jsonl", "run/global/2.json"],
    "again": ["study.toml"],
    "egress": ["site/agreement.json", "site/egress.jsonl", "site/egress.jsonl.head"],
    "egress json": ["site/agreement.json", "site/egress.jsonl"],
    "keys": ["keys/server.crt"],
}
HARMLESS = {("keys/server.crt", "gone")}  # it is made anew
SLOW = ("export", "resume", "explain study", "digest", "keys")


def asked(made: Path, tmp: Path, command: str, file: str, damage: Callable[[Path], None]) -> Any:
    """How a command ends if a file that it reads was damaged."""
    shutil.rmtree(tmp, ignore_errors=True)
    shutil.copytree(made, tmp)
    damage(tmp / file)
    before = os.getcwd()
    os.chdir(tmp)
    try:
        return CliRunner(env={"COLUMNS": "100"}).invoke(app, list(COMMANDS[command]))
    finally:
        os.chdir(before)


def require_plain_error(result: Any) -> None:
    """An answer, or one message that says whose it is."""
    fault = result.exception
    assert fault is None or isinstance(fault, SystemExit), repr(fault)
    assert "Traceback" not in result.output
    assert result.exit_code in (0, 1, 2)
    if result.exit_code == 2:
        assert result.stderr.startswith("fedplan: "), result.stderr
    if result.exit_code == 1:
        assert result.stderr.strip()


def replaced(content: bytes) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.write_bytes(content)

    return damage


def gone(file: Path) -> None:
    file.unlink()


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


WHOLE: dict[str, Callable[[Path], None]] = {
    "gone": gone,
    "a folder": a_folder,
    "zeros": replaced(b"\x00" * 300),
    "bytes": replaced(bytes(range(256))),
    "null": replaced(b"null"),
    "a list": replaced(b"[1]\n"),
    "an object": replaced(b"{}\n"),
    "a number": replaced(b"9" * 5000),
    "deep": replaced(b"[" * 100_000),
    "deep objects": replaced(b'{"a":' * 100_000),
    "deep tables": replaced(b"a = " + b"{a=" * 5000),
    "a long name": replaced(b"a" + b".a" * 20_000 + b" = 1"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_is_something_else_is_a_message(
    made: Path, tmp_path: Path, command: str
) -> None:
    """Not so the ledger of a run that goes on, whose committed length is what counts."""
    names = list(WHOLE)[:: 3 if command in SLOW else 1]
    for file in READ[command]:
        for name in names:
            result = asked(made, tmp_path / "x", command, file, WHOLE[name])
            require_plain_error(result)
            # an older world is good too, and a line without an end is one that is being written
            older = "global" in file and name != "a folder"
            writing = file.endswith("l") and name not in ("a list", "an object")
            if not older and not writing and (file, name) not in HARMLESS:
                assert result.exit_code != 0, (command, file, name)


ODD: list[Any] = [None, True, -1, 0, 2**70, 1e308, "x", "", "\x00", [], [[]], {}, {"a": 1}, [None]]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a JSON value holds anything."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()  # fmt: skip
    return [at, *(place for key, each in inner for place in places(each, (*at, key)))]


def put_at(value: Any, place: tuple[Any, ...], odd: Any) -> Any:
    if not place:
        return odd
    found = dict(value) if isinstance(value, dict) else list(value)
    found[place[0]] = put_at(found[place[0]], place[1:], odd)
    return found


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, str, Callable[[Path], None]]:
    command = draw(st.sampled_from([c for c in COMMANDS if c not in SLOW]))
    file = draw(st.sampled_from(READ[command]))
    how = draw(st.sampled_from(["cut", "bytes", "value", "value", "value"]))
    where, odd = draw(st.floats(0, 1)), draw(st.sampled_from(ODD))

    def damage(path: Path) -> None:
        content = path.read_bytes()
        place = int(where * (len(content) - 1))
        if how == "cut":
            path.write_bytes(content[:place])
        elif how == "bytes" or path.suffix not in (".json", ".jsonl"):
            path.write_bytes(content[:place] + b"\xff\x00]" + content[place + 3 :])
        else:
            path.write_text(_value_replaced(path, where, odd))

    damage.__name__ = f"{how} at {where} with {odd!r}"
    return command, file, damage


def _value_replaced(path: Path, where: float, odd: Any) -> str:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = int(where * (len(lines) - 1))
    value = json.loads(lines[number])
    found = places(value)
    lines[number] = json.dumps(put_at(value, found[int(where * 997) % len(found)], odd))
    return "\n".join(lines) + "\n"


@settings(max_examples=often(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages())
def test_a_damaged_file_is_an_answer_or_a_message(
    made: Path, tmp_path: Path, damaged: tuple[str, str, Callable[[Path], None]]
) -> None:
    command, file, damage = damaged
    require_plain_error(asked(made, tmp_path / "x", command, file, damage))


VALUES = st.one_of(
    st.sampled_from(
        [
            "[" * 5000,
            "{a=" * 500,
            "nan",
            "inf",
            "1e400",
            "9" * 5000,
            "2020-01-01",
            "''",
            "\x00",
            "\udcff",
            "{}",
            "[]",
            "{a.b.c=1}",
            '"a" \n[x]',
        ]
    ),
    st.text(max_size=20),
)
FIELDS = st.sampled_from(
    [
        "name",
        "seed",
        "threads",
        "device",
        "model",
        "model.config",
        "model.config.hidden_size",
        "model.type",
        "task",
        "data.path",
        "data.train_filter",
        "data.num_clients",
        "method",
        "method.plan",
        "method.settings.x",
        "train.lr",
        "train.rounds",
        "privacy",
        "privacy.noise_multiplier",
        "privacy.epsilon",
        "",
        ".",
        "a..b",
        "name.x",
    ]
)


@settings(max_examples=often(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FIELDS, VALUES)
def test_set_with_any_value_is_a_study_or_a_message(made: Path, field: str, value: str) -> None:
    from fedplan.studies.schema import ConfigError, read_study, study_from_dict

    try:
        study = read_study(made / "study.toml", [f"{field}={value}"])
    except ConfigError as error:
        assert str(error)
    else:
        # What was accepted is what a run's folder gives back.
        assert study_from_dict(json.loads(study.model_dump_json())) == study


def test_overrides_from_the_command_line_are_told_too(made: Path, tmp_path: Path) -> None:
    for change in ("model.config=" + "[" * 20_000, "name=../evil", "train.lr=nan", "a", "=1"):
        args = ["run", str(made / "study.toml"), "--output", str(tmp_path / "o"), "--set", change]
        require_plain_error(CliRunner().invoke(app, args))
        assert not (tmp_path / "o").exists()
