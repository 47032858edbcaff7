# SPDX-License-Identifier: Apache-2.0
"""Cost estimate: simulate a few rounds of each method, and extrapolate to the whole study."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.callbacks import CommittedRound
from fedplan.reports.explain_study import explain_experiment
from fedplan.reports.units import duration, megabytes
from fedplan.runners.simulation import Simulation
from fedplan.studies.experiment import build_experiment
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.toml_values import parse_toml_value
from fedplan.sweeps.cost_table import (
    DEFAULT_LINE,
    CostForecast,
    MeasuredCost,
    MethodCost,
    parse_line_speed,
)
from fedplan.sweeps.results import choose_score, read_run_result
from fedplan.sweeps.settings import split_values
from fedplan.sweeps.tables import EMPTY_CELL, markdown_table
from fedplan.sweeps.trials import BaseStudy, read_base_study

COLUMN_NAMES = ("method", "score", "MB per round", "MB in total", "epsilon", "time in total",
                "of it transfer", "memory, MB")  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a study's whole run with each method; see `estimate`.

    `costs`: one for each method. `score`: name of the measured metric, "" if not measured. `line`:
    speed of a site's network line, such as "100Mbit". `threads`: number of threads that were used.
    `markdown` and `json` return the table with `notes`.
    """

    costs: tuple[MethodCost, ...]
    score: str
    line: str
    threads: int

    def markdown(self) -> str:
        """Return the estimate as a Markdown table with notes."""
        rows, bits = list[list[str]](), parse_line_speed(self.line)
        for cost in self.costs:
            forecast, measured = cost.forecast, cost.measured
            if forecast is None or measured is None:
                rows.append([cost.method, "failed", *[EMPTY_CELL] * (len(COLUMN_NAMES) - 2)])
                continue
            total = forecast.upload_bytes + forecast.download_bytes
            rows.append(
                [
                    cost.method,
                    EMPTY_CELL if measured.score is None else f"{measured.score:.3f}",
                    megabytes(total // forecast.rounds),
                    megabytes(total),
                    EMPTY_CELL if forecast.epsilon is None else f"{forecast.epsilon:.3g}",
                    duration(cost.total_seconds(bits)),
                    duration(cost.transfer_seconds(bits)),
                    EMPTY_CELL
                    if forecast.memory_bytes is None
                    else megabytes(forecast.memory_bytes),
                ]
            )
        notes = [f"Note: {note}." for note in self.notes]
        return "\n".join([markdown_table(COLUMN_NAMES, rows), *notes]) + "\n"

    def json(self) -> dict[str, Any]:
        """Return the estimate as plain values, in bytes and seconds."""
        bits = parse_line_speed(self.line)
        return {
            "metric": self.score,
            "bits_per_second": bits,
            "methods": [cost.json(bits) for cost in self.costs],
            "notes": list(self.notes),
        }

    @property
    def notes(self) -> list[str]:
        """Sentences on failed methods, and on the meaning and limits of the numbers."""
        notes = [f"{cost.method} failed: {cost.error}" for cost in self.costs if cost.error]
        complete = [
            (cost.method, cost.forecast, cost.measured)
            for cost in self.costs
            if cost.forecast and cost.measured
        ]
        for _, forecast, measured in complete[:1]:
            notes += [
                f"the score is {self.score or 'not measured'} after {measured.rounds_run} of "
                f"{forecast.rounds} rounds; it says little about the score after all rounds",
                "bytes are at most those of one client that takes part in every round, upload and "
                f"download; time is for all {forecast.rounds} rounds, if every site computes as "
                f"fast as this machine ({self.threads} threads) and has a line of {self.line} per "
                "second; each round waits for the slowest site; evaluation is not included",
            ]
        for method, forecast, measured in complete:
            if not measured.steps_reported:
                notes.append(
                    f"{method}: the study's privacy hides a client's number of training steps, "
                    "so the time is that of an average client; one with more examples takes longer"
                )
            if forecast.stages > 1:
                notes.append(
                    f"{method} has {forecast.stages} stages: the time of all rounds is computed "
                    "from the rounds that were simulated"
                )
        return notes


def estimate(
    study: Study | Path | str,
    methods: Sequence[Any] | str = (),
    *,
    rounds: int = 2,
    line: str = DEFAULT_LINE,
    on_method: Callable[[MethodCost], None] = lambda _: None,
) -> Estimate:
    """Simulate the first rounds of a study with each method, and estimate the cost of all rounds.

    `methods`: names, or fields of a method section as dicts; a string may have several names with
    commas; by default the study's method, which keeps its settings. `rounds`: how many rounds to
    simulate; a full run would begin with the same rounds. `line`: speed of a site's network line.
    `on_method` is called with each cost when it is known. No run is kept on disk. A method that
    fails has an error in its cost. Raises ConfigError if the study or an argument is invalid, or if
    the study has no `data.path`.
    """
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}: give the number of rounds to simulate, 1 or more")
    parse_line_speed(line)
    base = read_base_study(study)
    unchanged = base.with_changes({})
    if not unchanged.has_central_data or unchanged.data.from_python:
        raise ConfigError(
            "data.path: an estimate simulates training on this machine; set it to a table that is "
            "similar to the data of the sites"
        )
    chosen = map(parse_toml_value, split_values(methods)) if isinstance(methods, str) else methods
    costs, score = list[MethodCost](), ""
    for method in [*chosen] or [unchanged.method.name or {"plan": unchanged.method.plan}]:
        cost, method_score = _estimate_method(base, unchanged, method, rounds)
        score = score or method_score
        costs.append(cost)
        on_method(cost)
    return Estimate(tuple(costs), score, line, unchanged.threads)


def _estimate_method(
    base: BaseStudy, unchanged: Study, method: str | dict[str, Any], rounds: int
) -> tuple[MethodCost, str]:
    """Simulate `rounds` rounds of a study with a method; return the cost and the score's name.

    `base`: the study's values, into which `method` is put; `unchanged`: the validated study without
    changes. `method`: a name, or fields of [method]; if these are the name or plan of the study,
    the study's [method] is used unchanged. Any Exception becomes an error in the cost, with the
    score's name "".
    """
    section = method if isinstance(method, dict) else {"name": method}
    others = ", ".join(f"{key}={value}" for key, value in section.items() if key != "name")
    name = " ".join(filter(None, [str(section.get("name", "")), others]))
    is_own = section in ({"name": unchanged.method.name}, {"plan": unchanged.method.plan})
    try:
        study = base.with_changes({} if is_own else {"method": section})
        with TemporaryDirectory(prefix="fedplan-") as folder:
            forecast = _forecast(study)
            measured, score = _measure(study, Path(folder) / "run", rounds)
        return MethodCost(name, forecast, measured), score
    except FedplanError as error:
        return MethodCost(name, error=str(error)), ""
    except Exception as error:
        return MethodCost(name, error=f"{type(error).__name__}: {error}"), ""


def _forecast(study: Study) -> CostForecast:
    """Return the bytes, epsilon and memory of a study's whole run, without training.

    Takes the maximum over classes of clients (clients with the same roles).
    """
    explanation, statement = explain_experiment(study, build_experiment(study))
    clients = explanation.forecast.clients
    steps = [step for client in clients for step in explanation.memory(client).values()]
    return CostForecast(
        plan=explanation.forecast.plan.text,
        rounds=study.train.rounds,
        upload_bytes=max(client.max_upload for client in clients),
        download_bytes=max(client.max_download for client in clients),
        epsilon=statement.guarantee.forecast_epsilon(statement.rounds) if statement else None,
        memory_bytes=max((step.total for step in steps), default=None),
        stages=max(len(client.stages) for client in clients),
    )


def _measure(study: Study, folder: Path, rounds: int) -> tuple[MeasuredCost, str]:
    """Simulate the first rounds of a study in a new folder; return (measurements, score's name).

    Evaluates after the last simulated round only; the measured time leaves out evaluation.
    """
    simulation = Simulation(study, folder)
    federation, committed, seconds = simulation.federation, list[CommittedRound](), 0.0
    last_round = min(rounds, study.train.rounds)
    try:
        for number in range(1, last_round + 1):
            start = time.monotonic()
            round_state = federation.run_round()
            seconds += time.monotonic() - start
            metrics = simulation.evaluate() if number == last_round else {}
            committed.append(federation.commit(round_state, metrics))
    finally:
        federation.executor.close()
    result = read_run_result(folder)
    score = choose_score("", [result])
    turns = [turn for each in committed for turn in each.turns]
    steps = [max(1, turn.steps) for turn in turns] or [1]
    return MeasuredCost(
        rounds_run=len(committed),
        score=result.score(score),
        step_seconds=seconds / sum(steps),
        max_steps=max(steps),
        steps_reported=all(turn.steps for turn in turns),
    ), score
