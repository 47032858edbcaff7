# SPDX-License-Identifier: Apache-2.0
"""Generations: what a store holds under a number, and the manifest that speaks for it.

A manifest holds its own digest and that of the tensor file. Under a seal its meta is sealed, bound
to the tensor file's digest and beside the folder's origin: what is of another generation or another
folder does not pass, though it was sealed with the same key.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import Any, cast

from torch import Tensor, strided, uint8

from fedplan.errors import StoreError
from fedplan.storage.encryption import Encryption
from fedplan.tensors.serialization import DTYPES

FORMAT = 1
SEALED = "sealed 1 with key"
"""What the format of a sealed manifest begins with; the key's name follows."""
LARGEST_MANIFEST = 64 << 20
"""Bytes: a larger manifest is neither written nor read."""

_WRITTEN = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "manifest": (.*)\}\n', re.DOTALL)


class Unfit(Exception):
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
class Manifest:
    """The meta of a generation, and which file holds its tensors.

    `origin` is drawn for each folder that is sealed, and stands in all its manifests.
    """

    number: int
    meta: dict[str, Any]
    sha256: str
    size: int
    origin: str

    @property
    def file(self) -> str:
        """The name of the tensor file."""
        return f"{self.number}.{self.sha256[:16]}.safetensors"

    @property
    def about(self) -> str:
        """The words that a meta is sealed under."""
        return f"meta {self.number} {self.sha256} {self.size}"

    def written(self, seal: Encryption | None) -> bytes:
        """It as JSON, with the digest of every byte of it."""
        said: dict[str, Any] = {"format": format_of(seal)}
        said |= {"number": self.number, "meta": self.meta, "sha256": self.sha256, "size": self.size}
        if seal is not None:
            secret = json.dumps([self.origin, self.meta], allow_nan=False).encode()
            said["meta"] = b64encode(seal.close(secret, self.about)).decode()
        body = json.dumps(said, allow_nan=False).encode()
        digest = hashlib.sha256(body).hexdigest()
        return f'{{"sha256": "{digest}", "manifest": '.encode() + body + b"}\n"


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: dense, none in the memory of another."""
    found: dict[str, Tensor] = {}
    taken = set[int]()
    for name, tensor in tensors.items():
        if name == "__metadata__" or not name.isprintable():
            raise StoreError(f"a tensor cannot be named {name!r}: use another, printable name")
        if tensor.dtype not in DTYPES or tensor.layout != strided:
            raise StoreError(f"{name!r} is {tensor.dtype}, {tensor.layout}: make it dense float32")
        dense = tensor.detach().cpu().contiguous()
        memory = dense.untyped_storage().data_ptr()
        found[name] = dense.clone() if memory in taken else dense
        taken.add(memory)
    return found


def digest_of(file: BufferedReader, tensors: dict[str, Tensor]) -> str:
    """The digest of a file; of tensors that it holds, what is in memory is not read again."""
    if not tensors:
        return hashlib.file_digest(file, "sha256").hexdigest()
    size = file.read(8)
    head = file.read(int.from_bytes(size, "little"))
    places = {n: said["data_offsets"][0] for n, said in json.loads(head).items() if n in tensors}
    found = hashlib.sha256(size + head)
    for name in sorted(places, key=lambda name: (places[name], tensors[name].numel())):
        found.update(cast(Any, tensors[name].reshape(-1).view(uint8).numpy()))
    return found.hexdigest()


def format_of(seal: Encryption | None) -> int | str:
    """The format of the manifests that are written with this seal, or with none."""
    return FORMAT if seal is None else f"{SEALED} {seal.name}"


def read_manifest(content: bytes, number: int, seal: Encryption | None) -> Manifest:
    """The manifest that was written so.

    Damage is Unfit. What is whole and of another format is a StoreError: to pass it over would be
    to begin anew beside a home that is there.
    """
    found = _WRITTEN.fullmatch(content)
    if found is None or hashlib.sha256(found[2]).hexdigest() != found[1].decode():
        raise Unfit(f"{number}.json is damaged")
    try:
        said = json.loads(found[2], parse_constant=_refuse)
        version = said.pop("format")
        if version == format_of(seal):
            return _checked(said, number, seal)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise Unfit(f"{number}.json is no manifest: {error!r}") from error
    raise StoreError(_mismatch(version, seal))


def require_same(meta: Mapping[str, Any], seal: Encryption | None) -> None:
    """Refuse a meta that would not be read as it was written."""
    try:
        text = json.dumps(dict(meta), allow_nan=False)
        same = json.loads(text) == dict(meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"the meta is no JSON: {error}; use finite numbers and strings") from error
    if not same:
        raise StoreError(f"the meta {text[:60]} changes in JSON: use lists and string keys")
    # In base64, what is sealed is a third longer.
    if len(text) > LARGEST_MANIFEST // (2 if seal else 1) - 1024:
        raise StoreError(f"the meta has {len(text)} characters: put what is large into tensors")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _checked(said: dict[str, Any], number: int, seal: Encryption | None) -> Manifest:
    manifest = Manifest(**said, origin="")
    if type(manifest.number) is not int or manifest.number != number:
        raise ValueError(f"number {manifest.number!r}")
    if type(manifest.size) is not int or manifest.size < 0:
        raise ValueError(f"size {manifest.size!r}")
    if not re.fullmatch("[0-9a-f]{64}", manifest.sha256):
        raise ValueError(f"sha256 {manifest.sha256!r}")
    if seal is not None:
        origin, meta = json.loads(_opened(said["meta"], manifest.about, seal))
        manifest = replace(manifest, meta=meta, origin=origin)
    if type(manifest.meta) is not dict:
        raise ValueError(f"meta {type(manifest.meta).__name__}")
    return manifest


def _opened(meta: str, about: str, seal: Encryption) -> bytes:
    try:
        return seal.open(b64decode(meta, validate=True), about)
    except StoreError as error:
        raise ValueError(str(error)) from error


def _mismatch(version: object, seal: Encryption | None) -> str:
    if version == FORMAT:
        return "is not sealed: read it without a key, or begin a sealed one in another folder"
    if str(version).startswith(SEALED):
        given = f"key {seal.name} was given" if seal else "no key was given"
        return f"is {version}, and {given}: give the key that it was sealed with"
    return f"has format {version!r}, not {format_of(seal)}: read it with the fedplan it is from"
