# SPDX-License-Identifier: Apache-2.0
"""Reading of safetensors files tensor by tensor, hashed while they are read."""

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
from fedplan.storage.checkpoints import InvalidCheckpoint, Manifest
from fedplan.storage.encryption import Encryption
from fedplan.tensors.layout import TensorEntry, parse_entries, tensor_view

MAX_HEADER_BYTES = 2**27
"""Size limit of a file's header, which lists names, dtypes and shapes."""
_PIECE = 2**20
_LOST = {errno.ENOENT, errno.EIO}

NameFilter = Callable[[str], bool]
"""Whether to load the tensor of a name."""


def all_tensors(_: str) -> bool:
    """NameFilter that loads every tensor."""
    return True


def no_tensors(_: str) -> bool:
    """NameFilter that loads no tensor: the file is only checked."""
    return False


class TensorRead(NamedTuple):
    """Loaded tensors, SHA-256 of the whole file, and an error message if it is malformed.

    `tensors` is empty if `fault` is set. Compare `sha256` before using the tensors: the file may
    be damaged.
    """

    tensors: dict[str, Tensor]
    sha256: str
    fault: str = ""


def read_tensors(file: Path, name_filter: NameFilter) -> TensorRead:
    """Read a safetensors file once; tensors that `name_filter` rejects are hashed, not loaded."""
    with FileIO(file) as opened:
        reader, size = _HashingReader(opened), file.stat().st_size
        tensors, fault = dict[str, Tensor](), ""
        try:
            for entry in _read_header(reader, size):
                if name_filter(entry.name):
                    tensors[entry.name] = reader.read_tensor(entry)
                else:
                    reader.skip(entry.stop - entry.start)
        except (ValueError, RecursionError) as error:
            tensors, fault = {}, str(error)
        reader.skip(size)
        return TensorRead(tensors, reader.hash.hexdigest(), fault)


def parse_tensors(data: bytes, name_filter: NameFilter) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file's bytes as views of these bytes.

    Raises ValueError if the bytes are malformed.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    if not 8 <= start <= len(data):
        raise ValueError("it ends too soon")
    entries = parse_entries(_parse_header(data[8:start]), len(data) - start)
    return {e.name: tensor_view(data, start, e) for e in entries if name_filter(e.name)}


def _read_header(reader: _HashingReader, size: int) -> list[TensorEntry]:
    """Read a file's header and return its tensors' entries in file order; ValueError if invalid."""
    count = int.from_bytes(reader.read(8), "little")
    if count > min(size, MAX_HEADER_BYTES):
        raise ValueError(f"its header would take {count} of {size} bytes")
    return parse_entries(_parse_header(reader.read(count)), size - 8 - count)


def _parse_header(text: bytes) -> dict[str, Any]:
    header: Any = json.loads(text.decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    entries = cast("dict[str, Any]", header)
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


class _HashingReader:
    """Sequential reader of a file that updates `hash` with every byte read."""

    def __init__(self, file: FileIO) -> None:
        self._file, self.hash = file, hashlib.sha256()

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes; ValueError if the file ends before."""
        buffer = bytearray(count)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def read_tensor(self, entry: TensorEntry) -> Tensor:
        """Read the next tensor into new memory; ValueError if the file ends before."""
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if tensor.numel():
            buffer: Any = tensor.view(-1).view(torch.uint8).numpy()
            self._fill(memoryview(buffer))
        return tensor

    def skip(self, count: int) -> None:
        """Hash the next `count` bytes, or all that are left."""
        while count > 0 and (piece := self._file.read(min(count, _PIECE))):
            self.hash.update(piece)
            count -= len(piece)

    def _fill(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes; ValueError if the file ends before."""
        at = 0
        while at < len(buffer):
            # Small pieces are hashed while they are in the CPU cache.
            count = self._file.readinto(buffer[at : at + _PIECE])
            if not count:
                raise ValueError("it ends too soon")
            self.hash.update(buffer[at : at + count])
            at += count


def read_verified_tensors(
    file: Path, manifest: Manifest, encryption: Encryption | None, name_filter: NameFilter
) -> dict[str, Tensor]:
    """Load and decrypt the tensors of a checkpoint's file that `name_filter` accepts.

    Raises InvalidCheckpoint if the file is missing, or its size, digest or format is wrong.
    """
    if encryption is not None:
        return _read_encrypted_tensors(file, manifest, encryption, name_filter)
    with lost_as_invalid(file):
        require_size(manifest, bounded_size(file, manifest.size))
        # Digest and tensors come from one read: the file may change between two.
        tensors, digest, fault = read_tensors(file, name_filter)
    _require_digest(manifest, digest)
    if fault:
        raise InvalidCheckpoint(f"{manifest.file} is no safetensors file: {fault}")
    return tensors


def _read_encrypted_tensors(
    file: Path, manifest: Manifest, encryption: Encryption, name_filter: NameFilter
) -> dict[str, Tensor]:
    """Load an encrypted tensor file; InvalidCheckpoint if it is damaged or not decryptable."""
    content = read_bounded(file, manifest.size)
    require_size(manifest, len(content))
    _require_digest(manifest, hashlib.sha256(content).hexdigest())
    try:
        return parse_tensors(encryption.decrypt(content, tensors_label(manifest)), name_filter)
    except StoreError as error:
        raise InvalidCheckpoint(f"{manifest.file} cannot be decrypted: {error}") from error
    except ValueError as error:
        raise InvalidCheckpoint(f"{manifest.file} is no safetensors file: {error}") from error


def _require_digest(manifest: Manifest, digest: str) -> None:
    if digest != manifest.sha256:
        raise InvalidCheckpoint(f"{manifest.file} is damaged: its digest differs")


def read_bounded(file: Path, limit: int) -> bytes:
    """Return a regular file's bytes; InvalidCheckpoint if it is lost or larger than `limit`."""
    with lost_as_invalid(file):
        bounded_size(file, limit)
        return file.read_bytes()


def bounded_size(file: Path, limit: int) -> int:
    """Return a file's size; InvalidCheckpoint if it is not regular, or larger than `limit`."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise InvalidCheckpoint(f"{file.name} is not a regular file")
    if status.st_size > limit:
        raise InvalidCheckpoint(f"{file.name} has {status.st_size} bytes, more than {limit}")
    return status.st_size


def require_size(manifest: Manifest, size: int) -> None:
    """Raise InvalidCheckpoint if `size` is not the size of the manifest's tensor file."""
    if size != manifest.size:
        raise InvalidCheckpoint(f"{manifest.file} has {size} bytes of {manifest.size}")


@contextmanager
def lost_as_invalid(file: Path) -> Generator[None]:
    """Raise InvalidCheckpoint if the body fails because a file is missing or unreadable."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise InvalidCheckpoint(f"{file.name} is lost: {error.strerror}") from error


def tensors_label(manifest: Manifest) -> str:
    """Return the label under which a checkpoint's tensors are encrypted."""
    return f"tensors {manifest.number}"
