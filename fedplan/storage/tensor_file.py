# SPDX-License-Identifier: Apache-2.0
"""Tensor files: safetensors read tensor by tensor, and hashed as they are read."""

from __future__ import annotations

import errno
import hashlib
import json
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedplan.errors import StoreError
from fedplan.storage.encryption import Encryption
from fedplan.storage.generations import Manifest, Unfit
from fedplan.tensors.layout import Place, places_in, viewed

LARGEST_HEAD = 2**27
"""Bytes that the names and shapes of a file may take."""
_PIECE = 2**20
_LOST = {errno.ENOENT, errno.EIO}

Names = Callable[[str], bool]
"""Which tensors of a file are wanted, by their names."""


def ALL(_: str) -> bool:
    """Every tensor."""
    return True


def NONE(_: str) -> bool:
    """No tensor: a file is only checked."""
    return False


class Reading(NamedTuple):
    """The tensors of a file, the digest of all of its bytes, and why there are no tensors, if so.

    Somebody may have damaged it: nothing of it counts before the digest is known to be right.
    """

    tensors: dict[str, Tensor]
    sha256: str
    fault: str = ""


def read_tensors(file: Path, names: Names) -> Reading:
    """Read a file once: tensors that nobody wants pass through, and are never held."""
    with FileIO(file) as opened:
        reader, size = _Hashed(opened), file.stat().st_size
        tensors, fault = dict[str, Tensor](), ""
        try:
            for place in _places(reader, size):
                if names(place.name):
                    tensors[place.name] = reader.tensor(place)
                else:
                    reader.skip(place.stop - place.start)
        except (ValueError, RecursionError) as error:
            tensors, fault = {}, str(error)
        reader.skip(size)
        return Reading(tensors, reader.found.hexdigest(), fault)


def tensors_in(data: bytes, names: Names) -> dict[str, Tensor]:
    """The tensors of the bytes of a file, where they lie; else a ValueError says why."""
    head = 8 + int.from_bytes(data[:8], "little")
    if not 8 <= head <= len(data):
        raise ValueError("it ends too soon")
    places = places_in(_entries(data[8:head]), len(data) - head)
    return {place.name: viewed(data, head, place) for place in places if names(place.name)}


def _places(reader: _Hashed, size: int) -> list[Place]:
    count = int.from_bytes(reader.bytes(8), "little")
    if count > min(size, LARGEST_HEAD):
        raise ValueError(f"its head would take {count} of {size} bytes")
    return places_in(_entries(reader.bytes(count)), size - 8 - count)


def _entries(text: bytes) -> dict[str, Any]:
    found: Any = json.loads(text.decode("utf-8"))
    if not isinstance(found, dict):
        raise ValueError("its head is no JSON object")
    held = cast("dict[str, Any]", found)
    return {name: entry for name, entry in held.items() if name != "__metadata__"}


class _Hashed:
    """A file whose digest grows with all that is read of it."""

    def __init__(self, file: FileIO) -> None:
        self._file, self.found = file, hashlib.sha256()

    def bytes(self, count: int) -> bytes:
        """The next bytes."""
        held = bytearray(count)
        self._fill(memoryview(held))
        return bytes(held)

    def tensor(self, place: Place) -> Tensor:
        """The next tensor, in memory of its own."""
        made = torch.empty(place.shape, dtype=place.dtype)
        if made.numel():
            held: Any = made.view(-1).view(torch.uint8).numpy()
            self._fill(memoryview(held))
        return made

    def skip(self, count: int) -> None:
        """Pass over as many bytes, or all that are left."""
        while count > 0 and (some := self._file.read(min(count, _PIECE))):
            self.found.update(some)
            count -= len(some)

    def _fill(self, place: memoryview) -> None:
        at = 0
        while at < len(place):
            # Hashed while it is in a core's cache.
            count = self._file.readinto(place[at : at + _PIECE])
            if not count:
                raise ValueError("it ends too soon")
            self.found.update(place[at : at + count])
            at += count


def checked_tensors(
    file: Path, manifest: Manifest, seal: Encryption | None, names: Names
) -> dict[str, Tensor]:
    """The tensors of the file that a manifest speaks of; one that is not that is unfit."""
    if seal is not None:
        return _opened(file, manifest, seal, names)
    with not_lost(file):
        require_size(manifest, size_of(file, manifest.size))
        # The bytes whose digest is taken, and not the file again, which may have changed.
        tensors, digest, fault = read_tensors(file, names)
    _require_digest(manifest, digest)
    if fault:
        raise Unfit(f"{manifest.file} is no safetensors file: {fault}")
    return tensors


def _opened(file: Path, manifest: Manifest, seal: Encryption, names: Names) -> dict[str, Tensor]:
    """The tensors of a sealed file."""
    content = content_of(file, manifest.size)
    require_size(manifest, len(content))
    _require_digest(manifest, hashlib.sha256(content).hexdigest())
    try:
        return tensors_in(seal.open(content, about(manifest)), names)
    except StoreError as error:
        raise Unfit(f"{manifest.file} does not open: {error}") from error
    except ValueError as error:
        raise Unfit(f"{manifest.file} is no safetensors file: {error}") from error


def _require_digest(manifest: Manifest, digest: str) -> None:
    if digest != manifest.sha256:
        raise Unfit(f"{manifest.file} is damaged: its digest differs")


def content_of(file: Path, most: int) -> bytes:
    """The bytes of a plain file, if they are no more than `most`."""
    with not_lost(file):
        size_of(file, most)
        return file.read_bytes()


def size_of(file: Path, most: int) -> int:
    """The bytes that a plain file has, if they are no more than `most`."""
    found = file.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise Unfit(f"{file.name} is no plain file")
    if found.st_size > most:
        raise Unfit(f"{file.name} has {found.st_size} bytes, more than {most}")
    return found.st_size


def require_size(manifest: Manifest, size: int) -> None:
    """Refuse a file of another size than its manifest says."""
    if size != manifest.size:
        raise Unfit(f"{manifest.file} has {size} bytes of {manifest.size}")


@contextmanager
def not_lost(file: Path) -> Generator[None]:
    """Tell of a file that is gone, or that its disk does not give, as of one that is unfit."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise Unfit(f"{file.name} is lost: {error.strerror}") from error


def about(manifest: Manifest) -> str:
    """The words that tensors are sealed under."""
    return f"tensors {manifest.number}"
