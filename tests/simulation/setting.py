# SPDX-License-Identifier: Apache-2.0
"""The studies that a seed draws: a tiny model, a few examples for each site, method and privacy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

import torch
from torch import Tensor, nn

from fedplan import register_layer_map
from fedplan.data.examples import Examples
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import EXAMPLE_COUNT
from fedplan.federation.ledger.digests import InitialModel, digest_initial_model
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Params
from fedplan.models.values import get_values
from fedplan.privacy.guarantee import Guarantee
from fedplan.secagg.config import SecAggConfig
from fedplan.training.fit import TrainArguments

RUN = "ab" * 8
METHODS = (
    *("fedavg", "fedper", "scaffold", "fedfrozen", "fedrep", "local-only", "fedprox", "bitfit"),
    "safl",
)
CHOICE = {"k": 1, "joint_choice": True, "probe": "gradient"}
"""Settings of the method that chooses layers by a poll of the sites."""
GUARANTEES = {
    "client": Guarantee("client", 900.0, 1e-5, 1.0, 1.0),
    "example": Guarantee("example", 900.0, 1e-5, 1.0, 1.0, 0.5, 1, 2),
}


@dataclass(frozen=True)
class Setting:
    """What a seed draws of a study; trials of the same setting share the undisturbed run.

    `joins`: the round before which the last site joins; 0 if it is there from the beginning.
    `scores`: sites evaluate each round.
    """

    method: str
    secure: bool
    unit: str
    sites: int
    rounds: int
    fraction: float
    joins: int = 0
    scores: bool = False

    @staticmethod
    def draw(rng: Random) -> Setting:
        """Draw a study that fedplan accepts."""
        secure, unit = rng.random() < 0.15, rng.choice(("", "", "client", "example"))
        method = rng.choice(("fedavg", "fedper") if secure or unit else METHODS)
        unit = "" if secure and unit == "example" else unit
        sites = 3 if secure else rng.choice((2, 2, 3))
        fraction = 1.0 if secure or unit else rng.choice((1.0, 1.0, 0.5))
        joins = rng.choice((0, 0, 2)) if fraction == 1.0 and not secure and not unit else 0
        scores = not secure and not unit and rng.random() < 0.25
        return Setting(method, secure, unit, sites, rng.choice((2, 2, 3)), fraction, joins, scores)

    @property
    def names(self) -> list[str]:
        """Names of the sites."""
        return [f"client-{i}" for i in range(self.sites)]

    @property
    def quorum(self) -> int:
        """The fewest updates of a round: all, unless the study hides who takes part."""
        return 1 if self.unit == "client" else max(1, round(self.fraction * self.sites))


@cache
def agreement_of(setting: Setting) -> Agreement:
    """What server and sites agree to."""
    secagg = SecAggConfig("secure", threshold=setting.sites // 2 + 1, min_contributors=2)
    return Agreement(
        "simulated",
        params(),
        method_by_name(setting.method, CHOICE if setting.method == "safl" else None),
        TrainArguments(lr=1e-2, batch_size=2, steps=1),
        GUARANTEES.get(setting.unit),
        secagg=secagg if setting.secure else SecAggConfig(),
        run=RUN,
    )


class TinyBlock(nn.Module):
    """A block of few params and operations."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.value = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.value(hidden) * torch.sigmoid(self.query(hidden) * self.key(hidden))


class TinyModel(nn.Module):
    """A few params of each kind in two blocks, so that a trial is short."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4).requires_grad_(False)
        self.layers = nn.ModuleList([TinyBlock(), TinyBlock()])
        self.head = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids).mean(1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


register_layer_map(
    "TinyModel",
    blocks={"encoder": "layers"},
    **{kind: kind for kind in ("embed", "query", "key", "value", "head")},
)


@cache
def tiny_model() -> nn.Module:
    """One model for server and sites: each turn loads its own values."""
    torch.manual_seed(0)
    return TinyModel().eval()


def score(model: nn.Module, rows: Examples) -> dict[str, float]:
    """A metric of a model on the examples of a site."""
    with torch.no_grad():
        value = loss(model, rows.batch(torch.arange(len(rows))))
    return {"loss": float(value), EXAMPLE_COUNT: len(rows)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Any differentiable number."""
    return (model(**batch) - 1).square().mean()


@cache
def params() -> Params:
    """All params but those of the embedding."""
    return tuple(p for p in describe(tiny_model()) if p.kind != "embed")


@cache
def start_values() -> dict[str, Tensor]:
    """The initial values of server and sites."""
    return {k: v.clone() for k, v in get_values(tiny_model(), params()).items()}


@cache
def initial_model() -> InitialModel:
    """Digests of the initial values."""
    return digest_initial_model(tiny_model(), params(), start_values())


class Rows:
    """A few texts of a site."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 16, (4, 4), generator=drawn)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"input_ids": self.ids[indices]}
