# SPDX-License-Identifier: Apache-2.0
"""Traces of a forward pass: attention maps, contexts and outputs of blocks, and their replay.

Attention is recorded at the level of torch operators, as softmaxes and the matrix products after
them, so it does not depend on module names or on modules that return their probabilities. Small
random inputs and models are made to be traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedplan.errors import FedplanError
from fedplan.models.params import Block
from fedplan.tensors.devices import fork_rng_state, model_device, to_device

LAYER_COUNTS = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth"
"""Config attributes with the number of layers."""
_SIZES = {
    LAYER_COUNTS: 2,
    "vocab_size entity_vocab_size": 300,
    "hidden_size d_model n_embd embedding_size dim entity_emb_size": 32,
    "intermediate_size d_ff n_inner ffn_dim d_inner hidden_dim moe_intermediate_size": 48,
    "encoder_ffn_dim decoder_ffn_dim": 48,
    "num_attention_heads n_head n_heads num_heads": 4,
    "encoder_attention_heads decoder_attention_heads": 4,
    "head_dim d_head d_kv rotary_dim": 8,
    "num_experts num_local_experts n_routed_experts": 4,
    "max_position_embeddings n_positions n_ctx max_length image_size": 64,
    "num_key_value_heads": 2,
}
SMALL_SIZES = {name: size for names, size in _SIZES.items() for name in names.split()}
"""Small values of config attributes."""
INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")
"""The main inputs that can be made at random."""


def small_model(config: Any) -> nn.Module:
    """Build a small random model of a transformers config's type, in eval mode; seeded.

    Tries small sizes, then a small number of layers only, then the config itself, until a model
    runs on dummy inputs. Raises FedplanError if none runs.
    """
    import transformers

    for names in (tuple(SMALL_SIZES), tuple(LAYER_COUNTS.split()), ()):
        try:
            small = deepcopy(config)
            for part in (small, *(getattr(small, each, None) for each in small.sub_configs)):
                for name in names if part is not None else ():
                    if isinstance(getattr(part, name, None), int):
                        setattr(part, name, min(SMALL_SIZES[name], getattr(part, name)))
            with fork_rng_state(seed=0), torch.no_grad():
                loader: Any = transformers.AutoModel
                model: nn.Module = loader.from_config(small).eval()
                model(**dummy_inputs(model))
            return model
        # Models raise arbitrary exceptions for sizes that do not fit each other.
        except Exception as error:
            last_error = error
    raise FedplanError(f"a small {config.model_type} cannot be built and run: {last_error}")


def dummy_inputs(model: nn.Module) -> dict[str, Tensor]:
    """A small seeded batch of two examples for a Hugging Face model; FedplanError for others."""
    config, main = getattr(model, "config", None), str(getattr(model, "main_input_name", ""))
    if config is None or main not in INPUTS:
        raise FedplanError(f"no dummy inputs for {type(model).__name__}: give a batch")
    batch = {main: _dummy_input(main, config)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = _dummy_input("input_ids", config)[:, :5]
    if "text_config" in dir(config) and main == "input_ids" and "vision_config" in dir(config):
        batch["pixel_values"] = _dummy_input("pixel_values", config.vision_config)
    return to_device(batch, model_device(model))


def _dummy_input(name: str, config: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    inner = (getattr(config, each, None) for each in ("vision_config", "text_config", "encoder"))
    size_name = "vocab_size" if name == "input_ids" else "image_size"
    sized: Any = next((c for c in (config, *inner) if size_name in dir(c)), config)
    if name == "input_ids":
        vocab_size = min(getattr(sized, "vocab_size", 64), 1000)
        return torch.randint(3, vocab_size - 3, (2, 8), generator=generator)
    if name == "pixel_values":
        side = sized.image_size if isinstance(sized.image_size, int) else sized.image_size[0]
        shape = (2, getattr(sized, "num_channels", 3), side, side)
    elif name == "input_features":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
    else:
        mels = getattr(config, "num_mel_bins", 0)
        shape = (2, config.max_length, mels) if mels else (2, 4000)
    return torch.randn(shape, generator=generator)


Tensors = tuple[Tensor, ...]
"""Tensors recorded in order."""
SOFTMAX_OPS = ("aten::_softmax", "aten::_safe_softmax", "aten::softmax")
MATMUL_OPS = ("aten::bmm", "aten::baddbmm")
FUSED_ATTENTION_OP = "aten::_scaled_dot_product"
TOP_K_OP = "aten::topk"


class AttentionRecorder(TorchDispatchMode):
    """Context manager that records all attention computed by torch operators in the body.

    `maps`: the attention probabilities, in order; of fused kernels (which give none) the products
    of query and key. `contexts`: the products of maps and values. `choices`: the number of top-k
    operations, as of routers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []
        self.contexts: list[Tensor] = []
        self.choices = 0
        self._awaits_context = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.name()).split(".")[0]
        # Routers use a softmax too, but of two dimensions only: tokens and experts.
        if name in SOFTMAX_OPS and out.dim() > 2:
            self.maps.append(out.clone())
            self._awaits_context = True
        elif name in MATMUL_OPS and self._awaits_context:
            self.contexts.append(out.clone())
            self._awaits_context = False
        elif name == TOP_K_OP:
            self.choices += 1
        elif name.startswith(FUSED_ATTENTION_OP):
            self.maps.append(args[0] @ args[1].transpose(-1, -2))
            self.contexts.append(out[0].clone())
        return out


@dataclass(frozen=True)
class BlockCall:
    """A recorded call of a block's `module`, with copies of `args` and `kwargs`."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def replay(self) -> BlockTrace:
        """Call the block again with copies of the same arguments, and return the trace."""
        with AttentionRecorder() as recorder:
            out = self.module(*_copy_arguments(self.args), **_copy_arguments(dict(self.kwargs)))
        return BlockTrace(
            tuple(recorder.maps), tuple(recorder.contexts), tensors_in(out), recorder.choices
        )


@dataclass(frozen=True)
class BlockTrace:
    """The tensors of one call of a block, in order: see AttentionRecorder."""

    maps: Tensors
    contexts: Tensors
    outputs: Tensors
    choices: int = 0


@dataclass
class ModelTrace:
    """The tensors of a forward pass of a model; made by `trace_model`.

    By block, of its first call: `calls`, `block_inputs` and `block_outputs`. Of the whole model:
    `maps`, all attention maps, and `outputs`.
    """

    calls: dict[Block, BlockCall] = field(default_factory=dict[Block, BlockCall])
    block_inputs: dict[Block, Tensors] = field(default_factory=dict[Block, Tensors])
    block_outputs: dict[Block, Tensors] = field(default_factory=dict[Block, Tensors])
    maps: Tensors = ()
    outputs: Tensors = ()


def trace_model(
    model: nn.Module, batch: Mapping[str, Tensor], blocks: Mapping[Block, nn.Module]
) -> ModelTrace:
    """Run a model on a batch (inputs by name) without gradients, and record the given blocks.

    A block that does not run is not in the trace. If the first argument of a block is all zero,
    noise is recorded instead.
    """
    trace = ModelTrace()

    def record_call(block: Block, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A block that runs several times (ALBERT) is checked by its first run.
        if block in trace.calls:
            return
        args, kwargs = _copy_arguments(args), _copy_arguments(kwargs)
        # The first block of DETR's decoder has an all-zero input.
        if args and isinstance(args[0], Tensor) and not args[0].any():
            noise = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(3))
            args = (noise.to(args[0]), *args[1:])
        trace.calls[block] = BlockCall(module, args, kwargs)
        trace.block_inputs[block] = tensors_in((args, kwargs))

    def record_output(block: Block, module: nn.Module, args: Any, out: Any) -> None:
        trace.block_outputs.setdefault(block, tuple(each.clone() for each in tensors_in(out)))

    with ExitStack() as undo, torch.no_grad():
        for block, module in blocks.items():
            call_hook = partial(record_call, block)
            undo.callback(module.register_forward_pre_hook(call_hook, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(partial(record_output, block)).remove)
        with AttentionRecorder() as recorder:
            out = model(**batch)
    trace.maps, trace.outputs = tuple(recorder.maps), tensors_in(out)
    return trace


def _copy_arguments(value: Any) -> Any:
    """Copy nested arguments for a replay: tensors are cloned, key-value caches become None."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copy_arguments(each) for each in value)
    if type(value) is dict:
        return {name: _copy_arguments(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return None if type(value).__name__.endswith("Cache") else value


def tensors_in(value: Any) -> Tensors:
    """All floating-point tensors in a value of nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        return (value,) if value.is_floating_point() else ()
    if isinstance(value, Mapping):
        value = tuple(value.values())  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, tuple | list):
        return tuple(t for each in value for t in tensors_in(each))  # pyright: ignore[reportUnknownVariableType]
    return ()


def same_tensors(ones: Tensors, others: Tensors) -> bool:
    """Whether two tuples of tensors have equal shapes and values; NaNs are equal to each other."""
    return len(ones) == len(others) and all(
        one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(ones, others, strict=True)
    )
