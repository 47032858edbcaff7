# SPDX-License-Identifier: Apache-2.0
"""Openings: what a run was asked to do and how it stands, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from inspect import getdoc

from fedplan.errors import FedplanError
from fedplan.federation.identity import RUN
from fedplan.federation.states import RunState
from fedplan.language.plan import Role
from fedplan.methods.registry import METHOD_NAMES
from fedplan.reports.explanation import in_order
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import Html, tag, together
from fedplan.reports.units import duration, megabytes, millions
from fedplan.reports.views import Segment
from fedplan.studies.sections import MethodSection
from fedplan.tensors.devices import AUTO

DOES = {
    Role.SHARE: "clients train and share",
    Role.KEEP: "each client trains and keeps",
    Role.HOLD: "each client holds its own, at rest,",
    Role.FREEZE: "nobody trains",
}
MOST = 4
"""Stages of a plan that are told in words; the figure has all."""


def opening(facts: RunFacts) -> list[Html]:
    """What was asked, what the plan does, and how it stands."""
    return [
        tag("p", state_of(facts), " ", _when(facts)),
        tag("p", *_asked(facts)),
        tag("p", *_plan(facts)),
        tag("p", _privacy(facts), " ", _machine(facts)),
        tag("dl", *(_tile(name, number) for name, number in _numbers(facts)), class_="tiles"),
    ]


def _numbers(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """The few numbers that a run is known by."""
    score, told = facts.score[0], facts.look.told
    scores = {f"{score}, world": facts.world_scores(""), f"{score}, own": facts.own_scores("")}
    if not facts.hidden:
        scores[f"{score}, worst client"] = facts.own_scores("", worst=True)
    for name, series in scores.items():
        if series.last is not None:
            yield name, f"{series.last:.3g}"
    if not facts.hides_clients and facts.rounds:
        yield "MB up", megabytes(sum(record.up for record in facts.rounds))
        yield "MB down", megabytes(sum(record.down for record in facts.rounds))
    if facts.agreement.guarantee is not None and facts.run.round:
        promised = facts.agreement.guarantee.epsilon
        yield (
            f"epsilon of {promised:g}",
            f"{facts.agreement.guarantee.forecast(facts.run.round):.3g}",
        )
    if told.seconds is not None:
        yield "a round", duration(told.seconds)


def _tile(name: str, number: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", number))


def state_of(facts: RunFacts) -> Html:
    """The state of a run, as a badge."""
    look = facts.look
    kind = "live" if look.live else "good" if look.state == RunState.DONE else "bad"
    return tag("span", look.state, class_=f"state {kind}")


def _when(facts: RunFacts) -> str:
    look = facts.look
    done = f"Round {facts.run.round} of {facts.study.train.rounds} is closed."
    why = f" {look.told.why}." if look.told.why and not facts.hides_clients else ""
    began = _moment(look.told.began) or _made(facts)
    ended = _moment(look.told.changed) if look.told.changed and not look.live else ""
    words = f" Begun {began}" + (f", last told {ended}." if ended else ".")
    return f"{done}{why}{words}"


def _made(facts: RunFacts) -> str:
    """When the folder's run was drawn; one from Python has no driver that tells."""
    try:
        when = (facts.run.folder / RUN).stat().st_mtime
    except OSError:
        return "at a time that nobody told"
    return _moment(datetime.fromtimestamp(when, UTC).isoformat())


def _moment(told: str) -> str:
    return f"{told[:10]} at {told[11:16]} UTC" if told else ""


def _asked(facts: RunFacts) -> Iterator[str]:
    study, params = facts.study, facts.agreement.params
    clients = len(facts.roster)
    who = f"{clients} {'client' if clients == 1 else 'clients'}" if clients else "Clients"
    share = study.clients.share
    some = f", of whom {share:.0%} are asked in each," if share < 1 else ""
    yield from ("The study ", tag("b", study.name), f" has {who} train ")
    yield from (tag("b", _model(facts)), f" together for {study.train.rounds} rounds{some} ")
    numel, size = sum(p.numel for p in params), sum(p.nbytes for p in params)
    yield f"with seed {study.seed}. The model has {millions(numel)} params, {megabytes(size)} MB; "
    score, higher = facts.score
    better = "higher" if higher else "lower"
    yield f"its task is {study.task.kind}, and {score} is what it is known by: {better} is better."


def _model(facts: RunFacts) -> str:
    said = facts.study.model
    if said.vision or said.text:
        return f"{said.vision} with {said.text}"
    return said.type or said.path or "a model from Python"


def _plan(facts: RunFacts) -> Iterator[str]:
    section = facts.study.method
    if section.name:
        yield from ("The method is ", tag("b", section.name), ". ", _about(section), " ")
    plan = facts.agreement.method.plan
    yield from ("The plan is ", tag("code", plan.text), f" ({plan.fingerprint}). ")
    views = facts.forecast.views
    for view in views[:MOST]:
        who = f"For {view.who}: " if len(views) > 1 else ""
        yield who + " ".join(map(_stage, view.stages[:MOST]))
        yield "" if len(view.stages) <= MOST else " Further stages are in the figure."
        yield " "
    if facts.forecast.fare.text:
        yield f"On the way: {facts.forecast.fare.text}."


def _about(section: MethodSection) -> str:
    """The first line that a method says of itself."""
    try:
        doc = getdoc(METHOD_NAMES.find(section.name).value) or ""
    except FedplanError:
        return ""
    return doc.partition("\n")[0].replace("`", "")


def _stage(stage: Segment) -> str:
    """What a stage of a plan says of each part, in a sentence."""
    held = dict[Role, dict[str, None]]()
    for param in in_order(tuple(stage.permitted)):
        held.setdefault(stage.permitted[param], {})[str(param.kind)] = None
    whole = len(held) == 1
    told = [
        f"{DOES[role]} {'everything' if whole else ', '.join(held[role])}"
        for role in DOES
        if role in held
    ]
    chosen = any(stage.certain[p] is not stage.permitted[p] for p in stage.permitted)
    some = "; of these, scores choose some blocks" if chosen else ""
    return f"In {stage.name}, {'; '.join(told)}{some}."


def _privacy(facts: RunFacts) -> str:
    guarantee = facts.agreement.guarantee
    if guarantee is None:
        return "No privacy is promised."
    return (
        f"Each {guarantee.unit} is hidden: epsilon {guarantee.epsilon:g} at delta "
        f"{guarantee.delta:g} is promised, by noise of {guarantee.noise:.3g} times the clip."
    )


def _machine(facts: RunFacts) -> Html:
    device = facts.study.device
    on = "the best device that is there" if device == AUTO else f"the device {device}"
    run = f", run {facts.run.identity.id}" if facts.run.round else ""
    folder = tag("code", str(facts.run.folder))
    return together(f"It trains on {on}. It is kept in ", folder, f"{run}.")
