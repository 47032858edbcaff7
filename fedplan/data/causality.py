# SPDX-License-Identifier: Apache-2.0
"""Check a language model's attention: whether a token can see the tokens after it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.tables import DataError
from fedplan.tensors.devices import eval_mode, model_device

_HALF = 4
"""Tokens in each half of a test sequence."""
_TOLERANCE = 1e-5
"""Largest change of logits by rounding, relative to the largest logit."""
_CAUSAL_TASKS = ("causal-lm", "instruction")
"""Tasks that predict the next token."""


def require_attention_mask(model: nn.Module, kind: str) -> None:
    """Raise DataError if a model's attention does not fit the `kind` of a language task.

    Runs the model on sequences with the same first half and different second halves. A model for a
    causal task must give the same logits for the first half, a model for masked-lm different ones.
    Does nothing for other kinds, and for a model with logits that do not depend on the input.
    """
    if kind not in (*_CAUSAL_TASKS, "masked-lm"):
        return
    first, second, third = _test_halves(model)
    sequences = [first + second, third + second, first + third]
    logits = _logits(model, {"input_ids": sequences, "attention_mask": [[1] * 2 * _HALF] * 3})
    base, other_start, other_end = logits[:, :_HALF]
    scale = max(float(base.abs().max()), 1e-30)
    if float((base - other_start).abs().max()) <= _TOLERANCE * scale:
        return
    change = float((base - other_end).abs().max()) / scale
    if kind in _CAUSAL_TASKS and change > _TOLERANCE:
        raise DataError(
            f"{type(model).__name__} sees the tokens that {kind} asks it to predict: use a "
            "decoder, model.config with is_decoder = true, or the task masked-lm"
        )
    if kind == "masked-lm" and change < _TOLERANCE / 10:
        raise DataError(
            f"{type(model).__name__} does not see the tokens after a masked token: use an encoder, "
            "or the task causal-lm"
        )


def require_packing_support(model: nn.Module) -> None:
    """Raise DataError if a model's attention mixes several texts packed in one sequence.

    Runs the model (without gradients): the logits of the second of two packed texts must equal the
    logits of this text alone, and must not change with the first text.
    """
    first, second, third = _test_halves(model)
    positions = [*range(_HALF)]
    packed = {"input_ids": [first + second, third + second], "position_ids": [positions * 2] * 2}
    single = {"input_ids": [second], "position_ids": [positions]}
    try:
        (after_first, after_third), alone = (
            _logits(model, inputs, cache=False)[:, -_HALF:] for inputs in (packed, single)
        )
        scale = float(alone.abs().max().clamp(min=1e-30))
        change = float((after_first - after_third).abs().max()) / scale
        difference = float((after_first - alone).abs().max()) / scale
    except TypeError:  # the model has no argument position_ids
        change, difference = 1.0, 1.0
    # A text alone is summed in another order than in a longer sequence; half precision shows it.
    precision = torch.finfo(cast("Any", model).get_input_embeddings().weight.dtype).eps
    if change > _TOLERANCE or difference > max(_TOLERANCE, 4 * precision):
        raise DataError(
            f"{type(model).__name__} mixes packed conversations: set packing = false, or use a "
            "model whose attention follows position_ids, such as llama or gpt2"
        )


def _logits(model: nn.Module, inputs: dict[str, list[list[int]]], *, cache: bool = True) -> Tensor:
    """Run a model on `inputs` (rows of integers by name); return float32 logits, no gradients.

    Runs in eval mode and restores the mode. `cache=False` passes `use_cache=False` to the model.
    """
    device = model_device(model)
    tensors = {name: torch.tensor(values, device=device) for name, values in inputs.items()}
    with eval_mode(model), torch.no_grad():
        output: Any = model(**tensors) if cache else model(**tensors, use_cache=False)
    return cast("Tensor", output if isinstance(output, Tensor) else output.logits).float()


def _test_halves(model: nn.Module) -> list[list[int]]:
    """Return three lists of _HALF token ids, none of them the padding id.

    The lists have no id in common (if there are three ids); a small vocabulary repeats ids within a
    list.
    """
    hf_model, halves = cast("Any", model), list[list[int]]()
    pad, size = hf_model.config.pad_token_id, len(hf_model.get_input_embeddings().weight)
    tokens = [token for token in range(size) if token != pad][-3 * _HALF :]
    for start in range(3):
        chosen = tokens[start::3] or tokens[:1]
        halves.append([chosen[index % len(chosen)] for index in range(_HALF)])
    return halves
