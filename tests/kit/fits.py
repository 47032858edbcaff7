# SPDX-License-Identifier: Apache-2.0
"""Fits of tiny models: jobs, rows of texts, and what tells two results apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
import zoo
from clients import loss
from torch import Tensor, nn

from fedplan.data.examples import NO_LABEL, Examples, RaggedArray, TokenSequences
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.training import Job, TrainArguments


def texts(count: int, *, tags: bool = False) -> TokenSequences:
    """Texts of different length, with a label each, or one at some of their tokens."""
    draw = torch.Generator().manual_seed(count)
    sizes = torch.randint(2, 9, (count,), generator=draw).tolist()
    ids = [torch.randint(3, 60, (size,), generator=draw).tolist() for size in sizes]
    labels = [[1 if token % 3 else NO_LABEL for token in row] for row in ids]
    held = RaggedArray.from_lists(labels) if tags else torch.arange(count) % 2
    return TokenSequences(RaggedArray.from_lists(ids), 0, held)


def job_of(
    model: nn.Module, train_arguments: TrainArguments, rows: Examples, plan: str = "share()"
) -> Job:
    params = describe(model)
    roles = resolve(parse(plan), params, Turn(round=1, client="a"))
    return Job(model, roles, rows, loss, train_arguments, 3, get_values(model, params))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def still(name: str, build: Callable[[str], nn.Module] = zoo.build) -> nn.Module:
    """A tiny model in float64, without dropout: its steps are exact but for the last bits."""
    model = build(name).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for word in ("attn_dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, word, None), float):
                setattr(module, word, 0.0)
    return model


def mean_of_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean over rows, as most losses are; `loss` of the kit is the square of one."""
    return zoo.loss(model(**batch))
