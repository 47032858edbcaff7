# SPDX-License-Identifier: Apache-2.0
"""Executors for tests: workers within this process that die when they are told to, runs side by side."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands import STUDY, TIMES

from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.runners.executors import pool
from fedplan.runners.executors.executor import PoolConfig
from fedplan.runners.executors.worker import Worker
from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import Study, parse_toml, resolve_paths, study_from_dict
from fedplan.tensors.named import Tensors

PEOPLE = {
    "data": {"num_clients": 5},
    "train": {"rounds": 3, "batch_size": 8},
    "evaluate": {"attention_examples": 0},
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": {"name": "fedavg"}, "clients": {"fraction": 0.6}},
    "homes": {
        "method": {"name": "fedper"},
        "clients": {"dropout_fraction": 0.2, "late_fraction": 0.2},
    },
    "scaffold": {"method": {"name": "scaffold"}, "clients": {"fraction": 0.8}},
    "polls": {"method": {"name": "safl", "settings": {"k": 1, "joint_choice": True}}},
    "private": {
        "method": {"name": "fedavg"},
        "privacy": {
            "unit": "client",
            "epsilon": 900.0,
            "noise_multiplier": 2.0,
            "clipping_norm": 0.5,
        },
        "clients": {"fraction": 0.6},
    },
    "defence": {"method": {"name": "fedavg"}, "defence": {"rule": "median"}},
    "rows": {
        "method": {"name": "fedavg"},
        "privacy": {
            "unit": "example",
            "epsilon": 900.0,
            "noise_multiplier": 2.0,
            "examples_per_site": 24,
        },
        "train": {"rounds": 2, "batch_size": 4, "steps": 2},
    },
    "sites": {
        "method": {"name": "fedper"},
        "data": {"num_clients": 4, "holdout_fraction": 0.3},
        "evaluate": {"attention_examples": 0, "on_clients": True},
    },
    "own": {"method": {"name": "fedper"}, "data": {"num_clients": 4, "holdout_fraction": 0.3}},
    "phases": {
        "method": {"plan": "chain(share(), when(after(1), freeze(query | key)), keep(head))"}
    },
    "yogi": {"method": {"name": "fedyogi"}, "clients": {"fraction": 0.4}},
    "prox": {"method": {"name": "fedprox"}, "defence": {"max_weight": 8}},
    "coded": {"method": {"name": "fedavg", "compression": "pipe(delta(), half())"}},
}
"""Ways in which a round sums, asks, keeps and hides: each as what a study says of it."""


def study_with(name: str, **more: Any) -> Study:
    """The tiny study in this folder, in one of the ways."""
    said = parse_toml(STUDY)
    for change in (PEOPLE, METHODS[name], more):
        for section, held in change.items():
            said[section] = {**said.get(section, {}), **held} if section != "method" else held
    own = METHODS[name].get("clients", {}) | more.get("clients", {})
    said["clients"] = {"dropout_fraction": 0.0} | own
    return resolve_paths(study_from_dict(said), Path.cwd())


class Here:
    """Workers within this process; before any message one may die, by the chance of a seed."""

    def __init__(self, count: int, deaths: int = 0, seed: int = 0) -> None:
        self.count, self.left, self.draw = count, deaths, random.Random(seed)
        self.workers = dict[int, Worker]()
        self.asked = list[tuple[int, bytes, Tensors]]()
        self.died = 0

    def start(self, number: int, said: Mapping[str, Any]) -> None:
        self.workers.pop(number, None)
        self.send(number, said)

    def share(self, tensors: Tensors) -> object:
        return {key: value.clone() for key, value in tensors.items()}

    def send(self, number: int, said: Mapping[str, Any], shared: Any = None) -> None:
        self.asked.append((number, json.dumps(said).encode(), shared or {}))

    def receive(self, timeout: float) -> list[tuple[int, TensorsAndJson | None]]:
        number = self.draw.choice([number for number, _, _ in self.asked])
        at = next(i for i, (of, _, _) in enumerate(self.asked) if of == number)
        if self.left and number in self.workers and self.draw.random() < 0.4:
            self.left, self.died = self.left - 1, self.died + 1
            self.asked = [each for each in self.asked if each[0] != number]
            return [(number, None)]
        _, words, tensors = self.asked.pop(at)
        worker = self.workers.setdefault(number, Worker())
        made, told = worker.reply(json.loads(words), tensors)
        return [(number, (made, json.loads(json.dumps(told))))]

    def close(self) -> None:
        self.workers.clear()
        self.asked.clear()


class Begun:
    """A run that was begun, to be copied: all who go on with it have the same secrets and keys."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        whole = Simulation(study, folder / "begun")
        for client in whole.federation.clients.values():
            client.journal.folder.mkdir(parents=True, exist_ok=True)
            assert client.digest_key

    def copied(self, name: str) -> Path:
        shutil.copytree(self.folder / "begun", self.folder / name)
        return self.folder / name

    def alone(self, name: str = "alone") -> Path:
        """Where this process has played it, one client after the other."""
        folder = self.copied(name)
        Simulation(self.study, folder).run()
        return folder

    def by(self, transport: Any, name: str, monkeypatch: Any) -> Path:
        """Where the workers of a transport have."""
        folder = self.copied(name)
        with monkeypatch.context() as patch:
            patch.setattr(pool, "make_transport", lambda *_: transport)
            Simulation(self.study, folder, pool_config=PoolConfig()).run()
        return folder


def files(folder: Path) -> dict[str, str]:
    """The digest of every file of a run but for those that tell of times."""
    found = (each for each in sorted(folder.rglob("*")) if each.is_file())
    return {
        str(each.relative_to(folder)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in found
        if each.name not in TIMES
    }
