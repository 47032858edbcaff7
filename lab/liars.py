# SPDX-License-Identifier: Apache-2.0
"""Run a study with one site that lies, under each defence: all runs in one result file."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from study import FACTS, LAB, variants
from torch import Tensor

from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client
from fedplan.federation.messages import Request, Update
from fedplan.federation.record import joined, parted
from fedplan.federation.turns import local
from fedplan.runners import local as runner
from fedplan.runners.simulation import Simulation
from fedplan.storage.lines import read_lines
from fedplan.studies import stage
from fedplan.studies.schema import Study, study_of
from fedplan.studies.shares import Shares, shares_of
from fedplan.tensors.named import digests

STUDY, HEAVY = "liars-digits", 2**27
RESULT = LAB / "results" / f"{STUDY}.json"

Change = Callable[[Tensor, Tensor], Tensor]
"""What a liar says of a value, of what it was before and of what its training made of it."""


def noise(before: Tensor, after: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(after.numel())
    return torch.randn(after.shape, generator=draw)


def honest(before: Tensor, after: Tensor) -> Tensor:
    return after


def times(factor: float) -> Change:
    return lambda before, after: before + factor * (after - before)


LIES: dict[str, tuple[Change, int]] = {
    "gone": (honest, 0),  # the liar is not there at all
    "weight 2^27": (honest, HEAVY),
    "weight 2^27, flipped": (times(-1), HEAVY),
    "flipped x 10": (times(-10), 0),
    "scaled x 100": (times(100), 0),
    "noise": (noise, 0),
}


def lying(liar: str, change: Change, weight: int) -> Callable[..., Update]:
    """A client's turn; the liar's update is another, and its record fits that."""

    def turn(agreement: Agreement, client: Client, request: Request) -> Update:
        update = local(agreement, client, request)
        if client.name != liar:
            return update
        values = {k: change(client.seen[k], value) for k, value in update.values.items()}
        after = parted(agreement.params, update.line["after"]) | digests(values)
        says = weight or update.weight
        line = {**update.line, "after": joined(agreement.params, after), "weight": says}
        return replace(update, values=values, weight=says, line=line)

    return turn


def remembered() -> Callable[..., Shares]:
    """The rows of a study, read once a seed: a third of a run's time."""
    found = dict[int, Shares]()

    def read(study: Study, own: Any = None) -> Shares:
        return found.setdefault(study.seed, found.get(study.seed) or shares_of(study, own))

    return read


def one(said: dict[str, Any], lie: str) -> dict[str, Any]:
    """One run, and what its last round says."""
    with tempfile.TemporaryDirectory() as place:
        simulation = Simulation(study_of(said), Path(place) / "run")
        liar = sorted(simulation.federation.clients)[-1]
        if lie == "gone":
            del simulation.federation.clients[liar]
        runner.local = lying(liar, *LIES[lie])
        simulation.run()
        scores = simulation.metrics[-1]
        lines = [x for x in read_lines(Path(place) / "run" / "ledger.jsonl") if "moved" in x]
    told = {name: lines[-1].get(name) for name in ("counted", "defence", "warnings")}
    return {"accuracy": scores["world.accuracy"], "loss": scores["world.loss"], **told}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--place", required=True, help="DIGITS=folder")
    name, folder = ask.parse_args().place.split("=", 1)
    stage.shares_of = remembered()
    (found, seeds), runs, started = variants(STUDY), list[dict[str, Any]](), time.monotonic()
    for seed in seeds:
        for variant, said in found.items():
            for lie in LIES:
                here = json.loads(json.dumps(said | {"seed": seed}).replace(name, folder))
                runs.append({"defence": variant, "lie": lie, "seed": seed, **one(here, lie)})
                print(seed, variant, lie, f"{runs[-1]['accuracy']:.3f}", flush=True)
        write(runs, started)


def write(runs: list[dict[str, Any]], started: float) -> None:
    """Keep what there is so far: a seed is whole."""
    result = {
        "command": "python lab/liars.py --place DIGITS=...",
        "facts": FACTS,
        "seconds": round(time.monotonic() - started, 1),
        "runs": runs,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
