# SPDX-License-Identifier: Apache-2.0
"""Stock Flower: FedAvg by run_simulation, two CPUs for Ray and one for each client."""

from __future__ import annotations

import os
import sys
import traceback

import flower_client
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from gate import Gate
from work import moved, read_work


def main() -> None:
    work, server = read_work(), ServerApp()
    model, gate = work.model(), Gate(work.line, work.rounds)
    start = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def note(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number:
            gate.closed(lambda: moved(arrays.to_torch_state_dict(), start))
        else:
            gate.ready()
        return None

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        share = work.spec["cohort"] / work.spec["clients"]
        strategy = FedAvg(
            fraction_train=share,
            fraction_evaluate=0.0,
            min_train_nodes=work.spec["cohort"],
            min_available_nodes=work.spec["clients"],
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=work.rounds,
            evaluate_fn=note,
        )

    torch.set_num_threads(1)
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2}}
    client = flower_client.app_of(sys.argv[1])
    try:
        run_simulation(server, client, work.spec["clients"], backend_config=resources)
    except Exception:  # otherwise the thread of the server waits at the gate for ever
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
