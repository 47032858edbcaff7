# SPDX-License-Identifier: Apache-2.0
"""Canaries: tensors of random bits, and a search for any piece of them in bytes and files."""

from __future__ import annotations

import mmap
import re
import zlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

WINDOW = 16
"""Bytes of a tensor that tell whose they are: of planted bfloat16 they hold more than 60 bits."""

DISTINCT = 6
"""Different bytes that a window must have: zeros, ones and small whole numbers tell nothing."""

STRIDE, MOST, MOST_AS_TEXT = 64, 4096, 64
"""A window starts so many bytes after the last; fewer if they would be too many for a tensor."""

BLOCK, DEPTH = 2**21, 2
"""Bytes looked at together, and how deep streams may lie within streams."""

STREAMS = {
    "gzip": (re.compile(rb"\x1f\x8b\x08"), 31),
    "zlib": (re.compile(rb"\x78[\x01\x5e\x9c\xda]"), 15),
    "zip": (re.compile(rb"PK\x03\x04"), -15),
}
"""How packed streams begin, and what zlib calls their kind."""

WORD = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")

Data = bytes | mmap.mmap


@dataclass(frozen=True)
class Hit:
    """What of a tensor was found: its bytes "raw", "hex" or "base64", or its "name".

    `count` windows were found, the first of them at `offset`. Where the place ends with
    "> zlib at 7", the offset is in what that stream unpacks to.
    """

    name: str
    form: str
    place: str
    offset: int
    count: int


def plant(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The tensors with random bits of their own, as small numbers of the signs they had.

    A variance stays positive and a model stays sane. Whole numbers are left as they are.
    """
    draw = torch.Generator().manual_seed(seed)
    return {
        name: _planted(value, draw) if value.is_floating_point() else value.clone()
        for name, value in tensors.items()
    }


def casts(patterns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The patterns as they are and in the other types that a wire might give them."""
    return {
        name if dtype == value.dtype else f"{name} as {str(dtype).removeprefix('torch.')}": (
            value.to(dtype)
        )
        for name, value in patterns.items()
        for dtype in (value.dtype, torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }


def unmarked(patterns: Mapping[str, Tensor]) -> list[str]:
    """Those that no search can find, because they are too small or too plain."""
    return [name for name, value in patterns.items() if not any(_windows(_bytes(value), MOST))]


def hits(patterns: Mapping[str, Tensor], places: Iterable[Path | bytes]) -> list[Hit]:
    """What the places, bytes or files or whole folders, hold of the patterns and of their names.

    Every run of STRIDE + WINDOW bytes is found, of tensors up to STRIDE * MOST bytes.

    >>> kept = plant({"head.weight": torch.ones(4, 4)}, seed=0)
    >>> [hit.form for hit in hits(kept, [b"head.weight:" + kept["head.weight"].numpy().tobytes()])]
    ['name', 'raw']
    """
    needles = Needles(patterns)
    return [
        hit
        for number, place in enumerate(places)
        for label, data in _contents(place, number)
        for hit in needles.found(label, data)
    ]


class Needles:
    """What to look for, by its first eight bytes."""

    def __init__(self, patterns: Mapping[str, Tensor]) -> None:
        self._by_start = defaultdict[bytes, dict[bytes, list[tuple[str, str]]]](dict)
        self._short = list[str]()
        for name, value in patterns.items():
            self._add_name(name)
            for form, needle in _forms(_bytes(value)):
                self._by_start[needle[:8]].setdefault(needle, []).append((name, form))
        starts = np.frombuffer(b"".join(self._by_start), np.uint64)
        self._starts = np.sort(starts)
        self._bits = np.uint64(64 - min(24, max(16, len(starts).bit_length() + 5)))
        self._sieve = np.zeros(2 ** (64 - int(self._bits)), np.bool_)
        self._sieve[self._slots(starts)] = True

    def found(self, place: str, data: Data, depth: int = DEPTH) -> Iterator[Hit]:
        """Hits in some bytes and in the streams within them, one for each name and form."""
        places = defaultdict[tuple[str, str], list[int]](list)
        for offset in self._candidates(data):
            for needle, meanings in self._by_start[data[offset : offset + 8]].items():
                if data[offset : offset + len(needle)] == needle:
                    for name, form in meanings:
                        if form != "name" or _alone(data, offset, needle):
                            places[name, form].append(offset)
        for name in self._short:
            places[name, "name"] += _names(data, name.encode())
        for (name, form), offsets in sorted(places.items()):
            if offsets:
                yield Hit(name, form, place, min(offsets), len(offsets))
        for label, unpacked in _streams(data) if depth else ():
            yield from self.found(f"{place} > {label}", unpacked, depth - 1)

    def _add_name(self, name: str) -> None:
        needle = name.encode()
        if len(needle) < 8:
            self._short.append(name)
        else:
            self._by_start[needle[:8]].setdefault(needle, []).append((name, "name"))

    def _candidates(self, data: Data) -> Iterator[int]:
        """Where one of the starts is."""
        for begin in range(0, len(data), BLOCK):
            block = data[begin : begin + BLOCK + 7]
            for shift in range(8):
                words = np.frombuffer(block[shift : shift + (len(block) - shift) // 8 * 8], "<u8")
                likely = np.flatnonzero(self._sieve[self._slots(words)])
                sure = likely[self._known(words[likely])]
                yield from (begin + shift + 8 * sure).tolist()

    def _known(self, words: np.ndarray) -> np.ndarray:
        """Which of them are starts."""
        nearest = np.searchsorted(self._starts[:-1], words)
        return self._starts[nearest] == words

    def _slots(self, words: np.ndarray) -> np.ndarray:
        """A place in the sieve for each eight bytes."""
        return (words * np.uint64(0x9E3779B97F4A7C15) >> self._bits).view(np.int64)


def _planted(value: Tensor, draw: torch.Generator) -> Tensor:
    noise = torch.rand(value.shape, generator=draw, dtype=torch.float64) * 0.1 + 0.02
    return torch.copysign(noise, value.double()).to(value.dtype)


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _windows(data: bytes, most: int) -> Iterator[bytes]:
    """Windows all over a tensor's bytes, with its first and its last."""
    last = len(data) - WINDOW
    stride = max(STRIDE, len(data) // most)
    for place in (*range(0, last, stride), last) if last >= 0 else ():
        if len(set(data[place : place + WINDOW])) >= DISTINCT:
            yield data[place : place + WINDOW]


def _forms(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The windows as they are and as they read in text."""
    for window in _windows(data, MOST):
        yield "raw", window
    for window in _windows(data, MOST_AS_TEXT):
        yield from (
            ("hex", text) for text in {window.hex().encode(), window.hex().upper().encode()}
        )
        for skipped in range(3):
            # text of base64 is of three bytes at a time, and where these begin is not known
            text = b64encode(window[skipped : skipped + (WINDOW - skipped) // 3 * 3])
            yield from (("base64", each) for each in {text, text.translate(_URL)})


_URL = bytes.maketrans(b"+/", b"-_")


def _contents(place: Path | bytes, number: int) -> Iterator[tuple[str, Data]]:
    if isinstance(place, bytes):
        yield f"bytes {number}", place
    elif place.is_dir():
        for path in sorted(place.rglob("*")):
            if path.is_file():
                yield from _contents(path, number)
    else:
        with place.open("rb") as file:
            empty = not place.stat().st_size
            yield str(place), b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _names(data: Data, name: bytes) -> Iterator[int]:
    offset = data.find(name)
    while offset >= 0:
        if _alone(data, offset, name):
            yield offset
        offset = data.find(name, offset + 1)


def _alone(data: Data, offset: int, name: bytes) -> bool:
    """Whether a name stands there, and not the middle of a longer one."""
    before, after = (
        data[max(0, offset - 1) : offset],
        data[offset + len(name) : offset + len(name) + 1],
    )
    # protocol buffers write the length of a name before it, and that may look like a letter
    return (not before or before[0] not in WORD or before[0] == len(name)) and (
        not after or after[0] not in WORD
    )


def _streams(data: Data) -> Iterator[tuple[str, bytes]]:
    """What unpacks from some place on, even if it breaks off."""
    for kind, (start, bits) in STREAMS.items():
        for match in start.finditer(data):
            offset = match.start()
            head = _zip_head(data, offset) if kind == "zip" else 0
            unpacked = _unpacked(data, offset + head, bits)
            if len(unpacked) >= WINDOW:
                yield f"{kind} at {offset}", unpacked


def _zip_head(data: Data, offset: int) -> int:
    """How long the head of a zip file's entry is: two of its parts say their own length."""
    sizes = data[offset + 26 : offset + 30]
    return 30 + int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little")


def _unpacked(data: Data, offset: int, bits: int) -> bytes:
    """What a stream gives until it ends or makes no sense."""
    unpacking, pieces = zlib.decompressobj(bits), list[bytes]()
    try:
        while not unpacking.eof and offset < len(data):
            pieces.append(unpacking.decompress(data[offset : offset + 1024]))
            offset += 1024
    except zlib.error:
        pass
    return b"".join(pieces)
