# SPDX-License-Identifier: Apache-2.0
"""Restores a model, and global random numbers, after a training loop that fedplan did not write."""

from __future__ import annotations

import copy
import random
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.tensors.devices import require_unsharded
from fedplan.training.fit import Job


@contextmanager
def fork_python_rng_state(seed: int) -> Generator[None]:
    """Seed the global generators of Python and NumPy, run the body, and restore their state."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def without_additions(model: nn.Module) -> Generator[None]:
    """Context manager that restores all modules of a model at exit, but for values and buffers.

    Trainers leave adapters, value heads, hooks, wrapped forwards, and dropout that is turned off.
    Params are put back where they were replaced. Buffers keep their values, also where they were
    replaced.
    """
    before = [(owner, type(owner), _copy_state(owner)) for owner in _owners(model)]
    try:
        yield
    finally:
        for owner, kind, state in before:
            attributes = vars(owner)
            if type(owner) is not kind:
                owner.__class__ = kind
            for name in attributes.keys() - state.keys():
                del attributes[name]
            for name, (value, items) in state.items():
                if name == "_buffers":
                    for added in value.keys() - items.keys():
                        del value[added]
                    continue
                attributes[name] = value
                if isinstance(value, list):
                    cast("list[Any]", value)[:] = items
                elif _is_collection(value):
                    value.clear()
                    value.update(items)


def _owners(model: nn.Module) -> list[object]:
    """Return all modules of a model, and their configs, which Trainers change, too."""
    owners = {id(module): cast("object", module) for module in model.modules()}
    for module in list(owners.values()):
        attributes = vars(module)
        adapters = cast("dict[str, Any]", attributes.get("peft_config") or {})
        for config in (*map(attributes.get, ("config", "generation_config")), *adapters.values()):
            if getattr(config, "__dict__", None) is not None:
                owners[id(config)] = config
    return list(owners.values())


def _copy_state(owner: object) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of an object by name, each with a copy if it is a collection."""
    return {
        name: (value, copy.copy(value) if _is_collection(value) else None)
        for name, value in vars(owner).items()
    }


def _is_collection(value: Any) -> bool:
    return isinstance(value, dict | list | set)


_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor with its hooks by number, or None."""


@contextmanager
def same_params(job: Job, params_before: Mapping[str, nn.Parameter]) -> Generator[None]:
    """Context manager that requires at exit that the params are those of before, on their devices.

    Params that were cast to another dtype, and hooks of params, are put back, also after an error.
    Raises FedplanError for replaced params, moved ones, and frozen ones of another dtype.
    """
    values = {name: tensor.detach() for name, tensor in params_before.items()}
    hooks = {name: _tensor_hooks(tensor) for name, tensor in params_before.items()}
    merged = _merged_layers(job.model)
    frozen = {param.name for param, role in job.roles.items() if not role.is_trained}
    try:
        yield
        require_same_params(job.model, params_before)
        if added := _merged_layers(job.model) - merged:
            raise FedplanError(
                f"the loop left an adapter merged into {min(added)}, where the next turn would add "
                "it once more: call unmerge_adapter() before the loop ends"
            )
        for name, tensor in params_before.items():
            if tensor.device != values[name].device:
                raise FedplanError(
                    f"the loop moved the model to {tensor.device}: set the device in the study, "
                    "and in the arguments of a Trainer (use_cpu)"
                )
            if tensor.shape != values[name].shape:
                raise FedplanError(
                    f"the loop changed the shape of {name} from {tuple(values[name].shape)} to "
                    f"{tuple(tensor.shape)}: do that before the run starts"
                )
            if tensor.dtype != values[name].dtype:
                if name in frozen:
                    raise FedplanError(
                        f"the loop cast {name} to {tensor.dtype}, and the plan freezes it: load "
                        "the model in the dtype that the loop needs"
                    )
                values[name].copy_(tensor.detach())
    finally:
        for name, tensor in params_before.items():
            old = values[name]
            if (tensor.dtype, tensor.device, tensor.shape) != (old.dtype, old.device, old.shape):
                tensor.data = old
            for attribute, before in hooks[name].items():
                # Torch goes on to run the hooks of a dict that is replaced.
                if after := getattr(tensor, attribute):
                    after.clear()
                    after.update(before)


def _tensor_hooks(tensor: Tensor) -> dict[str, dict[int, Any]]:
    """Return copies of a tensor's hooks, by attribute."""
    return {name: dict(getattr(tensor, name) or {}) for name in _TENSOR_HOOKS}


def _merged_layers(model: nn.Module) -> set[str]:
    """Return the names of the layers into whose weights peft has merged an adapter."""
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return {name for name, module in modules if vars(module).get("merged_adapters")}


def all_named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the params of a model under all their names: a tied one has several."""
    return dict(model.named_parameters(remove_duplicate=False))


def require_same_params(model: nn.Module, params_before: Mapping[str, nn.Parameter]) -> None:
    """Raise FedplanError if a loop removed or replaced a param, or sharded the model."""
    require_unsharded(model)
    params = all_named_parameters(model)
    if changed := [n for n, tensor in params_before.items() if params.get(n) is not tensor]:
        raise FedplanError(
            f"the loop replaced {min(changed)} in the model: do that before the run starts, since "
            "the plan trains or freezes the tensor that was there"
        )
