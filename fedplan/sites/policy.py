# SPDX-License-Identifier: Apache-2.0
"""Policies: what a site lets happen, whatever a server asks, in a file that nobody else writes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from fedplan.errors import FedplanError
from fedplan.federation.account import Limits
from fedplan.federation.agreement import Agreement
from fedplan.language.crowds import kinds_of, phases_in
from fedplan.language.horizon import MANY, rounds_ahead
from fedplan.language.parser import parse_part
from fedplan.language.parts import Part
from fedplan.language.plan import Role
from fedplan.language.resolution import permitted, touched
from fedplan.language.turn import Turn
from fedplan.models.params import Kind, Param, Params
from fedplan.privacy.accounting.budget import Unit
from fedplan.reports.forecasts import forecast
from fedplan.reports.units import megabytes
from fedplan.studies.plain import odd, read_toml
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.sections import Section
from fedplan.studies.words import Count, as_fault

POLICY = "policy.toml"
"""In a site's folder: what it lets happen."""
RULE = "rule"
"""Who approved, where no person had to."""


def _a_part(said: str) -> str:
    with as_fault():
        parse_part(said)
    return said


PartText = Annotated[str, AfterValidator(_a_part)]


class LimitsSection(Section):
    """Where a site stops, of each dataset and over all studies; 0 is no limit."""

    rounds: Count = Limits.rounds
    """The most turns that are answered; 0 is no limit."""
    bytes: Annotated[int, Field(ge=0)] = Limits.bytes
    """The most bytes that leave; 0 is no limit."""
    epsilon: Annotated[float, Field(ge=0)] = Limits.epsilon
    """The most epsilon that is spent; 0 is no limit."""
    delta: Annotated[float, Field(gt=0, lt=1)] = Limits.delta
    """The delta that the epsilon is counted at."""


class DemandSection(Section):
    """What a study must hide, and how well at least."""

    unit: Unit
    """What a study must hide: a client or an example."""
    epsilon: Annotated[float, Field(gt=0)]
    """The most epsilon that a study may promise."""
    delta: Annotated[float, Field(gt=0, lt=1)] = Limits.delta
    """The largest delta that a study may promise it at."""


class Policy(Section):
    """What a site lets happen. A study against it runs in no case; one within it is approved by a
    person, or with `by_rule` by nobody.
    """

    by_rule: bool = False
    """Whether a study within this policy needs no person."""
    never_share: list[PartText] = Field(default_factory=list[str])
    """Parts of the plan language whose values never leave."""
    metrics: list[str] = Field(default_factory=list[str])
    """The scores of the site's rows that may leave, the loss among them."""
    least_rows: Count = 20
    """From how many rows on a score may leave."""
    weight: bool = True
    """Whether a study may tell how many rows there are."""
    require_masked: Count = 0
    """Of how many sites a sum must be that the server sees; 0 lets it see this site's update."""
    colluders: Count = 0
    """How many other sites may tell the server all they have: masks and noise must still hold."""
    approvers: list[str] = Field(default_factory=list[str])
    """The users who may approve; if there are none, whoever can write the site's home."""
    limits: LimitsSection = LimitsSection()
    """Where the site stops, whatever was approved."""
    require_privacy: DemandSection | None = None
    """What a study must hide, and how well; without it, nothing."""

    @property
    def digest(self) -> str:
        """Tells two policies apart."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def bounds(self) -> Limits:
        """The limits as an account takes them."""
        return Limits(**self.limits.model_dump())

    def lets_approve(self, user: str) -> bool:
        """Whether a user may approve studies."""
        return not self.approvers or user in self.approvers

    def lines(self) -> list[str]:
        """It in words."""
        return list(_words(self))


def read_policy(file: Path) -> Policy:
    """The policy of a file. There is none without one: silence would let anything happen."""
    try:
        return policy_of(read_toml(file.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file} is not there: write what this site lets happen; an empty file has every study "
            "wait for a person"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def policy_of(said: Mapping[str, object]) -> Policy:
    """A policy from plain values; each fault is named by its field."""
    faults = [f"{name}: {fault}" for name, held in said.items() if (fault := odd(held))]
    try:
        if not faults:
            return Policy.model_validate(dict(said))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    raise ConfigError("the policy does not fit:\n  " + "\n  ".join(faults))


def judged(
    policy: Policy, study: Study, agreement: Agreement, site: Turn | None = None
) -> list[str]:
    """What of a study is against a policy, in sentences; nothing if it is within it.

    `site` is the site as plans see it, by its name and its traits; without it, any client is meant.
    """
    site = seen_in(study, site)
    return [
        *_never_shared(policy, study, agreement, site),
        *_past_limits(policy.limits, study, agreement),
        *_unhidden(policy, study, agreement),
        *_unmasked(policy, study, agreement),
    ]


def seen_in(study: Study, site: Turn | None) -> Turn | None:
    """A site as the plan of a study sees it: with what the study says of it, and its own words."""
    if site is None:
        return None
    return replace(site, traits={**study.clients.traits.get(site.client, {}), **site.traits})


def shared_in(agreement: Agreement, rounds: int, site: Turn | None = None) -> dict[Param, Turn]:
    """What may leave in a run, each param with the first turn that shares it.

    Every phase is taken to come in every round: a server says which it is.
    """
    plan, params, found = agreement.method.plan, agreement.params, dict[Param, Turn]()
    numbers = _rounds(agreement, rounds)
    if numbers is None:
        return dict.fromkeys(touched(plan, params, Role.SHARE), Turn())
    kinds = [turn for _, turn in kinds_of(plan, None)] if site is None else [site]
    said = set[object]()
    for number in numbers:
        for phase in ("", *phases_in(plan)):
            for turn in (replace(kind, round=number, phase=phase) for kind in kinds):
                if (steps := plan.settle(turn)) in said:
                    continue
                said.add(steps)
                roles = permitted(plan, params, turn)
                for param in (p for p in params if roles[p] is Role.SHARE):
                    found.setdefault(param, turn)
    return found


def _rounds(agreement: Agreement, rounds: int) -> list[int] | None:
    """The rounds to look at; none if a plan may say anything at any time."""
    if rounds <= MANY:
        return list(range(1, rounds + 1))
    ahead = rounds_ahead(agreement.method.plan)
    return None if ahead is None else sorted(number for number, _ in ahead)


def _never_shared(
    policy: Policy, study: Study, agreement: Agreement, site: Turn | None
) -> Iterator[str]:
    shared = shared_in(agreement, study.train.rounds, site) if policy.never_share else {}
    for text in policy.never_share:
        part = parse_part(text)
        leaving = {p: turn for p, turn in shared.items() if _is_of(part, p, agreement.params)}
        doubted = [p for p in shared if p not in leaving and part.doubtful(p)]
        if leaving:
            first = min(leaving.values(), key=lambda turn: turn.round)
            yield (
                f"{text} never leaves this site (never_share), and the plan shares "
                f"{_some([p.key for p in leaving])}{_when(first)}"
            )
        if doubted:
            yield (
                f"{text} never leaves this site (never_share), and nobody knows whether "
                f"{_some([p.key for p in doubted])} is of it: the study may say model.like"
            )


def _is_of(part: Part, param: Param, params: Params) -> bool:
    """Whether a param is of a part, by any of its names: an embedding may be the head too.

    An adapter is of what it changes as well: with a public base, it is the trained layer.
    """
    others = [replace(param, name=name, kind=Kind.HEAD) for name in param.tied]
    if param.kind is Kind.ADAPTER:
        others += [each for each in params if _is_host(each, param)]
    return any(part.holds(each) for each in (param, *others))


def _is_host(param: Param, adapter: Param) -> bool:
    module = param.name.rpartition(".")[0].removesuffix(".base_layer")
    return param.kind is not Kind.ADAPTER and adapter.name.startswith(f"{module}.")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _when(turn: Turn) -> str:
    phase = f' in phase "{turn.phase}"' if turn.phase else ""
    return f" from round {turn.round} on{phase}" if turn.round else " in some round"


def _past_limits(limits: LimitsSection, study: Study, agreement: Agreement) -> Iterator[str]:
    rounds, guarantee = study.train.rounds, agreement.guarantee
    if limits.rounds and rounds > limits.rounds:
        yield f"it has {rounds} rounds, and limits.rounds is {limits.rounds}"
    if limits.bytes and (least := _least_up(agreement, rounds)) > limits.bytes:
        yield (
            f"{megabytes(least)} MB leave at the least, and limits.bytes is "
            f"{megabytes(limits.bytes)} MB"
        )
    hidden = agreement.in_shares or (guarantee is not None and guarantee.unit == "example")
    if limits.epsilon and not hidden:
        yield f"it hides no examples, and limits.epsilon is {limits.epsilon:g}"
    elif limits.epsilon and guarantee is not None:
        spent = replace(guarantee, delta=limits.delta).forecast(rounds)
        if spent > limits.epsilon:
            yield (
                f"it spends epsilon {spent:.3g} at delta {limits.delta:g}, and limits.epsilon is "
                f"{limits.epsilon:g}"
            )


def _least_up(agreement: Agreement, rounds: int) -> int:
    """The bytes that surely leave over all rounds; of very many, those of the first."""
    found = forecast(
        agreement.method.plan, agreement.params, rounds=min(rounds, MANY), fare=agreement.fare
    )
    return min(sum(least for least, _ in view.ups) for view in found.views)


def _unhidden(policy: Policy, study: Study, agreement: Agreement) -> Iterator[str]:
    guarantee = agreement.guarantee
    told = not agreement.masking.alike
    if guarantee is not None:
        told = guarantee.cap and not agreement.in_shares
    if not policy.weight and told and agreement.masking.active:
        yield (
            "the sum of rows is told of each part, and weight is false: two parts that differ by "
            "this site, or two rounds, tell its rows; a study with [privacy], or with "
            "aggregation.alike, does not"
        )
    elif not policy.weight and told:
        yield (
            "each update tells how many rows there are, and weight is false: a study with "
            "[privacy] does not tell it"
        )
    asked, said = policy.require_privacy, study.privacy
    if asked is None:
        return
    if said is None or said.unit != asked.unit:
        hides = f"it hides each {said.unit}" if said else "it promises no privacy"
        yield f"{hides}, and require_privacy.unit is {asked.unit!r}"
    elif said.epsilon > asked.epsilon or said.delta > asked.delta:
        yield (
            f"it promises epsilon {said.epsilon:g} at delta {said.delta:g}, and require_privacy "
            f"asks for {asked.epsilon:g} at {asked.delta:g}"
        )


def _unmasked(policy: Policy, study: Study, agreement: Agreement) -> Iterator[str]:
    least, masking = policy.require_masked, agreement.masking
    if not masking.active:
        for name, value in (("require_masked", least), ("colluders", policy.colluders)):
            if value:
                yield f"the server would see this site's update, and {name} is {value}"
        return
    if masking.colluders < policy.colluders:
        yield (
            f"aggregation.colluders is {masking.colluders}, and this site's colluders is "
            f"{policy.colluders}"
        )
    if least:
        names = study.clients.names
        asked = max(1, round(study.clients.share * len(names))) if names else 0
        try:
            opens = masking.threshold or (masking.least(asked) if asked else 0)
        except FedplanError as error:
            yield str(error)
            return
        fewest = min(masking.floor, opens)
        if fewest < least:
            yield (
                f"a sum of {fewest} sites may be opened (aggregation.threshold, floor), and "
                f"require_masked is {least}"
            )


def picked(study: Study) -> list[str]:
    """The words by which a study picks some of a site's rows: a rule approves of none of them."""
    data = study.data
    said = {"data.only": data.only, "data.train": data.train, "data.limit": data.limit}
    return [f"{name} = {value}" for name, value in said.items() if value]


def _words(policy: Policy) -> Iterator[str]:
    who = ", ".join(policy.approvers) or "whoever can write the site's home"
    yield (
        "A study within this policy is approved by rule."
        if policy.by_rule
        else f"A study within this policy waits for a person: {who}."
    )
    parts = ", ".join(policy.never_share)
    yield f"These parts never leave: {parts}." if parts else "No part is barred from leaving."
    scores = ", ".join(policy.metrics)
    yield (
        f"Scores that may leave, from {policy.least_rows} rows on: {scores}."
        if scores
        else "No score of its rows leaves, and no loss."
    )
    yield f"How many rows there are {'may leave' if policy.weight else 'never leaves'}."
    if policy.require_masked:
        yield f"The server sees no update, but sums of {policy.require_masked} sites or more."
    if policy.colluders:
        yield (
            "The server sees no update, even if it is told all that "
            f"{policy.colluders} of the other sites have."
        )
    said = {name: value for name, value in policy.limits.model_dump().items() if name != "delta"}
    limits = ", ".join(f"{name} {value:g}" for name, value in said.items() if value)
    yield f"Limits of each dataset, over all studies: {limits or 'none'}."
    if (asked := policy.require_privacy) is not None:
        yield (
            f"A study must hide each {asked.unit}: epsilon {asked.epsilon:g} at delta "
            f"{asked.delta:g}, or less."
        )
