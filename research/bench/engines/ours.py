# SPDX-License-Identifier: Apache-2.0
"""fedplan: the workload as a study of files, or as objects, by whatever runner is asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

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
    return {
        "steps": work.said["steps"],
        "batch_size": work.said["batch"],
        "optimizer": "sgd",
        "lr": RATE,
        "rounds": work.rounds,
    }


def study_values(work: Work) -> dict[str, Any]:
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
            "partition": "column",
            "partition_column": "client",
            "num_clients": 0,
            "holdout_fraction": 0.0,
            "min_examples": 1,
        },
        "method": {"name": "fedavg"},
        "train": train_of(work),
        "clients": {"fraction": work.said["cohort"] / work.said["clients"]},
    }


def opened(work: Work, callback: Any, folder: Path) -> Any:
    """The simulation of one process, before its first round."""
    from fedplan.runners.simulation import Simulation
    from fedplan.studies.schema import study_from_dict

    if work.said["kind"] == "linear":
        clients = {f"c{i:05}": Rows(*work.client(i)) for i in range(work.said["clients"])}
        share = work.said["cohort"] / work.said["clients"]
        return fp.simulate(
            fp.methods.fedavg(), work.model(), clients, loss, train=fp.TrainConfig(**train_of(work)),
            participation=fp.ClientsConfig(fraction=share), callbacks=[callback],
            options=fp.RunOptions(folder=folder, start=False),
        ).simulation  # fmt: skip
    return Simulation(study_from_dict(study_values(work)), folder, callbacks=[callback])


def hired(work: Work, callback: Any, folder: Path) -> None:
    """Play it by several processes: they start within the first round."""
    from fedplan.studies.schema import study_from_dict

    crew: dict[str, Any] = {"runner": work.engine, "workers": work.workers}
    fp.run_study(study_from_dict(study_values(work)), folder, callbacks=[callback], **crew)


def main() -> None:
    work = asked()
    folder = Path(mkdtemp(prefix="fedplan-bench-")) / "run"
    print(f"fedplan of {Path(fp.__file__).parent}, run in {folder}", file=sys.stderr)
    gate = Gate(work.line, work.rounds)

    def told() -> dict[str, float]:
        now, turns = fp.open_run(folder).global_values(), work.rounds * work.said["cohort"]
        start = {k: v.detach() for k, v in work.model().named_parameters() if k in now}
        ledger = sum(file.stat().st_size for file in folder.glob("ledger*"))
        return {"moved": far(now, start), "ledger": ledger / turns}

    def callback(closed: Any) -> None:
        gate.closed(told)

    if work.workers > 1:
        gate.ready()
        hired(work, callback, folder)
    else:
        simulation = opened(work, callback, folder)
        gate.ready()
        simulation.run()
    rmtree(folder.parent)


if __name__ == "__main__":
    main()
