# SPDX-License-Identifier: Apache-2.0
"""The summary at the top of a report: state, study, plan, privacy and main numbers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from inspect import getdoc

from fedplan.errors import FedplanError
from fedplan.federation.identity import RUN_FILE
from fedplan.federation.run_states import RunState
from fedplan.language.plan import Role
from fedplan.methods.registry import METHOD_REGISTRY
from fedplan.reports.explanation import sort_params
from fedplan.reports.forecast_types import StageForecast
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import Html, join_html, tag
from fedplan.reports.units import duration, megabytes, millions
from fedplan.studies.sections import MethodSection
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
    """Return the paragraphs and number tiles that summarize a run."""
    return [
        tag("p", state_badge(facts), " ", _progress(facts)),
        tag("p", *_study(facts)),
        tag("p", *_plan(facts)),
        tag("p", _privacy(facts), " ", _location(facts)),
        tag("dl", *_tiles(facts), class_="tiles"),
    ]


def _tiles(facts: RunFacts) -> Iterator[Html]:
    """Yield the main numbers of a run as definition list entries."""
    for name, value in _numbers(facts):
        yield tag("div", tag("dt", name), tag("dd", value))


def _numbers(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Yield names and values of the main numbers: scores, traffic, epsilon and time per round.

    Numbers that differential privacy protects are left out.
    """
    score, seconds = facts.score[0], facts.snapshot.status.seconds
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
        yield "upload MB", megabytes(sum(record.up for record in facts.rounds))
        yield "download MB", megabytes(sum(record.down for record in facts.rounds))
    if facts.agreement.guarantee is not None and facts.run.round:
        guaranteed = facts.agreement.guarantee.epsilon
        yield (
            f"epsilon spent of {guaranteed:g}",
            f"{facts.agreement.guarantee.forecast_epsilon(facts.run.round):.3g}",
        )
    if seconds is not None:
        yield "time per round", duration(seconds)


def state_badge(facts: RunFacts) -> Html:
    """Return the state of a run as a coloured badge."""
    snapshot = facts.snapshot
    kind = "live" if snapshot.live else "good" if snapshot.state == RunState.DONE else "bad"
    return tag("span", snapshot.state, class_=f"state {kind}")


def _progress(facts: RunFacts) -> str:
    """Return the closed rounds, the reason of a stop, and when the run began and was updated."""
    snapshot, status = facts.snapshot, facts.snapshot.status
    closed = f"{facts.run.round} of {facts.study.train.rounds} rounds are done."
    why = f" {status.why}." if status.why and not facts.client_level_dp else ""
    began = _format_time(status.began) or _file_time(facts)
    updated = _format_time(status.changed) if status.changed and not snapshot.live else ""
    times = f" Started {began}" + (f", last updated {updated}." if updated else ".")
    return f"{closed}{why}{times}"


def _file_time(facts: RunFacts) -> str:
    """Return when the run's id was written; a run from Python has no status with a start time."""
    try:
        when = (facts.run.folder / RUN_FILE).stat().st_mtime
    except OSError:
        return "at an unknown time"
    return _format_time(datetime.fromtimestamp(when, UTC).isoformat())


def _format_time(iso: str) -> str:
    """Return an ISO time in UTC as `2026-11-16 at 09:00 UTC`; empty for an empty text."""
    return f"{iso[:10]} at {iso[11:16]} UTC" if iso else ""


def _study(facts: RunFacts) -> Iterator[str]:
    """Yield the pieces of a paragraph on the study: clients, model, rounds, task and metric."""
    study, params = facts.study, facts.agreement.params
    clients = len(facts.roster)
    count = f"{clients} {'client' if clients == 1 else 'clients'}" if clients else "clients"
    fraction = study.clients.fraction
    sampling = f", with {fraction:.0%} of the clients in each round," if fraction < 1 else ""
    yield from ("The study ", tag("b", study.name), f": {count} train ")
    yield from (tag("b", _model(facts)), f" for {study.train.rounds} rounds{sampling} ")
    numel, size = sum(p.numel for p in params), sum(p.nbytes for p in params)
    yield f"with seed {study.seed}. The model has {millions(numel)} params, {megabytes(size)} MB; "
    score, higher = facts.score
    better = "higher" if higher else "lower"
    yield f"the task is {study.task.kind}, measured by {score} ({better} is better)."


def _model(facts: RunFacts) -> str:
    """Return the name of the study's model."""
    model = facts.study.model
    if model.vision or model.text:
        return f"{model.vision} with {model.text}"
    return model.type or model.path or "a model from Python"


def _plan(facts: RunFacts) -> Iterator[str]:
    """Yield the pieces of a paragraph on the method, the plan and its stages."""
    section = facts.study.method
    if section.name:
        yield from ("The method is ", tag("b", section.name), ". ", _about(section), " ")
    plan = facts.agreement.method.plan
    yield from ("The plan is ", tag("code", plan.text), f" ({plan.fingerprint}). ")
    clients = facts.forecast.clients
    for client in clients[:MAX_STAGES]:
        label = f"For {client.client_class}: " if len(clients) > 1 else ""
        yield label + " ".join(map(_stage, client.stages[:MAX_STAGES]))
        yield "" if len(client.stages) <= MAX_STAGES else " The figure shows all further stages."
        yield " "
    if facts.forecast.wire_cost.text:
        yield f"Compression: {facts.forecast.wire_cost.text}."


def _about(section: MethodSection) -> str:
    """Return the first line of a method's docstring; empty if the method is unknown here."""
    try:
        doc = getdoc(METHOD_REGISTRY.find(section.name).value) or ""
    except FedplanError:
        return ""
    return doc.partition("\n")[0].replace("`", "")


def _stage(stage: StageForecast) -> str:
    """Return a sentence on the kinds of params of each role in a stage."""
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


def _privacy(facts: RunFacts) -> str:
    """Return a sentence on the guarantee of differential privacy."""
    guarantee = facts.agreement.guarantee
    if guarantee is None:
        return "Differential privacy: off."
    return (
        f"Differential privacy: {guarantee.unit}-level, epsilon {guarantee.epsilon:g} at delta "
        f"{guarantee.delta:g}, noise multiplier {guarantee.noise_multiplier:.3g}."
    )


def _location(facts: RunFacts) -> Html:
    """Return a sentence on the device, the folder and the id of the run."""
    device = facts.study.device
    name = "the best available device" if device == AUTO else f"the device {device}"
    run = f", run {facts.run.identity.id}" if facts.run.round else ""
    folder = tag("code", str(facts.run.folder))
    return join_html(f"It trains on {name}. Folder: ", folder, f"{run}.")
