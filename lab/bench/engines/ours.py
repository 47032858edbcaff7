# SPDX-License-Identifier: Apache-2.0
"""fedplan: the workload as a study of files, or as objects, by whatever runner is asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from gate import Gate
from torch import Tensor, nn
from work import RATE, Work, asked, far

import fedplan as fp


class Rows:
    """One client's rows, for a model that is no Transformer."""

    def __init__(self, rows: Tensor, labels: Tensor) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"rows": self.rows[indices], "labels": self.labels[indices]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["rows"]), batch["labels"])


def train_of(work: Work) -> dict[str, Any]:
    said = {name: work.said[name] for name in ("steps", "batch")}
    return said | {"optimiser": "sgd", "rate": RATE, "rounds": work.rounds}


def study_of(work: Work) -> dict[str, Any]:
    """The study of a workload's files; nothing is tested, as no other engine tests."""
    vision = work.said["kind"] == "vit"
    table = "table.npz" if vision else "table.parquet"
    pictures = {"kind": "image-classification", "input": "image", "image_size": 32}
    task = pictures if vision else {"kind": "text-classification", "max_length": 64}
    return {
        "name": "bench",
        "threads": 1,
        "model": {"path": str(work.folder / "model")},
        "task": task | {"label": "label"},
        "data": {
            "path": str(work.folder / table),
            "by": "column",
            "column": "client",
            "clients": 0,
            "own_test": 0.0,
            "least": 1,
        },
        "method": {"name": "fedavg"},
        "train": train_of(work),
        "clients": {"share": work.said["cohort"] / work.said["clients"]},
    }


def run(work: Work, callback: Any, folder: Path) -> Any:
    """The simulation before its first round."""
    from fedplan.runners.simulation import Simulation
    from fedplan.studies.schema import study_of as read

    if work.said["kind"] == "linear":
        clients = {f"c{i:05}": Rows(*work.client(i)) for i in range(work.said["clients"])}
        share = work.said["cohort"] / work.said["clients"]
        return fp.simulate(
            fp.methods.fedavg(), work.model(), clients, loss, train=train_of(work), share=share,
            callbacks=[callback], folder=folder, run=False,
        )  # fmt: skip
    return Simulation(read(study_of(work)), folder, callbacks=[callback], **crew_of(work))


def crew_of(work: Work) -> Mapping[str, Any]:
    """What says by how many processes, and whose; nothing where one process does it."""
    return {"runner": work.engine, "workers": work.workers} if work.workers > 1 else {}


def main() -> None:
    work = asked()
    folder = Path(mkdtemp(prefix="fedplan-bench-"))
    print(f"fedplan of {Path(fp.__file__).parent}, run in {folder}", file=sys.stderr)
    gate, made = Gate(work.line, work.rounds), list[Any]()

    def moved() -> float:
        now = dict(made[0].federation.world_values())
        return far(now, {k: start[k] for k in now})

    simulation = run(work, lambda closed: gate.closed(moved), folder)
    start = {k: v.clone() for k, v in simulation.federation.world_values().items()}
    made.append(simulation)
    gate.ready()
    simulation.run()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
