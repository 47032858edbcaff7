# SPDX-License-Identifier: Apache-2.0
"""Results of runs, read from their folders: metrics, the score to compare by, and differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from fedplan.data.metrics import metric_direction
from fedplan.errors import FedplanError
from fedplan.federation.identity import STUDY
from fedplan.federation.ledger.callbacks import COHORT_PREFIXES, PER_CLIENT_PREFIXES
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.ledger.records import ROLE_BY_LETTER, TurnRecord, read_record
from fedplan.federation.ledger.status import RunState, read_status
from fedplan.language.plan import Role
from fedplan.models.params import Kind
from fedplan.reports.formats import millions
from fedplan.reports.pages.facts import differing_fields, study_fields
from fedplan.reports.study_explanation import read_privacy_statement
from fedplan.studies.run import RunReader, read_consistently, read_run
from fedplan.studies.run_scores import (
    GLOBAL_PREFIXES,
    SPREAD_PREFIXES,
    RunScores,
    ScoreRules,
    score_rules,
)
from fedplan.studies.schema import Study
from fedplan.sweeps.records import FAILURES_FILE, is_sweep, read_sweep_spec, read_trial_results

ABSENT = "absent"
"""Role text of a kind of param that a run does not have."""


@dataclass(frozen=True)
class RunResult:
    """The result so far of the run in `folder`, read by `read_run_result`.

    `plan`: the plan's text. `rounds`: number of closed rounds. `finished`: whether the run reached
    its last round or was stopped early by a rule. `metrics`: one row of numbers per round.
    `seconds`: `rounds` times the median duration of the last rounds; None if not known, as
    `epsilon_spent`. `directions`: whether higher is better, of the metrics that the task names.
    `score` and `curve` return a metric that may be shown under the run's privacy.
    """

    folder: Path
    study: Study
    plan: str
    rounds: int
    finished: bool
    metrics: Metrics
    seconds: float | None
    epsilon_spent: float | None
    directions: Mapping[str, bool]
    rules: ScoreRules

    @property
    def upload_bytes(self) -> int | None:
        """The bytes that all clients uploaded; None under client-level DP."""
        return self._total_bytes("upload_bytes")

    @property
    def download_bytes(self) -> int | None:
        """The bytes that all clients downloaded; None under client-level DP."""
        return self._total_bytes("download_bytes")

    def _total_bytes(self, metric: str) -> int | None:
        # Under client-level DP, the bytes would reveal the number of sampled clients.
        return None if self.study.client_level_dp else int(sum(row[metric] for row in self.metrics))

    @cached_property
    def public_metrics(self) -> list[dict[str, float]]:
        """The metrics of each round; with DP, without the metrics of single clients.

        Client-level DP also excludes sums and means over the sampled clients (COHORT_PREFIXES).
        """
        if not self.study.privacy:
            return list(self.metrics)
        hidden = PER_CLIENT_PREFIXES
        if self.study.client_level_dp:
            hidden = (*PER_CLIENT_PREFIXES, *COHORT_PREFIXES)
        return [{k: v for k, v in row.items() if not k.startswith(hidden)} for row in self.metrics]

    def score(self, name: str) -> float | None:
        """Return a metric of the last round that has it; None if no round does."""
        return next((row[name] for row in reversed(self.public_metrics) if name in row), None)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return (round, value) of a metric for each round that has it."""
        return [(int(row["round"]), row[name]) for row in self.public_metrics if name in row]

    @property
    def primary(self) -> str:
        """The task's primary metric."""
        return self.rules.metric

    @cached_property
    def scores(self) -> RunScores:
        """The scores of the last evaluated round, as far as they may be shown."""
        return self.rules.of_run(self.public_metrics)

    def higher_is_better(self, name: str) -> bool:
        """Return whether a higher value of a metric is better; true for an unknown metric."""
        return metric_direction(name, self.directions) is not False


def read_run_result(folder: Path) -> RunResult:
    """Return the result so far of the run in a folder; raise FedplanError if unreadable."""

    def read(run: RunReader) -> RunResult:
        status, study = read_status(run.folder), run.study
        # Stopped by early stopping or a callback, not by a person, a signal or an error.
        stopped_early = bool(status and status.state == RunState.STOPPED and status.stopped_early)
        round_seconds = status.round_seconds if status else None
        spent = None
        if study.privacy and study.has_central_data:
            spent = read_privacy_statement(run.folder, with_sweep=False).epsilon_spent
        return RunResult(
            folder=run.folder,
            study=study,
            plan=run.agreement.method.plan.text,
            rounds=run.round,
            finished=run.round >= study.train.rounds or stopped_early,
            metrics=run.metrics,
            seconds=round_seconds * run.round if round_seconds is not None else None,
            rules=score_rules(run),
            epsilon_spent=spent,
            directions=run.directions,
        )

    return read_consistently(folder, read)


def find_run_folders(places: Sequence[Path | str]) -> tuple[list[Path], list[str]]:
    """Return (folders of runs, notes on missing trials) for folders of runs and of sweeps.

    Each folder occurs once. Trials that failed or have not started are left out with a note. Raises
    FedplanError if one of `places` is neither a run nor a sweep.
    """
    folders, notes = list[Path](), list[str]()
    for place in map(Path, places):
        if not is_sweep(place):
            folders.append(read_run(place).folder)
            continue
        names, failed = read_sweep_spec(place).runs, read_trial_results(place / FAILURES_FILE)
        started = [
            place / name
            for name in names
            if (place / name / STUDY).is_file() and name not in failed
        ]
        folders += started
        if failed:
            notes.append(f"{len(failed)} of {len(names)} runs of {place} failed: left out")
        if missing := len(names) - len(started) - len(failed):
            notes.append(f"{missing} of {len(names)} runs of {place} have not started: left out")
    return list(dict.fromkeys(folders)), notes


ON_VALIDATION = "validation."
"""Prefix of scores on validation examples."""


def choose_scores(name: str, results: Sequence[RunResult]) -> list[str]:
    """Return the metrics to compare the runs by: `name` if given, else those that lead their plans.

    Plans that keep or hold params are compared by the mean of the personal models, others by the
    global model, else by the first metric that all have. A score on validation examples is
    preferred. Raises FedplanError if all of these are missing in some of the `results`.
    """
    primaries = sorted({result.rules.metric for result in results})
    personal, overall = (
        [f"{on}{p}{metric}" for on in (ON_VALIDATION, "") for p in prefixes for metric in primaries]
        for prefixes in (SPREAD_PREFIXES, GLOBAL_PREFIXES)
    )

    def common(columns: Sequence[str]) -> list[str]:
        """Return the first column that all runs have, in a list that is empty if there is none."""
        every = (c for c in columns if all(r.score(c) is not None for r in results))
        return [*islice(every, 1)]

    if name:
        chosen = common([name])
    else:
        kinds = {result.rules.personal for result in results}
        chosen = common(personal) if True in kinds else []
        chosen += common(overall) if False in kinds else []
        chosen = chosen or common([*overall, *personal, "loss"])
    if chosen:
        return chosen
    candidates = [name] if name else [*personal, *overall, "loss"]
    lacking = next(
        (r for r in results if all(r.score(each) is None for each in candidates)), results[0]
    )
    present = sorted({key for row in lacking.public_metrics for key in row})
    scores = [key for key in present if not key.startswith(("clients.", "sites.by."))]
    meant = [key for key in scores if key.endswith(f".{name}")] if name else []
    raise FedplanError(
        f"not all runs have {name or 'a common score'}: {lacking.folder} has "
        f"{', '.join(meant or scores) or 'no round yet'}; name a metric of all runs with --score"
    )


def describe_study_differences(base: Study, other: Study) -> list[str]:
    """Return a sentence for each field of `other` that differs from `base`."""
    base_fields, other_fields = study_fields(base), study_fields(other)

    def text(fields: Mapping[str, Any], name: str) -> str:
        return repr(fields[name]) if name in fields else "unset"

    return [
        f"{name} is {text(other_fields, name)}, not {text(base_fields, name)}"
        for name in differing_fields((base, other))
    ]


@dataclass(frozen=True)
class RoleHistory:
    """The roles of a run's params in words by kind and round, and the size of each kind."""

    roles: Mapping[Kind, Mapping[int, str]]
    sizes: Mapping[Kind, int]

    @property
    def rounds(self) -> set[int]:
        """All rounds with a role."""
        return {number for by_round in self.roles.values() for number in by_round}


def describe_role_differences(base: RoleHistory, other: RoleHistory) -> list[str]:
    """Return a sentence for kinds of params with other roles in the rounds that both runs have."""
    rounds = base.rounds & other.rounds
    sizes = {**base.sizes, **other.sizes}
    kinds_by_change = dict[tuple[str, str, tuple[int, ...]], list[Kind]]()
    for kind in Kind:
        base_roles, other_roles = base.roles.get(kind, {}), other.roles.get(kind, {})
        rounds_by_pair = dict[tuple[str, str], list[int]]()
        for number in sorted(rounds) if base_roles or other_roles else ():
            pair = base_roles.get(number, ABSENT), other_roles.get(number, ABSENT)
            if pair[0] != pair[1]:
                rounds_by_pair.setdefault(pair, []).append(number)
        for pair, numbers in rounds_by_pair.items():
            kinds_by_change.setdefault((*pair, tuple(numbers)), []).append(kind)
    return [
        f"{', '.join(kinds)} ({millions(sum(sizes[k] for k in kinds))} params): {new}, "
        f"not {old}, in {_rounds_text(numbers, len(rounds))}"
        for (old, new, numbers), kinds in kinds_by_change.items()
    ]


def read_role_history(folder: Path) -> RoleHistory:
    """Return the roles of a run's params, from its ledger; raise FedplanError if unreadable."""

    def read(run: RunReader) -> RoleHistory:
        params, roles_by_kind = run.params, dict[Kind, dict[int, set[Role]]]()
        counted = set[tuple[int, str]]()
        for turn in map(read_record, run.ledger_lines()):
            if isinstance(turn, TurnRecord) and (turn.round, turn.roles) not in counted:
                counted.add((turn.round, turn.roles))
                for param, letter in zip(params, turn.roles, strict=True):
                    by_round = roles_by_kind.setdefault(param.kind, {})
                    by_round.setdefault(turn.round, set()).add(ROLE_BY_LETTER[letter])
        texts = dict[Kind, dict[int, str]]()
        for kind, by_round in roles_by_kind.items():
            for number, roles in by_round.items():
                words = [role.word for role in Role if role in roles]
                several = " and ".join(f"partly {word}" for word in words)
                texts.setdefault(kind, {})[number] = words[0] if len(words) == 1 else several
        sizes = {kind: sum(p.numel for p in params if p.kind is kind) for kind in roles_by_kind}
        return RoleHistory(texts, sizes)

    return read_consistently(folder, read)


def _rounds_text(numbers: tuple[int, ...], total: int) -> str:
    """Return ascending round numbers in words: `all rounds`, `round 3`, `rounds 4-10`."""
    if len(numbers) == total:
        return "all rounds"
    if len(numbers) == 1:
        return f"round {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"rounds {numbers[0]}-{numbers[-1]}"
    return f"{len(numbers)} of {total} rounds, the first of them {numbers[0]}"
