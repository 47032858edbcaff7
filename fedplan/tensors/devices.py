# SPDX-License-Identifier: Apache-2.0
"""Devices: where a model computes, what is brought there, and how it is left as it was found."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError

HOST = torch.device("cpu")
"""Where world, homes, sums, digests and start values are, wherever models compute."""
AUTO = "auto"
"""The word for the best device of a machine: of its accelerators the first here, or the host."""
_BEST = ("cuda", "xpu", "mps")
_WORDS = "auto, cpu, cuda, cuda:1, mps, xpu"


class DeviceError(FedplanError):
    """A device that is not there, or that cannot do what is asked of it."""

    code = "settings"


def device_word(text: str) -> str:
    """A word for a device, if it is one; whether it is here is not asked."""
    if text == AUTO:
        return text
    try:
        found = torch.device(text)
    except RuntimeError:
        found = None
    # Torch takes an index modulo 256, so that cuda:300 would be cuda:44.
    if found is None or str(found) != text or found.type == "meta":
        raise DeviceError(f"there is no device {text!r}; the words are {_WORDS}")
    return text


def device_named(text: str) -> torch.device:
    """The device of a word, if it is on this machine."""
    if device_word(text) == AUTO:
        return next((torch.device(kind) for kind in _BEST if _count(kind)), HOST)
    device = torch.device(text)
    count = 1 if device.type == "cpu" else _count(device.type)
    if (device.index or 0) >= count:
        raise DeviceError(
            f"device is {text!r}, and this machine has {count} of {device.type}: take another, "
            f"or {AUTO}"
        )
    return device


def _count(kind: str) -> int:
    """How many devices of a kind are here."""
    try:
        module: Any = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    return int(module.device_count()) if module.is_available() else 0


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes: where its first parameter is."""
    return next((tensor.device for tensor in model.parameters()), HOST)


def settled(model: nn.Module, device: torch.device) -> nn.Module:
    """A model on a device; one that is there is not touched, for quantised ones refuse to move."""
    where = device_of(model)
    there = where.type == device.type and device.index in (None, where.index)
    return model if there else model.to(device)


def device_text(device: torch.device) -> str:
    """A device as its maker calls it, where torch knows: its kind alone does not say how it rounds.

    >>> device_text(HOST)
    'cpu'
    """
    module: Any = torch.get_device_module(device)
    named = device.type in ("cuda", "xpu")
    return f"{device.type} {module.get_device_name(device)}" if named else device.type


def brought(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors on a device; what is there already is not copied."""
    return {name: _brought(tensor, device) for name, tensor in tensors.items()}


def _brought(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device == HOST:
        # The allocator of pinned memory waits for the copy; nobody else writes to this one.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def widest(device: torch.device) -> torch.dtype:
    """What sums are made in on a device: float64 where it has that."""
    return torch.float32 if device.type == "mps" else torch.float64


def numbers(scalars: Iterable[Tensor]) -> list[float]:
    """Scalars of a device as numbers: it is waited for once, and not once for each."""
    return cast("list[float]", _read(scalars))


def integers(scalars: Iterable[Tensor]) -> list[int]:
    """Whole numbers of a device, read at once."""
    return cast("list[int]", _read(scalars))


def _read(scalars: Iterable[Tensor]) -> list[Any]:
    held = [scalar.detach() for scalar in scalars]
    return cast("list[Any]", torch.stack(held).to(HOST).tolist()) if held else []


@contextmanager
def forked(device: torch.device = HOST, seed: int | None = None) -> Generator[None]:
    """Random numbers of the host and of a device, from a seed if given; then they are as before."""
    with torch.random.fork_rng(devices=[]):
        before = None if device.type == "cpu" else _chance(device)
        try:
            if seed is not None:
                _begin(device, seed)
            yield
        finally:
            if before is not None:
                _set_chance(device, before)


def chance(device: torch.device = HOST) -> bytes:
    """How far the random numbers of the host and of a device have come."""
    states = [torch.get_rng_state(), *([] if device.type == "cpu" else [_chance(device)])]
    return b"".join(cast("Any", state.numpy()).tobytes() for state in states)


def _chance(device: torch.device) -> Tensor:
    module: Any = torch.get_device_module(device)
    # There is one of these at most, and it is not asked which.
    return module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def _set_chance(device: torch.device, state: Tensor) -> None:
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


def _begin(device: torch.device, seed: int) -> None:
    """Begin anew on the host and on this device: others of its kind are not ours to change."""
    torch.default_generator.manual_seed(seed)
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        module.manual_seed(seed)
    elif device.type != "cpu":
        with module.device(device):
            module.manual_seed(seed)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Forward passes in a smaller dtype where that is safe, or as they are if there is none."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def scaler(device: torch.device, dtype: torch.dtype | None) -> torch.amp.GradScaler:
    """What keeps small gradients of float16 above zero; of other dtypes it changes nothing."""
    return torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)


@contextmanager
def deterministic(on: bool = True) -> Generator[None]:
    """Algorithms that give the same bits each time on one device, or an error where there is none.

    Two devices, or two versions of their libraries, still round differently.
    """
    if not on:
        yield
        return
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)


@contextmanager
def at_rest(model: nn.Module) -> Generator[None]:
    """A model in evaluation; then each module's mode, and the random numbers, are as before."""
    modes = {module: module.training for module in model.modules()}
    try:
        with forked(device_of(model)):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
