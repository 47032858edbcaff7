# SPDX-License-Identifier: Apache-2.0
"""The runs of a question: seed by seed, each after the one that it begins with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Any

from fedplan.studies.export import export_run
from fedplan.studies.run import read_run
from fedplan.studies.schema import Study
from fedplan.sweeps.results import read_run_result
from fedplan.sweeps.sweeping import run_trials
from fedplan.sweeps.trials import BaseStudy, Trial
from research.bench.facts import facts_of
from research.decide.places import digest_of_path, first_of, here, placed, texts_in
from research.decide.proof import commit_of
from research.decide.question import QuestionError, QuestionFile
from research.decide.results import Played, fault_of
from research.words import translate_changes, translate_metric, translate_study

ROOT = Path(__file__).parents[2]
KEPT = "kept."
"""How names of what clients keep begin, among the numbers that a question tells."""
MODEL = "start"
"""In a run's folder: its last global model, for those that begin with it."""


FACTS = facts_of(ROOT)
"""Of the code that runs: read once, since a commit may be made meanwhile."""


@dataclass(frozen=True)
class Bench:
    """Where runs are played: a folder for each form of a question, and what words in paths are."""

    folder: Path
    places: Mapping[str, str]

    def home(self, asked: QuestionFile) -> Path:
        """Where the runs of a question are, as it stands now: no run counts for another form."""
        return self.folder / asked.digest[:12]

    def study(self, asked: QuestionFile, arm: str, seed: int) -> Study:
        """The study of one run; one that begins with another loads its exported world."""
        said = translate_study(placed(asked.said, self.places, seed))
        changes = translate_changes(placed(asked.question.changes(arm), self.places, seed))
        if start := asked.question.arms[arm].start:
            changes["model"] = {"path": str(self.exported(asked, start, seed))}
        return BaseStudy(said, asked.files[0].parent).with_changes({**changes, "seed": seed})

    def exported(self, asked: QuestionFile, arm: str, seed: int) -> Path:
        """Where an arm's last world is."""
        return self.home(asked) / f"{arm}-{seed}" / MODEL

    def sources(self, asked: QuestionFile, arm: str, seed: int) -> dict[str, str]:
        """The digest of each file or folder that a run names by a place."""
        named = {**asked.said, "changes": asked.question.changes(arm)}
        paths = [text for text in texts_in(named) if first_of(text) in self.places]
        return {text: digest_of_path(Path(here(text, self.places, seed))) for text in paths}

    def play(self, asked: QuestionFile, arm: str, seed: int) -> Played:
        """Play a run, or go on with it, and say what it came to."""
        began, commit = int(time.time()), commit_of(asked)
        name, home = f"{arm}-{seed}", self.home(asked)
        swept = run_trials(home, [Trial(name, self.study(asked, arm, seed))])
        if fault := swept.failures.get(name):
            raise QuestionError(f"{name} failed: {fault}")
        if name in swept.unfinished:
            raise QuestionError(f"{name} was asked to stop: the same command goes on with it")
        if any(each.start == arm for each in asked.question.arms.values()):
            self._export(asked, arm, seed)
        found, score = read_run_result(home / name), asked.question.score.name
        tells = {n: translate_metric(t, found.primary) for n, t in asked.question.tells.items()}
        keeps = any(text.startswith(KEPT) for text in tells.values())
        row = {**found.metrics[-1], **(kept_sizes(home / name) if keeps else {})}
        return Played(
            arm=arm,
            seed=seed,
            question=asked.digest,
            commit=commit,
            began=began,
            seconds=round(swept.results[name].seconds, 1),
            up=found.upload_bytes,
            down=found.download_bytes,
            curve=found.curve(translate_metric(score, found.primary)),
            facts=FACTS,
            told=told_of(row, tells),
            sources=self.sources(asked, arm, seed),
        )

    def _export(self, asked: QuestionFile, arm: str, seed: int) -> None:
        if not self.exported(asked, arm, seed).is_dir():
            run = self.home(asked) / f"{arm}-{seed}"
            export_run(run, self.exported(asked, arm, seed), global_model=True)


def kept_sizes(folder: Path) -> dict[str, float]:
    """The mean absolute value of each tensor that a client of a run keeps: `kept.client.name`."""
    run = read_run(folder)
    states = {client: run.client_state(client)[0] for client in run.clients}
    return {
        f"{KEPT}{client}.{name}": tensor.abs().mean().item()
        for client, state in states.items()
        for name, tensor in state.items()
    }


def told_of(row: Mapping[str, float], tells: Mapping[str, str]) -> dict[str, float]:
    """Means of the numbers of a round whose names fit patterns.

    Raises QuestionError if a pattern fits none; kept tensors may be missing, as arms keep others.
    """
    found = dict[str, float]()
    for name, pattern in tells.items():
        fitting = [number for key, number in row.items() if fnmatchcase(key, pattern)]
        if not fitting and pattern.startswith(KEPT):
            continue
        if not fitting:
            raise QuestionError(f"tells.{name}: no number of the last round fits {pattern!r}")
        found[name] = mean(fitting)
    return found


def todo(
    asked: QuestionFile, runs: Mapping[str, Played], *, first: bool = False
) -> list[tuple[str, int]]:
    """The runs that are left, seed by seed: what is there early compares every arm on a few."""
    done = {each.name for each in runs.values() if not fault_of(asked, each)}
    arms = asked.question.needed(first=first)
    return [(a, s) for s in asked.question.seeds for a in arms if f"{a}-{s}" not in done]


def play_all(
    asked: QuestionFile,
    bench: Bench,
    runs: dict[str, Played],
    *,
    keep: Callable[[Played], Any],
    wait: Callable[[], bool],
    first: bool = False,
) -> None:
    """Play what is left, as long as `wait` lets the next one begin; each is kept as it ends."""
    commit_of(asked)
    for arm, seed in todo(asked, runs, first=first):
        if not wait():
            return
        for start in asked.question.line(arm)[:-1]:
            if not bench.exported(asked, start, seed).is_dir():
                bench.play(asked, start, seed)  # its folder was removed: it is played again
        found = bench.play(asked, arm, seed)
        runs[found.key] = found
        keep(found)
