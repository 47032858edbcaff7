# SPDX-License-Identifier: Apache-2.0
"""Reading of safetensors files tensor by tensor, hashed while they are read."""

from __future__ import annotations

import errno
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
from fedplan.storage.checkpoints import InvalidCheckpoint, Manifest, new_hash
from fedplan.storage.encryption import Encryption
from fedplan.tensors.serialization import TensorEntry, parse_entries, tensor_view

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
    """Result of `read_tensors`: tensors by name, digest of the whole file, and an error message.

    `fault` is the message if the file is malformed, and `tensors` is then empty. Compare `digest`
    with the expected digest before using the tensors: they may be damaged without a fault.
    """

    tensors: dict[str, Tensor]
    digest: str
    fault: str = ""


def read_tensors(file: Path, name_filter: NameFilter, hash_name: str = "blake3") -> TensorRead:
    """Read a safetensors file once; load the tensors that `name_filter` accepts, hash all bytes.

    `hash_name`: as of a Manifest. A malformed file is reported in `fault` of the result. Raises
    OSError if reading fails.
    """
    with FileIO(file) as opened:
        reader, size = _HashingReader(opened, new_hash(hash_name)), file.stat().st_size
        tensors, fault = dict[str, Tensor](), ""
        try:
            count = int.from_bytes(reader.read(8), "little")
            if count > min(size, MAX_HEADER_BYTES):
                raise ValueError(f"its header would take {count} of {size} bytes")
            for entry in parse_entries(_parse_header(reader.read(count)), size - 8 - count):
                if name_filter(entry.name):
                    tensors[entry.name] = reader.read_tensor(entry)
                else:
                    reader.skip(entry.stop - entry.start)
        except (ValueError, RecursionError) as error:
            tensors, fault = {}, str(error)
        reader.skip(size)
        return TensorRead(tensors, reader.digest.hexdigest(), fault)


def parse_tensors(data: bytes, name_filter: NameFilter) -> dict[str, Tensor]:
    """Return the tensors in `data` (bytes of a safetensors file) that `name_filter` accepts.

    The tensors are views of `data`, not copies: do not write to them. Raises ValueError if `data`
    is malformed.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    if not 8 <= start <= len(data):
        raise ValueError("it ends too soon")
    entries = parse_entries(_parse_header(data[8:start]), len(data) - start)
    return {e.name: tensor_view(data, start, e) for e in entries if name_filter(e.name)}


def _parse_header(text: bytes) -> dict[str, Any]:
    """Parse a safetensors header; return its entries by tensor name, ValueError if malformed."""
    header: Any = json.loads(text.decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    entries = cast("dict[str, Any]", header)
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


class _HashingReader:
    """Sequential reader of an open `file` that updates the hash `digest` with every byte read."""

    def __init__(self, file: FileIO, digest: Any) -> None:
        self._file, self.digest = file, digest

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes; ValueError if the file ends before."""
        buffer = bytearray(count)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def read_tensor(self, entry: TensorEntry) -> Tensor:
        """Read the next bytes into a new tensor, with the shape and dtype of `entry`.

        Raises ValueError if the file ends before.
        """
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if tensor.numel():
            buffer: Any = tensor.view(-1).view(torch.uint8).numpy()
            self._fill(memoryview(buffer))
        return tensor

    def skip(self, count: int) -> None:
        """Hash the next `count` bytes, or all that are left."""
        while count > 0 and (piece := self._file.read(min(count, _PIECE))):
            self.digest.update(piece)
            count -= len(piece)

    def _fill(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes; ValueError if the file ends before."""
        at = 0
        while at < len(buffer):
            # Small pieces are hashed while they are in the CPU cache.
            count = self._file.readinto(buffer[at : at + _PIECE])
            if not count:
                raise ValueError("it ends too soon")
            self.digest.update(buffer[at : at + count])
            at += count


def read_verified_tensors(
    file: Path, manifest: Manifest, encryption: Encryption | None, name_filter: NameFilter
) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint's tensor file that `name_filter` accepts.

    `manifest` gives the expected size and digest of the whole file; `encryption` decrypts, None if
    the file is not encrypted. Raises InvalidCheckpoint if the file is missing, its size or digest
    is wrong, it cannot be decrypted, or it is no safetensors file.
    """
    content = b""
    if encryption is not None:
        content = read_bounded(file, manifest.size)
        require_size(manifest, len(content))
        digest = new_hash(manifest.hash)
        digest.update(content)
        read = TensorRead({}, digest.hexdigest())
    else:
        with lost_as_invalid(file):
            require_size(manifest, bounded_size(file, manifest.size))
            # Digest and tensors come from one read: the file may change between two.
            read = read_tensors(file, name_filter, manifest.hash)
    if read.digest != manifest.digest:
        raise InvalidCheckpoint(f"{manifest.file} is damaged: its digest differs")
    try:
        if encryption is not None:
            return parse_tensors(encryption.decrypt(content, tensors_label(manifest)), name_filter)
        if read.fault:
            raise ValueError(read.fault)
    except StoreError as error:
        raise InvalidCheckpoint(f"{manifest.file} cannot be decrypted: {error}") from error
    except ValueError as error:
        raise InvalidCheckpoint(f"{manifest.file} is no safetensors file: {error}") from error
    return read.tensors


def read_bounded(file: Path, limit: int) -> bytes:
    """Return the bytes of a regular file.

    Raises InvalidCheckpoint if the file is missing, not regular, or larger than `limit` bytes.
    """
    with lost_as_invalid(file):
        bounded_size(file, limit)
        return file.read_bytes()


def bounded_size(file: Path, limit: int) -> int:
    """Return a file's size in bytes.

    Raises InvalidCheckpoint if the file is larger than `limit` bytes or not regular, OSError if
    missing.
    """
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
    """Turn an OSError of the body (file missing, or input/output error) into InvalidCheckpoint.

    Other OSErrors pass unchanged. `file` is named in the message.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise InvalidCheckpoint(f"{file.name} is lost: {error.strerror}") from error


def tensors_label(manifest: Manifest) -> str:
    """Return the label under which a checkpoint's tensors are encrypted."""
    return f"tensors {manifest.number}"
