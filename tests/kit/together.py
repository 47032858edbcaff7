# SPDX-License-Identifier: Apache-2.0
"""Fits that several ranks play together, and the ranks that play them with a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import zoo
from clients import Few
from fits import job_of, mean_of_rows, still, texts
from torch import Tensor, nn

from fedplan.data.examples import NO_LABEL, Examples
from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.models.values import get_values
from fedplan.tensors.devices import CPU
from fedplan.tensors.named import Tensors, aux_name
from fedplan.training import (
    ClientHook,
    FitResult,
    Job,
    TrainArguments,
    adamw,
    alternate,
    control_variates,
    dynamic,
    plain_fit,
    proximal,
    sgd,
    train_own_copy,
)
from fedplan.training.client_hooks import CONTROL
from fedplan.training.ranks import Ranks


class Double:
    """Rows in float64."""

    def __init__(self, rows: Examples) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        found = self.rows.batch(indices)
        return {k: v.double() if v.is_floating_point() else v for k, v in found.items()}


class Tagger(nn.Module):
    """An embedding and a head, beside a head that nothing uses, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.head, self.spare = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def tag_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["input_ids"]).reshape(-1, 2)
    return nn.functional.cross_entropy(logits, batch["labels"].reshape(-1), ignore_index=NO_LABEL)


def broken(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("this rank fails")


def redraw(model: nn.Module) -> None:
    """Draw the values of a model anew, in every process alike."""
    for param in model.parameters():
        draw = torch.Generator().manual_seed(param.numel())
        param.data = 0.2 * torch.randn(param.shape, generator=draw, dtype=param.dtype)


@dataclass(frozen=True)
class Case:
    """What is trained, on how many rows, by which settings."""

    model: str = "vit"
    plan: str = "share()"
    rows: int = 9
    hook: ClientHook | None = None
    build: Callable[[str], nn.Module] = zoo.build
    said: tuple[tuple[str, Any], ...] = ()

    def fit(self, ranks: Ranks | None, **change: Any) -> tuple[Job, FitResult]:
        """The job, whose model is trained, and what the fit returned."""
        said: dict[str, Any] = {
            "optimizer": sgd(),
            "lr": 0.05,
            "batch_size": 4,
            "epochs": 2,
            **dict(self.said),
        }
        rows = (
            texts(self.rows, tags=True) if self.model == "tags" else Few(self.model, 0, self.rows)
        )
        model = Tagger().double() if self.model == "tags" else still(self.model, self.build)
        redraw(model)
        job = job_of(model, TrainArguments(**said), Double(rows), self.plan)
        of = tag_loss if self.model == "tags" else mean_of_rows
        controls = {aux_name(k, CONTROL): v * 0.01 for k, v in job.start.items()}
        job = replace(job, **{"loss": of, "ranks": ranks, "memory": controls, **change})
        return job, (self.hook(plain_fit) if self.hook else plain_fit)(job)


CASES = {
    "fedavg": Case(),
    "fused": Case("gpt2", "chain(share(), freeze(query | key))"),
    "fused kept": Case("phi3", "chain(share(), keep(head), freeze(query | key))"),
    "fedprox": Case(hook=proximal(0.5)),
    "scaffold": Case("gpt2", "chain(share(), freeze(query))", hook=control_variates),
    "feddyn": Case(hook=dynamic(0.5)),
    "ditto": Case(hook=train_own_copy(0.5)),
    "fedrep": Case(plan="chain(share(), keep(head))", hook=alternate()),
    "clipped": Case(
        "bert",
        said=(("max_grad_norm", 0.05), ("gradient_accumulation_steps", 3), ("batch_size", 2)),
    ),
    "lora": Case("gpt2", "share(adapter)", build=zoo.with_lora),
    "one row": Case(rows=1),
    "tags": Case("tags", rows=7, said=(("optimizer", adamw(weight_decay=0.1)), ("batch_size", 3))),
    "compiled": Case(said=(("torch_compile", "eager"), ("epochs", 1))),
    "broken": Case(),
}


class Other:
    """Handler of the second rank."""

    def reply(self, message: dict[str, Any], tensors: Tensors) -> TensorsAndJson:
        if message["do"] in ("start", "join"):
            self.ranks = Ranks(1, 2, 60.0)
            if message["do"] == "join":
                self.ranks.join(Path(message["file"]), CPU)
            return {}, {}
        change = {"loss": broken} if message["do"] == "broken" else {}
        try:
            job, done = CASES[message["do"]].fit(self.ranks, **change)
        except ValueError:
            self.ranks.leave()
            raise
        return get_values(job.model, job.roles), {"loss": done.loss, "steps": done.steps}
