# SPDX-License-Identifier: Apache-2.0
"""Quantised models: packed weights, with what unpacks them, which rest while others train."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.models.params import Param

QUANTISED = ("nf4", "fp4", "int8")
"""How bitsandbytes packs the linear layers of a model; its head and its tables stay as they are."""


def quantisation(kind: str, dtype: torch.dtype) -> Any:
    """How transformers is told to pack a model while it loads; layers compute in `dtype`.

    Four bits are as QLoRA has them: blocks of 64 numbers, whose scales are quantised too.
    """
    import transformers

    _require_library(kind)
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _require_library(kind: str) -> None:
    try:
        import accelerate as _accelerate
        import bitsandbytes as _bitsandbytes
    except ImportError as error:
        raise FedplanError(
            f"a model in {kind} takes bitsandbytes and accelerate: pip install fedplan[quantised]"
        ) from error
    del _accelerate, _bitsandbytes


def steadied(model: nn.Module) -> nn.Module:
    """The model with layers that keep their packed weights as they lie.

    On some processors bitsandbytes packs them anew, in another order, when a model is first
    evaluated: then no digest of them would last.
    """
    for name, tensor in model.named_parameters():
        if is_packed(tensor):
            _require_whole_numbers(name, tensor)
            layer = cast("Any", model.get_submodule(name.rpartition(".")[0]))
            layer.support_avx512bf16_for_cpu = False
    return model


def _require_whole_numbers(name: str, weight: Tensor) -> None:
    if weight.is_floating_point():
        raise FedplanError(
            f"{name!r} is packed and stored as {weight.dtype}, which a plan would take for "
            "numbers to train: quantise the model with bnb_4bit_quant_storage uint8"
        )


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is a packed weight, told by where its class is defined."""
    return type(tensor).__module__.startswith("bitsandbytes.")


def is_quantised(model: nn.Module) -> bool:
    """Whether any weight of a model is packed."""
    return any(is_packed(tensor) for tensor in model.parameters())


def value_in(model: nn.Module, param: Param, tensor: Tensor) -> Tensor:
    """A param's value in a model, of which `tensor` has its name: a view of its numbers.

    Of a packed weight it is all that says its numbers, as bytes: what is packed, and the scales,
    the code and the block size that unpack it. So one digest pins both.
    """
    view = param.view(tensor.detach())
    if not is_packed(tensor):
        return view
    state = _state(model.get_submodule(param.name.rpartition(".")[0]))
    # Some of it stays in host memory wherever the weight is.
    beside = (_bytes(state[name]).to(view.device) for name in sorted(state))
    return torch.cat([_bytes(view), *beside])


def mixes_rows(layer: nn.Module) -> bool:
    """Whether a packed layer works a row out by what the others of its batch hold.

    Where any row has a large number, int8 takes that column of all of them apart. On a CPU it does
    so when it is evaluated, on other devices in training too.
    """
    # An adapter shows the weight of the layer within it, which is asked for itself.
    eight = any(is_packed(t) and t.dtype == torch.int8 for t in layer.parameters(recurse=False))
    return eight and cast("Any", layer).state.threshold > 0


def dequantised(model: nn.Module) -> nn.Module:
    """A model without adapters, its packed weights as the floats that they stand for."""
    return cast("Any", model).dequantize() if is_quantised(model) else model


def _state(layer: nn.Module) -> dict[str, Tensor]:
    """What a layer unpacks its weight by."""
    held = cast("Any", layer)
    four = getattr(held.weight, "quant_state", None)
    if four is not None:
        return four.as_dict(packed=True)
    # In its first run a layer of eight bits takes the scales over from its weight.
    scales = getattr(held.weight, "SCB", None)
    return {"SCB": held.state.SCB if scales is None else scales}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
