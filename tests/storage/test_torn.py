# SPDX-License-Identifier: Apache-2.0
"""A file that a kill or a full disk cut anywhere: the run goes on to the same bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from clients import few, loss
from commands import STUDY, run

from fedplan.errors import FedplanError, StoreError
from fedplan.federation.agreement import Agreement
from fedplan.federation.identity import RUN_FILE
from fedplan.federation.ledger.egress import EGRESS_LOG, EgressEntry, EgressLog, read_egress
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.runners.simulation import Simulation
from fedplan.storage.append_log import head_file
from fedplan.storage.files import write_atomic
from fedplan.studies.schema import read_study
from fedplan.tensors.named import digests
from fedplan.training.fit import TrainArguments

ROUNDS = 3


def federation(folder: Path) -> Federation:
    model = zoo.build("bert")
    agreement = Agreement(
        "torn",
        describe(model),
        method_by_name("fedper"),
        TrainArguments(lr=1e-2, batch_size=2, steps=1),
    )
    return Federation(agreement, model, few("bert", 2), loss, folder, rounds=ROUNDS)


def play(folder: Path, until: int = ROUNDS) -> Federation:
    fed = federation(folder)
    while fed.global_state.round < until:
        round_state = fed.run_round()
        fed.commit(round_state, {"score": float(len(round_state.aggregated))})
    return fed


def left(fed: Federation) -> object:
    """All that a run leaves but its id."""
    homes = {n: digests(s.journal.client_state()[0]) for n, s in fed.clients.items()}
    files = [(fed.server.folder / name).read_bytes() for name in ("ledger.jsonl", "metrics.jsonl")]
    return digests(fed.global_state.values), homes, files


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file and folder, with bytes and when it was last changed."""
    return {
        str(p.relative_to(folder)): (
            p.read_bytes() if p.is_file() else b"",
            p.stat().st_mtime_ns,
        )
        for p in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, object]:
    """A run of all rounds, the same one before its last, and what the first left."""
    folder = tmp_path_factory.mktemp("whole")
    play(folder, ROUNDS - 1)
    before = tmp_path_factory.mktemp("before") / "run"
    shutil.copytree(folder, before)
    return folder, before, left(play(folder))


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl"])
def test_a_ledger_is_opened_whatever_the_last_write_left(
    name: str, whole: tuple[Path, Path, object], tmp_path: Path
) -> None:
    folder, before, _ = whole
    shutil.copytree(before, tmp_path / "run")
    good, full = (before / name).read_bytes(), (folder / name).read_bytes()
    fed = federation(tmp_path / "run")
    ledger = fed.server.ledger if name == "ledger.jsonl" else fed.server.metrics
    every = range(len(good), len(full) + 1)
    for cut in {*every[:200], *every[::11], *every[-200:]}:
        (tmp_path / "run" / name).write_bytes(full[:cut])
        again = type(ledger)(ledger.file, length=ledger.length, sha256=ledger.sha256)
        assert (again.file.read_bytes(), again.length_and_digest) == (
            good,
            ledger.length_and_digest,
        )


CUTS = (0.0, 0.001, 0.3, 0.999, 1.0)


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("share", CUTS)
def test_a_run_whose_last_write_was_cut_ends_with_the_same_bits(
    name: str, share: float, whole: tuple[Path, Path, object], tmp_path: Path
) -> None:
    folder, before, expected = whole
    shutil.copytree(before, tmp_path / "run")
    good, full = (before / name).read_bytes(), (folder / name).read_bytes()
    cut = len(good) + round(share * (len(full) - len(good)))
    (tmp_path / "run" / name).write_bytes(full[:cut])
    assert left(play(tmp_path / "run")) == expected


def test_a_ledger_writes_over_what_a_full_disk_left_behind(tmp_path: Path) -> None:
    from fedplan.storage.append_log import CommittedLog, read_json_lines

    ledger = CommittedLog(tmp_path / "lines")
    ledger.append([{"a": 1}])
    with (tmp_path / "lines").open("ab") as file:
        file.write(b'{"half')
    assert read_json_lines(tmp_path / "lines") == [{"a": 1}]
    ledger.append([{"b": 2}])
    assert read_json_lines(tmp_path / "lines") == [{"a": 1}, {"b": 2}]
    assert CommittedLog(tmp_path / "lines").length_and_digest == ledger.length_and_digest


def stores(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.parent.name not in ("", folder.name))


def test_a_checkpoint_cut_anywhere_while_it_was_written_changes_nothing(
    whole: tuple[Path, Path, object], tmp_path: Path
) -> None:
    folder, before, expected = whole
    fresh = [
        p for p in stores(folder) if p.is_file() and not (before / p.relative_to(folder)).exists()
    ]
    assert len(fresh) >= 6
    for number, file in enumerate(fresh):
        run = tmp_path / str(number)
        shutil.copytree(before, run)
        content, place = file.read_bytes(), run / file.relative_to(folder)
        kind = file.suffix.removeprefix(".")
        beside = place.with_name(f"{file.name.partition('.')[0]}.{kind}.tmp")
        for cut in {0, 1, len(content) // 2, len(content) - 1, len(content)}:
            beside.write_bytes(content[:cut])
            assert federation(run).global_state.round == ROUNDS - 1
        if kind == "safetensors":
            place.write_bytes(content)  # renamed, and its manifest never written
        if number % 3 == 0:
            assert left(play(run)) == expected


class Killed(BaseException):
    """A kill, in this process."""


def test_a_start_that_is_killed_at_any_sync_or_rename_begins_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = read_study(here / "study.toml", ["train.rounds=1"])
    expected = digests(first_round(study, here / "whole"))
    points = 0
    for point in range(1, 200, 2):
        left_over = [point]

        def counted(
            real: Callable[..., object], left: list[int] = left_over
        ) -> Callable[..., object]:
            def call(*args: object, **named: object) -> object:
                left[0] -= 1
                if left[0] == 0:
                    raise Killed
                return real(*args, **named)

            return call

        folder = here / f"killed-{point}"
        with monkeypatch.context() as patch:
            for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "rename")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                Simulation(study, folder)
                break
            except Killed:
                points += 1
        assert digests(first_round(study, folder)) == expected
    assert points >= 4


def first_round(study: object, folder: Path) -> dict[str, torch.Tensor]:
    simulation = Simulation(study, folder)  # type: ignore[arg-type]
    simulation.federation.commit(simulation.federation.run_round())
    return simulation.federation.global_state.values


@pytest.mark.parametrize(
    "name", ["study.json", "manifest.json", RUN_FILE, "ledger.jsonl", "metrics.jsonl", "global"]
)
def test_a_start_whose_files_are_not_all_there_begins_again(here: Path, name: str) -> None:
    study = read_study(here / "study.toml", ["train.rounds=1"])
    Simulation(study, here / "run")
    place = here / "run" / name
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    for half in (b"", b"{"):
        (here / "run" / f".{name}.tmp").write_bytes(half)
        code, out = run(
            "run", "study.toml", "--set", "train.rounds=1", "--output", "run", "--resume"
        )
        assert code == 0, out
    assert run("verify", "run")[0] == 0


def test_a_small_file_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "small"
    write_atomic(file, "one")

    def full(opened: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        write_atomic(file, "two")
    assert file.read_text() == "one" and os.listdir(tmp_path) == ["small"]


def test_a_file_is_never_written_through_a_name_that_was_laid_out(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / ".small.tmp").symlink_to(tmp_path / "target")
    (tmp_path / "small").symlink_to(tmp_path / "target")
    write_atomic(tmp_path / "small", "other")
    assert (tmp_path / "target").read_text() == "mine"
    assert (tmp_path / "small").read_text() == "other" and not (tmp_path / "small").is_symlink()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [(".", "it is a folder"), ("nowhere/x", "there is no folder"), ("fifo", "not a regular file")],
)
def test_the_remedy_is_of_what_is_wrong(tmp_path: Path, name: str, remedy: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StoreError, match=remedy):
        write_atomic(tmp_path / name, "")
    with pytest.raises(StoreError, match="name a file"):
        write_atomic(Path(), "")


def test_what_kills_left_beside_a_file_goes_with_the_next_write(tmp_path: Path) -> None:
    old, new = (tmp_path / f".small.{name}.tmp" for name in ("old", "new"))
    for each in (old, new, tmp_path / ".other.x.tmp"):
        each.write_text("half")
    os.utime(old, (0, 0))
    os.utime(tmp_path / ".other.x.tmp", (0, 0))
    write_atomic(tmp_path / "small", "whole")
    assert sorted(os.listdir(tmp_path)) == [".other.x.tmp", ".small.new.tmp", "small"]


def test_a_sites_record_cut_at_any_byte_is_read_and_goes_on(tmp_path: Path) -> None:
    """As a kill cuts it: the line was not whole, so its head was not written."""
    egress, beside = EgressLog(tmp_path), head_file(tmp_path / EGRESS_LOG)
    egress.append(EgressEntry("update", round=1))
    before, head = (tmp_path / EGRESS_LOG).read_bytes(), beside.read_bytes()
    egress.append(EgressEntry("update", round=2))
    full = (tmp_path / EGRESS_LOG).read_bytes()
    for cut in range(len(before), len(full)):
        (tmp_path / EGRESS_LOG).write_bytes(full[:cut])
        beside.write_bytes(head)
        assert [each["round"] for each in read_egress(tmp_path)] == [1]
        EgressLog(tmp_path).append(EgressEntry("update", round=2))
        assert [each["round"] for each in read_egress(tmp_path)] == [1, 2]
        assert (tmp_path / EGRESS_LOG).read_bytes().startswith(before)


PRIVATE = """
[privacy]
unit = "client"
epsilon = 900.0
delta = 1e-5
clipping_norm = 1.0
noise_multiplier = 1.0
"""


@pytest.mark.parametrize("private", [False, True])
def test_who_reads_a_run_writes_nothing_and_needs_no_lock(here: Path, private: bool) -> None:
    if private:
        Path("study.toml").write_text(STUDY.replace("dropout_fraction = 0.1", "") + PRIVATE)
    code, out = run("run", "study.toml", "--output", "run")
    assert code == 0, out
    with (here / "run/ledger.jsonl").open("ab") as file:
        file.write(b'{"kind": "tu')  # a line that is being written
    os.sync()
    before = tree(here / "run")
    held = os.open(here / "run", os.O_RDONLY), os.open(here / "run/global", os.O_RDONLY)
    import fcntl

    for lock in held:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free already, or it fails
    assert "bytes after round 3" in run("verify", "run")[1]
    for words in (
        ("export", "run", "out", "--global"),
        ("export", "run", "own", "--client", "client-01"),
    ):
        code, out = run(*words)
        assert code == 0, out
    assert run("privacy", "run")[0] == (0 if private else 2)
    assert run("explain", "study.toml")[0] == 0
    for lock in held:
        os.close(lock)
    assert tree(here / "run") == before


def test_of_two_starts_at_once_one_wins_and_the_other_is_told(here: Path) -> None:
    study = read_study(here / "study.toml")
    other = read_study(here / "study.toml", ["method.plan=share()"])
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        simulation = Simulation(study, here / "run")
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(simulation.federation.global_state.round)
    os.read(ready[0], 1)
    before = tree(here / "run")
    for each in (study, other):
        with pytest.raises(FedplanError, match="another process writes to"):
            Simulation(each, here / "run")
    assert tree(here / "run") == before
    os.write(done[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(FedplanError, match="another study"):
        Simulation(other, here / "run")
    assert Simulation(study, here / "run").federation.global_state.round == 0


def test_of_several_that_write_a_record_none_loses_a_line(tmp_path: Path) -> None:
    writers = [EgressLog(tmp_path) for _ in range(3)]
    for number in range(12):
        writers[number * number % 3].append(EgressEntry("update", request=f"r/{number}"))
    assert [line["request"] for line in read_egress(tmp_path)] == [f"r/{n}" for n in range(12)]
