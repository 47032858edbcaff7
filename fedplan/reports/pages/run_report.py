# SPDX-License-Identifier: Apache-2.0
"""The HTML report of one or several runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from inspect import getdoc
from pathlib import Path
from typing import Protocol

from fedplan.audits.run import audit_run
from fedplan.errors import FedplanError
from fedplan.federation.identity import RUN_FILE
from fedplan.federation.ledger.status import RunState
from fedplan.language.plan import Role
from fedplan.methods.registry import METHOD_REGISTRY
from fedplan.models.catalog import is_hub_id
from fedplan.reports.explanation import sort_params
from fedplan.reports.forecasts import StageForecast
from fedplan.reports.formats import TRAFFIC_LABELS, duration, megabytes, millions
from fedplan.reports.pages.facts import RunFacts, group_runs, read_run_facts, run_names
from fedplan.reports.pages.page import Page, PageBlock, PageSection, block
from fedplan.reports.pages.record import record_section
from fedplan.reports.pages.round_grids import participation_section, roles_section
from fedplan.reports.pages.scores import (
    clients_section,
    curves_section,
    drift_section,
    privacy_section,
)
from fedplan.reports.pages.test_scores import test_scores_section
from fedplan.reports.pages.traffic import traffic_section
from fedplan.reports.run_warnings import run_warnings
from fedplan.storage.logs import utc_now
from fedplan.studies.record import read_sessions
from fedplan.studies.run import read_consistently
from fedplan.studies.run_scores import ScoreKind
from fedplan.tensors.devices import AUTO

REFRESH_SECONDS = 10
"""Seconds after which a browser reloads the page of a run in progress."""
ROLE_PHRASES = {
    Role.SHARE: "clients train and upload",
    Role.KEEP: "each client trains its personal",
    Role.HOLD: "each client has its own frozen",
    Role.FREEZE: "frozen for all:",
}
"""The beginning of a phrase on the params of each role."""
MAX_STAGES = 4
"""The most classes of clients, and stages of a plan, described in words; the figure shows all."""


class HasFolder(Protocol):
    """A run, opened or running."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...


AnyRun = str | Path | HasFolder
"""A run or its folder."""


def report(
    runs: AnyRun | Sequence[AnyRun],
    file: str | Path = "report.html",
    *,
    csv: str | Path | None = None,
    png: str | Path | None = None,
) -> Path:
    """Write the report of one or several runs to a self-contained HTML file; return its path.

    Runs may be in progress and are not changed. `csv` and `png` are folders for the numbers and the
    images of the figures, created if missing; files there are overwritten. Raises FedplanError if
    `runs` is empty or a folder has no run.
    """
    page = report_page(runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs])
    file = Path(file)
    page.write(file, csv=Path(csv) if csv else None, png=Path(png) if png else None)
    return file


def report_page(runs: Sequence[AnyRun], *, refresh: int = REFRESH_SECONDS) -> Page:
    """Build the report of runs, which may be in progress: then a browser reloads it.

    Raises FedplanError if `runs` is empty or a folder has no run.
    """
    if not runs:
        raise FedplanError("a report needs at least one run: give the folder of a run")
    folders = [run if isinstance(run, str | Path) else run.folder for run in runs]
    facts = [read_consistently(Path(folder), read_run_facts) for folder in folders]
    live = any(each.snapshot.live for each in facts)
    title = ", ".join(dict.fromkeys(each.study.name for each in facts))
    method, rounds = facts[0].study.method.name, facts[0].study.train.rounds
    about = f"{method}, {rounds} rounds" if method else f"{rounds} rounds"
    return Page(
        f"{title}: {about if len(facts) == 1 else f'{len(facts)} runs'}",
        tuple(_lead(facts)),
        tuple(_sections(facts)),
        f"Written by fedplan {utc_now()[:16].replace('T', ' ')} UTC from the folders of the runs."
        + (" A run is in progress: this page reloads by itself." if live else ""),
        refresh if live else 0,
    )


def watch_report(
    runs: Sequence[AnyRun],
    file: Path,
    seconds: float,
    *,
    csv: Path | None = None,
    png: Path | None = None,
) -> Iterator[Page]:
    """Write the report of runs to a file every `seconds` until all have ended; yield each page."""
    while True:
        page = report_page(runs, refresh=max(1, round(seconds)))
        page.write(file, csv=csv, png=png)
        yield page
        if not page.refresh_seconds:
            return
        time.sleep(seconds)


def _lead(facts: Sequence[RunFacts]) -> Iterator[PageBlock]:
    """Yield a table of several runs, a summary of each group's first run, and all warnings.

    Under client-level differential privacy traffic would reveal how many clients were sampled.
    """
    groups, rows = group_runs(facts), list[tuple[str, ...]]()
    labels: dict[ScoreKind, str] = {s.kind: s.label for each in facts for s in each.scores.scores}
    for name, each in zip(run_names(facts), facts, strict=True) if len(facts) > 1 else ():
        rounds = f"{each.run.round} of {each.study.train.rounds}"
        scores = map(each.scores.find, labels)
        texts = (score.number if score else "" for score in scores)
        sizes = ("" if each.client_level_dp else megabytes(count) for count in each.traffic)
        rows.append((name, each.snapshot.state, rounds, *texts, *sizes))
    if rows:
        columns = ("run", "state", "rounds", *labels.values(), *TRAFFIC_LABELS)
        yield block("table", columns=columns, rows=rows, numbers=len(columns) - 2)
    for group in groups:
        if len(groups) > 1:
            yield block("heading", text=group.name)
        yield _summary(group.runs[0])
    for name, each in zip(run_names(facts), facts, strict=True):
        if warnings := run_warnings(each):
            warnings = [warning.of_run(each.run.folder) for warning in warnings]
            yield block("warnings", run=name, warnings=warnings)


def _sections(facts: Sequence[RunFacts]) -> Iterator[PageSection]:
    """Yield the sections of all runs, then those of each run, named if there are several."""
    groups = group_runs(facts)
    for group in groups:
        name = group.name if len(groups) > 1 else ""
        yield _add_name(roles_section(group.runs[0], name), name)
    yield curves_section(facts)
    for name, each in zip(run_names(facts), facts, strict=True):
        for section in (
            test_scores_section(each),
            clients_section(each),
            drift_section(each, name),
            traffic_section(each),
            privacy_section(each),
            participation_section(each),
            record_section(each),
            _audit_section(each),
        ):
            yield _add_name(section, name)


def _add_name(section: PageSection, name: str) -> PageSection:
    """Return a section with `name` added to its title; unchanged for an empty name."""
    return replace(section, title=f"{section.title}, {name}") if name else section


def _audit_section(facts: RunFacts) -> PageSection:
    """Verify a run that has ended, and return the section with the result.

    An error of the verification counts as a fault. Under client-level DP no client is named.
    """
    title, folder = "Audit", facts.run.folder
    if facts.snapshot.live:
        return PageSection(title, ("The run is in progress. It is verified when it has ended.",))
    if not facts.run.round:
        return PageSection(title)
    try:
        audit = audit_run(folder)
        faults, checked = list(audit.faults), audit.summary
        movement = "" if audit.unmoved else "every trained one moved, "
    except FedplanError as error:  # a run that cannot be checked is not verified
        faults, checked, movement = [str(error)], "", ""
    if facts.client_level_dp:
        # The clients that were sampled, and their number, are a secret of the server.
        count = f"{len(faults)} in all: fedplan verify {folder} lists them"
        faults = [count] if faults else []
        checked = (
            f"{facts.run.round} rounds: no frozen tensor changed, {movement}every byte is "
            f"explained by the plan {facts.agreement.method.plan.fingerprint}, and no personal "
            "param was uploaded."
        )
    return PageSection(title, (block("audit", faults=faults, checked=checked),))


def _summary(facts: RunFacts) -> PageBlock:
    """Return the block on state, study, plan, privacy, folder and main numbers of a run."""
    study, guarantee, snapshot = facts.study, facts.agreement.guarantee, facts.snapshot
    live, done = snapshot.live, snapshot.state == RunState.DONE
    clients, fraction, params = len(facts.roster), study.clients.fraction, facts.agreement.params
    count = f"{clients} {'client' if clients == 1 else 'clients'}" if clients else "clients"
    sampling = f", with {fraction:.0%} of the clients in each round," if fraction < 1 else ""
    path = study.model.path  # a folder by its name, a model of the Hub by its id
    local = path and not is_hub_id(path)
    model = study.model.type or (Path(path).name if local else path) or "a model from Python"
    if study.model.vision or study.model.text:
        model = f"{study.model.vision} with {study.model.text}"
    numel, size = sum(p.numel for p in params), sum(p.nbytes for p in params)
    score, higher = facts.score
    training = (
        f"for {study.train.rounds} rounds{sampling} with seed {study.seed}. The model has "
        f"{millions(numel)} params, {megabytes(size)} MB; the task is {study.task.kind}, measured "
        f"by {score} ({'higher' if higher else 'lower'} is better)."
    )
    about = ""
    if method := study.method.name:
        with suppress(FedplanError):  # a method may be unknown here
            about = (getdoc(METHOD_REGISTRY.find(method).value) or "").partition("\n")[0]
    privacy = "Differential privacy: off."
    if guarantee is not None:
        privacy = (
            f"Differential privacy: {guarantee.unit}-level, epsilon {guarantee.epsilon:g} at delta "
            f"{guarantee.delta:g}, noise multiplier {guarantee.noise_multiplier:.3g}."
        )
    planned = "the best available device" if study.device == AUTO else f"the device {study.device}"
    used = dict.fromkeys(str(session["device"]) for session in read_sessions(facts.run.folder))
    trains = f"It trained on {', '.join(used)}" if used and not live else f"It trains on {planned}"
    return block(
        "summary",
        state=snapshot.state,
        state_class="live" if live else "good" if done else "bad",
        progress=_progress(facts),
        study=study.name,
        clients=count,
        model=model,
        training=training,
        method=method,
        about=about.replace("`", ""),
        plan=facts.agreement.method.plan.text,
        fingerprint=facts.agreement.method.plan.fingerprint,
        stages=" ".join(_stages(facts)),
        privacy=f"{privacy} {trains}.",
        folder=str(facts.run.folder),
        run=f", run {facts.run.identity.id}" if facts.run.round else "",
        numbers=list(_numbers(facts)),
    )


def _numbers(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of a run's main numbers that are known and not protected."""
    seconds = facts.snapshot.status.round_seconds
    for score in facts.scores.scores:
        yield f"{score.label} ({score.about})", score.number
    if not facts.client_level_dp and facts.rounds:
        yield from zip(TRAFFIC_LABELS, map(megabytes, facts.traffic), strict=True)
    if facts.agreement.guarantee is not None and facts.run.round:
        spent = facts.epsilon_spent
        promised = f"of {facts.agreement.guarantee.epsilon:g}"
        yield f"epsilon spent {promised}", f"{spent:.4f}" if spent is not None else "at the sites"
    if seconds is not None:
        yield "time per round", duration(seconds)


def _progress(facts: RunFacts) -> str:
    """Return the closed rounds, the reason of a stop, and when the run began and was updated."""
    snapshot, status = facts.snapshot, facts.snapshot.status
    closed = f"{facts.run.round} of {facts.study.train.rounds} rounds are done."
    why = f" {status.reason}." if status.reason and not facts.client_level_dp else ""
    began = _format_time(status.started_at)
    if not began:  # a run from Python has no status: its id was written at the start
        try:
            when = (facts.run.folder / RUN_FILE).stat().st_mtime
            began = _format_time(datetime.fromtimestamp(when, UTC).isoformat())
        except OSError:
            began = "at an unknown time"
    updated = _format_time(status.updated_at) if status.updated_at and not snapshot.live else ""
    return f"{closed}{why} Started {began}" + (f", last updated {updated}." if updated else ".")


def _format_time(iso: str) -> str:
    """Return an ISO time in UTC as `2026-11-16 at 09:00 UTC`; empty for an empty text."""
    return f"{iso[:10]} at {iso[11:16]} UTC" if iso else ""


def _stages(facts: RunFacts) -> Iterator[str]:
    """Yield sentences on the stages of a run's plan for each class of clients, and on its codec."""
    clients = facts.forecast.clients
    for client in clients[:MAX_STAGES]:
        label = f"For {client.client_class}: " if len(clients) > 1 else ""
        yield label + " ".join(map(_stage, client.stages[:MAX_STAGES]))
        if len(client.stages) > MAX_STAGES:
            yield "The figure shows all further stages."
    if facts.forecast.wire_cost.text:
        yield f"Compression: {facts.forecast.wire_cost.text}."


def _stage(stage: StageForecast) -> str:
    """Return a sentence on the kinds of params that have each role in a stage of the plan."""
    kinds = dict[Role, dict[str, None]]()
    for param in sort_params(tuple(stage.permitted)):
        kinds.setdefault(stage.permitted[param], {})[param.label] = None
    phrases = [
        f"{phrase} {'all params' if len(kinds) == 1 else ', '.join(kinds[role])}"
        for role, phrase in ROLE_PHRASES.items()
        if role in kinds
    ]
    chosen = any(stage.certain[p] is not stage.permitted[p] for p in stage.permitted)
    choice = "; of these, layer scores choose some blocks" if chosen else ""
    return f"In {stage.name}, {'; '.join(phrases)}{choice}."
