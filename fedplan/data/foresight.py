# SPDX-License-Identifier: Apache-2.0
"""Foresight: whether a language model sees the tokens that come after a token."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.tables import DataError
from fedplan.tensors.devices import at_rest, device_of

_HALF = 4
"""Tokens of each half of the texts that a model is tried on."""
_SLACK = 1e-5
"""How far rounding may move logits, as a share of the largest."""
_ONWARD = ("causal-lm", "instruction")
"""The tasks that ask for the next token."""


def require_sight(model: nn.Module, kind: str) -> None:
    """Refuse a model that sees too much for its task, or too little; other tasks are not asked.

    Found out by behaviour: two texts of one opening and two endings. A model that predicts the next
    token and whose answers in the opening move has seen what it is to predict; one that fills gaps
    and whose answers do not move sees one side of a gap alone.
    """
    if kind not in (*_ONWARD, "masked-lm"):
        return
    opening, other, ending = _tried(model)
    scale = max(float(opening.abs().max()), 1e-30)
    if float((opening - other).abs().max()) <= _SLACK * scale:
        return  # It answers the same to all: nothing can be told of it.
    far = float((opening - ending).abs().max()) / scale
    if kind in _ONWARD and far > _SLACK:
        raise DataError(
            f"{type(model).__name__} sees the tokens that {kind} asks it to predict: take a "
            "decoder, model.settings with is_decoder = true, or the task masked-lm"
        )
    if kind == "masked-lm" and far < _SLACK / 10:
        raise DataError(
            f"{type(model).__name__} sees nothing of what comes after a gap that masked-lm asks it "
            "to fill: take an encoder, or the task causal-lm"
        )


def require_packing(model: nn.Module) -> None:
    """Refuse a model to which packed texts are one.

    The second of two must be answered as alone, and another first one must not move its answers.
    """
    try:
        moved, far = _apart(model)
    except TypeError:  # it takes no position_ids
        moved, far = 1.0, 1.0
    # A text alone is summed in another order than in a longer row, which half precision shows.
    fine = torch.finfo(cast("Any", model).get_input_embeddings().weight.dtype).eps
    if moved > _SLACK or far > max(_SLACK, 4 * fine):
        raise DataError(
            f"{type(model).__name__} does not keep packed conversations apart: leave packing out, "
            "or take a model whose attention follows its position_ids, such as llama or gpt2"
        )


def _apart(model: nn.Module) -> tuple[float, float]:
    """How far the answers to a packed text move with the text before it, and from it alone."""
    first, second, third = _texts(model)
    places = [*range(_HALF)]
    two = {"input_ids": [first + second, third + second], "position_ids": [places * 2] * 2}
    one = {"input_ids": [second], "position_ids": [places]}
    packed, alone = (_logits(model, each, cache=False)[:, -_HALF:] for each in (two, one))
    scale = float(alone.abs().max().clamp(min=1e-30))
    after, other = packed
    return float((after - other).abs().max()) / scale, float((after - alone).abs().max()) / scale


def _tried(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of one opening; those of another; and those of the first with another ending."""
    first, second, third = _texts(model)
    texts = [first + second, third + second, first + third]
    logits = _logits(model, {"input_ids": texts, "attention_mask": [[1] * 2 * _HALF] * 3})
    one, two, three = logits[:, :_HALF]
    return one, two, three


def _logits(model: nn.Module, asked: dict[str, list[list[int]]], *, cache: bool = True) -> Tensor:
    device = device_of(model)
    inputs = {name: torch.tensor(each, device=device) for name, each in asked.items()}
    with at_rest(model), torch.no_grad():
        found: Any = model(**inputs) if cache else model(**inputs, use_cache=False)
    return cast("Tensor", found if isinstance(found, Tensor) else found.logits).float()


def _texts(model: nn.Module) -> tuple[list[int], list[int], list[int]]:
    """Three halves of a text, of words that a model knows."""
    made = cast("Any", model)
    pad, size = made.config.pad_token_id, len(made.get_input_embeddings().weight)
    words = [number for number in range(size) if number != pad][-3 * _HALF :]
    return _spread(words, 0), _spread(words, 1), _spread(words, 2)


def _spread(words: list[int], start: int) -> list[int]:
    """Half a text, of every third word; of few words, some come twice."""
    some = words[start::3] or words[:1]
    return [some[place % len(some)] for place in range(_HALF)]
