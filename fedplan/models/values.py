# SPDX-License-Identifier: Apache-2.0
"""Values of a live model: its params, packed (quantized) weights, and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from fedplan.errors import FedplanError, import_extra
from fedplan.models.params import Param
from fedplan.tensors.devices import CPU
from fedplan.tensors.named import Tensors, same_bits

QUANTIZATIONS = ("nf4", "fp4", "int8")
"""The supported formats of linear layers; the head and the embeddings are not quantized."""


def quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """The BitsAndBytesConfig of a format in QUANTIZATIONS; nf4 and fp4 compute in `dtype`."""
    import transformers

    for module in ("bitsandbytes", "accelerate"):
        import_extra(module, f"a model in {kind}")
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def pin_packed_layout(model: nn.Module) -> nn.Module:
    """Keep bitsandbytes from repacking weights; FedplanError if they are stored as floats."""
    # On some CPUs bitsandbytes repacks weights when a model is first evaluated, and digests change.
    for name, tensor in model.named_parameters():
        if is_packed(tensor):
            if tensor.is_floating_point():
                raise FedplanError(
                    f"{name!r} is packed and stored as {tensor.dtype}, which looks trainable: "
                    "quantize the model with bnb_4bit_quant_storage uint8"
                )
            layer = cast("Any", model.get_submodule(name.rpartition(".")[0]))
            layer.support_avx512bf16_for_cpu = False
    return model


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is a packed weight of bitsandbytes, by the module of its class."""
    return type(tensor).__module__.startswith("bitsandbytes.")


def is_quantized(model: nn.Module) -> bool:
    """Whether any weight of a model is packed."""
    return any(is_packed(tensor) for tensor in model.parameters())


def param_value(model: nn.Module, param: Param, tensor: Tensor) -> Tensor:
    """The detached value of a param; `tensor` is the model's parameter named `param.name`.

    A view for ordinary tensors. For a packed weight, a new uint8 tensor: the bytes of the weight
    and of the quantization state (scales, code, block size), so that a digest covers both.
    """
    view = param.view(tensor.detach())
    if not is_packed(tensor):
        return view
    layer = cast("Any", model.get_submodule(param.name.rpartition(".")[0]))
    four_bit_state = getattr(layer.weight, "quant_state", None)
    state: dict[str, Tensor]
    if four_bit_state is not None:
        state = four_bit_state.as_dict(packed=True)
    else:
        # In its first forward pass an int8 layer moves the scales from its weight to its state.
        scales = getattr(layer.weight, "SCB", None)
        state = {"SCB": layer.state.SCB if scales is None else scales}
    # Parts of the state stay on the CPU wherever the weight is.
    state_bytes = (_bytes(state[name]).to(view.device) for name in sorted(state))
    return torch.cat([_bytes(view), *state_bytes])


def mixes_examples(layer: nn.Module) -> bool:
    """Whether a layer's output for one example depends on others: int8 with outlier columns."""
    # A large value in any example moves that column of all examples to higher precision (on a CPU
    # in eval mode, on other devices in training too).
    # Only own params: an adapter also exposes the weight of the layer inside it.
    is_int8 = any(is_packed(t) and t.dtype == torch.int8 for t in layer.parameters(recurse=False))
    return is_int8 and cast("Any", layer).state.threshold > 0


def dequantize(model: nn.Module) -> nn.Module:
    """Convert packed weights of a model without adapters to floats; others are unchanged."""
    return cast("Any", model).dequantize() if is_quantized(model) else model


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def get_values(
    model: nn.Module, params: Iterable[Param], *, copy: bool = True
) -> dict[str, Tensor]:
    """The values of `params` in a model as detached CPU tensors, by param key.

    With `copy=False` a value that is already on the CPU shares the model's memory, except for
    packed (quantized) weights: see `param_value`.
    """
    tensors = dict(model.named_parameters())
    values = {p.key: param_value(model, p, tensors[p.name]) for p in params}
    if copy or any(value.device != CPU for value in values.values()):
        values = {key: value.to(CPU, copy=copy) for key, value in values.items()}
    return values


@torch.no_grad()
def set_values(model: nn.Module, values: Tensors, params: Iterable[Param]) -> None:
    """Copy `values`, by param key, into a model; params without a value stay unchanged.

    Packed (quantized) weights are never written. Raises FedplanError for a value of another shape,
    and for a packed weight whose given value differs; params before it are already written.
    """
    tensors = dict(model.named_parameters())
    for p in params:
        if p.key not in values:
            continue
        value = values[p.key]
        if is_packed(tensors[p.name]):
            now = param_value(model, p, tensors[p.name])
            if now.shape != value.shape or not torch.equal(now.to(value.device), value):
                raise FedplanError(
                    f"{p.key} is quantized and cannot be changed, but its new value differs: "
                    "load the model that has this value"
                )
            continue
        view = p.view(tensors[p.name])
        if view.shape != value.shape:
            raise FedplanError(
                f"{p.key} has shape {tuple(view.shape)}, but its value {tuple(value.shape)}"
            )
        view.copy_(value)


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers of a model by name, non-persistent ones included."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def restore_buffers(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Put all buffers of a model back, as `copy_buffers` returned them; remove new ones."""
    for name in {name for name, _ in model.named_buffers()} - before.keys():
        owner, _, attribute = name.rpartition(".")
        delattr(model.get_submodule(owner), attribute)
    for name, value in before.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        buffer = getattr(module, attribute, None)
        if isinstance(buffer, Tensor) and buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            setattr(module, attribute, value.clone())


def require_unchanged_buffers(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise FedplanError if a buffer differs by a bit from `before`, or is new or missing."""
    # A changed buffer would be in no message, client state or checkpoint.
    after = dict(model.named_buffers())
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        if old is None or new is None or not same_bits(old, new):
            raise FedplanError(
                f"{name} is no param, and training changes it: it would be lost between rounds. "
                "Set model.freeze_batch_norm = true (fedplan.models.freeze_batch_norms) to freeze "
                "the statistics of batch norms, or use GroupNorm instead"
            )


def freeze_batch_norms(model: nn.Module) -> nn.Module:
    """Freeze the running statistics of all batch and instance norms, in place; return the model.

    From now on the norms stay in eval mode; their weights and biases stay trainable.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and not isinstance(module, _EvalOnly):
            cls = type(module)
            # The class name stays, because `describe` recognizes norms by it.
            module.__class__ = type(cls.__name__, (_EvalOnly, cls), {"__module__": cls.__module__})
            module.train(False)
    return model


class _EvalOnly(nn.Module):
    """Mixin for modules that never enter training mode."""

    def train(self, mode: bool = True) -> _EvalOnly:
        return super().train(False)
