# SPDX-License-Identifier: Apache-2.0
"""A log holds every line that was written, whole, in its order, and never grows without end."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplan.errors import FedplanError
from fedplan.storage import locks, logs
from fedplan.storage.locks import Process, current_process
from fedplan.storage.logs import LOG, Log, follow_log, read_log


@given(st.lists(st.text(max_size=40), max_size=12))
def test_what_is_written_is_read(texts: list[str]) -> None:
    with TemporaryDirectory() as place:
        log = Log(Path(place))
        for number, text in enumerate(["first", *texts]):
            log.note("said", text, round=number, site=f"site-{number % 2}")
        found = read_log(Path(place))
        assert [entry.text for entry in found] == ["first", *texts]
        own = read_log(Path(place), site="site-1")
        assert [entry.round for entry in own] == list(range(1, len(texts) + 1, 2))
        assert not read_log(Path(place), since="2999")


def test_a_log_begins_anew_when_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LARGEST", 2000)
    log = Log(tmp_path)
    for number in range(1, 201):
        log.note("said", "x" * 100, round=number)
    assert {p.name for p in tmp_path.iterdir()} == {LOG, *(f"log.{n}.jsonl" for n in range(1, 5))}
    assert all(p.stat().st_size <= 2000 for p in tmp_path.iterdir())
    rounds = [entry.round for entry in read_log(tmp_path)]
    assert rounds == list(range(rounds[0], 201)) and len(rounds) > 30


def test_what_is_cut_off_or_no_line_is_left_out(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.note("one")
    with (tmp_path / LOG).open("ab") as out:
        out.write(b'[1]\n{"time": 3}\nnothing\n\xff\xfe\n{"time": "20')
    assert [entry.event for entry in read_log(tmp_path)] == ["one"]
    with pytest.raises(FedplanError, match="has no log"):
        read_log(tmp_path / "elsewhere")


def test_a_full_disk_or_a_lost_folder_stops_nobody(tmp_path: Path) -> None:
    Log(tmp_path / "gone").note("said")
    assert not (tmp_path / "gone").exists()


def test_a_log_is_followed_over_a_new_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LARGEST", 1000)
    monkeypatch.setattr(logs, "LOOK", 0.001)
    log = Log(tmp_path)
    log.note("said", round=1)
    lines = follow_log(tmp_path)
    assert next(lines).round == 1

    def write() -> None:
        for number in range(2, 20):
            log.note("said", "x" * 60, round=number)

    writing = threading.Timer(0.05, write)
    writing.start()
    assert [next(lines).round for _ in range(18)] == list(range(2, 20))
    writing.join()


def test_a_line_written_while_the_first_ones_are_read_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOOK", 0.001)
    log = Log(tmp_path)
    for number in (1, 2):
        log.note("said", round=number)
    lines = follow_log(tmp_path)
    seen = [next(lines).round]
    log.note("said", round=3)
    seen += [next(lines).round, next(lines).round]
    log.note("said", round=4)
    assert [*seen, next(lines).round] == [1, 2, 3, 4]
    with pytest.raises(FedplanError, match="has no log"):
        next(follow_log(tmp_path / "elsewhere"))


def test_a_process_is_known_by_its_number_and_its_beginning() -> None:
    own = current_process()
    assert own.alive is True
    assert Process(own.pid, own.host, "another boot 1").alive is False
    assert Process(own.pid, "another host", own.start).alive is None
    child = subprocess.Popen(["sleep", "60"])
    there = replace(own, pid=child.pid, start=locks._start(child.pid))
    assert there.alive is True
    child.kill()
    while locks._start(child.pid):
        pass
    assert there.alive is False, "it has ended, and nobody has waited for it yet"
    child.wait()
    assert there.alive is False
