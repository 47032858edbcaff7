# SPDX-License-Identifier: Apache-2.0
"""Laws of the store: a checkpoint is read whole, as it was written, or not at all."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from often import often
from safetensors.torch import save
from torch import Tensor

from fedplan.errors import StoreError
from fedplan.storage import files as storage_files
from fedplan.storage.checkpoints import Checkpoint, SkippedCheckpoint
from fedplan.storage.files import POINTS, VARIABLE
from fedplan.storage.locks import NoLocks
from fedplan.storage.store import Store
from fedplan.tensors.serialization import DTYPES

SIZES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPES}
STORE_POINTS = [name for name in POINTS if name.startswith("store.")]
NAMES = ("h.0.attn.c_attn.weight[query]", "x#control", 'ä "quoted"\\/ 漢', "state/reply/", "")


@pytest.fixture(autouse=True)
def unarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    storage_files.reset_failpoints()
    yield
    storage_files.reset_failpoints()


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return {k: bits(v) for k, v in one.items()} == {k: bits(v) for k, v in other.items()}


def is_checkpoint(found: Checkpoint | None, number: int) -> bool:
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
    """The manifest and the tensor file of a checkpoint."""
    manifest = folder / f"{number}.json"
    fields = json.loads(manifest.read_bytes())["manifest"]
    digest = fields.get("blake3") or fields["sha256"]
    return manifest, folder / f"{number}.{digest[:16]}.safetensors"


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store, generator = Store(tmp_path), torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for dtype in SIZES:
        for shape in ((), (0,), (3, 0, 2), (1,), (5, 7)):
            raw = torch.randint(0, 256, (*shape, SIZES[dtype]), generator=generator)
            if dtype == "bool":
                raw %= 2
            values = raw.to(torch.uint8).reshape(-1).clone().view(getattr(torch, dtype))
            tensors[f"{dtype} {shape}"] = values.reshape(shape)
    meta = {"a": [1, 2.5, None, True, {"b": "ä\ud800\n"}], "c": {}, "d": -0.0, "e": 10**40}
    store.write(tensors, meta, number=7)
    found = store.read_newest()
    assert found is not None and found.meta == meta and same(found.tensors, tensors)


def test_views_and_shared_memory_come_back_by_value(tmp_path: Path) -> None:
    whole = torch.nn.Parameter(torch.randn(6, 4))
    tensors = {"whole": whole, "again": whole, "rows": whole[2:4], "turned": whole.t()}
    Store(tmp_path).write(tensors, {}, number=0)
    found = Store(tmp_path).read_newest()
    assert found is not None and same(found.tensors, tensors)
    found.tensors["whole"].add_(1)  # what is read is the reader's own
    again = Store(tmp_path).read_newest()
    assert again is not None and same(again.tensors, tensors)


def test_an_empty_checkpoint_is_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "b")
    assert store.read_newest() is None
    store.write({}, {}, number=0)
    assert store.read_newest() == Checkpoint(0, {}, {})


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        two(tmp_path / "new")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "new").iterdir()} == {0o600}


def test_the_folders_it_makes_on_the_way_are_the_owners_too(tmp_path: Path) -> None:
    store = Store(tmp_path / "clients" / "a")
    assert not (tmp_path / "clients").exists()
    store.write({}, {}, number=1)
    assert (tmp_path / "clients").stat().st_mode & 0o777 == 0o700


HOLDER = """
import sys
from pathlib import Path
from fedplan.storage.store import Store
store = Store(Path(sys.argv[1]))
if sys.argv[2] == "claims":
    store.lock()
else:
    store._write_tensors = lambda *_: (print("held", flush=True), sys.stdin.read())
    store.write({}, {}, number=9)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["claims", "writes"])
def test_two_processes_do_not_write_to_one_folder(tmp_path: Path, how: str) -> None:
    store = two(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        for asked in (store.lock, lambda: write(store, 3)):
            with pytest.raises(StoreError, match=r"another process.*wait") as raised:
                asked()
            assert str(tmp_path) in str(raised.value)
        assert is_checkpoint(Store(tmp_path).read_newest(), 2), "readers need no lock"
        holder.kill()
    write(store, 3)  # a killed process holds nothing
    assert is_checkpoint(store.read_newest(), 3) and len(list(tmp_path.iterdir())) == 4


def test_one_process_may_open_and_claim_a_folder_twice(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path / ".." / tmp_path.name)
    write(first, 1)
    first.lock()
    second.lock()
    write(second, 2)
    del second
    write(first, 3)
    assert is_checkpoint(Store(tmp_path).read_newest(), 3)


def test_a_disk_without_locks_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(NoLocks, match="without locks"):
        two(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_old_checkpoints_go(tmp_path: Path, keep: int) -> None:
    store = Store(tmp_path, keep=keep)
    for number in range(6):
        write(store, number)
    assert store.numbers() == list(range(5, 5 - keep, -1))
    assert len(list(tmp_path.iterdir())) == 2 * keep
    assert is_checkpoint(store.read_newest(), 5)


def test_a_number_is_replaced_and_none_goes_back(tmp_path: Path) -> None:
    store = two(tmp_path)
    store.write({"other": torch.ones(2)}, {}, number=2)
    found = store.read_newest()
    assert found is not None and same(found.tensors, {"other": torch.ones(2)})
    write(store, 2)
    assert is_checkpoint(store.read_newest(), 2) and len(list(tmp_path.iterdir())) == 4
    with pytest.raises(StoreError, match="checkpoint 1 is older than checkpoint 2"):
        write(store, 1)


@pytest.mark.parametrize(
    "tensors,meta,number,told",
    [
        ({}, {"loss": float("nan")}, 3, "not JSON"),
        ({}, {"loss": float("inf")}, 3, "not JSON"),
        ({}, {"part": {1, 2}}, 3, "not JSON"),
        ({}, {"shape": (1, 2)}, 3, "lists and string keys"),
        ({}, {"known": {1: 2}}, 3, "lists and string keys"),
        ({}, {}, -1, "-1"),
        ({}, {}, True, "True"),
        ({}, {}, 10**18, "integer"),
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
    assert is_checkpoint(store.read_newest(), 2) and len(list(tmp_path.iterdir())) == 4


def damage(folder: Path, change: Callable[[bytes], bytes], file: Path) -> Store:
    """A store after one file was damaged; the file is put back right."""
    content = file.read_bytes()
    file.write_bytes(change(content))
    store = Store(folder)
    assert is_checkpoint(store.read_newest(), 1), file
    assert [each.number for each in store.skipped] == [2]
    file.write_bytes(content)
    return store


def flip(place: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        byte = content[place // 8] ^ 1 << place % 8
        return content[: place // 8] + bytes([byte]) + content[place // 8 + 1 :]

    return change


def test_flipped_bits_are_found_and_the_checkpoint_before_is_read(tmp_path: Path) -> None:
    two(tmp_path)
    chance = random.Random(0)
    for file in files(tmp_path, 2):
        for place in chance.sample(range(8 * file.stat().st_size), often(1000)):
            damage(tmp_path, flip(place), file)
    assert is_checkpoint(Store(tmp_path).read_newest(), 2)


def test_truncated_and_longer_files_are_found(tmp_path: Path) -> None:
    two(tmp_path)
    chance = random.Random(1)
    for file in files(tmp_path, 2):
        for size in {0, file.stat().st_size - 1, *chance.sample(range(file.stat().st_size), 100)}:
            damage(tmp_path, lambda content, size=size: content[:size], file)
        damage(tmp_path, lambda content: content + b"\0", file)
        damage(tmp_path, lambda content: bytes(len(content)), file)


def test_files_of_another_checkpoint_do_not_pass(tmp_path: Path) -> None:
    two(tmp_path)
    for old, new in zip(files(tmp_path, 1), files(tmp_path, 2), strict=True):
        damage(tmp_path, lambda _, old=old: old.read_bytes(), new)


def test_what_was_passed_over_goes_with_the_next_write(tmp_path: Path) -> None:
    store = two(tmp_path)
    files(tmp_path, 2)[1].write_bytes(b"")
    assert is_checkpoint(store.read_newest(), 1)
    assert store.skipped == [SkippedCheckpoint(2, store.skipped[0].reason)]
    assert "0 bytes of" in str(store.skipped[0])
    write(store, 2)
    assert is_checkpoint(store.read_newest(), 2) and store.skipped == []
    files(tmp_path, 2)[0].write_bytes(b"")
    assert is_checkpoint(store.read_newest(), 1)
    write(store, 3)
    assert store.numbers() == [3, 1] and len(list(tmp_path.iterdir())) == 4


def test_no_good_checkpoint_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    two(tmp_path)
    for number in (1, 2):
        files(tmp_path, number)[1].unlink()
    with pytest.raises(StoreError, match=r"checkpoint 2: .* lost.*; checkpoint 1: .*anew") as told:
        Store(tmp_path).read_newest()
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
    digest = blake3(content).hexdigest()
    said = {"format": 2, "number": 9, "meta": {}, "blake3": digest, "size": len(content)} | other
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
    assert is_checkpoint(store.read_newest(), 2)
    assert [each.number for each in store.skipped] == [10, 9, 8, 7, 3]
    assert "no safetensors" in store.skipped[1].reason
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # the bomb was live


BAD_MANIFESTS = [
    *(forged(b"", number=8), forged(b"", number="9"), forged(b"", number=9.0)),
    *(forged(b"", size=-1), forged(b"", size=True), forged(b"", size=1 << 60)),
    *(forged(b"", meta=[]), forged(b"", meta=None), forged(b"", blake3="../../x")),
    *(
        forged(b"", blake3=7),
        forged(b"", sha256="0" * 64),
        forged(b"", more=1),
        forged(b"", meta={"loss": float("nan")}),
    ),
    *((sealed(said), "x") for said in (b"", b"[]", b"7", b"null", b"{}", b"\xff", b"[" * 10**5)),
]


@pytest.mark.parametrize("manifest", [each[0] for each in BAD_MANIFESTS], ids=lambda m: m[80:200])
def test_a_manifest_is_not_believed(tmp_path: Path, manifest: bytes) -> None:
    store = two(tmp_path)
    (tmp_path / "9.json").write_bytes(manifest)
    assert is_checkpoint(store.read_newest(), 2)
    assert [each.number for each in store.skipped] == [9]


def test_another_format_is_told_not_passed_over(tmp_path: Path) -> None:
    store = two(tmp_path)
    (tmp_path / "9.json").write_bytes(forged(b"", format=3)[0])
    with pytest.raises(StoreError, match="format 3, not 2"):
        store.read_newest()
    with pytest.raises(StoreError, match="format 3, not 2"):
        write(store, 9)
    assert store.numbers() == [9, 2, 1]


def test_a_checkpoint_of_an_older_version_is_read_and_its_meta_replaced(tmp_path: Path) -> None:
    """Format 1 has a SHA-256 of the tensor file."""
    content = save(tensors_of(1))
    said = {"format": 1, "number": 1, "meta": {"round": 1}}
    said |= {"sha256": sha256(content).hexdigest(), "size": len(content)}
    (tmp_path / "1.json").write_bytes(sealed(json.dumps(said).encode()))
    file = tmp_path / f"1.{said['sha256'][:16]}.safetensors"
    file.write_bytes(content)
    assert is_checkpoint(Store(tmp_path).read_newest(), 1)
    Store(tmp_path).replace_meta({"round": 1, "more": 2}, number=1)
    read = Store(tmp_path).read_newest()
    assert read is not None and read.meta == {"round": 1, "more": 2}
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StoreError, match="digest differs"):
        Store(tmp_path).read_newest()


KILLS = """
import os, sys
from pathlib import Path
import torch
from fedplan.storage.journal import Journal
from fedplan.storage.store import Store

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


def kill(folder: Path, points: list[str]) -> Path:
    """Make folders in which a process was killed at a point of its second write, new or again."""
    cases = [(point, number) for point in points for number in (1, 2)]
    command = [sys.executable, "-c", KILLS, str(folder), repr(NAMES), repr(cases)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kill(tmp_path_factory.mktemp("killed"), STORE_POINTS)


@pytest.mark.parametrize("number", [1, 2], ids=["replaced", "new"])
@pytest.mark.parametrize("point", STORE_POINTS)
def test_a_kill_leaves_one_checkpoint_or_the_other(killed: Path, point: str, number: int) -> None:
    folder = killed / f"{point}-{number}"
    store = Store(folder)
    found, content = store.read_newest(), 2 if point in COMMITTED else 1
    assert found is not None and found.number == (number if content == 2 else 1)
    assert same(found.tensors, tensors_of(content)) and found.meta == {"round": content}
    assert store.skipped == []
    write(store, 2)  # a resumed run does the round again
    assert is_checkpoint(store.read_newest(), 2)
    assert len(list(folder.iterdir())) == 4


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
    assert f"checkpoint {number}" in str(raised.value) and str(tmp_path) in str(raised.value)
    assert not list(tmp_path.glob("*.tmp"))
    found = Store(tmp_path).read_newest()
    if point in COMMITTED:
        assert found is not None and found.number == number and found.meta == {"new": True}
    else:
        assert is_checkpoint(found, 2)
    write(store, number)
    assert is_checkpoint(store.read_newest(), number) and len(list(tmp_path.iterdir())) == 4


def test_every_file_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves a manifest, and of its tensors the name alone."""
    events, fsync, rename = list[str](), os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def renamed(file: Path, target: Path) -> Path:
        events.append(f"{file.name} renamed")
        return rename(file, target)

    store = Store(tmp_path / "store")
    store.make_folder()
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(store, 1)
    files_in_order = ("1.safetensors.tmp", "1.json.tmp")
    events = events[events.index(files_in_order[0]) :]  # before come the names of new folders
    assert events == [each for n in files_in_order for each in (n, f"{n} renamed", "store")]


def test_who_relies_on_a_checkpoint_first_syncs_the_name_that_a_kill_may_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(tmp_path)
    synced = list[Path]()
    monkeypatch.setattr(
        os, "fsync", lambda each: synced.append(Path(f"/proc/self/fd/{each}").resolve())
    )
    assert is_checkpoint(Store(tmp_path, read_only=True).read_newest(), 2) and not synced
    assert is_checkpoint(Store(tmp_path).read_newest(), 2) and synced == [tmp_path.resolve()]


def test_leftovers_of_a_killed_write_go_with_the_next(tmp_path: Path) -> None:
    store = two(tmp_path)
    left = ("3.json.tmp", "3.safetensors.tmp", ".tmpAb3_x9", f"3.{'0' * 16}.safetensors")
    for name in left:
        (tmp_path / name).write_bytes(b"left")
    (tmp_path / "notes.txt").write_bytes(b"not ours")
    assert is_checkpoint(store.read_newest(), 2)
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


def test_a_full_disk_leaves_the_last_good_checkpoint(small_disk: Path) -> None:
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
            assert is_checkpoint(store.read_newest(), 2)
            assert not list((small_disk / "store").glob("*.tmp"))
    assert failures >= 30
    filler.unlink()
    store.write(large, {}, number=3)
    found = store.read_newest()
    assert found is not None and same(found.tensors, large)


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="cannot be created"):
            Store(folder).lock()
    with pytest.raises(StoreError, match="keep is 0"):
        Store(tmp_path, keep=0)
