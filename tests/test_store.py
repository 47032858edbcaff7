# SPDX-License-Identifier: Apache-2.0
"""Laws of the store: a generation is read whole, as it was written, or not at all."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from fedplan import failpoints
from fedplan.failpoints import POINTS, VARIABLE
from fedplan.journal import Journal
from fedplan.params import ITEMSIZE
from fedplan.store import Generation, Skipped, Store, StoreError

STORE_POINTS = [name for name in POINTS if name.startswith("store.")]
OUR_POINTS = [name for name in POINTS if name.startswith(("store.", "journal."))]
NAMES = ("h.0.attn.c_attn.weight[query]", "x#control", 'ä "quoted"\\/ 漢', "home/reply/", "")


@pytest.fixture(autouse=True)
def unarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    failpoints.forget()
    yield
    failpoints.forget()


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return {k: bits(v) for k, v in one.items()} == {k: bits(v) for k, v in other.items()}


def is_generation(found: Generation | None, number: int) -> bool:
    return (
        found is not None
        and (found.number, found.meta) == (number, {"round": number})
        and same(found.tensors, tensors_of(number))
    )


def tensors_of(number: int) -> dict[str, Tensor]:
    return {name: torch.arange(9.0) + 100 * number + i for i, name in enumerate(NAMES)}


def write(store: Store, number: int) -> None:
    store.write(tensors_of(number), {"round": number}, number=number)


def two(folder: Path) -> Store:
    store = Store(folder)
    write(store, 1)
    write(store, 2)
    return store


def files(folder: Path, number: int) -> tuple[Path, Path]:
    """The manifest and the tensor file of a generation."""
    (tensors,) = folder.glob(f"{number}.*.safetensors")
    return folder / f"{number}.json", tensors


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store, generator = Store(tmp_path), torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for dtype in ITEMSIZE:
        for shape in ((), (0,), (3, 0, 2), (1,), (5, 7)):
            raw = torch.randint(0, 256, (*shape, ITEMSIZE[dtype]), generator=generator)
            if dtype == "bool":
                raw %= 2
            values = raw.to(torch.uint8).reshape(-1).clone().view(getattr(torch, dtype))
            tensors[f"{dtype} {shape}"] = values.reshape(shape)
    meta = {"a": [1, 2.5, None, True, {"b": "ä\ud800\n"}], "c": {}, "d": -0.0, "e": 10**40}
    store.write(tensors, meta, number=7)
    found = store.read()
    assert found is not None and found.meta == meta and same(found.tensors, tensors)


def test_views_and_shared_memory_come_back_by_value(tmp_path: Path) -> None:
    whole = torch.nn.Parameter(torch.randn(6, 4))
    tensors = {"whole": whole, "again": whole, "rows": whole[2:4], "turned": whole.t()}
    Store(tmp_path).write(tensors, {}, number=0)
    found = Store(tmp_path).read()
    assert found is not None and same(found.tensors, tensors)
    found.tensors["whole"].add_(1)  # what is read is the reader's own
    again = Store(tmp_path).read()
    assert again is not None and same(again.tensors, tensors)


def test_an_empty_generation_is_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "b")
    assert store.read() is None
    store.write({}, {}, number=0)
    assert store.read() == Generation(0, {}, {})


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        two(tmp_path / "new")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "new").iterdir()} == {0o600}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_old_generations_go(tmp_path: Path, keep: int) -> None:
    store = Store(tmp_path, keep=keep)
    for number in range(6):
        write(store, number)
    assert store.numbers() == list(range(5, 5 - keep, -1))
    assert len(list(tmp_path.iterdir())) == 2 * keep
    assert is_generation(store.read(), 5)


def test_a_number_is_replaced_and_none_goes_back(tmp_path: Path) -> None:
    store = two(tmp_path)
    store.write({"other": torch.ones(2)}, {}, number=2)
    found = store.read()
    assert found is not None and same(found.tensors, {"other": torch.ones(2)})
    write(store, 2)
    assert is_generation(store.read(), 2) and len(list(tmp_path.iterdir())) == 4
    with pytest.raises(StoreError, match="generation 1 is older than generation 2"):
        write(store, 1)


@pytest.mark.parametrize(
    "tensors,meta,number,told",
    [
        ({}, {"loss": float("nan")}, 3, "no JSON"),
        ({}, {"loss": float("inf")}, 3, "no JSON"),
        ({}, {"part": {1, 2}}, 3, "no JSON"),
        ({}, {"shape": (1, 2)}, 3, "lists and string keys"),
        ({}, {"known": {1: 2}}, 3, "lists and string keys"),
        ({}, {}, -1, "-1"),
        ({}, {}, True, "True"),
        ({}, {}, 10**18, "whole"),
        ({"__metadata__": torch.ones(1)}, {}, 3, "__metadata__"),
        ({"\ud800": torch.ones(1)}, {}, 3, "printable"),
        ({"z": torch.ones(1, dtype=torch.complex128)}, {}, 3, "'z' is torch.complex128"),
        ({"s": torch.ones(2, 2).to_sparse()}, {}, 3, "sparse"),
    ],
)
def test_what_cannot_come_back_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], meta: dict[str, Any], number: int, told: str
) -> None:
    store = two(tmp_path)
    with pytest.raises(StoreError, match=told):
        store.write(tensors, meta, number=number)
    assert is_generation(store.read(), 2) and len(list(tmp_path.iterdir())) == 4


def damage(folder: Path, change: Callable[[bytes], bytes], file: Path) -> Store:
    """A store after one file was damaged; the file is put back right."""
    content = file.read_bytes()
    file.write_bytes(change(content))
    store = Store(folder)
    assert is_generation(store.read(), 1), file
    assert [each.number for each in store.skipped] == [2]
    file.write_bytes(content)
    return store


def flip(place: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        byte = content[place // 8] ^ 1 << place % 8
        return content[: place // 8] + bytes([byte]) + content[place // 8 + 1 :]

    return change


def test_flipped_bits_are_found_and_the_generation_before_is_read(tmp_path: Path) -> None:
    two(tmp_path)
    chance = random.Random(0)
    for file in files(tmp_path, 2):
        for place in chance.sample(range(8 * file.stat().st_size), 500):
            damage(tmp_path, flip(place), file)
    assert is_generation(Store(tmp_path).read(), 2)


def test_truncated_and_longer_files_are_found(tmp_path: Path) -> None:
    two(tmp_path)
    chance = random.Random(1)
    for file in files(tmp_path, 2):
        for size in {0, file.stat().st_size - 1, *chance.sample(range(file.stat().st_size), 100)}:
            damage(tmp_path, lambda content, size=size: content[:size], file)
        damage(tmp_path, lambda content: content + b"\0", file)
        damage(tmp_path, lambda content: bytes(len(content)), file)


def test_files_of_another_generation_do_not_pass(tmp_path: Path) -> None:
    two(tmp_path)
    for old, new in zip(files(tmp_path, 1), files(tmp_path, 2), strict=True):
        damage(tmp_path, lambda _, old=old: old.read_bytes(), new)


def test_what_was_passed_over_goes_with_the_next_write(tmp_path: Path) -> None:
    store = two(tmp_path)
    files(tmp_path, 2)[1].write_bytes(b"")
    assert is_generation(store.read(), 1)
    assert store.skipped == [Skipped(2, store.skipped[0].reason)]
    assert "0 bytes of" in str(store.skipped[0])
    write(store, 2)
    assert is_generation(store.read(), 2) and store.skipped == []
    files(tmp_path, 2)[0].write_bytes(b"")
    assert is_generation(store.read(), 1)
    write(store, 3)
    assert store.numbers() == [3, 1] and len(list(tmp_path.iterdir())) == 4


def test_no_good_generation_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    two(tmp_path)
    for number in (1, 2):
        files(tmp_path, number)[1].unlink()
    with pytest.raises(StoreError, match=r"generation 2: .* lost.*; generation 1: .*anew") as told:
        Store(tmp_path).read()
    assert str(tmp_path) in str(told.value)


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def sealed(said: bytes) -> bytes:
    return b'{"sha256": "%s", "manifest": %s}\n' % (sha256(said).hexdigest().encode(), said)


def forged(content: bytes, **other: Any) -> tuple[bytes, str]:
    """A manifest with right digests for a tensor file of any content, and that file's name."""
    digest = sha256(content).hexdigest()
    said = {"format": 1, "number": 9, "meta": {}, "sha256": digest, "size": len(content)} | other
    return sealed(json.dumps(said).encode()), f"9.{digest[:16]}.safetensors"


def test_garbage_and_pickles_are_never_loaded(tmp_path: Path) -> None:
    store = two(tmp_path / "store")
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark))
    for name in ("3.json", "4.safetensors", "5.pt", "model.pkl", "6.json.tmp", "\u0667.json"):
        (tmp_path / "store" / name).write_bytes(bomb)
    (tmp_path / "store" / "7.json").mkdir()
    os.mkfifo(tmp_path / "store" / "8.json")
    (tmp_path / "store" / "10.json").symlink_to(files(tmp_path / "store", 2)[0])
    manifest, name = forged(bomb)
    (tmp_path / "store" / "9.json").write_bytes(manifest)
    (tmp_path / "store" / name).write_bytes(bomb)
    assert is_generation(store.read(), 2)
    assert [each.number for each in store.skipped] == [10, 9, 8, 7, 3]
    assert "no safetensors" in store.skipped[1].reason
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # the bomb was live


BAD_MANIFESTS = [
    *(forged(b"", number=8), forged(b"", number="9"), forged(b"", number=9.0)),
    *(forged(b"", size=-1), forged(b"", size=True), forged(b"", size=1 << 60)),
    *(forged(b"", meta=[]), forged(b"", meta=None), forged(b"", sha256="../../x")),
    *(forged(b"", sha256=7), forged(b"", more=1), forged(b"", meta={"loss": float("nan")})),
    *((sealed(said), "x") for said in (b"", b"[]", b"7", b"null", b"{}", b"\xff", b"[" * 10**5)),
]


@pytest.mark.parametrize("manifest", [each[0] for each in BAD_MANIFESTS], ids=lambda m: m[80:200])
def test_a_manifest_is_not_believed(tmp_path: Path, manifest: bytes) -> None:
    store = two(tmp_path)
    (tmp_path / "9.json").write_bytes(manifest)
    assert is_generation(store.read(), 2)
    assert [each.number for each in store.skipped] == [9]


def test_another_format_is_told_not_passed_over(tmp_path: Path) -> None:
    store = two(tmp_path)
    (tmp_path / "9.json").write_bytes(forged(b"", format=2)[0])
    with pytest.raises(StoreError, match="format 2, not 1"):
        store.read()
    with pytest.raises(StoreError, match="format 2, not 1"):
        write(store, 9)
    assert store.numbers() == [9, 2, 1]


KILLS = """
import os, sys
from pathlib import Path
import torch
from fedplan.journal import Journal
from fedplan.store import Store

names, cases = eval(sys.argv[2]), eval(sys.argv[3])

def write(folder, kind, number, content):
    tensors = {n: torch.arange(9.0) + 100 * content + i for i, n in enumerate(names)}
    meta = {"round": content}
    if kind == "store":
        Store(folder).write(tensors, meta, number=number)
    else:
        Journal(folder).commit(f"request {content}", tensors, meta, tensors, meta)

for point, number in cases:
    folder, kind = Path(sys.argv[1]) / f"{point}-{number}", point.split(".")[0]
    write(folder, kind, 1, 1)
    child = os.fork()
    if not child:
        os.environ["FEDPLAN_FAILPOINT"] = f"{point}:kill@1"
        write(folder, kind, number, 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, point
"""
COMMITTED = ("store.manifest_renamed", "store.folder_synced", "store.pruned")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders in which a process was killed at a point of its second write, new or again."""
    folder = tmp_path_factory.mktemp("killed")
    cases = [(point, number) for point in OUR_POINTS for number in (1, 2)]
    command = [sys.executable, "-c", KILLS, str(folder), repr(NAMES), repr(cases)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.mark.parametrize("number", [1, 2], ids=["replaced", "new"])
@pytest.mark.parametrize("point", STORE_POINTS)
def test_a_kill_leaves_one_generation_or_the_other(killed: Path, point: str, number: int) -> None:
    folder = killed / f"{point}-{number}"
    store = Store(folder)
    found, content = store.read(), 2 if point in COMMITTED else 1
    assert found is not None and found.number == (number if content == 2 else 1)
    assert same(found.tensors, tensors_of(content)) and found.meta == {"round": content}
    assert store.skipped == []
    write(store, 2)  # a resumed run does the round again
    assert is_generation(store.read(), 2)
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("point", [p for p in OUR_POINTS if p.startswith("journal.")])
def test_a_kill_leaves_home_and_reply_together(killed: Path, point: str) -> None:
    journal = Journal(killed / f"{point}-2")
    number = 2 if point == "journal.after_commit" else 1
    home, notes = journal.home()
    assert same(home, tensors_of(number)) and notes == {"round": number}
    assert (journal.answered("request 2") is not None) == (number == 2)


@pytest.mark.parametrize("action,told", [("raise", "Input/output"), ("enospc", "No space left")])
@pytest.mark.parametrize("point", STORE_POINTS)
@pytest.mark.parametrize("number", [2, 3], ids=["replaced", "new"])
def test_a_failing_disk_leaves_one_or_the_other(
    tmp_path: Path, point: str, action: str, told: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = two(tmp_path)
    monkeypatch.setenv(VARIABLE, f"{point}:{action}@1")
    with pytest.raises(StoreError, match=told) as raised:
        store.write({"new": torch.ones(3)}, {"new": True}, number=number)
    assert f"generation {number}" in str(raised.value) and str(tmp_path) in str(raised.value)
    assert not list(tmp_path.glob("*.tmp"))
    found = Store(tmp_path).read()
    if point in COMMITTED:
        assert found is not None and found.number == number and found.meta == {"new": True}
    else:
        assert is_generation(found, 2)
    write(store, number)
    assert is_generation(store.read(), number) and len(list(tmp_path.iterdir())) == 4


def test_leftovers_of_a_killed_write_go_with_the_next(tmp_path: Path) -> None:
    store = two(tmp_path)
    left = ("3.json.tmp", "3.safetensors.tmp", ".tmpAb3_x9", f"3.{'0' * 16}.safetensors")
    for name in left:
        (tmp_path / name).write_bytes(b"left")
    (tmp_path / "notes.txt").write_bytes(b"not ours")
    assert is_generation(store.read(), 2)
    write(store, 3)
    assert {p.name for p in tmp_path.iterdir()} == {
        "notes.txt",
        *(p.name for n in (2, 3) for p in files(tmp_path, n)),
    }


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here: it takes root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_last_good_generation(small_disk: Path) -> None:
    """Free space runs from none to almost enough, so that every write meets the end once."""
    store = two(small_disk / "store")
    large = {"large": torch.zeros(1_000_000)}
    filler = small_disk / "filler"
    failures = 0
    for free in [*range(0, 40960, 4096), *range(3_900_000, 4_050_000, 4096)]:
        filler.unlink(missing_ok=True)
        space = os.statvfs(small_disk)
        filler.write_bytes(bytes(space.f_bavail * space.f_frsize - free))
        try:
            store.write(large, {"round": 3, "long": "x" * 9000}, number=3)
        except StoreError as error:
            failures += 1
            assert "No space left" in str(error) and "free space" in str(error)
            assert is_generation(store.read(), 2)
            assert not list((small_disk / "store").glob("*.tmp"))
    assert failures >= 30
    filler.unlink()
    store.write(large, {}, number=3)
    found = store.read()
    assert found is not None and same(found.tensors, large)


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="cannot be made"):
            Store(folder)
    with pytest.raises(StoreError, match="keep is 0"):
        Store(tmp_path, keep=0)


def test_the_same_request_has_the_same_answer_and_home_moves_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.answered("r1") is None and journal.home() == ({}, {})
    tensor = torch.randn(4)
    home, reply = {"x#control": tensor}, {"x#control": tensor, "home/a": torch.ones(())}
    journal.commit("r1", home, {"seen": 1}, reply, {"weight": 3})
    expected = {k: v.clone() for k, v in reply.items()}
    tensor.add_(1)  # the model trains on in the same memory
    for each in (journal, journal, Journal(tmp_path)):
        answer = each.answered("r1")
        assert answer is not None and same(answer[0], expected) and answer[1] == {"weight": 3}
        answer[0]["x#control"].zero_()
        assert same(each.home()[0], {"x#control": expected["x#control"]})
        assert each.home()[1] == {"seen": 1}
    with pytest.raises(StoreError, match="'r1' was answered"):
        journal.commit("r1", {}, {}, {}, {})
    journal.commit("r2", {}, {"seen": 2}, {}, {})
    assert journal.answered("r1") is not None and journal.home() == ({}, {"seen": 2})
    assert journal.answered("r3") is None


def test_a_damaged_journal_falls_back_whole_and_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in (1, 2):
        journal.commit(f"r{number}", tensors_of(number), {"n": number}, tensors_of(number), {})
    files(tmp_path, 2)[1].write_bytes(b"")
    assert journal.answered("r2") is None and same(journal.home()[0], tensors_of(1))
    assert [each.number for each in journal.skipped] == [2]
    journal.commit("r2", tensors_of(2), {"n": 2}, tensors_of(2), {})
    assert journal.answered("r2") is not None and journal.answered("r1") is not None
    assert journal.home()[1] == {"n": 2}


class JournalMachine(RuleBasedStateMachine):
    """A journal against a list of commits, with failures at any point of any commit."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.journal = Journal(self.folder)
        self.model: list[tuple[str, int]] = []

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule()
    def restart(self) -> None:
        self.journal = Journal(self.folder)

    def commit(self, request: str, value: int) -> None:
        tensors = {"x#control": torch.tensor([value])}
        self.journal.commit(request, tensors, {"value": value}, tensors, {"value": value})

    requests = st.sampled_from("abcd")
    values = st.integers(0, 10**6)

    @rule(request=requests, value=values)
    def work(self, request: str, value: int) -> None:
        if self.journal.answered(request) is None:
            self.commit(request, value)
            self.model.append((request, value))
        else:
            with pytest.raises(StoreError):
                self.commit(request, value)

    @rule(
        request=requests,
        value=values,
        point=st.sampled_from(OUR_POINTS),
        action=st.sampled_from(["raise", "enospc"]),
    )
    def fail(self, request: str, value: int, point: str, action: str) -> None:
        if self.journal.answered(request) is not None:
            return
        os.environ[VARIABLE] = f"{point}:{action}@1"
        failpoints.forget()
        try:
            with pytest.raises(StoreError):
                self.commit(request, value)
        finally:
            del os.environ[VARIABLE]
        if point in (*COMMITTED, "journal.after_commit"):
            self.model.append((request, value))

    @rule(place=st.integers(0, 10**6), manifest=st.booleans())
    def rot(self, place: int, manifest: bool) -> None:
        """The newest generation loses a bit: the client is where it was one commit before."""
        kept = sorted(int(p.stem) for p in self.folder.glob("*.json"))
        if len(kept) == 2 and not self.journal.skipped:
            file = files(self.folder, kept[-1])[0 if manifest else 1]
            file.write_bytes(flip(place % (8 * file.stat().st_size))(file.read_bytes()))
            self.model = self.model[-2:-1]

    @invariant()
    def home_is_the_last_commit(self) -> None:
        home, notes = self.journal.home()
        if not self.model:
            assert (home, notes) == ({}, {})
            return
        value = self.model[-1][1]
        assert notes == {"value": value} and same(home, {"x#control": torch.tensor([value])})

    @invariant()
    def the_last_two_are_answered_and_every_answer_is_right(self) -> None:
        for request in "abcd":
            answer = self.journal.answered(request)
            if answer is not None:
                assert answer[1] == {"value": dict(self.model)[request]}
                assert same(answer[0], {"x#control": torch.tensor([answer[1]["value"]])})
            else:
                assert request not in dict(self.model[-2:])


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=40,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
