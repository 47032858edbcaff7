# SPDX-License-Identifier: Apache-2.0
"""Rehearsals: a few rounds of each method on this machine, and the price list that follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.callbacks import Closed
from fedplan.privacy.statement import Statement
from fedplan.reports.explanation import Explanation
from fedplan.reports.preview import foreseen_of
from fedplan.reports.units import duration, megabytes
from fedplan.runners.simulation import Simulation
from fedplan.studies.plain import value_of
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.stage import stage_of
from fedplan.sweeps.prices import LINE, Forecasted, Measured, Price, bits_of
from fedplan.sweeps.results import result_of, score_named
from fedplan.sweeps.settings import split
from fedplan.sweeps.tables import NONE, table
from fedplan.sweeps.trials import Ground, ground_of

HEADS = ("method", "score", "MB a round", "MB in all", "epsilon", "time in all", "of it travel",
         "memory, MB")  # fmt: skip


@dataclass(frozen=True)
class Rehearsal:
    """A price list: a row for each method, of a study of so many rounds."""

    prices: tuple[Price, ...]
    score: str
    line: str
    threads: int

    def markdown(self) -> str:
        """It as a person reads it."""
        rows = [self._row(each) for each in self.prices]
        notes = [f"Note: {note}." for note in self.notes]
        return "\n".join([table(HEADS, rows), *notes]) + "\n"

    def json(self) -> dict[str, Any]:
        """It as plain values, in bytes and seconds."""
        bits = bits_of(self.line)
        return {
            "score": self.score,
            "bits_a_second": bits,
            "methods": [price.json(bits) for price in self.prices],
            "notes": list(self.notes),
        }

    def _row(self, price: Price) -> list[str]:
        told, found, bits = price.forecast, price.measured, bits_of(self.line)
        if told is None or found is None:
            return [price.method, "failed", *[NONE] * (len(HEADS) - 2)]
        whole = told.up + told.down
        return [
            price.method,
            NONE if found.score is None else f"{found.score:.3f}",
            megabytes(whole // told.rounds),
            megabytes(whole),
            NONE if told.epsilon is None else f"{told.epsilon:.3g}",
            duration(price.seconds(bits)),
            duration(price.travel(bits)),
            NONE if told.memory is None else megabytes(told.memory),
        ]

    @property
    def notes(self) -> list[str]:
        """What the numbers are of, and what they leave out."""
        found = [f"{each.method} failed: {each.error}" for each in self.prices if each.error]
        known = [each for each in self.prices if each.forecast and each.measured]
        if known and known[0].forecast and known[0].measured:
            played, rounds = known[0].measured.played, known[0].forecast.rounds
            found.append(
                f"the score is {self.score or 'not measured'} after {played} of {rounds} rounds; it"
                " says little of the last one"
            )
            found.append(
                "bytes are of one client that takes part in every round, at most, up and down; "
                f"time is of all {rounds} rounds where every site computes as this machine does "
                f"({self.threads} threads), the slowest one counts, and sends at {self.line} a "
                "second; scoring is not in it"
            )
        for each in known:
            if each.measured and not each.measured.told:
                found.append(
                    f"{each.method}: the study hides how many steps a client takes, so the time is "
                    "that of a mean client; one with more rows takes longer"
                )
            if each.forecast and each.forecast.stages > 1:
                found.append(
                    f"{each.method} has {each.forecast.stages} stages: the time is that of the "
                    "rounds that were played, for all"
                )
        return found


def rehearse(
    study: Study | Path | str,
    methods: Sequence[Any] | str = (),
    *,
    rounds: int = 2,
    line: str = LINE,
    tell: Callable[[Price], None] = lambda _: None,
) -> Rehearsal:
    """Play the first rounds of a study under each method, and say what all rounds would cost.

    A method is a name, or the fields of a method section as a dictionary; the study's own keeps its
    settings, and without any it is the only one. Nothing is kept. The rounds that are played are
    those of the whole run, with its noise and its rates: only the later ones are left out.
    """
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}: say how many to play, 1 or more")
    bits_of(line)
    ground = ground_of(study)
    own = ground.study({})
    if not own.gathered or own.data.given:
        raise ConfigError("data.path: to rehearse takes rows here; name a table as the sites have")
    asked = [value_of(each) for each in split(methods)] if isinstance(methods, str) else [*methods]
    prices, score = list[Price](), ""
    for each in asked or [own.method.name or {"plan": own.method.plan}]:
        price, named = _priced(ground, own, each, rounds)
        score = score or named
        prices.append(price)
        tell(price)
    return Rehearsal(tuple(prices), score, line, own.threads)


def _priced(
    ground: Ground, own: Study, method: str | dict[str, Any], rounds: int
) -> tuple[Price, str]:
    """A method's price; what is wrong with one is no reason to leave out the others."""
    section = method if isinstance(method, dict) else {"name": method}
    name = _words(section)
    same = section in ({"name": own.method.name}, {"plan": own.method.plan})
    try:
        study = ground.study({} if same else {"method": section})
        with TemporaryDirectory(prefix="fedplan-") as folder:
            forecast = _forecast(study)
            measured, score = _measured(study, Path(folder) / "run", rounds)
        return Price(name, forecast, measured), score
    except Exception as error:
        ours = isinstance(error, FedplanError)
        return Price(name, error=str(error) if ours else f"{type(error).__name__}: {error}"), ""


def _words(section: dict[str, Any]) -> str:
    said = {key: value for key, value in section.items() if key != "name"}
    rest = ", ".join(f"{key}={value}" for key, value in said.items())
    return " ".join(filter(None, [str(section.get("name", "")), rest]))


def _forecast(study: Study) -> Forecasted:
    explanation, statement = foreseen_of(study, stage_of(study))
    views = explanation.forecast.views
    return Forecasted(
        plan=explanation.forecast.plan.text,
        rounds=study.train.rounds,
        up=max(view.up for view in views),
        down=max(view.down for view in views),
        epsilon=_epsilon(statement),
        memory=_memory(explanation),
        stages=max(len(view.stages) for view in views),
    )


def _epsilon(statement: Statement | None) -> float | None:
    return statement.guarantee.forecast(statement.rounds) if statement else None


def _memory(explanation: Explanation) -> int | None:
    stages = [m for view in explanation.forecast.views for m in explanation.memory(view).values()]
    return max((each.total for each in stages), default=None)


def _measured(study: Study, folder: Path, rounds: int) -> tuple[Measured, str]:
    """Play the first rounds by hand, with the clock stopped while models are scored."""
    simulation = Simulation(study, folder)
    federation, closed, took = simulation.federation, list[Closed](), 0.0
    try:
        for number in range(1, min(rounds, study.train.rounds) + 1):
            began = time.monotonic()
            tally = federation.round()
            took += time.monotonic() - began
            last = number == min(rounds, study.train.rounds)
            closed.append(federation.commit(tally, simulation.scores() if last else {}))
    finally:
        federation.crew.close()
    result = result_of(folder)
    score = score_named("", [result])
    turns = [turn for each in closed for turn in each.turns]
    # Where steps are hidden, a turn is one.
    steps = [max(1, turn.steps) for turn in turns] or [1]
    return Measured(
        played=len(closed),
        score=result.score(score),
        step=took / sum(steps),
        longest=max(steps),
        told=all(turn.steps for turn in turns),
    ), score
