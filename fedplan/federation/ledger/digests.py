# SPDX-License-Identifier: Apache-2.0
"""Digests of examples, of a client's personal values, and of the model that a run starts from.

Frozen params are in memory once, in the model itself, without a copy to compare with. Digests from
before the first round show whether they changed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples
from fedplan.models.params import Param, Params
from fedplan.models.values import param_value
from fedplan.privacy.mechanisms.noise import derive_key
from fedplan.tensors.devices import CPU, device_description, model_device, read_ints
from fedplan.tensors.named import Tensors, checksum, digest, full_digest

CODE_PACKAGES = ("fedplan", "torch", "transformers")
"""Packages whose versions count as inputs of an answer."""
MAX_CLASSES = 1000
"""The most classes whose labels are counted."""


@dataclass(frozen=True)
class ExamplesSummary:
    """What is recorded of examples: how many, their digest, and how many have each label.

    `label_counts` is by class index; empty if the examples have no classes (see
    `summarize_examples`).
    """

    count: int
    digest: str
    label_counts: dict[int, int]


def summarize_examples(examples: Examples) -> ExamplesSummary:
    """Read all examples once, in order and in batches of 256; return their summary.

    The digest is the first 32 hex digits of SHA-256 over the names and digests of all tensors of
    each batch. Labels are counted if `labels` has an integer per example, or a row of zeros and
    ones; more than MAX_CLASSES different integers are not classes and are not counted.
    """
    sha256, label_counts = hashlib.sha256(), Counter[int]()
    order = torch.arange(len(examples))
    for indices in cast("tuple[Tensor, ...]", order.split(256)) if len(examples) else ():
        batch = examples.batch(indices)
        for name, tensor in sorted(batch.items()):
            sha256.update(f"{name} {digest(tensor)}".encode())
        label_counts.update(_class_indices(batch.get("labels")))
    if len(label_counts) > MAX_CLASSES:
        label_counts.clear()
    return ExamplesSummary(
        len(examples), sha256.hexdigest()[:32], dict(sorted(label_counts.items()))
    )


def _class_indices(labels: Tensor | None) -> list[int]:
    """Return the class indices of all labels of a batch; none if the labels are no classes."""
    if labels is None or labels.dim() not in (1, 2):
        return []
    if labels.dim() == 1:
        is_index = not labels.is_floating_point() and not labels.is_complex()
        return cast("list[int]", labels[labels >= 0].tolist()) if is_index else []
    if not labels.is_floating_point() or not bool(((labels == 0) | (labels == 1)).all()):
        return []
    return cast("list[int]", labels.nonzero()[:, 1].tolist())


def examples_digest(examples: Examples) -> str:
    """Return the digest of `summarize_examples`."""
    return summarize_examples(examples).digest


_version = cache(version)
"""Version of a package; looking it up takes a third of a small training step."""


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
        list(map(_version, CODE_PACKAGES)),
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


@dataclass(frozen=True)
class InitialModel:
    """Digests of the model that a run starts from, to prove that frozen params do not change.

    Create with `digest_initial_model`; `changed_params` compares a model. `digests`: full digest by
    param key. `checksums`: checksum by key of the frozen params, for a model on an accelerator,
    where copying all frozen params to the CPU each round would be slow; else empty.
    """

    digests: dict[str, str] = field(default_factory=dict[str, str])
    checksums: dict[str, int] = field(default_factory=dict[str, int])

    @cached_property
    def short_digests(self) -> Mapping[str, str]:
        """The 16-digit digest of each param, as in the ledger."""
        return {key: digest[:16] for key, digest in self.digests.items()}

    def with_checksums(self, model: nn.Module, frozen: Params) -> InitialModel:
        """Return a copy with checksums of the frozen params; `self` if the model is on the CPU.

        Call before the first round, after the model was moved to its device.
        """
        if model_device(model) == CPU:
            return self
        return replace(self, checksums=_checksums(model, frozen))

    def changed_params(self, model: nn.Module, frozen: Params) -> Iterator[Param]:
        """Yield each frozen param with another value in the model than the initial value.

        Compares checksums if there are any, else digests.
        """
        if not frozen:
            return iter(())  # without a walk over the model's modules
        if not self.checksums:
            digests = _digests(model, frozen)
            return (p for p, digest in digests if digest != self.digests[p.key])
        checksums = _checksums(model, frozen)
        return (p for p in frozen if checksums[p.key] != self.checksums[p.key])


def digest_initial_model(model: nn.Module, params: Params, start: Tensors) -> InitialModel:
    """Return the digests of all params before the first round; call before training.

    `start`: values of the params that may change; all other params are read from the model.
    """
    frozen = dict(_digests(model, [p for p in params if p.key not in start]))
    return InitialModel(
        {p.key: frozen[p] if p in frozen else full_digest(start[p.key]) for p in params}
    )


def _digests(model: nn.Module, params: Iterable[Param]) -> Iterator[tuple[Param, str]]:
    tensors = dict(model.named_parameters())
    # Lazily: the value of a quantized weight, or of one on an accelerator, is a copy.
    return ((p, full_digest(param_value(model, p, tensors[p.name]).to(CPU))) for p in params)


def _checksums(model: nn.Module, params: Params) -> dict[str, int]:
    """Return the checksum of each param, computed on the model's device."""
    tensors = dict(model.named_parameters())
    checksums = read_ints(checksum(param_value(model, p, tensors[p.name])) for p in params)
    return {p.key: number for p, number in zip(params, checksums, strict=True)}
