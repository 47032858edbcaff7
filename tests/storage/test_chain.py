# SPDX-License-Identifier: Apache-2.0
"""A chain of lines: whatever is done to it but appending is noticed, and said where."""

from __future__ import annotations

import json
import multiprocessing
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often

from fedplan.storage import chain as module
from fedplan.storage.chain import (
    GENESIS_DIGEST,
    BrokenChain,
    ChainFile,
    ChainHead,
    head_file,
    read_chain,
)

LINES = 6


def made(folder: Path, count: int = LINES) -> Path:
    """A chain of a few lines."""
    chain = ChainFile(folder / "lines.jsonl")
    for number in range(count):
        chain.append({"number": number, "text": "é" * number})
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
    with pytest.raises(BrokenChain, match=f"{file.name}"):
        read_chain(file)


def test_a_chain_is_its_lines_each_with_its_time_and_the_digest_before(tmp_path: Path) -> None:
    file = made(tmp_path)
    lines = read_chain(file)
    assert [line["number"] for line in lines] == list(range(LINES))
    assert lines[0]["before"] == GENESIS_DIGEST and all(
        line["time"].endswith("+00:00") for line in lines
    )
    assert len({line["before"] for line in lines}) == LINES
    assert ChainFile(file).head.lines == LINES and file.stat().st_mode & 0o077 == 0
    assert read_chain(tmp_path / "none") == [] and ChainFile(tmp_path / "none").head == ChainHead()


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
    with pytest.raises(BrokenChain, match="broken at line 4, which does not follow the line"):
        read_chain(file)
    file.write_bytes(b"".join(lines[:-1]))
    for act in (lambda: read_chain(file), lambda: ChainFile(file).append({})):
        with pytest.raises(BrokenChain, match=r"line 6 as lines\.jsonl\.head knows it: the last"):
            act()
    assert file.read_bytes() == b"".join(lines[:-1]), "what is broken is left as it is"
    file.write_bytes(whole)
    head_file(file).unlink()
    with pytest.raises(BrokenChain, match=r"has 6 lines, and lines\.jsonl\.head knows of 0"):
        ChainFile(file).append({})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"lines": 6}', "null", "9" * 5000])
def test_a_head_that_is_none_is_an_error(text: str, tmp_path: Path) -> None:
    file = copied(tmp_path)
    head_file(file).write_text(text)
    with pytest.raises(BrokenChain, match=r"lines\.jsonl\.head"):
        read_chain(file)


@settings(max_examples=often(100))
@given(data=st.data())
def test_any_byte_of_a_head_that_is_edited_is_noticed(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        file = copied(Path(folder), 3)
        content = bytearray(head_file(file).read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        head_file(file).write_bytes(bytes(content))
        with pytest.raises(BrokenChain):
            read_chain(file)


def test_a_kill_between_a_line_and_its_head_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made(tmp_path, 2)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "write_atomic", killed)
        ChainFile(file).append({"number": 2})
    assert ChainFile(file).head.lines == 2
    assert [line["number"] for line in read_chain(file)] == [0, 1, 2]
    ChainFile(file).append({"number": 3})
    assert [line["number"] for line in read_chain(file)] == [0, 1, 2, 3]
    assert ChainFile(file).head.lines == 4


def test_a_full_disk_leaves_a_chain_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = made(tmp_path, 2)

    def full(opened: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(Exception, match="No space left"):
        patch.setattr(os, "fsync", full)
        ChainFile(file).append({"number": 2})
    assert [line["number"] for line in read_chain(file)][:2] == [0, 1]
    ChainFile(file).append({"number": 3})
    assert read_chain(file)[-1]["number"] == 3


def _append(file: Path, name: str) -> None:
    for number in range(20):
        ChainFile(file).append({"name": name, "number": number})


def test_of_several_processes_that_append_none_loses_a_line(tmp_path: Path) -> None:
    file, fork = tmp_path / "lines.jsonl", multiprocessing.get_context("fork")
    writers = [fork.Process(target=_append, args=(file, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = read_chain(file)
    assert len(lines) == 60
    for name in "abc":
        assert [x["number"] for x in lines if x["name"] == name] == list(range(20))
