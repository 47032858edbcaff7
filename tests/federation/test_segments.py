# SPDX-License-Identifier: Apache-2.0
"""A ledger in segments: each proves the one before it, and a run goes on from the last alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zoo
from clients import RUN, few, know_secrets, loss

from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.identity import GLOBAL_FOLDER
from fedplan.federation.ledger import segments
from fedplan.federation.ledger.segments import (
    closed_segment_faults,
    ledger_lines,
    newest_segment,
    segment_header_faults,
    segment_name,
    segment_number,
)
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.storage.store import Store
from fedplan.training.fit import TrainArguments

ROUNDS = 4


def federation(folder: Path) -> Federation:
    model = zoo.build("bert")
    agreement = Agreement(
        "cut",
        describe(model),
        method_by_name("fedavg"),
        TrainArguments(lr=1e-2, batch_size=2, steps=1),
        run=RUN,
    )
    return Federation(agreement, model, few("bert", 2), loss, folder, rounds=ROUNDS)


def play(folder: Path, until: int = ROUNDS, *, again: bool = False) -> Federation:
    """Play rounds; `again`, from the disk before each."""
    folder.mkdir(exist_ok=True)
    know_secrets(folder, ["client-0", "client-1"])
    fed = federation(folder)
    while fed.global_state.round < until:
        fed = federation(folder) if again else fed
        fed.commit(fed.run_round(), {"score": 1.0 / fed.global_state.round})
    return fed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one segment."""
    return play(tmp_path_factory.mktemp("whole") / "run").server.folder


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda limit: monkeypatch.setattr(segments, "SEGMENT_BYTES", limit)


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, in a segment a round."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(segments, "SEGMENT_BYTES", 1)
        return play(tmp_path_factory.mktemp("parted") / "run").server.folder


def files_of(folder: Path) -> dict[str, Any]:
    found = Store(folder / GLOBAL_FOLDER, read_only=True).peek()
    assert found is not None
    return found.meta["files"]


def lines_of(folder: Path) -> list[bytes]:
    return list(ledger_lines(folder, files_of(folder)))


def faults_of(folder: Path) -> list[str]:
    files = files_of(folder)
    return [*closed_segment_faults(folder, files).values()] or list(
        segment_header_faults(folder, files)
    )


def test_segments_hold_the_lines_of_one_ledger(whole: Path, parted: Path) -> None:
    assert [p.name for p in sorted(whole.glob("ledger*"))] == ["ledger.jsonl"]
    names = [segment_name(number) for number in range(1, ROUNDS + 1)]
    assert {p.name for p in parted.glob("ledger*")} == set(names)
    assert newest_segment(parted).name == names[-1] == "ledger.000004.jsonl"
    assert [segment_number(name) for name in (*names, "ledger.x.jsonl")] == [1, 2, 3, 4, 0]
    assert lines_of(parted) == lines_of(whole)
    assert [name for name in files_of(parted) if segment_number(name)] == names[-1:]
    agreement = federation(parted).agreement
    assert not verify_ledger(agreement, map(json.loads, lines_of(parted)))
    assert not faults_of(parted)


@pytest.mark.parametrize("limit", [1, 6000])
def test_a_run_that_goes_on_from_its_last_segment_is_the_run_that_never_stopped(
    limit: int, whole: Path, short: Callable[[int], None], tmp_path: Path
) -> None:
    short(limit)
    fed = play(tmp_path / "run", again=True)
    assert lines_of(tmp_path / "run") == lines_of(whole) and not faults_of(tmp_path / "run")
    last = federation(whole).server.last_round()
    again = federation(tmp_path / "run").server
    assert again.history == fed.server.history == federation(whole).server.history
    told = again.last_round()
    assert told and replace(told, folder=whole) == last


def test_closed_segments_are_not_parsed_when_a_run_goes_on(
    parted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(parted, tmp_path / "run")
    read, seen = segments.read_segment, list[str]()

    def told(file: Path) -> Any:
        seen.append(file.name)
        return read(file)

    monkeypatch.setattr(segments, "read_segment", told)
    assert len(federation(tmp_path / "run").server.history) == ROUNDS
    assert {*seen} == {segment_name(ROUNDS)}


@pytest.mark.parametrize("number", range(1, ROUNDS))
@pytest.mark.parametrize("what", ["flipped", "cut", "longer", "lost", "older"])
def test_a_closed_segment_that_was_changed_is_named(
    number: int, what: str, parted: Path, tmp_path: Path
) -> None:
    shutil.copytree(parted, tmp_path / "run")
    file = tmp_path / "run" / segment_name(number)
    content = file.read_bytes()
    changed = {
        "flipped": content[:40] + bytes([content[40] ^ 1]) + content[41:],
        "cut": content[:-1],
        "longer": content + b"{}\n",
        "older": b"".join(content.splitlines(keepends=True)[:-1]),
    }
    file.unlink() if what == "lost" else file.write_bytes(changed[what])
    assert any(file.name in fault for fault in faults_of(tmp_path / "run"))
    with pytest.raises(FedplanError, match=f"{file.name}.*: restore it from a backup"):
        federation(tmp_path / "run")


def test_what_a_kill_left_of_the_next_segment_is_taken_away(
    parted: Path, whole: Path, short: Callable[[int], None], tmp_path: Path
) -> None:
    short(1)
    folder = play(tmp_path / "run", ROUNDS - 1).server.folder
    full = (parted / segment_name(ROUNDS)).read_bytes()
    for cut in (0, 10, len(full) // 2, len(full)):
        (folder / segment_name(ROUNDS)).write_bytes(full[:cut])
        federation(folder)
        assert not (folder / segment_name(ROUNDS)).exists()
    (folder / segment_name(ROUNDS)).write_bytes(full[:100])
    play(folder)
    assert lines_of(folder) == lines_of(whole)


def test_a_world_older_than_its_segments_is_refused(parted: Path, tmp_path: Path) -> None:
    shutil.copytree(parted, tmp_path / "run")
    for number in (ROUNDS, ROUNDS - 1):
        (tmp_path / "run/global" / f"{number}.json").unlink()
    shutil.rmtree(tmp_path / "run/global")
    with pytest.raises(FedplanError, match="records round 4, but the stored global model is of"):
        federation(tmp_path / "run")


def test_an_opening_that_tells_other_rounds_is_named(parted: Path, tmp_path: Path) -> None:
    shutil.copytree(parted, tmp_path / "run")
    file = tmp_path / "run" / segment_name(ROUNDS)
    first, *rest = file.read_bytes().splitlines(keepends=True)
    said = json.loads(first)
    said["metrics"][0]["upload_bytes"] += 1
    file.write_bytes(json.dumps(said).encode() + b"\n" + b"".join(rest))
    assert list(segment_header_faults(tmp_path / "run", files_of(tmp_path / "run"))) == [
        "the header of ledger.000004.jsonl has other rounds than the ledger before it"
    ]
