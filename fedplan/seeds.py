# SPDX-License-Identifier: Apache-2.0
"""Seeds: every random choice has a name, and its name is its seed."""

from __future__ import annotations

import hashlib

import torch


def seed(*words: str | int) -> int:
    """A seed from the words that name a choice: experiment, purpose, round, client."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def generator(*words: str | int) -> torch.Generator:
    """A generator of its own for a choice."""
    return torch.Generator().manual_seed(seed(*words))
