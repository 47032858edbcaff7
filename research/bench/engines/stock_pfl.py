# SPDX-License-Identifier: Apache-2.0
"""pfl: federated averaging on its simulated backend, in one process or under torchrun."""

from __future__ import annotations

from typing import Any

import torch
from gate import Gate
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import RATE, Work, moved, read_work


class Lossy(nn.Module):
    """The workload's model with the two methods that pfl asks a model for."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.inner = work, work.model()

    def loss(self, rows: Tensor, labels: Tensor, **_: Any) -> Tensor:
        self.train()
        return self.work.loss(self.inner, rows, labels)

    def metrics(self, rows: Tensor, labels: Tensor, **_: Any) -> dict[str, Weighted]:
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(rows, labels)), 1)}


class Between(TrainingProcessCallback):
    """Waits after each round: the first process for the benchmark, the others for the first."""

    def __init__(self, gate: Gate | None, start: dict[str, Tensor]) -> None:
        self.gate, self.start = gate, start

    def on_train_begin(self, *, model: Any) -> Metrics:
        if self.gate:
            self.gate.ready()
        together()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if self.gate:
            now = dict(model.pytorch_model.named_parameters())
            self.gate.closed(lambda: moved(now, self.start))
        together()
        return False, Metrics()


def together() -> None:
    if pytorch_ops.distributed.world_size > 1:
        torch.distributed.barrier()


def main() -> None:
    work = read_work()
    first = pytorch_ops.distributed.global_rank == 0
    model = Lossy(work)
    start = {k: v.detach().clone() for k, v in model.named_parameters()}
    users = [str(i) for i in range(work.spec["clients"])]
    data = FederatedDataset(
        lambda user: Dataset(work.client(int(user)), user_id=user),
        get_user_sampler("minimize_reuse", users),
    )
    params = NNAlgorithmParams(
        central_num_iterations=work.rounds,
        evaluation_frequency=10**9,  # it evaluates in the first round, which is not counted
        train_cohort_size=work.spec["cohort"],
        val_cohort_size=None,
    )
    settings = NNTrainHyperParams(
        local_num_epochs=1,
        local_learning_rate=RATE,
        local_batch_size=work.spec["batch"],
    )
    gate = Gate(work.line, work.rounds) if first else None
    FederatedAveraging().run(
        params,
        SimulatedBackend(training_data=data, val_data=data),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        settings,
        None,
        [Between(gate, start)],
    )


if __name__ == "__main__":
    main()
