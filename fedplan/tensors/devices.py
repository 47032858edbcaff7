# SPDX-License-Identifier: Apache-2.0
"""Devices: choose one, move tensors to it, and restore random state and module modes."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError

CPU = torch.device("cpu")
"""Device of the global state, client state, sums and digests, wherever models compute."""
AUTO = "auto"
"""Device name for the first available accelerator (cuda, xpu, mps), else the CPU."""
_ACCELERATORS = ("cuda", "xpu", "mps")
_SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor")
"""Packages of torch whose classes hold shards of tensors."""
_EXAMPLES = "auto, cpu, cuda, cuda:1, mps, xpu"


class DeviceError(FedplanError):
    """An unknown or unavailable device, or an operation that the device does not support."""

    code = "settings"


def check_device_name(name: str) -> str:
    """Return `name` unchanged; raise DeviceError unless it is "auto" or a torch device name.

    Does not check whether this machine has the device.
    """
    if name == AUTO:
        return name
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    # Torch takes an index modulo 256, so that cuda:300 would be cuda:44.
    if device is None or str(device) != name or device.type == "meta":
        raise DeviceError(f"there is no device {name!r}; device names are {_EXAMPLES}")
    return name


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a name; "auto" gives the first accelerator, else the CPU.

    Raises DeviceError for an unknown name, or if this machine does not have the device.
    """
    if check_device_name(name) == AUTO:
        return next((torch.device(kind) for kind in _ACCELERATORS if device_count(kind)), CPU)
    device = torch.device(name)
    count = 1 if device.type == "cpu" else device_count(device.type)
    if (device.index or 0) >= count:
        kind = device.type.upper()
        fault = f"this machine has {count} {kind} devices" if count else f"{kind} is not available"
        raise DeviceError(f'device is {name!r}, and {fault} here; use device = "cpu" or "auto"')
    return device


def worker_device(name: str, number: int) -> torch.device:
    """Return the device of worker `number`, from 0: devices in turn if `name` has no index.

    With "auto" or "cuda" on a machine with four cards, worker 5 gets cuda:1. Raises as
    `resolve_device`.
    """
    device = resolve_device(name)
    if ":" not in str(device) and (count := device_count(device.type)):
        return torch.device(device.type, number % count)
    return device


def rank_device(name: str, rank: int, count: int) -> torch.device:
    """Return the device of rank `rank`, from 0, of `count` that train one model: a card each.

    Several ranks share the CPU. Raises DeviceError if `name` is one card, if this machine has fewer
    than `count`, and for other devices than CUDA and the CPU; and as `resolve_device`.
    """
    device = resolve_device(name)
    if name == "cpu":
        return device
    cards = device_count(device.type)
    if device.type != "cuda" or ":" in str(device) or cards < count:
        raise DeviceError(
            f"devices_per_client is {count}, and device {name!r} stands for {device} on a machine "
            f'with {cards} cards: it needs {count} cards and device = "cuda"'
        )
    return torch.device(device.type, rank)


def device_count(kind: str) -> int:
    """Return the number of available devices of a type such as "cuda"; 0 for "cpu"."""
    if kind == CPU.type:
        return 0
    try:
        module: Any = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    return int(module.device_count()) if module.is_available() else 0


def require_unsharded(model: nn.Module) -> None:
    """Raise DeviceError if FSDP or tensor parallelism shards the model.

    Also if ACCELERATE_USE_FSDP is true, which `accelerate launch` sets for FSDP.
    """
    parts = cast("Iterable[tuple[str, object]]", model.named_modules())
    sharded = [
        f"{name or 'the model'} is a {type(each).__name__}"
        for name, each in (*parts, *model.named_parameters())
        if any(cls.__module__.startswith(_SHARDING) for cls in type(each).__mro__)
    ]
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "on", "t", "true", "y", "yes"):
        sharded.insert(0, f"ACCELERATE_USE_FSDP is {os.environ['ACCELERATE_USE_FSDP']!r}")
    if sharded:
        raise sharded_model_error(sharded[0])


def sharded_model_error(evidence: str) -> DeviceError:
    """Return the error for a sharded model. `evidence`: how it is known, as "0 is a FSDPLinear"."""
    return DeviceError(
        f"{evidence}: FSDP and tensor parallelism divide the tensors of a model among processes; "
        "roles, frozen slices of fused tensors, digests and clipping need whole tensors. Use "
        "neither, and start fedplan without accelerate launch; devices_per_client trains one model "
        "on several devices that each hold the whole model; a model that is too large for one "
        "device can be trained with adapters, bfloat16 or 4-bit weights"
    )


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter; the CPU if it has none."""
    return next((tensor.device for tensor in model.parameters()), CPU)


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device in place and return it.

    Does nothing if the model's first parameter is on the device already.
    """
    # Quantized models raise on `.to()`, even to their own device.
    current = model_device(model)
    there = current.type == device.type and device.index in (None, current.index)
    return model if there else model.to(device)


def device_description(device: torch.device) -> str:
    """Return the device type, with the hardware name for cuda and xpu.

    >>> device_description(CPU)
    'cpu'
    """
    module: Any = torch.get_device_module(device)
    has_name = device.type in ("cuda", "xpu")
    return f"{device.type} {module.get_device_name(device)}" if has_name else device.type


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors on a device; tensors that are there already are not copied.

    A copy from the CPU to CUDA is asynchronous, and may still run when the function returns.
    `host_copy` returns the tensors that were copied.
    """
    moved = dict[str, Tensor]()
    for name, tensor in tensors.items():
        is_copied = device.type == "cuda" and tensor.device == CPU
        # The pinned-memory allocator waits for the copy, and nobody else writes to this tensor.
        source = tensor.pin_memory() if is_copied else tensor
        moved[name] = source.to(device, non_blocking=is_copied)
        if moved[name] is not tensor and not tensor.is_inference():
            cast("Any", moved[name]).source = (tensor, tensor._version)
    return moved


def host_copy(tensor: Tensor) -> Tensor:
    """Return the tensor of the CPU from which `to_device` copied `tensor`; else `tensor` itself.

    Its values are known without waiting for the device. Returns `tensor` also if one of the two has
    changed since.
    """
    source, version = getattr(tensor, "source", (tensor, None))
    is_unchanged = source.device == CPU and source._version == version and tensor._version == 0
    return source if is_unchanged else tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device: float64, or float32 on mps, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def read_floats(scalars: Iterable[Tensor]) -> list[float]:
    """Return scalar tensors of one device as floats, with a single transfer."""
    detached = [scalar.detach() for scalar in scalars]
    return cast("list[float]", torch.stack(detached).to(CPU).tolist()) if detached else []


def read_ints(scalars: Iterable[Tensor]) -> list[int]:
    """Return scalar integer tensors of one device as ints, with a single transfer."""
    return cast("list[int]", read_floats(scalars))  # torch's tolist keeps ints


@contextmanager
def fork_rng_state(device: torch.device = CPU, seed: int | None = None) -> Generator[None]:
    """Run the body, and then restore torch's random state of the CPU and of the device.

    With `seed`, the body starts with these two generators seeded; other devices keep their state.
    """
    module: Any = torch.get_device_module(device)
    with torch.random.fork_rng(devices=[]):
        before = None if device.type == "cpu" else _device_rng_state(device)
        try:
            if seed is not None:
                torch.default_generator.manual_seed(seed)
                if device.type == "mps":
                    module.manual_seed(seed)
                elif device.type != "cpu":
                    with module.device(device):
                        module.manual_seed(seed)
            yield
        finally:
            if before is not None:
                # There is at most one mps device, and its module takes no device argument.
                module.set_rng_state(before, *([] if device.type == "mps" else [device]))


def rng_state(device: torch.device = CPU) -> bytes:
    """Return torch's random state of the CPU, followed by that of the device."""
    states = [torch.get_rng_state(), *([] if device.type == "cpu" else [_device_rng_state(device)])]
    return b"".join(cast("Any", state.numpy()).tobytes() for state in states)


def _device_rng_state(device: torch.device) -> Tensor:
    module: Any = torch.get_device_module(device)
    # There is at most one mps device, and its module takes no device argument.
    return module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return torch's autocast context for a dtype; a disabled one for None."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def grad_scaler(device: torch.device, dtype: torch.dtype | None) -> torch.amp.GradScaler:
    """Return a gradient scaler, enabled for float16 only."""
    return torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)


@contextmanager
def deterministic(on: bool = True) -> Generator[None]:
    """Run the body with torch's deterministic algorithms; then restore the setting.

    Does nothing if `on` is False. Within the body, torch raises RuntimeError for an operation
    without a deterministic algorithm. Results still differ between devices and library versions.
    Sets the environment variable CUBLAS_WORKSPACE_CONFIG if unset, for the rest of the process.
    """
    if not on:
        yield
        return
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_on = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warn_only)


@contextmanager
def tensor_float32(on: bool) -> Generator[None]:
    """Run the body with matrix products of float32 on CUDA in TF32 if `on`, else in float32.

    Then restores the setting. Other devices than CUDA compute in float32 either way.
    """
    products: Any = torch.backends.cuda.matmul
    # Since torch 2.9, reading the older name fails if somebody has set the newer one.
    newer = getattr(products, "fp32_precision", None)
    before = products.allow_tf32 if newer is None else newer
    try:
        products.allow_tf32 = on
        yield
    finally:
        products.allow_tf32 = before in (True, "tf32")
        if newer is not None:
            products.fp32_precision = before


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Run the body with the model in eval mode.

    Then restores the training mode of each module, and torch's random state of the CPU and of the
    model's device, also if the body raises.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        with fork_rng_state(model_device(model)):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
