# SPDX-License-Identifier: Apache-2.0
"""The scores of a run as every screen shows them: personal, worst client and global.

The score that matters for the plan comes first. A plan that keeps or holds any param leads with the
personal models; of any other plan all models are the global one, which leads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from typing import TYPE_CHECKING, Any, Literal

from fedplan.language.plan import Role
from fedplan.language.resolution import params_with_roles
from fedplan.models.params import Params

if TYPE_CHECKING:  # `fedplan status` loads no torch
    from fedplan.federation.agreement import Agreement
    from fedplan.studies.run import RunReader

ScoreKind = Literal["personal", "worst client", "global", "mean of clients", "this client"]
"""Mean over the clients' personal models; the worst of these; the global model; the mean over
clients of a model that all of them share; or the personal model of one client."""
COMMON_TEST, CLIENT_TESTS = "the common test set", "all clients' test examples"
"""On which examples a score is."""
SPREAD_PREFIXES = (
    *("personal.", "sites.spread.personal.", "sites.spread.global."),
    "sites.personal.",  # of score counts, which have no spread
)
"""Prefixes of metrics on how the primary metric spreads over clients."""
GLOBAL_PREFIXES = ("global.", "sites.global.")
"""Prefixes of the global model's metrics."""
CLIENT_COLUMNS = ("clients.{}.{}", "sites.by.{}.personal.{}", "sites.by.{}.global.{}")
"""Names of the metrics of one client, with its name and the metric."""
SMALL_SCORE, LARGE_SCORE = 0.01, 10
"""Three decimals tell too little of a score below, and too much of one above."""
POOLED_CLIENTS = "global.clients"
"""Number of clients whose test examples are those of the global model's metrics; absent if these
are on the common test set."""


@dataclass(frozen=True)
class RunScore:
    """One score of a round.

    `column`: name of the metric in the round's row. `examples`: on which examples it is.
    `clients`: over how many clients, 0 if it is of one model. `std`: standard deviation over these.
    `client`: name of the client whose score it is, if it may be shown. `untrained`: kinds of params
    of the global model that have their initial values, as "head". `interval`: lowest and highest
    value that bins or noise of score counts leave possible; None for an exact score.
    """

    kind: ScoreKind
    metric: str
    value: float
    column: str
    examples: str
    clients: int = 0
    std: float | None = None
    client: str = ""
    untrained: str = ""
    interval: tuple[float, float] | None = None

    @property
    def number(self) -> str:
        """The value, with its interval if it has one: `0.712 (0.690 to 0.731)`."""
        between = " ({} to {})".format(*map(score_text, self.interval)) if self.interval else ""
        return f"{score_text(self.value)}{between}"

    @property
    def label(self) -> str:
        """The name without value and examples: `personal accuracy`, `worst client`."""
        if self.kind == "worst client":
            return self.kind
        if self.kind == "this client":
            return f"this client's {self.metric}"
        if self.kind == "mean of clients":
            return f"{self.metric}, mean of clients"
        return f"{self.kind} {self.metric}"

    @property
    def about(self) -> str:
        """Whose score it is, and on which examples."""
        if self.column.startswith("sites.personal."):
            return f"pooled over {self.clients} clients, each on its own test examples"
        if self.kind == "personal" and not self.client:
            return f"mean of {self.clients} clients, each on its own test examples"
        if self.kind in ("personal", "worst client", "this client"):
            return f"{f'{self.client}, ' if self.client else ''}on its own test examples"
        return self.on

    @property
    def on(self) -> str:
        """The examples, and what the model lacks: `on the common test set`."""
        mean = ""
        if self.kind == "global" and self.clients:
            mean = f", mean of {self.clients} clients weighted by examples"
        return f"on {self.examples}{mean}{untrained_note(self.untrained)}"

    @property
    def text(self) -> str:
        """Label, value and examples in one line."""
        return f"{self.label} {self.number} ({self.about})"


@dataclass(frozen=True)
class RunScores:
    """The scores of one round by the task's primary metric, the leading one first; may be empty."""

    metric: str
    higher_is_better: bool
    round: int
    scores: tuple[RunScore, ...] = ()

    @property
    def leading(self) -> RunScore | None:
        """The score that matters for the plan; None if nothing was measured."""
        return self.scores[0] if self.scores else None

    def find(self, *kinds: ScoreKind) -> RunScore | None:
        """Return the first score of one of these kinds; None if there is none."""
        return next((score for score in self.scores if score.kind in kinds), None)

    @property
    def texts(self) -> list[str]:
        """A line for each score, with its examples: `global accuracy 0.8 (on ...)`."""
        return [score.text for score in self.scores]

    def json(self) -> dict[str, Any]:
        """Return metric, direction, round and scores as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunScores:
        """Return the scores that `json` has made plain; TypeError or KeyError if they are not."""
        scores = list[RunScore]()
        for each in fields["scores"]:
            interval: list[float] | None = each["interval"]
            score = RunScore(**each)
            scores.append(replace(score, interval=(interval[0], interval[1]) if interval else None))
        metric, higher, number = (fields[n] for n in ("metric", "higher_is_better", "round"))
        return cls(metric, higher, number, tuple(scores))


@dataclass(frozen=True)
class ScoreRules:
    """How to read the scores of a run by the task's primary metric; see `score_rules`.

    `personal`: whether the plan keeps or holds params. `names_clients`: whether scores of single
    clients may be shown. `untrained`: kinds of params that the global model has with their initial
    values.
    """

    metric: str
    higher_is_better: bool
    personal: bool
    names_clients: bool = True
    untrained: str = ""

    @property
    def global_note(self) -> str:
        """What stands behind the examples of a global score: `; its head was never trained`."""
        return untrained_note(self.untrained)

    def of_row(self, row: Mapping[str, float]) -> RunScores:
        """Return the scores in the row of one round; empty if the round was not evaluated."""
        prefix = next((each for each in SPREAD_PREFIXES if f"{each}{self.metric}" in row), "")
        overall = self._global_score(row)
        mean = self._mean_score(row, prefix) if prefix else None
        worst = self._worst_score(row, prefix) if prefix and self.names_clients else None
        if mean is not None and mean.kind == "personal":
            ordered = (mean, worst, overall)
        else:  # the mean is of the global model, too
            ordered = (overall or mean, worst)
        scores = tuple(score for score in ordered if score is not None)
        return RunScores(self.metric, self.higher_is_better, int(row.get("round", 0)), scores)

    def of_run(self, rows: Sequence[Mapping[str, float]]) -> RunScores:
        """Return the scores of the last round that was evaluated."""
        every = map(self.of_row, reversed(rows))
        return next((each for each in every if each.scores), self.of_row({}))

    def client_column(self, row: Mapping[str, float], client: str) -> str:
        """Return the name of the metric of a client in a row; "" if there is none."""
        columns = (each.format(client, self.metric) for each in CLIENT_COLUMNS)
        return next((column for column in columns if column in row), "")

    def _global_score(self, row: Mapping[str, float]) -> RunScore | None:
        column = next(
            (f"{p}{self.metric}" for p in GLOBAL_PREFIXES if f"{p}{self.metric}" in row), ""
        )
        if not column:
            return None
        of_clients = column.startswith("sites.") or POOLED_CLIENTS in row
        examples = CLIENT_TESTS if of_clients else COMMON_TEST
        spread = "sites.spread.global."  # of metrics by client; score counts have none
        averaged = column.startswith("sites.") and f"{spread}{self.metric}" in row
        return RunScore(
            "global",
            self.metric,
            row[column],
            column,
            examples,
            clients=int(row.get(f"{spread}clients", 0)) if averaged else 0,
            untrained=self.untrained,
            interval=_interval(row, column),
        )

    def _mean_score(self, row: Mapping[str, float], prefix: str) -> RunScore:
        column, is_global = f"{prefix}{self.metric}", prefix.endswith("global.")
        kind = "personal" if self.personal and not is_global else "mean of clients"
        return RunScore(
            kind,
            self.metric,
            row[column],
            column,
            CLIENT_TESTS,
            clients=int(row.get(f"{prefix}clients", row.get("sites.clients", 0))),
            std=row.get(f"{column}_std"),
            interval=_interval(row, column),
        )

    def _worst_score(self, row: Mapping[str, float], prefix: str) -> RunScore | None:
        column = f"{prefix}{self.metric}_worst"
        if column not in row:
            return None
        pattern = CLIENT_COLUMNS[SPREAD_PREFIXES.index(prefix)]
        before, after = pattern.format("\0", self.metric).split("\0")
        value, name = row[column], ""
        for key, score in row.items():
            same = score == value or (isnan(score) and isnan(value))
            if same and key.startswith(before) and key.endswith(after):
                name = key[len(before) : -len(after)]
                break
        return RunScore("worst client", self.metric, value, column, CLIENT_TESTS, client=name)


def score_text(value: float) -> str:
    """Return a score as text: `0.712`; from 10 with four digits, a small one with two: `0.0004`."""
    if abs(value) >= LARGE_SCORE:
        return f"{value:.4g}"
    return f"{value:.2g}" if 0 < abs(value) < SMALL_SCORE else f"{value:.3f}"


def _interval(row: Mapping[str, float], column: str) -> tuple[float, float] | None:
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    return None if low is None or high is None else (low, high)


def personal_params(agreement: Agreement) -> Params:
    """Return the params of which some client has its own value, or its own copy."""
    plan, params = agreement.method.plan, agreement.params
    copied = (Role.SHARE,) if agreement.method.own_copy else ()
    return params_with_roles(plan, params, Role.KEEP, Role.HOLD, *copied)


def is_personal(agreement: Agreement) -> bool:
    """Return whether some client has its own value, or its own copy, of any param."""
    return agreement.has_personal


def untrained_params(agreement: Agreement) -> Params:
    """Return the params that clients have for themselves and that no client ever shares."""
    shared = set(params_with_roles(agreement.method.plan, agreement.params, Role.SHARE))
    return tuple(p for p in personal_params(agreement) if p not in shared)


def untrained_kinds(agreement: Agreement) -> str:
    """Return the kinds of `untrained_params`: "norm, head"; "" if there are none."""
    return ", ".join(dict.fromkeys(p.label for p in untrained_params(agreement)))


def untrained_note(kinds: str) -> str:
    """Return what stands behind a score of a global model with untrained kinds of params."""
    return f"; its {kinds} {'were' if ',' in kinds else 'was'} never trained" if kinds else ""


def score_rules(run: RunReader) -> ScoreRules:
    """Return how to read the scores of a run."""
    higher, agreement = run.higher_is_better(run.primary) is not False, run.agreement
    names_clients, untrained = run.study.privacy is None, untrained_kinds(agreement)
    return ScoreRules(run.primary, higher, is_personal(agreement), names_clients, untrained)


def run_scores(run: RunReader) -> RunScores:
    """Return the scores of the last evaluated round of a run."""
    return score_rules(run).of_row(run.last_scores)


def client_score(run: RunReader, client: str) -> RunScore | None:
    """Return the last score of one client, of the model that it has; None if there is none."""
    rules, row = score_rules(run), run.last_scores
    column = rules.client_column(row, client)
    if not column:
        return None
    return RunScore("personal", rules.metric, row[column], column, CLIENT_TESTS, client=client)
