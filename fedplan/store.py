# SPDX-License-Identifier: Apache-2.0
"""Store: generations of tensors on disk that outlive a kill, a full disk and a flipped bit.

A generation is a tensor file and a manifest, `7.json`, that holds the tensor file's digest and its
own. The manifest is renamed into place last, so a generation is there whole or not at all. Part of
the digest stands in the tensor file's name: to write a number again never touches the tensors that
its present manifest speaks of.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, strided

from fedplan.errors import StoreError as StoreError
from fedplan.failpoints import reach
from fedplan.locks import alone, claimed
from fedplan.params import ITEMSIZE

Tensors = Mapping[str, Tensor]
Meta = Mapping[str, Any]
Read = tuple[dict[str, Tensor], dict[str, Any]]
Wanted = Callable[[dict[str, Any]], bool]

FORMAT = 1
LARGEST_MANIFEST = 64 << 20
"""Bytes: a larger manifest is neither written nor read."""

_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})\.json", re.ASCII)
_TENSORS = re.compile(r"[0-9]+\.[0-9a-f]{16}\.safetensors", re.ASCII)
_TEMPORARY = re.compile(r"[0-9]+\.(json|safetensors)\.tmp|\.tmp\w{6}", re.ASCII)
"""Ours, and those that safetensors writes to before it renames."""
_SEALED = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "manifest": (.*)\}\n', re.DOTALL)
_LOST = {errno.ENOENT, errno.EIO}


class _Unfit(Exception):
    """Why a generation is passed over."""


@dataclass(frozen=True)
class Generation:
    """What was written under a number."""

    number: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Skipped:
    """A generation that was passed over, and why."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"generation {self.number}: {self.reason}"


@dataclass(frozen=True)
class _Manifest:
    number: int
    meta: dict[str, Any]
    sha256: str
    size: int

    @property
    def file(self) -> str:
        return f"{self.number}.{self.sha256[:16]}.safetensors"

    def sealed(self) -> bytes:
        """It as JSON, with the digest of every byte of it."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, allow_nan=False).encode()
        digest = hashlib.sha256(body).hexdigest()
        return f'{{"sha256": "{digest}", "manifest": '.encode() + body + b"}\n"


class Store:
    """A folder of generations, of which the newest `keep` good ones stay.

    One process writes at a time; any may read. `claim` keeps the others from it for longer.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise StoreError(f"keep is {keep}: a store keeps at least 1 generation")
        self._unfit: dict[int, str] = {}
        self._folder, self._keep = folder, keep
        with told(f"{folder} cannot be made", "name a folder that you may write to"):
            missing = [each for each in (folder, *folder.parents) if not each.exists()]
            for each in reversed(missing):
                each.mkdir(mode=0o700, exist_ok=True)
                _sync(each.parent)
            folder.mkdir(exist_ok=True)

    def claim(self) -> None:
        """Let no other process write here while this Store lives, however its process ends."""
        with told(f"{self._folder} cannot be claimed", "make it readable to this user"):
            self._claim = claimed(self._folder)

    def write(self, tensors: Tensors, meta: Meta, *, number: int) -> None:
        """Write a generation: when this returns it is on disk; until then the last one is.

        A number that exists is replaced. After a StoreError either generation may be the newest.
        """
        _require_same(meta)
        with (
            told(
                f"generation {number} was not finished in {self._folder}",
                "the last good one is untouched; free space or mend the disk, then write it again",
            ),
            alone(self._folder),
        ):
            self._require_next(number)
            try:
                self._commit(_Manifest(number, dict(meta), "", 0), _apart(tensors))
            finally:
                with suppress(OSError):
                    self._remove(_TEMPORARY)

    def read(self) -> Generation | None:
        """The newest good generation, None if there never was one; `skipped` has the others."""
        return self.find(lambda _: True)

    def find(self, wanted: Wanted) -> Generation | None:
        """The newest good generation with such a meta; tensors of others are not read."""
        with told(f"{self._folder} cannot be read", "make it readable to this user"):
            # What a killed writer renamed may not be on disk yet: nobody acts on it before it is.
            _sync(self._folder)
            numbers = self.numbers()
            self._unfit = {n: reason for n, reason in self._unfit.items() if n in numbers}
            found = self._newest(numbers, wanted)
        if numbers and len(self._unfit) == len(numbers):
            raise StoreError(
                f"{self._folder} holds no good generation ({'; '.join(map(str, self.skipped))}): "
                "put a copy of the folder back, or remove it to begin anew"
            )
        return found

    @property
    def skipped(self) -> list[Skipped]:
        """The generations that were passed over, the newest first; the next write removes them."""
        return [Skipped(*each) for each in sorted(self._unfit.items(), reverse=True)]

    def numbers(self) -> list[int]:
        """The numbers of all generations, good or not, the newest first."""
        names = (_NUMBER.fullmatch(name) for name in os.listdir(self._folder))
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def standing(self) -> list[int]:
        """The generations that were not passed over, the newest first."""
        with told(f"{self._folder} cannot be read", "make it readable to this user"):
            return [number for number in self.numbers() if number not in self._unfit]

    def _newest(self, numbers: list[int], wanted: Wanted) -> Generation | None:
        for number in numbers:
            try:
                manifest = self._manifest(number)
                if wanted(manifest.meta):
                    found = Generation(number, self._tensors(manifest), manifest.meta)
                    self._unfit.pop(number, None)
                    return found
            except _Unfit as error:
                self._unfit[number] = str(error)
        return None

    def _manifest(self, number: int) -> _Manifest:
        file = self._folder / f"{number}.json"
        found = _SEALED.fullmatch(_content(file, LARGEST_MANIFEST))
        if found is None or hashlib.sha256(found[2]).hexdigest() != found[1].decode():
            raise _Unfit(f"{file.name} is damaged")
        try:
            said = json.loads(found[2], parse_constant=_refuse)
            version = said.pop("format")
            manifest = _checked(said, number) if version == FORMAT else None
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise _Unfit(f"{file.name} is no manifest: {error!r}") from error
        if manifest is None:
            raise StoreError(
                f"{file} has format {version!r}, not {FORMAT}: read it with the fedplan it is from"
            )
        return manifest

    def _tensors(self, manifest: _Manifest) -> dict[str, Tensor]:
        content = _content(self._folder / manifest.file, manifest.size)
        if len(content) != manifest.size:
            raise _Unfit(f"{manifest.file} has {len(content)} bytes of {manifest.size}")
        if hashlib.sha256(content).hexdigest() != manifest.sha256:
            raise _Unfit(f"{manifest.file} is damaged: its digest differs")
        try:
            # The bytes whose digest was taken, and not the file again, which may have changed.
            return load(content)
        except (SafetensorError, ValueError, KeyError, RuntimeError, AssertionError) as error:
            raise _Unfit(f"{manifest.file} is no safetensors file: {error}") from error

    def _require_next(self, number: int) -> None:
        if type(number) is not int or not 0 <= number < 10**18:
            raise StoreError(f"generation {number!r}: a number is a whole one from 0 to 10^18 - 1")
        newest = max(self.standing(), default=0)
        if number < newest:
            raise StoreError(
                f"generation {number} is older than generation {newest} in {self._folder}: go on "
                "from what read() returns, or begin anew in another folder"
            )

    def _commit(self, manifest: _Manifest, tensors: dict[str, Tensor]) -> None:
        reach("store.begun")
        self._sweep()
        manifest = self._write_tensors(manifest, tensors)
        self._write_manifest(manifest)
        self._unfit.pop(manifest.number, None)
        self._prune()
        reach("store.pruned")

    def _write_tensors(self, manifest: _Manifest, tensors: dict[str, Tensor]) -> _Manifest:
        temporary = self._folder / f"{manifest.number}.safetensors.tmp"
        save_file(tensors, temporary)
        temporary.chmod(0o600)
        reach("store.tensors_written")
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
            reach("store.tensors_synced")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
        manifest = _Manifest(manifest.number, manifest.meta, digest, size)
        temporary.rename(self._folder / manifest.file)
        reach("store.tensors_renamed")
        _sync(self._folder)
        return manifest

    def _write_manifest(self, manifest: _Manifest) -> None:
        temporary = self._folder / f"{manifest.number}.json.tmp"
        with open(temporary, "xb", opener=_private) as file:
            file.write(manifest.sealed())
            file.flush()
            reach("store.manifest_written")
            os.fsync(file.fileno())
        temporary.rename(self._folder / f"{manifest.number}.json")
        reach("store.manifest_renamed")
        _sync(self._folder)
        reach("store.folder_synced")

    def _sweep(self) -> None:
        """Remove what no manifest speaks of: the leftovers of writes that failed."""
        _sync(self._folder)
        self._remove(_TEMPORARY)
        names = os.listdir(self._folder)
        spoken = set[str]()
        for number in self.numbers():
            try:
                spoken.add(self._manifest(number).file)
            except _Unfit:
                # A manifest that cannot be read may speak of any file of its number.
                spoken |= {name for name in names if name.startswith(f"{number}.")}
        self._remove(_TENSORS, spoken)

    def _prune(self) -> None:
        stay = self.standing()[: self._keep]
        for number in self.numbers():
            if number not in stay:
                (self._folder / f"{number}.json").unlink()
        self._sweep()

    def _remove(self, names: re.Pattern[str], but: Collection[str] = ()) -> None:
        for name in os.listdir(self._folder):
            if names.fullmatch(name) and name not in but:
                (self._folder / name).unlink()


@contextmanager
def told(what: str, remedy: str) -> Generator[None]:
    """Tell a failure of the disk as a StoreError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{what}: {error}; {remedy}") from error


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _private(file: str, flags: int) -> int:
    return os.open(file, flags, 0o600)


def _content(file: Path, most: int) -> bytes:
    """The bytes of a plain file, if they are no more than `most`."""
    try:
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise _Unfit(f"{file.name} is no plain file")
        if found.st_size > most:
            raise _Unfit(f"{file.name} has {found.st_size} bytes, more than {most}")
        return file.read_bytes()
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise _Unfit(f"{file.name} is lost: {error.strerror}") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _checked(said: dict[str, Any], number: int) -> _Manifest:
    manifest = _Manifest(**said)
    if type(manifest.number) is not int or manifest.number != number:
        raise ValueError(f"number {manifest.number!r}")
    if type(manifest.size) is not int or manifest.size < 0:
        raise ValueError(f"size {manifest.size!r}")
    if type(manifest.meta) is not dict or not re.fullmatch("[0-9a-f]{64}", manifest.sha256):
        raise ValueError(f"sha256 {manifest.sha256!r}, meta {type(manifest.meta).__name__}")
    return manifest


def _require_same(meta: Meta) -> None:
    """Refuse a meta that would not be read as it was written."""
    try:
        text = json.dumps(dict(meta), allow_nan=False)
        same = json.loads(text) == dict(meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"the meta is no JSON: {error}; use finite numbers and strings") from error
    if not same:
        raise StoreError(f"the meta {text[:60]} changes in JSON: use lists and string keys")
    if len(text) > LARGEST_MANIFEST - 1024:
        raise StoreError(f"the meta has {len(text)} characters: put what is large into tensors")


def _apart(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: dense, none in the memory of another."""
    apart: dict[str, Tensor] = {}
    taken = set[int]()
    for name, tensor in tensors.items():
        if name == "__metadata__" or not name.isprintable():
            raise StoreError(f"a tensor cannot be named {name!r}: use another, printable name")
        if str(tensor.dtype).removeprefix("torch.") not in ITEMSIZE or tensor.layout != strided:
            raise StoreError(f"{name!r} is {tensor.dtype}, {tensor.layout}: make it dense float32")
        dense = tensor.detach().cpu().contiguous()
        memory = dense.untyped_storage().data_ptr()
        apart[name] = dense.clone() if memory in taken else dense
        taken.add(memory)
    return apart
