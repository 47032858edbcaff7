# SPDX-License-Identifier: Apache-2.0
"""Digests of the inputs of an answer: examples, models, and a client's personal values."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples
from fedplan.privacy.mechanisms.noise import derive_key
from fedplan.tensors.devices import CPU, device_description, model_device
from fedplan.tensors.named import digest

CODE_PACKAGES = ("fedplan", "torch", "transformers")
"""Packages whose versions count as inputs of an answer."""


def examples_digest(examples: Examples) -> str:
    """Return the first 32 hex digits of SHA-256 over the names and digests of all tensors.

    Reads all examples in order, in batches of 256; each tensor of a batch counts by its name and
    digest.
    """
    sha256 = hashlib.sha256()
    order = torch.arange(len(examples))
    for indices in cast("tuple[Tensor, ...]", order.split(256)) if len(examples) else ():
        for name, tensor in sorted(examples.batch(indices).items()):
            sha256.update(f"{name} {digest(tensor)}".encode())
    return sha256.hexdigest()[:32]


def model_digest(model: nn.Module) -> str:
    """Return a SHA-256 of everything about a model but the params.

    Covers repr of the modules, config, buffers, the device if not CPU, the number of torch threads,
    and the versions of CODE_PACKAGES.
    """
    buffers = {name: digest(buffer.to(CPU)) for name, buffer in model.named_buffers()}
    config: Any = getattr(model, "config", None)
    structure = [
        repr(model),
        str(config),
        torch.get_num_threads(),
        [version(name) for name in CODE_PACKAGES],
    ]
    device = model_device(model)
    # Another device rounds differently, so its answer must not share noise with this one.
    return combine_digests(
        structure, buffers, *([] if device == CPU else [device_description(device)])
    )


def combine_digests(*parts: object) -> str:
    """Return the SHA-256 of several values as one JSON list; other objects count by their repr."""
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def keyed_digest(key: bytes, name: str, value_digest: str) -> str:
    """Return 16 hex digits of a keyed hash of a personal value's name and digest.

    Without the key, nobody can check a guess of the value.
    """
    return derive_key(key, "own value", name, value_digest).hex()[:16]
