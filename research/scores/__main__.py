# SPDX-License-Identifier: Apache-2.0
"""Run the oracle and the readings: `python -m research.scores DATA` goes on where it was stopped.

DATA is a folder with gte-small, and with text/ of the tasks. Each task and seed has a file in
research/results/scores; the gains of single blocks come first, then those of leaving one out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from fedplan.errors import FedplanError
from research.bench.facts import facts_of
from research.scores.oracle import Encoder, Prefix, held_out, prefixes, trained
from research.scores.question import Question, Training, commit_of, read_question
from research.scores.readings import Scores, of_change, of_gradients, of_maps
from research.scores.tasks import Rows, Task, task_named

ROOT = Path(__file__).parents[2]
OUT = ROOT / "research" / "results" / "scores"
OTHER = "abstracts"
"""Text of no task that is asked about: what a block does on any text."""
WARM = 100
"""The order of rows in which the head is trained alone is another than that of the runs."""


@dataclass(frozen=True)
class Bench:
    """A task of a seed, the model that it begins with, its features, and the file of its results."""

    task: Task
    seed: int
    encoder: Encoder
    below: tuple[Prefix, ...]
    asked: Question
    file: Path

    def held(self) -> dict[str, Any]:
        """What is known so far."""
        said: dict[str, Any] = (
            json.loads(self.file.read_text()) if self.file.exists() else {"runs": {}}
        )
        if said.get("question", self.asked.digest) != self.asked.digest:
            raise FedplanError(f"{self.file} is of another form of the question: move it away")
        return said

    def keep(self, said: dict[str, Any]) -> None:
        """Write it, whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(said, indent=1) + "\n")
        part.rename(self.file)


def bench(name: str, seed: int, asked: Question, data: Path, file: Path) -> Bench:
    torch.manual_seed(seed)
    folder, how = data / asked.model, asked.training
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = task_named(name, seed, (how.rows, how.tests), how.tokens, tokenizer, data)
    new = Encoder(folder, task)
    below = tuple(prefixes(new, task))
    warm = replace(how, steps=how.warm, head_rate=how.warm_rate)
    begun = trained(new, frozenset(), task, below[-1], warm, WARM + seed)
    return Bench(task, seed, begun, below, asked, file)


def play(bench: Bench, kind: str, blocks: frozenset[int], prefix: Prefix) -> None:
    """One run of the oracle, unless it is there."""
    said, name = bench.held(), kind if kind in ("head", "all") else f"{kind} {_which(kind, blocks)}"
    if name in said["runs"]:
        return
    began = time.time()
    how = bench.asked.training
    if kind in ("all", "without"):
        how = replace(how, steps=how.steps_without)
    made = trained(bench.encoder, blocks, bench.task, prefix, how, bench.seed)
    loss, score = held_out(made, bench.task, prefix)
    told = {"loss": loss, "score": score, "began": int(began), "seconds": time.time() - began}
    said["runs"][name] = {key: round(value, 6) for key, value in told.items()}
    bench.keep(said)
    print(bench.task.name, bench.seed, name, said["runs"][name], flush=True)


def _which(kind: str, blocks: frozenset[int], count: int = 12) -> int:
    return min(blocks if kind == "alone" else frozenset(range(count)) - blocks)


def alone(bench: Bench) -> None:
    """The head, and each block with the head."""
    count = len(bench.encoder.blocks)
    for prefix in bench.below:
        kind = "alone" if prefix.block < count else "head"
        play(bench, kind, frozenset({prefix.block} if prefix.block < count else ()), prefix)


def without(bench: Bench) -> None:
    """All blocks, and all but each."""
    every = frozenset(range(len(bench.encoder.blocks)))
    play(bench, "all", every, bench.below[0])
    for block in sorted(every):
        play(bench, "without", every - {block}, bench.below[0])


def look(bench: Bench, other: Rows, commit: str) -> None:
    """All readings of a task, unless they are there."""
    said = bench.held()
    if "readings" in said:
        return
    facts = {"command": "python -m research.scores DATA", **facts_of(ROOT)}
    question = {
        "question": bench.asked.digest,
        "asked at": commit,
        "training": asdict(bench.asked.training),
    }
    readings = {
        name: [float(f"{s:.8g}") for s in found]
        for name, found in readings_of(bench, other).items()
    }
    bench.keep(
        {
            "task": bench.task.name,
            "seed": bench.seed,
            **question,
            **facts,
            "readings": readings,
            **said,
        }
    )


def readings_of(bench: Bench, other: Rows) -> Scores:
    """Attention as it is pretrained; gradients with a new head and with one that was trained."""
    how = bench.asked.training
    rows = bench.task.train.some(torch.arange(bench.asked.looks))
    found = of_maps(bench.encoder, rows)
    usual = of_maps(bench.encoder, other)["all to [CLS], by length"]
    pairs = zip(found["all to [CLS], by length"], usual, strict=True)
    found["more to [CLS] than on other text"] = [mine - theirs for mine, theirs in pairs]
    found |= of_gradients(bench.encoder, rows)
    new = deepcopy(bench.encoder)
    torch.nn.init.normal_(new.head.weight, std=0.02)
    found["gradient, new head"] = of_gradients(new, rows)["gradient"]
    return {**found, **_changes(bench, rows, replace(how, steps=bench.asked.few))}


def _changes(bench: Bench, rows: Rows, few: Training) -> Scores:
    every = frozenset(range(len(bench.encoder.blocks)))
    after = trained(bench.encoder, every, bench.task, bench.below[0], few, bench.seed)
    return of_change(bench.encoder, after, rows)


def other_text(seed: int, asked: Question, data: Path) -> Rows:
    """Rows of no task that is asked about."""
    tokenizer = AutoTokenizer.from_pretrained(data / asked.model)
    sizes = (asked.looks, 1)
    return task_named(OTHER, seed, sizes, asked.training.tokens, tokenizer, data).train


def benches(asked: Question) -> Iterator[tuple[str, int, Path]]:
    for seed in asked.seeds:
        for name in asked.tasks:
            yield name, seed, OUT / f"{name}-{seed}.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.scores", description=__doc__)
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    torch.set_num_threads(1)
    asked, commit = read_question(), commit_of()
    for step in (alone, without):
        for name, seed, file in benches(asked):
            here = bench(name, seed, asked, data, file)
            look(here, other_text(seed, asked, data), commit)
            step(here)


if __name__ == "__main__":
    main()
