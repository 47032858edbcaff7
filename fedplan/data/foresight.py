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


def require_sight(model: nn.Module, kind: str) -> None:
    """Refuse a model that sees too much for its task, or too little; other tasks are not asked.

    Found out by behaviour: two texts of one opening and two endings. A model that predicts the next
    token and whose answers in the opening move has seen what it is to predict; one that fills gaps
    and whose answers do not move sees one side of a gap alone.
    """
    if kind not in ("causal-lm", "masked-lm"):
        return
    opening, other, ending = _tried(model)
    scale = max(float(opening.abs().max()), 1e-30)
    if float((opening - other).abs().max()) <= _SLACK * scale:
        return  # It answers the same to all: nothing can be told of it.
    far = float((opening - ending).abs().max()) / scale
    if kind == "causal-lm" and far > _SLACK:
        raise DataError(
            f"{type(model).__name__} sees the tokens that causal-lm asks it to predict: take a "
            "decoder, model.settings with is_decoder = true, or the task masked-lm"
        )
    if kind == "masked-lm" and far < _SLACK / 10:
        raise DataError(
            f"{type(model).__name__} sees nothing of what comes after a gap that masked-lm asks it "
            "to fill: take an encoder, or the task causal-lm"
        )


def _tried(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of one opening; those of another; and those of the first with another ending."""
    made = cast("Any", model)
    pad, size = made.config.pad_token_id, len(made.get_input_embeddings().weight)
    words = [number for number in range(size) if number != pad][-3 * _HALF :]
    first, second, third = (_spread(words, start) for start in range(3))
    texts = torch.tensor([first + second, third + second, first + third])
    texts = texts.to(device_of(model))
    with at_rest(model), torch.no_grad():
        found: Any = model(input_ids=texts, attention_mask=torch.ones_like(texts))
    logits = cast("Tensor", found if isinstance(found, Tensor) else found.logits).float()
    one, two, three = logits[:, :_HALF]
    return one, two, three


def _spread(words: list[int], start: int) -> list[int]:
    """Half a text, of every third word; of few words, some come twice."""
    some = words[start::3] or words[:1]
    return [some[place % len(some)] for place in range(_HALF)]
