# SPDX-License-Identifier: Apache-2.0
"""A study that is small enough to be run many times, and a sweep of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from commands import STUDY, some_digits

from fedplan.federation.ledger.events import CommittedRound
from fedplan.federation.ledger.status import ask_to_stop
from fedplan.studies.run import read_run
from fedplan.sweeps.sweeping import Sweep, sweep

SMALL = (
    STUDY.replace('plan = "chain(share(), when(after(1), freeze(query | key)), keep(head))"', 'name = "fedavg"')
    .replace("[clients]\ndropout_fraction = 0.1\n[evaluate]\nattention_examples = 4\n", "")
    .replace("rounds = 3", "rounds = 2")
)  # fmt: skip
"""Three clients, two rounds, FedAvg."""
ASKED_OF = "FEDPLAN_TEST_ASKED_OF"
METHODS = {"method.name": ["fedavg", "fedper"]}


class Mortal:
    """Plays no trial, and dies of those with the seed 1."""

    def reply(self, message: dict[str, Any], _: object) -> tuple[dict[str, Any], dict[str, Any]]:
        if message["study"]["seed"] == 1:
            os.kill(os.getpid(), 9)
        return {}, {"seconds": 1.0, "stop_reason": Path(message["folder"]).name}


def asks_to_stop(_: CommittedRound) -> None:
    """A tracker that asks its own run to stop, as an operator does."""
    ask_to_stop(Path(os.environ[ASKED_OF]))


def small_study(folder: Path) -> Path:
    """The study's file in a folder, with its data."""
    some_digits(folder)
    (folder / "study.toml").write_text(SMALL)
    return folder / "study.toml"


def small_sweep(folder: Path) -> Sweep:
    """Two methods on three seeds."""
    return sweep(small_study(folder), METHODS, folder=folder / "sweep", seeds=3)


def bits(folder: Path) -> tuple[dict[str, bytes], list[dict[str, float]]]:
    """What a run came to, whose clients' secrets are its own: the world, and the numbers by round."""
    run = read_run(folder)
    values = {name: each.numpy().tobytes() for name, each in run.global_state.values.items()}
    return values, list(run.metrics)
