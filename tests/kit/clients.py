# SPDX-License-Identifier: Apache-2.0
"""Small federations for tests: a few clients with a few rows for any tiny model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
import zoo
from torch import Tensor, nn

from fedplan.federation.client import KEY, Client, ClientPrivacy, TrainSetup
from fedplan.federation.endpoint import open_journal
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import SECRET_FILE
from fedplan.storage.journal import client_state_folder
from fedplan.studies.experiment import Experiment, make_eval_set
from fedplan.studies.schema import Study

GUARANTEES = {
    "veiled": Guarantee(
        "client",
        900.0,
        1e-5,
        1.0,
        1.0,
        0.7,
        vote_noise_multiplier=2.0,
        vote_every=2,
        clipping_quantile=0.5,
    ),
    "cloaked": Guarantee(
        "example", 900.0, 1e-5, 1.0, 1.0, 0.5, 2, 2, vote_noise_multiplier=2.0, vote_every=2
    ),
    "weighed": Guarantee("client", 900.0, 1e-5, 1.0, 1.0, vote_noise_multiplier=2.0, max_weight=4),
}
"""Runs that hide their clients or their examples, and vote on the layers."""


RUN = "ab" * 8
"""The id of runs whose noise is to be the same: votes of rows are drawn by it."""


def client_of(
    study: Study, experiment: Experiment, name: str, folder: Path, privacy: ClientPrivacy
) -> Client:
    """A client of a study with a model and a journal of its own, as a site makes it."""
    return Client(
        name=name,
        examples=experiment.data.train[name],
        journal=open_journal(folder),
        setup=TrainSetup(
            copy.deepcopy(experiment.model),
            experiment.data.task.loss,
            experiment.initial_values,
            experiment.initial_model,
        ),
        privacy=privacy,
        eval_set=make_eval_set(study, experiment.data, name),
    )


def know_secrets(folder: Path, clients: Iterable[str]) -> None:
    """Two runs with the same secrets draw the same noise, and key their digests alike."""
    for name in clients:
        client_state_folder(folder, name).mkdir(parents=True, exist_ok=True)
        (client_state_folder(folder, name) / KEY).touch(mode=0o600)
        (client_state_folder(folder, name) / KEY).write_bytes(name.encode().ljust(32)[:32])
    for name in ("", *clients):
        place = folder / "privacy" / name
        place.mkdir(parents=True, exist_ok=True)
        (place / SECRET_FILE).touch(mode=0o600)
        (place / SECRET_FILE).write_bytes(place.name.encode().ljust(32)[:32])


class Few:
    """Rows for a tiny model: its own inputs, shifted by a seed so that clients differ."""

    def __init__(self, name: str, seed: int, count: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = {k: v.repeat(count, *[1] * (v.dim() - 1))[:count] for k, v in zoo.feed(name).items()}
        self.rows = {k: self._shifted(v, generator) for k, v in rows.items()}

    def _shifted(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        if rows.is_floating_point():
            return rows + torch.randn(rows.shape, generator=generator)
        return torch.randint(3, 60, rows.shape, generator=generator)

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {k: v[indices] for k, v in self.rows.items()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Any differentiable number: how far the model's answers are from one."""
    return (zoo.loss(model(**batch)) - 1).square().float()


def few(name: str, clients: int = 2) -> dict[str, Few]:
    return {f"client-{i}": Few(name, i, count=3 + i) for i in range(clients)}
