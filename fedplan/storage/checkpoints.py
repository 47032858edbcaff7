# SPDX-License-Identifier: Apache-2.0
"""The two files of a checkpoint: its tensors, hashed while they are read, and its manifest.

A manifest holds its own digest and the digest of the tensor file. With encryption its meta is
encrypted together with a random id of the folder, under a label with the tensor file's digest:
a manifest copied from another checkpoint or folder is rejected, even under the same key.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import stat
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from blake3 import blake3
from torch import Tensor

from fedplan.errors import StoreError
from fedplan.storage.encryption import Encryption
from fedplan.tensors.serialization import DTYPES, TensorEntry, parse_entries, tensor_view

FORMATS = {"sha256": 1, "blake3": 2}
"""Format number of manifests without encryption, by the hash of the tensor file; 2 is written."""
SEALED = "sealed 1 with key"
"""Prefix of the format of encrypted manifests; the key id follows."""
MAX_MANIFEST_BYTES = 64 << 20
"""Size limit of a manifest, for writing and for reading."""
MAX_HEADER_BYTES = 2**27
"""Size limit of a tensor file's header, which lists names, dtypes and shapes."""
NameFilter = Callable[[str], bool]
"""Whether to load the tensor of a name."""

_PIECE = 2**20
_LOST = {errno.ENOENT, errno.EIO}
_WRITTEN = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "manifest": (.*)\}\n', re.DOTALL)


class InvalidCheckpoint(Exception):
    """A checkpoint is damaged or incomplete, with the reason as text.

    Store catches it and skips the checkpoint; no caller of Store sees it.
    """


@dataclass(frozen=True)
class Checkpoint:
    """The content of one checkpoint: number, tensors by name, and meta (a JSON object)."""

    number: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


@dataclass(frozen=True)
class SkippedCheckpoint:
    """The number of a checkpoint that a reader skipped, and the reason."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.number}: {self.reason}"


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint, stored as `<number>.json` beside the tensor file.

    `meta` is the user's JSON object. `digest` (hex) and `size` (bytes) describe the tensor file,
    whose name is `file`; `hash` is the digest's function, a key of FORMATS. `origin` is a random id
    of the folder, equal in all manifests of the folder, and empty without encryption. `to_bytes`
    serializes, `parse_manifest` reads and checks.
    """

    number: int
    meta: dict[str, Any]
    hash: str
    digest: str
    size: int
    origin: str

    @property
    def file(self) -> str:
        """Name of the tensor file."""
        return f"{self.number}.{self.digest[:16]}.safetensors"

    @property
    def tensors_label(self) -> str:
        """Label under which the tensor file is encrypted."""
        return f"tensors {self.number}"

    @property
    def meta_label(self) -> str:
        """Label under which the meta is encrypted."""
        return f"meta {self.number} {self.digest} {self.size}"

    def to_bytes(self, encryption: Encryption | None) -> bytes:
        """Serialize to one line of JSON that includes a SHA-256 of the manifest's fields.

        With `encryption` the meta and the origin are encrypted, the other fields stay readable.
        """
        kind = manifest_format(encryption, self.hash)
        fields: dict[str, Any] = {"format": kind, "number": self.number}
        fields |= {"meta": self.meta, self.hash: self.digest, "size": self.size}
        if encryption is not None:
            secret = json.dumps([self.origin, self.meta], allow_nan=False).encode()
            fields["meta"] = b64encode(encryption.encrypt(secret, self.meta_label)).decode()
        body = json.dumps(fields, allow_nan=False).encode()
        digest = hashlib.sha256(body).hexdigest()
        return f'{{"sha256": "{digest}", "manifest": '.encode() + body + b"}\n"


def contiguous_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as safetensors needs them: on the CPU, contiguous, not sharing memory.

    A tensor that fits already is returned without a copy. Raises StoreError for the name
    `__metadata__` or an unprintable name, and for a tensor that is sparse or of an unsupported
    dtype.
    """
    contiguous: dict[str, Tensor] = {}
    pointers = set[int]()
    for name, tensor in tensors.items():
        if name == "__metadata__" or not name.isprintable():
            raise StoreError(f"a tensor cannot be named {name!r}: use another, printable name")
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise StoreError(f"{name!r} is {tensor.dtype}, {tensor.layout}: make it dense float32")
        dense = tensor.detach().cpu().contiguous()
        pointer = dense.untyped_storage().data_ptr()
        contiguous[name] = dense.clone() if pointer in pointers else dense
        pointers.add(pointer)
    return contiguous


def new_hash(name: str) -> Any:
    """Return an empty hash by its name, a key of FORMATS."""
    # Of a large file, SHA-256 takes as long as a training step where the processor has no
    # instructions for it, and BLAKE3 a tenth of that.
    return blake3() if name == "blake3" else hashlib.new(name)


def saved_tensors_digest(file: BufferedReader, tensors: dict[str, Tensor], hash_name: str) -> str:
    """Return the digest (hex) of a safetensors file of `tensors` that is open at its start.

    Only the header is read: the tensors, which were just saved to the file, are hashed in memory.
    """
    size = file.read(8)
    header = file.read(int.from_bytes(size, "little"))
    offsets = {n: e["data_offsets"][0] for n, e in json.loads(header).items() if n in tensors}
    digest = new_hash(hash_name)
    digest.update(size + header)
    for name in sorted(offsets, key=lambda name: (offsets[name], tensors[name].numel())):
        digest.update(cast(Any, tensors[name].reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def manifest_format(encryption: Encryption | None, hash_name: str) -> int | str:
    """Return the "format" field of a manifest: a number, or a text with the key id if encrypted."""
    return FORMATS[hash_name] if encryption is None else f"{SEALED} {encryption.key_id}"


def parse_manifest(content: bytes, number: int, encryption: Encryption | None) -> Manifest:
    """Parse and decrypt a manifest written by `Manifest.to_bytes`; `content` is the whole file.

    Raises InvalidCheckpoint if the bytes are damaged, a field is wrong, or the manifest is not of
    checkpoint `number`. Raises StoreError if the manifest is intact but of another format, or
    encrypted with another key than `encryption` (None: no key).
    """
    match = _WRITTEN.fullmatch(content)
    if match is None or hashlib.sha256(match[2]).hexdigest() != match[1].decode():
        raise InvalidCheckpoint(f"{number}.json is damaged")
    try:
        fields = json.loads(match[2], parse_constant=_refuse_constant)
        version = fields.pop("format")
        hash_name = "blake3" if version == FORMATS["blake3"] else "sha256"
        if version != manifest_format(encryption, hash_name):
            # Skipping an intact one would start anew beside existing client state.
            raise StoreError(_format_mismatch_text(version, encryption))
        manifest = Manifest(hash=hash_name, digest=fields.pop(hash_name), **fields, origin="")
        if type(manifest.number) is not int or manifest.number != number:
            raise ValueError(f"number {manifest.number!r}")
        if type(manifest.size) is not int or manifest.size < 0:
            raise ValueError(f"size {manifest.size!r}")
        if not re.fullmatch("[0-9a-f]{64}", manifest.digest):
            raise ValueError(f"{hash_name} {manifest.digest!r}")
        if encryption is not None:
            try:
                encrypted = b64decode(fields["meta"], validate=True)
                origin, meta = json.loads(encryption.decrypt(encrypted, manifest.meta_label))
            except StoreError as error:
                raise ValueError(str(error)) from error
            manifest = replace(manifest, meta=meta, origin=origin)
        if type(manifest.meta) is not dict:
            raise ValueError(f"meta {type(manifest.meta).__name__}")
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidCheckpoint(f"{number}.json is not a manifest: {error!r}") from error
    return manifest


def require_json_meta(meta: Mapping[str, Any], encryption: Encryption | None) -> None:
    """Raise StoreError if a meta changes in JSON (tuples, int keys, NaN) or is too large."""
    try:
        text = json.dumps(dict(meta), allow_nan=False)
        same = json.loads(text) == dict(meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"the meta is not JSON: {error}; use finite numbers and strings"
        ) from error
    if not same:
        raise StoreError(f"the meta {text[:60]} changes in JSON: use lists and string keys")
    # Encrypted and in base64 it is a third longer.
    if len(text) > MAX_MANIFEST_BYTES // (2 if encryption else 1) - 1024:
        raise StoreError(f"the meta has {len(text)} characters: put what is large into tensors")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _format_mismatch_text(version: object, encryption: Encryption | None) -> str:
    """Return the error, without subject, for an intact manifest of another format `version`."""
    if version in FORMATS.values():
        return "is not encrypted: read it without a key, or start an encrypted one elsewhere"
    if str(version).startswith(SEALED):
        given = f"key {encryption.key_id} was given" if encryption else "no key was given"
        return f"is {version}, and {given}: give the key that it was encrypted with"
    known = f"{SEALED} {encryption.key_id}" if encryption else max(FORMATS.values())
    return f"has format {version!r}, not {known}: read it with the version of fedplan that wrote it"


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
    with lost_as_invalid(file):
        require_file_size(file, manifest)
        if encryption is None:
            # Digest and tensors come from one read: the file may change between two.
            read = read_tensors(file, name_filter, manifest.hash)
        else:
            content, digest = file.read_bytes(), new_hash(manifest.hash)
            digest.update(content)
            read = TensorRead({}, digest.hexdigest())
    if read.digest != manifest.digest:
        raise InvalidCheckpoint(f"{manifest.file} is damaged: its digest differs")
    try:
        if encryption is not None:
            return parse_tensors(encryption.decrypt(content, manifest.tensors_label), name_filter)
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


def require_file_size(file: Path, manifest: Manifest) -> None:
    """Raise InvalidCheckpoint unless the manifest's tensor file has the size that it says."""
    if (size := bounded_size(file, manifest.size)) != manifest.size:
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
