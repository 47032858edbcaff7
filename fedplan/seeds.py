# SPDX-License-Identifier: Apache-2.0
"""Seeds: each random choice derives its seed from the words that name it."""

from __future__ import annotations

import hashlib

import torch


def seed(*words: str | int) -> int:
    """Return a 63-bit seed: a SHA-256 hash of the words that name a random choice.

    Typical words are the experiment's name, the purpose, the round and the client. 1 and "1" give
    different seeds.
    """
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def generator(*words: str | int) -> torch.Generator:
    """Return a new CPU generator, seeded with `seed(*words)`."""
    return torch.Generator().manual_seed(seed(*words))
