# SPDX-License-Identifier: Apache-2.0
"""fedplan: the workload as a study of files or as objects, with the runner of the request."""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from gate import Gate
from torch import Tensor, nn
from work import RATE, Work, moved, read_work

import fedplan as fp
from fedplan.studies import schema

OLDER = {
    "batch_size": "batch",
    "optimizer": "optimiser",
    "lr": "rate",
    "partition": "by",
    "partition_column": "column",
    "num_clients": "clients",
    "holdout_fraction": "own_test",
    "min_examples": "least",
    "fraction": "share",
}
"""Fields of a study by their names in November 2026, for a tree of `--before`."""
BEFORE = "study_of" in vars(schema)
"""Whether the tree uses these older names."""


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


def section(**values: Any) -> dict[str, Any]:
    return {OLDER.get(name, name): each for name, each in values.items()} if BEFORE else values


def train_of(work: Work) -> dict[str, Any]:
    return section(
        steps=work.spec["steps"],
        batch_size=work.spec["batch"],
        optimizer="sgd",
        lr=RATE,
        rounds=work.rounds,
    )


def study_of(work: Work) -> Any:
    """The study of a workload's files. It evaluates nothing, since no other engine does."""
    vision = work.spec["kind"] == "vit"
    table = "table.npz" if vision else "table.parquet"
    pictures = {"kind": "image-classification", "input": "image", "image_size": 32}
    task = pictures if vision else {"kind": "text-classification", "max_length": 64}
    adapter = {"adapter": {"path": str(work.folder / "adapter")}} if work.spec["rank"] else {}
    adapted = {"plan": "chain(freeze(), share(adapter))"}
    values = {
        "name": "bench",
        "threads": 1,
        "model": {"path": str(work.folder / "model")} | adapter,
        "task": task | {"label": "label"},
        "data": section(
            path=str(work.folder / table),
            partition="column",
            partition_column="client",
            num_clients=0,
            holdout_fraction=0.0,
            min_examples=1,
        ),
        "method": adapted if adapter else {"name": "fedavg"},
        "train": train_of(work),
        "clients": section(fraction=work.spec["cohort"] / work.spec["clients"]),
    }
    return vars(schema)["study_of" if BEFORE else "study_from_dict"](values)


def opened(work: Work, callback: Any, folder: Path) -> Any:
    """The simulation in one process, before its first round."""
    from fedplan.runners.simulation import Simulation

    if work.spec["kind"] != "linear":
        return Simulation(study_of(work), folder, callbacks=[callback])
    clients = {f"c{i:05}": Rows(*work.client(i)) for i in range(work.spec["clients"])}
    share, train = work.spec["cohort"] / work.spec["clients"], train_of(work)
    settings: dict[str, Any] = {"callbacks": [callback]}
    if BEFORE:
        settings |= {"train": train, "share": share, "folder": folder, "run": False}
        return fp.simulate(fp.methods.fedavg(), work.model(), clients, loss, **settings)
    settings |= {
        "train": fp.TrainConfig(**train),
        "participation": fp.ClientsConfig(fraction=share),
        "options": fp.RunOptions(folder=folder, start=False),
    }
    return fp.simulate(fp.methods.fedavg(), work.model(), clients, loss, **settings).simulation


def run_workers(work: Work, callback: Any, folder: Path) -> None:
    """Run all rounds in several processes, which start in the first round."""
    workers: dict[str, Any] = {"runner": work.engine, "workers": work.workers}
    fp.run_study(study_of(work), folder, callbacks=[callback], **workers)


def main() -> None:
    work = read_work()
    folder = Path(mkdtemp(prefix="fedplan-bench-")) / "run"
    print(f"fedplan of {Path(fp.__file__).parent}, run in {folder}", file=sys.stderr)
    gate = Gate(work.line, work.rounds)

    def told() -> dict[str, float]:
        run: Any = fp.open_run(folder)
        now, turns = (
            run.world.values if BEFORE else run.global_values(),
            work.rounds * work.spec["cohort"],
        )
        start = {k: v.detach() for k, v in work.model().named_parameters() if k in now}
        ledger = sum(file.stat().st_size for file in folder.glob("ledger*"))
        return moved(now, start) | {"ledger": ledger / turns}

    def callback(closed: Any) -> None:
        gate.closed(told)

    if work.workers > 1:
        gate.ready()
        run_workers(work, callback, folder)
    else:
        simulation = opened(work, callback, folder)
        gate.ready()
        simulation.run()
    rmtree(folder.parent)


if __name__ == "__main__":
    main()
