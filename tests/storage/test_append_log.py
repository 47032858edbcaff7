# SPDX-License-Identifier: Apache-2.0
"""Append-only logs: no appended line is lost, and any edit of a chained log is noticed."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often

from fedplan.errors import StoreError
from fedplan.storage import append_log as module
from fedplan.storage.append_log import (
    GENESIS_DIGEST,
    AppendLog,
    CommittedLog,
    DamagedLog,
    LogHead,
    head_file,
    read_json_lines,
    timestamp,
)
from fedplan.storage.files import VARIABLE, reset_failpoints

LINES = 6
HEADS = [
    LogHead(lines=0, length=10**9).text,
    LogHead(lines=-1, length=-5, last=-5).text,
    LogHead(lines=6).text.replace('"lines": 6', '"lines": null'),
]
"""Heads of the right form that no log has."""


def made(folder: Path, count: int = LINES) -> Path:
    """A chain of a few lines."""
    chain = AppendLog(folder / "lines.jsonl", chained=True)
    for number in range(count):
        chain.append({"number": number, "text": "é" * number, "time": timestamp()})
    return chain.file


@cache
def _written(count: int) -> tuple[bytes, bytes]:
    with TemporaryDirectory() as folder:
        file = made(Path(folder), count)
        return file.read_bytes(), head_file(file).read_bytes()


def copied(folder: Path, count: int = LINES) -> Path:
    """A copy of such a chain, which takes no disk to wait for."""
    file = folder / "lines.jsonl"
    for place, content in zip((file, head_file(file)), _written(count), strict=True):
        place.write_bytes(content)
    return file


def changed(file: Path, content: bytes) -> None:
    """Put other bytes into a chain, as an editor would."""
    file.write_bytes(content)
    with pytest.raises(DamagedLog, match=f"{file.name}"):
        AppendLog(file, chained=True).read()


def test_each_line_of_a_chained_log_has_the_digest_of_the_line_before(tmp_path: Path) -> None:
    file = made(tmp_path)
    lines = AppendLog(file, chained=True).read()
    assert [line["number"] for line in lines] == list(range(LINES))
    assert lines[0]["before"] == GENESIS_DIGEST and all(
        line["time"].endswith("+00:00") for line in lines
    )
    assert len({line["before"] for line in lines}) == LINES
    assert AppendLog(file, chained=True).head.lines == LINES and file.stat().st_mode & 0o077 == 0
    assert (
        AppendLog(tmp_path / "none", chained=True).read() == []
        and AppendLog(tmp_path / "none", chained=True).head == LogHead()
    )


@settings(max_examples=often(400))
@given(data=st.data())
def test_any_byte_that_is_edited_is_noticed(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        file = copied(Path(folder), 3)
        content = bytearray(file.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        changed(file, bytes(content))


@settings(max_examples=often(200))
@given(data=st.data())
def test_lines_removed_swapped_inserted_or_cut_are_noticed(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        file = copied(Path(folder))
        lines = file.read_bytes().splitlines(keepends=True)
        one, other = data.draw(st.permutations(range(LINES)))[:2]
        match data.draw(st.sampled_from(["removed", "swapped", "inserted", "cut", "doubled"])):
            case "removed":
                del lines[one]
            case "swapped":
                lines[one], lines[other] = lines[other], lines[one]
            case "inserted":
                said = {"before": json.loads(lines[one])["before"], "number": 9}
                lines.insert(one, json.dumps(said).encode() + b"\n")
            case "doubled":
                lines.insert(other, lines[one])
            case _:
                lines = lines[:one]
        changed(file, b"".join(lines))


def test_it_is_said_where_a_chain_is_broken_and_nothing_is_added_to_it(tmp_path: Path) -> None:
    file = made(tmp_path)
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"number": 2', b'"number": 7')]))
    file.write_bytes(file.read_bytes() + b"".join(lines[3:]))
    with pytest.raises(DamagedLog, match="damaged at line 4, which does not follow the line"):
        AppendLog(file, chained=True).read()
    file.write_bytes(b"".join(lines[:-1]))
    for act in (
        lambda: AppendLog(file, chained=True).read(),
        lambda: AppendLog(file, chained=True).append({}),
    ):
        with pytest.raises(DamagedLog, match=r"line 6 as lines\.jsonl\.head knows it: the last"):
            act()
    assert file.read_bytes() == b"".join(lines[:-1]), "what is broken is left as it is"
    file.write_bytes(whole)
    head_file(file).unlink()
    with pytest.raises(DamagedLog, match=r"has 6 lines, and lines\.jsonl\.head knows of 0"):
        AppendLog(file, chained=True).append({})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"lines": 6}', "null", "9" * 5000, *HEADS])
def test_a_head_that_is_none_is_an_error(text: str, tmp_path: Path) -> None:
    file = copied(tmp_path)
    head_file(file).write_text(text)
    with pytest.raises(DamagedLog, match=r"lines\.jsonl\.head"):
        AppendLog(file, chained=True).read()


@settings(max_examples=often(100))
@given(data=st.data())
def test_any_byte_of_a_head_that_is_edited_is_noticed(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        file = copied(Path(folder), 3)
        content = bytearray(head_file(file).read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        head_file(file).write_bytes(bytes(content))
        with pytest.raises(DamagedLog):
            AppendLog(file, chained=True).read()


def test_a_kill_between_a_line_and_its_head_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made(tmp_path, 2)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "write_atomic", killed)
        AppendLog(file, chained=True).append({"number": 2})
    assert AppendLog(file, chained=True).head.lines == 2
    assert [line["number"] for line in AppendLog(file, chained=True).read()] == [0, 1, 2]
    AppendLog(file, chained=True).append({"number": 3})
    assert [line["number"] for line in AppendLog(file, chained=True).read()] == [0, 1, 2, 3]
    assert AppendLog(file, chained=True).head.lines == 4


def test_one_line_past_its_head_is_of_a_kill_and_two_are_damage(tmp_path: Path) -> None:
    file = copied(tmp_path, 3)
    heads = [LogHead()]
    for line in file.read_bytes().splitlines(keepends=True):
        heads.append(heads[-1].extended_by(line))
    for known in (2, 1):
        head_file(file).write_text(heads[known].text)
        if known == 2:
            assert len(AppendLog(file, chained=True).read()) == 3
            continue
        for act in (AppendLog.read, lambda log: log.append({})):
            with pytest.raises(DamagedLog, match=r"has 3 lines, and .* knows of 1"):
                act(AppendLog(file, chained=True))


def test_a_line_whose_write_failed_is_taken_back_from_a_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AppendLog(copied(tmp_path, 2), chained=True)
    log.append({"number": 2})
    reset_failpoints()
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="No space left"):
        patch.setenv(VARIABLE, "log.written:enospc@1")
        log.append({"number": 3})
    assert [line["number"] for line in AppendLog(log.file, chained=True).read()] == [0, 1, 2]


def test_a_full_disk_leaves_a_chain_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = made(tmp_path, 2)

    def full(opened: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(Exception, match="No space left"):
        patch.setattr(os, "fsync", full)
        AppendLog(file, chained=True).append({"number": 2})
    assert [line["number"] for line in AppendLog(file, chained=True).read()][:2] == [0, 1]
    AppendLog(file, chained=True).append({"number": 3})
    assert AppendLog(file, chained=True).read()[-1]["number"] == 3


def _append(file: Path, name: str) -> None:
    for number in range(20):
        AppendLog(file, chained=True).append({"name": name, "number": number})


def test_of_several_processes_that_append_none_loses_a_line(tmp_path: Path) -> None:
    file, fork = tmp_path / "lines.jsonl", multiprocessing.get_context("fork")
    writers = [fork.Process(target=_append, args=(file, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = AppendLog(file, chained=True).read()
    assert len(lines) == 60
    for name in "abc":
        assert [x["number"] for x in lines if x["name"] == name] == list(range(20))


# ---- power cuts: a disk that forgets everything that was not synced


class Disk:
    """A folder as a power cut leaves it: content as of the last fsync of each file, and the names
    as of the last fsync of the folder. Syncs at the place `skip` in the code are left out."""

    def __init__(self, folder: Path, skip: str = "") -> None:
        self.folder, self.skip, self.places = folder, skip, set[str]()
        self.contents, self.names = dict[int, bytes](), dict[str, int]()

    def fsync(self, descriptor: int) -> None:
        frames = sys._getframe(1), sys._getframe(2)
        place = " by ".join(frame.f_code.co_name for frame in frames)
        self.places.add(place)
        if place == self.skip:
            return
        file = Path(f"/proc/self/fd/{descriptor}").resolve()
        if file == self.folder:
            self.names = {path.name: path.stat().st_ino for path in file.iterdir()}
        elif file.parent == self.folder:
            self.contents[os.fstat(descriptor).st_ino] = file.read_bytes()

    def after_power_cut(self, folder: Path) -> Path:
        folder.mkdir()
        for name, inode in self.names.items():
            if not name.endswith(".tmp"):
                (folder / name).write_bytes(self.contents.get(inode, b""))
        return folder


def _kept(folder: Path, kind: str) -> list[int]:
    """Numbers of the lines that a reader finds, or [-1] if the log is damaged."""
    file = folder / "lines.jsonl"
    try:
        lines = (
            read_json_lines(file)
            if kind == "committed"
            else AppendLog(file, chained=kind == "chained").read()
        )
        return [line["number"] for line in lines]
    except (DamagedLog, OSError):
        return [-1]


def _append_three(folder: Path, kind: str, disk: Disk, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "fsync", disk.fsync)
    file = folder / "lines.jsonl"
    log = CommittedLog(file) if kind == "committed" else AppendLog(file, chained=kind == "chained")
    for number in range(3):
        if isinstance(log, CommittedLog):
            log.append([{"number": number}])
        else:
            log.append({"number": number})


@pytest.mark.parametrize("kind", ["plain", "chained", "committed"])
def test_a_power_cut_loses_no_appended_line_and_every_sync_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def after(skip: str) -> tuple[list[int], set[str]]:
        folder = tmp_path / f"skip {skip}"
        folder.mkdir()
        disk = Disk(folder, skip)
        with monkeypatch.context() as patch:
            _append_three(folder, kind, disk, patch)
        return _kept(disk.after_power_cut(tmp_path / f"cut {skip}"), kind), disk.places

    numbers, places = after("")
    assert numbers == [0, 1, 2]
    assert len(places) == {"plain": 3, "chained": 5, "committed": 2}[kind], places
    made_up_for = {"_write_from by _settle"}  # the next test has this one
    if kind == "chained":  # the head's own sync of the folder
        made_up_for.add("sync_folder by _settle")
    for place in places - made_up_for:
        assert after(place)[0] != [0, 1, 2], place


@pytest.mark.parametrize("another", [False, True])
def test_a_line_left_by_a_kill_before_its_sync_is_synced_by_the_next_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """A process that finds a line may act on it: so it must be on disk, not only in memory."""
    log = AppendLog(tmp_path / "lines.jsonl")
    log.append({"number": 0})
    with log.file.open("ab") as out:  # a process that was killed before its sync
        out.write(b'{"number": 1}\n')
    disk = Disk(tmp_path)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    log = AppendLog(log.file) if another else log
    with log.locked():
        assert [line["number"] for line in log.read()] == [0, 1]
    assert _kept(disk.after_power_cut(tmp_path / "cut"), "plain") == [0, 1]


def test_a_process_forked_within_a_lock_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT", 0.0)
    log, fork = AppendLog(tmp_path / "lines.jsonl"), multiprocessing.get_context("fork")
    ended = fork.Event()
    with log.locked():
        child = fork.Process(target=ended.wait)
        child.start()
    log.append({"number": 0})
    ended.set()
    child.join()


def test_readers_beside_writers_find_no_damage(tmp_path: Path) -> None:
    file, fork = tmp_path / "lines.jsonl", multiprocessing.get_context("fork")
    AppendLog(file, chained=True).append({"name": "x", "number": 0})
    writer = fork.Process(target=_append, args=(file, "a"))
    writer.start()
    while writer.is_alive():
        AppendLog(file, chained=True).read()
    writer.join()
    assert writer.exitcode == 0 and len(AppendLog(file, chained=True).read()) == 21


@pytest.mark.parametrize("point", ["log.begun", "log.written", "log.synced", "log.head_written"])
@pytest.mark.parametrize("chained", [False, True])
def test_a_failing_disk_damages_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, chained: bool
) -> None:
    log = AppendLog(tmp_path / "lines.jsonl", chained=chained)
    log.append({"number": 0})
    reset_failpoints()
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, f"{point}:enospc@1")
        if chained or point != "log.head_written":
            with pytest.raises(StoreError, match="No space left"):
                log.append({"number": 1})
    after = [line["number"] for line in AppendLog(log.file, chained=chained).read()]
    assert after == ([0, 1] if chained and point == "log.head_written" else [0])
    log.append({"number": 2})
    assert [line["number"] for line in log.read()] == [*after, 2]


def test_a_lost_log_is_refused_and_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(DamagedLog, match="shorter"):
        CommittedLog(tmp_path / "ledger.jsonl", length=5)
    assert not (tmp_path / "ledger.jsonl").exists()
