# SPDX-License-Identifier: Apache-2.0
"""The summary at the top of a report: state, study, plan, privacy and main numbers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from inspect import getdoc

from fedplan.errors import FedplanError
from fedplan.federation.identity import RUN_FILE
from fedplan.federation.ledger.status import RunState
from fedplan.language.plan import Role
from fedplan.methods.registry import METHOD_REGISTRY
from fedplan.reports.explanation import sort_params
from fedplan.reports.forecasts import StageForecast
from fedplan.reports.formats import duration, megabytes, millions
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import Html, tag
from fedplan.tensors.devices import AUTO

ROLE_PHRASES = {
    Role.SHARE: "clients train and upload",
    Role.KEEP: "each client trains its personal",
    Role.HOLD: "each client has its own frozen",
    Role.FREEZE: "frozen for all:",
}
"""The beginning of a phrase on the params of each role."""
MAX_STAGES = 4
"""The most classes of clients, and stages of a plan, described in words; the figure shows all."""


def run_summary(facts: RunFacts) -> list[Html]:
    """Return paragraphs on state, study, plan, privacy and folder of a run, then main numbers."""
    device, guarantee = facts.study.device, facts.agreement.guarantee
    device = "the best available device" if device == AUTO else f"the device {device}"
    run = f", run {facts.run.identity.id}" if facts.run.round else ""
    privacy = "Differential privacy: off."
    if guarantee is not None:
        privacy = (
            f"Differential privacy: {guarantee.unit}-level, epsilon {guarantee.epsilon:g} at delta "
            f"{guarantee.delta:g}, noise multiplier {guarantee.noise_multiplier:.3g}."
        )
    folder = tag("code", str(facts.run.folder))
    tiles = (tag("div", tag("dt", name), tag("dd", value)) for name, value in _numbers(facts))
    return [
        tag("p", state_badge(facts), " ", _progress(facts)),
        tag("p", *_study(facts)),
        tag("p", *_plan(facts)),
        tag("p", f"{privacy} It trains on {device}. Folder: ", folder, f"{run}."),
        tag("dl", *tiles, class_="tiles"),
    ]


def _numbers(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of a run's main numbers: scores, traffic, epsilon and time per round.

    Numbers that are unknown, or that differential privacy protects, are left out.
    """
    score, seconds = facts.score[0], facts.snapshot.status.round_seconds
    scores = {
        f"global {score}": facts.global_scores(""),
        f"personal {score}, mean": facts.personal_scores(""),
    }
    if not facts.privacy_unit:
        scores[f"personal {score}, worst client"] = facts.personal_scores("", worst=True)
    for name, series in scores.items():
        if series.last is not None:
            yield name, f"{series.last:.3g}"
    if not facts.client_level_dp and facts.rounds:
        yield "upload MB", megabytes(sum(record.upload_bytes for record in facts.rounds))
        yield "download MB", megabytes(sum(record.download_bytes for record in facts.rounds))
    if facts.agreement.guarantee is not None and facts.run.round:
        spent = facts.agreement.guarantee.forecast_epsilon(facts.run.round)
        yield f"epsilon spent of {facts.agreement.guarantee.epsilon:g}", f"{spent:.3g}"
    if seconds is not None:
        yield "time per round", duration(seconds)


def state_badge(facts: RunFacts) -> Html:
    """Return the state of a run as a badge: live, good or bad by its CSS class."""
    snapshot = facts.snapshot
    kind = "live" if snapshot.live else "good" if snapshot.state == RunState.DONE else "bad"
    return tag("span", snapshot.state, class_=f"state {kind}")


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


def _study(facts: RunFacts) -> Iterator[str]:
    """Yield the pieces of a paragraph on a run's study: clients, model, rounds, task and metric.

    Pieces are plain text, to be escaped, or Html.
    """
    study, params, model = facts.study, facts.agreement.params, facts.study.model
    clients, fraction = len(facts.roster), study.clients.fraction
    count = f"{clients} {'client' if clients == 1 else 'clients'}" if clients else "clients"
    sampling = f", with {fraction:.0%} of the clients in each round," if fraction < 1 else ""
    name = model.type or model.path or "a model from Python"
    name = f"{model.vision} with {model.text}" if model.vision or model.text else name
    yield from ("The study ", tag("b", study.name), f": {count} train ")
    yield from (tag("b", name), f" for {study.train.rounds} rounds{sampling} ")
    numel, size = sum(p.numel for p in params), sum(p.nbytes for p in params)
    yield f"with seed {study.seed}. The model has {millions(numel)} params, {megabytes(size)} MB; "
    score, higher = facts.score
    better = "higher" if higher else "lower"
    yield f"the task is {study.task.kind}, measured by {score} ({better} is better)."


def _plan(facts: RunFacts) -> Iterator[str]:
    """Yield the pieces of a paragraph on a run's method, plan and stages.

    Pieces are plain text, to be escaped, or Html. A method is described by the first line of its
    docstring, unless it is unknown here.
    """
    method, plan = facts.study.method.name, facts.agreement.method.plan
    if method:
        doc = ""
        with suppress(FedplanError):
            doc = getdoc(METHOD_REGISTRY.find(method).value) or ""
        about = doc.partition("\n")[0].replace("`", "")
        yield from ("The method is ", tag("b", method), ". ", about, " ")
    yield from ("The plan is ", tag("code", plan.text), f" ({plan.fingerprint}). ")
    clients = facts.forecast.clients
    for client in clients[:MAX_STAGES]:
        label = f"For {client.client_class}: " if len(clients) > 1 else ""
        yield label + " ".join(map(_stage, client.stages[:MAX_STAGES]))
        yield "" if len(client.stages) <= MAX_STAGES else " The figure shows all further stages."
        yield " "
    if facts.forecast.wire_cost.text:
        yield f"Compression: {facts.forecast.wire_cost.text}."


def _stage(stage: StageForecast) -> str:
    """Return a sentence on the kinds of params that have each role in a stage of the plan."""
    kinds = dict[Role, dict[str, None]]()
    for param in sort_params(tuple(stage.permitted)):
        kinds.setdefault(stage.permitted[param], {})[str(param.kind)] = None
    phrases = [
        f"{phrase} {'all params' if len(kinds) == 1 else ', '.join(kinds[role])}"
        for role, phrase in ROLE_PHRASES.items()
        if role in kinds
    ]
    chosen = any(stage.certain[p] is not stage.permitted[p] for p in stage.permitted)
    choice = "; of these, layer scores choose some blocks" if chosen else ""
    return f"In {stage.name}, {'; '.join(phrases)}{choice}."
