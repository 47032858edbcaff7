# SPDX-License-Identifier: Apache-2.0
"""Laws of seals: what is sealed opens as it was, with its key and in its place, or not at all."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from often import often
from test_journal import JournalMachine
from test_store import (
    COMMITTED,
    NAMES,
    STORE_POINTS,
    files,
    flip,
    is_checkpoint,
    same,
    sealed,
    small_disk,
    tensors_of,
    unarmed,
    write,
)
from torch import Tensor

from fedplan.errors import StoreError
from fedplan.storage import encryption
from fedplan.storage.checkpoints import MAX_MANIFEST_BYTES
from fedplan.storage.encryption import Encryption, new_key_file
from fedplan.storage.files import VARIABLE
from fedplan.storage.journal import Journal
from fedplan.storage.store import Store
from fedplan.tensors.serialization import DTYPES

__all__ = ["small_disk", "unarmed"]  # fixtures

KEY, OTHER = Encryption(b"k" * 32), Encryption(b"o" * 32)
HEADER = 52
SIZES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPES}


@contextmanager
def chunks(size: int) -> Iterator[None]:
    with patch.object(encryption, "CHUNK", size):
        yield


def two(folder: Path, encryption: Encryption | None = KEY) -> Store:
    store = Store(folder, encryption=encryption)
    write(store, 1)
    write(store, 2)
    return store


# Key files


def test_a_new_key_file_is_the_owners_and_is_not_written_over(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new_key_file(tmp_path / "key")
        new_key_file(tmp_path / "another")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    content = (tmp_path / "key").read_bytes()
    assert len(content) == 82 and content != (tmp_path / "another").read_bytes()
    with pytest.raises(StoreError, match=r"File exists.*name a new file"):
        new_key_file(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == content
    with pytest.raises(StoreError, match="No such file"):
        new_key_file(tmp_path / "none" / "key")
    one, again = (Encryption.from_file(tmp_path / "key") for _ in range(2))
    assert again.decrypt(one.encrypt(b"home", "a"), "a") == b"home"


def test_a_key_file_that_cannot_be_written_is_not_left_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(StoreError, match=r"No space left.*free space"):
        new_key_file(tmp_path / "key")
    assert not (tmp_path / "key").exists()


def test_a_flipped_bit_of_a_new_key_file_is_noticed_or_changes_no_key(tmp_path: Path) -> None:
    new_key_file(tmp_path / "key")
    whole = (tmp_path / "key").read_bytes()
    key_id, refused = Encryption.from_file(tmp_path / "key").key_id, 0
    for position, bit in product(range(len(whole)), range(8)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << bit
        (tmp_path / "key").write_bytes(flipped)
        try:
            assert Encryption.from_file(tmp_path / "key").key_id == key_id
        except StoreError:
            refused += 1
    assert refused > 600


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content",
    [
        *(b"k" * 32, b"6b" * 32, b"6B" * 32 + b"\n"),
        b"6b" * 32 + f" {KEY.key_id}\n".encode(),
    ],
    ids=["raw", "hex", "line", "with its id"],
)
def test_a_key_is_raw_or_hex(tmp_path: Path, content: bytes) -> None:
    for mode in (0o600, 0o400):
        encryption = Encryption.from_file(key_file(tmp_path, content, mode))
        assert (
            encryption.key_id == KEY.key_id
            and encryption.decrypt(KEY.encrypt(b"x", "a"), "a") == b"x"
        )


@pytest.mark.parametrize(
    "content",
    [b"", b"k" * 31, b"k" * 33, b"6b" * 31, b"6b" * 33, b"6g" * 32, b"6b" * 32 + b"\n\n"],
)
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(StoreError, match="holds no key"):
        Encryption.from_file(key_file(tmp_path, content))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(StoreError, match=rf"mode {mode:04o}\): chmod 600 .*key"):
        Encryption.from_file(key_file(tmp_path, b"k" * 32, mode))


def test_a_key_file_is_a_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, told in (("pipe", "not a regular file"), ("", "directory"), ("none", "No such file")):
        with pytest.raises(StoreError, match=told):
            Encryption.from_file(tmp_path / name)
    with pytest.raises(StoreError, match="has 3 bytes"):
        Encryption(b"key")


def test_the_key_is_not_shown() -> None:
    assert "k" * 9 not in repr(KEY) + str(KEY) + KEY.key_id and KEY.key_id != OTHER.key_id


# Sealed bytes


@given(data=st.binary(max_size=300), about=st.text(st.characters(codec="utf-8")))
@settings(deadline=None)
def test_what_is_sealed_opens_as_it_was(data: bytes, about: str) -> None:
    for size in (7, 64, encryption.CHUNK):
        with chunks(size):
            closed = KEY.encrypt(data, about)
        assert KEY.decrypt(closed, about) == data, "with chunks of any other size"
        assert len(closed) == HEADER + len(data) + 16 * max(1, -(-len(data) // size))
        with pytest.raises(StoreError):
            KEY.decrypt(closed, about + "x")
        with pytest.raises(StoreError):
            OTHER.decrypt(closed, about)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 48])
def test_at_the_borders_of_chunks_every_bit_and_every_byte_counts(length: int) -> None:
    data = bytes(range(length))
    with chunks(16):
        closed = KEY.encrypt(data, "tensors 7")
    assert KEY.decrypt(closed, "tensors 7") == data
    spoilt = [flip(place)(closed) for place in range(8 * len(closed))]
    spoilt += [closed[:size] for size in range(len(closed))]
    spoilt += [closed + b"\0", closed + closed[-16:], closed + bytes(16), closed + closed[HEADER:]]
    for each in spoilt:
        with pytest.raises(StoreError):
            KEY.decrypt(each, "tensors 7")


def test_chunks_lost_moved_doubled_or_from_elsewhere_do_not_open() -> None:
    with chunks(16):
        one, other = (KEY.encrypt(bytes([n]) * 64, "tensors 7") for n in range(2))
    head, parts = one[:HEADER], [one[i : i + 32] for i in range(HEADER, len(one), 32)]
    others = [other[i : i + 32] for i in range(HEADER, len(other), 32)]
    assert KEY.decrypt(head + b"".join(parts), "tensors 7") == bytes(64)
    wrong = [parts[:k] + parts[k + 1 :] for k in range(4)]
    wrong += [parts[:k] for k in range(4)]
    wrong += [[*parts[:k], others[k], *parts[k + 1 :]] for k in range(4)]
    wrong += [
        [parts[1], parts[0], *parts[2:]],
        [*parts, parts[-1]],
        [parts[0], *parts],
        parts[::-1],
    ]
    for each in [*(head + b"".join(w) for w in wrong), other[:HEADER] + one[HEADER:]]:
        with pytest.raises(StoreError):
            KEY.decrypt(each, "tensors 7")


@given(data=st.binary(max_size=200), magic=st.booleans())
def test_garbage_is_a_store_error(data: bytes, magic: bool) -> None:
    for size in (0, 1, 1 << 30, (1 << 32) - 1):
        header = b"fedplan sealed 1" + size.to_bytes(4, "big") if magic else b""
        with pytest.raises(StoreError):
            KEY.decrypt(header + data, "tensors 7")


@pytest.mark.parametrize("size", [0, (1 << 30) + 1, (1 << 32) - 1])
def test_chunks_larger_than_the_cipher_takes_are_not_tried(size: int) -> None:
    closed = KEY.encrypt(b"home", "a")
    with pytest.raises(StoreError, match=f"chunks of {size}"):
        KEY.decrypt(closed[:16] + size.to_bytes(4, "big") + closed[20:], "a")


def test_the_same_is_never_sealed_the_same() -> None:
    closed = {KEY.encrypt(b"home", "a") for _ in range(100)}
    assert len({each[:HEADER] for each in closed}) == len({each[HEADER:] for each in closed}) == 100


def test_it_is_aes_256_gcm_with_a_key_from_hkdf() -> None:
    """The format, written down a second time."""
    import hmac

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    with chunks(4):
        closed = KEY.encrypt(b"abcdef", "tensors 7")
    header, body = closed[:HEADER], closed[HEADER:]
    assert header[:20] == b"fedplan sealed 1\0\0\0\4"
    extracted = hmac.digest(header[20:], b"k" * 32, "sha256")
    cipher = AESGCM(hmac.digest(extracted, b"fedplan: sealed data\1", "sha256"))
    for number, chunk, data in ((0, body[:20], b"abcd"), (1, body[20:], b"ef")):
        bound = header + number.to_bytes(8, "big") + bytes([number]) + b"tensors 7"
        assert cipher.decrypt(number.to_bytes(12, "big"), chunk, bound) == data


# Sealed stores


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in draw(st.sets(st.sampled_from(NAMES))):
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        count = torch.Size(shape).numel() * SIZES[dtype]
        raw = random.Random(draw(st.integers())).randbytes(count)
        values = torch.tensor(list(raw), dtype=torch.uint8)
        values = (values % 2 if dtype == "bool" else values).view(getattr(torch, dtype))
        found[name] = values.reshape(shape)
    return found


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
trees = st.recursive(
    leaves | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3),
    max_leaves=5,
)


@given(
    tensors=checkpoints(),
    meta=st.dictionaries(st.text(), trees, max_size=3),
    number=st.integers(0, 10**18 - 1),
    size=st.sampled_from([50, 1000, encryption.CHUNK]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_checkpoint_comes_back(
    tensors: dict[str, Tensor], meta: dict[str, Any], number: int, size: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, chunks(size):
        Store(Path(folder), encryption=KEY).write(tensors, meta, number=number)
        found = Store(Path(folder), encryption=KEY).read_newest()
        assert found is not None and (found.number, found.meta) == (number, meta)
        assert same(found.tensors, tensors)


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    raw = torch.arange(64, dtype=torch.uint8) % 2
    tensors = {dtype: raw.clone().view(getattr(torch, dtype)) for dtype in SIZES}
    Store(tmp_path, encryption=KEY).write(tensors, {}, number=0)
    found = Store(tmp_path, encryption=KEY).read_newest()
    assert found is not None and same(found.tensors, tensors)


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        two(tmp_path / "new")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "new").iterdir()} == {0o600}
    assert len(list((tmp_path / "new").iterdir())) == 4


SECRETS = {"state/the tensor's name": torch.arange(16.0) + 0.123}
NOTE = "the patient's note that nobody reads"


def readable(folder: Path) -> list[str]:
    """Which files show a tensor's bytes, its name, the note or the name of the request."""
    raw = SECRETS["state/the tensor's name"].numpy().tobytes()
    assert len(raw) == 64
    words = [NOTE.encode(), b"the tensor's name", b"request 7", b"notes", b"float"]
    secrets = [raw, raw[:16], *words, *(b64encode(word)[:-4] for word in words if len(word) > 8)]
    kept = [p for p in folder.rglob("*") if p.is_file()]
    return [p.name for p in kept if any(s in p.read_bytes() + p.name.encode() for s in secrets)]


def test_nothing_of_a_home_is_readable(tmp_path: Path) -> None:
    for name, cipher in (("sealed", KEY), ("open", None)):
        journal = Journal(tmp_path / name, encryption=cipher)
        for request in ("request 6", "request 7"):
            journal.commit(request, SECRETS, {"note": NOTE}, SECRETS, {"note": NOTE})
        home, notes = journal.client_state()
        assert same(home, SECRETS) and notes == {"note": NOTE}
    assert readable(tmp_path / "sealed") == []
    assert len(readable(tmp_path / "open")) == 4, "the search would find it"


def test_without_a_seal_the_files_are_as_ever(tmp_path: Path) -> None:
    """Byte for byte what format 2 is: a manifest of these keys, and plain safetensors."""
    from safetensors.torch import save

    write(Store(tmp_path), 1)
    manifest, tensors = files(tmp_path, 1)
    content = save(tensors_of(1))
    said = {"format": 2, "number": 1, "meta": {"round": 1}}
    said |= {"blake3": blake3(content).hexdigest(), "size": len(content)}
    assert tensors.read_bytes() == content
    assert manifest.read_bytes() == sealed(json.dumps(said).encode())


def damage(folder: Path, content: bytes, file: Path) -> None:
    """A damaged file is found and checkpoint 1 is read; the file is put back right."""
    before = file.read_bytes()
    file.write_bytes(content)
    store = Store(folder, encryption=KEY)
    assert is_checkpoint(store.read_newest(), 1), file
    assert [each.number for each in store.skipped] == [2]
    file.write_bytes(before)


def test_flipped_bits_and_truncations_are_found(tmp_path: Path) -> None:
    two(tmp_path)
    chance = random.Random(0)
    for file in files(tmp_path, 2):
        content = file.read_bytes()
        for place in chance.sample(range(8 * len(content)), often(500)):
            damage(tmp_path, flip(place)(content), file)
        for size in chance.sample(range(len(content)), often(100)):
            damage(tmp_path, content[:size], file)
        damage(tmp_path, content + b"\0", file)
        damage(tmp_path, b"", file)
    assert is_checkpoint(Store(tmp_path, encryption=KEY).read_newest(), 2)


def said_in(folder: Path, number: int) -> dict[str, Any]:
    return json.loads((folder / f"{number}.json").read_bytes())["manifest"]


def forge(folder: Path, number: int, content: bytes | None = None, **other: Any) -> None:
    """Write a checkpoint's manifest anew, and its tensors, with digests that are right."""
    said = said_in(folder, number) | other
    if content is not None:
        files(folder, number)[1].unlink()
        said |= {"sha256": sha256(content).hexdigest(), "size": len(content)}
        (folder / f"{number}.{said['sha256'][:16]}.safetensors").write_bytes(content)
    (folder / f"{number}.json").write_bytes(sealed(json.dumps(said).encode()))


def test_damage_with_right_digests_is_found_too(tmp_path: Path) -> None:
    """Who may write to the disk can take digests, and has no key."""
    whole = tmp_path / "whole"
    two(whole)
    meta, content = b64decode(said_in(whole, 2)["meta"]), files(whole, 2)[1].read_bytes()
    older = said_in(whole, 1)["meta"], files(whole, 1)[1].read_bytes()
    chance = random.Random(1)
    forgeries: list[tuple[bytes | None, dict[str, Any]]] = [
        *((flip(chance.randrange(8 * len(content)))(content), {}) for _ in range(100)),
        *((content[: chance.randrange(len(content))], {}) for _ in range(20)),
        (older[1], {}),
        (older[1], {"meta": older[0]}),
        (None, {"meta": older[0]}),
        (None, {"meta": {"round": 2}}),
        (None, {"meta": "?"}),
        (None, {"meta": b64encode(b"").decode()}),
    ]
    for _ in range(100):
        spoilt = flip(chance.randrange(8 * len(meta)))(meta)
        forgeries.append((None, {"meta": b64encode(spoilt).decode()}))
    for tensors, other in forgeries:
        folder = tmp_path / "forged"
        shutil.copytree(whole, folder)
        forge(folder, 2, tensors, **other)
        store = Store(folder, encryption=KEY)
        assert is_checkpoint(store.read_newest(), 1) and len(store.skipped) == 1
        shutil.rmtree(folder)


def test_files_of_another_checkpoint_do_not_pass(tmp_path: Path) -> None:
    two(tmp_path)
    for old, new in zip(files(tmp_path, 1), files(tmp_path, 2), strict=True):
        damage(tmp_path, old.read_bytes(), new)


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, Path]:
    """A home, and that of another client with the same key."""
    home, another = tmp_path / "home", tmp_path / "another"
    two(home)
    store = Store(another, encryption=KEY)
    for number in (1, 2):
        store.write({"other": torch.ones(5)}, {"round": number}, number=number)
    return home, another


ELSEWHERE = "checkpoints 2 and 1 in .* were not written in one folder: restore"


@pytest.mark.parametrize("number", [1, 2])
def test_the_tensors_of_another_folder_do_not_pass(mixed: tuple[Path, Path], number: int) -> None:
    home = mixed[0]
    own, other = (files(folder, number)[1] for folder in mixed)
    content, foreign = own.read_bytes(), other.read_bytes()
    own.write_bytes(foreign)
    assert is_checkpoint(Store(home, encryption=KEY).read_newest(), 3 - number)
    own.write_bytes(content)
    forge(home, number, foreign)
    assert is_checkpoint(Store(home, encryption=KEY).read_newest(), 3 - number), (
        "though the digest is right"
    )


@pytest.mark.parametrize("number", [1, 2])
def test_a_checkpoint_of_another_folder_does_not_pass(
    mixed: tuple[Path, Path], number: int
) -> None:
    home, another = mixed
    shutil.copy(files(another, number)[0], home)
    if number == 2:
        assert is_checkpoint(Store(home, encryption=KEY).read_newest(), 1), (
            "its tensors are not there"
        )
    shutil.copy(files(another, number)[1], home)
    store = Store(home, encryption=KEY)
    for asked in (
        store.read_newest,
        lambda: write(store, 3),
        Journal(home, encryption=KEY).client_state,
    ):
        with pytest.raises(StoreError, match=ELSEWHERE):
            asked()


def test_a_folder_may_be_moved_and_put_back_from_a_copy(tmp_path: Path) -> None:
    two(tmp_path / "home")
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    write(Store(tmp_path / "home", encryption=KEY), 3)
    shutil.copy(files(tmp_path / "copy", 1)[0], tmp_path / "home")
    shutil.copy(files(tmp_path / "copy", 1)[1], tmp_path / "home")
    assert is_checkpoint(Store(tmp_path / "home", encryption=KEY).read_newest(), 3)
    store = Store(tmp_path / "copy", encryption=KEY)
    assert is_checkpoint(store.read_newest(), 2)
    write(store, 3)
    assert is_checkpoint(store.read_newest(), 3)


@pytest.mark.parametrize(
    "wrote,reads,told",
    [
        (KEY, None, rf"2\.json is sealed .*{KEY.key_id}, and no key was given: give the key"),
        (KEY, OTHER, rf"sealed .*{KEY.key_id}, and key {OTHER.key_id} was given: give the key"),
        (None, KEY, r"2\.json is not encrypted: read it without a key"),
    ],
    ids=["no key", "wrong key", "needless key"],
)
def test_the_wrong_key_is_told_and_nothing_is_touched(
    tmp_path: Path, wrote: Encryption | None, reads: Encryption | None, told: str
) -> None:
    two(tmp_path, wrote)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    store, journal = Store(tmp_path, encryption=reads), Journal(tmp_path, encryption=reads)
    for asked in (
        store.read_newest,
        lambda: write(store, 3),
        lambda: write(store, 2),
        journal.client_state,
        lambda: journal.reply_for("r"),
        lambda: journal.commit("r", {}, {}, {}, {}),
    ):
        with pytest.raises(StoreError, match=told) as raised:
            asked()
        assert str(tmp_path) in str(raised.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert is_checkpoint(Store(tmp_path, encryption=wrote).read_newest(), 2)
    (tmp_path / "2.json").write_bytes(b"")  # and not only if the newest one says so
    with pytest.raises(StoreError, match=told.replace(r"2\.json", r"1\.json")):
        store.read_newest()


def test_another_sealed_format_is_told(tmp_path: Path) -> None:
    two(tmp_path)
    forge(tmp_path, 2, format=3)
    with pytest.raises(StoreError, match="has format 3, not sealed 1 with key"):
        Store(tmp_path, encryption=KEY).read_newest()


def test_a_meta_that_is_too_large_when_sealed_is_refused(tmp_path: Path) -> None:
    store = two(tmp_path)
    with pytest.raises(StoreError, match="put what is large into tensors"):
        store.write({}, {"long": "x" * (MAX_MANIFEST_BYTES // 2)}, number=3)
    meta = {"long": "x" * (MAX_MANIFEST_BYTES // 2 - 1100)}
    store.write({}, meta, number=3)
    found = store.read_newest()
    assert found is not None and found.meta == meta


KILLS = """
import os, sys
from pathlib import Path
from test_encryption import KEY, NOTE, SECRETS
from fedplan.storage.store import Store

for point in eval(sys.argv[2]):
    store = Store(Path(sys.argv[1]) / point, encryption=KEY)
    store.write(SECRETS, {"round": 1, "note": NOTE}, number=1)
    child = os.fork()
    if not child:
        os.environ["FEDPLAN_FAILPOINT"] = f"{point}:kill@1"
        store.write(SECRETS, {"round": 2, "note": NOTE}, number=2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, point
"""


def test_a_kill_leaves_one_checkpoint_or_the_other_and_nothing_readable(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLS, str(tmp_path), repr(STORE_POINTS)]
    place = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, check=False, env=place)
    assert done.returncode == 0, done.stderr.decode()
    assert readable(tmp_path) == []
    for point in STORE_POINTS:
        store, number = Store(tmp_path / point, encryption=KEY), 2 if point in COMMITTED else 1
        found = store.read_newest()
        assert found is not None and found.number == number and store.skipped == []
        assert same(found.tensors, SECRETS) and found.meta == {"round": number, "note": NOTE}
        write(store, 2)
        assert (
            is_checkpoint(store.read_newest(), 2) and len(list((tmp_path / point).iterdir())) == 4
        )


@pytest.mark.parametrize("action,told", [("raise", "Input/output"), ("enospc", "No space left")])
@pytest.mark.parametrize("point", STORE_POINTS)
@pytest.mark.parametrize("number", [2, 3], ids=["replaced", "new"])
def test_a_failing_disk_leaves_one_or_the_other(
    tmp_path: Path, point: str, action: str, told: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = two(tmp_path)
    monkeypatch.setenv(VARIABLE, f"{point}:{action}@1")
    with pytest.raises(StoreError, match=told):
        store.write({"new": torch.ones(3)}, {"new": True}, number=number)
    assert not list(tmp_path.glob("*.tmp"))
    found = Store(tmp_path, encryption=KEY).read_newest()
    if point in COMMITTED:
        assert found is not None and found.number == number and found.meta == {"new": True}
    else:
        assert is_checkpoint(found, 2)
    write(store, number)
    assert is_checkpoint(store.read_newest(), number) and len(list(tmp_path.iterdir())) == 4


def test_a_full_disk_leaves_the_last_good_checkpoint(small_disk: Path) -> None:
    store = two(small_disk / "store")
    large, filler = {"large": torch.zeros(1_000_000)}, small_disk / "filler"
    for free in [*range(0, 40960, 8192), *range(3_900_000, 4_000_000, 8192)]:
        filler.unlink(missing_ok=True)
        space = os.statvfs(small_disk)
        filler.write_bytes(bytes(space.f_bavail * space.f_frsize - free))
        with pytest.raises(StoreError, match=r"No space left.*free space"):
            store.write(large, {"round": 3, "long": "x" * 9000}, number=3)
        assert is_checkpoint(store.read_newest(), 2)
        assert not list((small_disk / "store").glob("*.tmp"))
    filler.unlink()
    store.write(large, {}, number=3)
    found = store.read_newest()
    assert found is not None and same(found.tensors, large)


class SealedMachine(JournalMachine):
    """The laws of journals hold for sealed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal(self.folder, encryption=KEY)

    @rule()
    def restart(self) -> None:
        self.journal = Journal(self.folder, encryption=KEY)


TestSealedMachine = SealedMachine.TestCase
TestSealedMachine.settings = settings(
    max_examples=25,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_read_error_does_not_split_a_folder(tmp_path: Path) -> None:
    store, plain = Store(tmp_path / "s", encryption=KEY), Path.read_bytes
    store.write({}, {"n": 1}, number=1)
    failing = [OSError(errno.EIO, "Input/output error")]

    def read(file: Path) -> bytes:
        if file.name == "1.json" and failing:
            raise failing.pop()
        return plain(file)

    with patch.object(Path, "read_bytes", read), pytest.raises(StoreError, match="Input/output"):
        Store(tmp_path / "s", encryption=KEY).write({}, {"n": 2}, number=2)
    store.write({}, {"n": 2}, number=2)
    newest = Store(tmp_path / "s", encryption=KEY).read_newest()
    assert newest is not None and newest.meta == {"n": 2}
