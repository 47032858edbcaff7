# SPDX-License-Identifier: Apache-2.0
"""Without a common test set, the global model is tested on all clients' test examples together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import STUDY
from sklearn.metrics import accuracy_score, f1_score
from torch import nn

import fedplan as fp
from fedplan.models.values import set_values
from fedplan.runners.simulation import Simulation
from fedplan.studies.run import read_run
from fedplan.studies.run_scores import CLIENT_TESTS, run_scores
from fedplan.studies.schema import read_study


@pytest.mark.parametrize("plan", ["share()", "chain(share(), keep(head))"])
def test_it_is_what_scikit_learn_says_of_all_examples(here: Path, plan: str) -> None:
    Path("study.toml").write_text(STUDY.replace('test_split = "test"\n', ""))
    study = read_study(Path("study.toml"), [f"method.plan='{plan}'", "train.rounds=1"])
    simulation = Simulation(study, Path("out")).run()
    federation, tests = simulation.federation, simulation.data.client_tests
    set_values(federation.model, federation.global_values(), federation.agreement.trainable)
    truth, guess = list[int](), list[int]()
    for rows in tests.values():
        batch = rows.batch(torch.arange(len(rows)))
        truth += batch.pop("labels").tolist()
        with torch.no_grad():
            guess += federation.model.eval()(**batch).logits.argmax(-1).tolist()
    row = simulation.metrics[-1]
    assert row["global.accuracy"] == pytest.approx(accuracy_score(truth, guess))
    assert row["global.f1"] == pytest.approx(f1_score(truth, guess, average="macro"))
    assert (row["global.examples"], row["global.clients"]) == (len(truth), len(tests))
    scores = run_scores(read_run("out"))
    overall = scores.find("global")
    assert overall is not None and overall.examples == CLIENT_TESTS
    assert scores.leading is not None
    assert scores.leading.kind == ("personal" if "keep" in plan else "global")


def test_a_task_from_python_has_the_mean_over_all_examples() -> None:
    def table(seed: int, count: int) -> torch.utils.data.TensorDataset:
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])

    clients = {
        name: {"train": table(seed, 16), "test": table(seed + 10, size)}
        for name, seed, size in (("north", 1, 5), ("south", 2, 20))
    }
    run = fp.simulate(fp.share(), nn.Linear(4, 2), clients, loss, train=fp.TrainConfig(rounds=1))
    row = run.metrics[-1]
    mean = (5 * row["clients.north.loss"] + 20 * row["clients.south.loss"]) / 25
    assert row["global.loss"] == pytest.approx(mean) and row["global.examples"] == 25
