# SPDX-License-Identifier: Apache-2.0
"""Marks: what an answer is made of, as digests: rows, models, and a client's own values."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples
from fedplan.privacy.mechanisms.secret import derived
from fedplan.tensors.devices import HOST, device_of, device_text
from fedplan.tensors.named import digest

CODE = ("fedplan", "torch", "transformers")
"""What turns rows and values into an answer, besides them: another version may do it otherwise."""


def mark_of(examples: Examples) -> str:
    """Tells two clients' rows apart by all that a batch of them holds, whatever they are called."""
    found = hashlib.sha256()
    whole = torch.arange(len(examples))
    for indices in cast("tuple[Tensor, ...]", whole.split(256)) if len(examples) else ():
        for name, tensor in sorted(examples.batch(indices).items()):
            found.update(f"{name} {digest(tensor)}".encode())
    return found.hexdigest()[:32]


def model_mark(model: nn.Module) -> str:
    """Tells two models apart by all but their params: how they are built, and their buffers."""
    buffers = {name: digest(buffer.to(HOST)) for name, buffer in model.named_buffers()}
    config: Any = getattr(model, "config", None)
    built = [repr(model), str(config), torch.get_num_threads(), [version(name) for name in CODE]]
    device = device_of(model)
    # Another device rounds otherwise: that is another answer, which shares no noise with this one.
    return joint(built, buffers, *([] if device == HOST else [device_text(device)]))


def joint(*parts: object) -> str:
    """One digest of plain values, with where each of them ends."""
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def keyed(key: bytes, name: str, mark: str) -> str:
    """A digest of a client's own value that only who has the key can check a guess against."""
    return derived(key, "own value", name, mark).hex()[:16]
