# SPDX-License-Identifier: Apache-2.0
"""Bytes that params cost in transfer between server and clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from fedplan.models.params import Param


@dataclass(frozen=True)
class WireCost:
    """Transfer costs of a federation between server and clients.

    `upload_bytes`: returns the bytes of a shared param in an upload, with auxiliary tensors;
    by default its size.
    `aux_count`: number of auxiliary tensors beside each shared param.
    `text`: the reason for unusual costs, for people (compression, for example); may be empty.
    `server_merged`: keys of params that no client shares but the server changes, as FLoRA's base
    weights; server and clients start with the same values.
    """

    upload_bytes: Callable[[Param], int] = attrgetter("nbytes")
    aux_count: int = 0
    text: str = ""
    server_merged: frozenset[str] = frozenset()
