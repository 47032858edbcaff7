# SPDX-License-Identifier: Apache-2.0
"""Policy of a site: the limits that hold for every study, read from the site's policy.toml."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from fedplan.data.column_statistics import CountRule
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.egress import Limits
from fedplan.language.parser import parse_part
from fedplan.language.parts import Part
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.language.resolution import (
    MAX_ROUNDS_CHECKED,
    client_classes,
    params_with_roles,
    permitted_roles,
    phase_names,
    rounds_to_check,
)
from fedplan.models.params import Kind, Param, Params
from fedplan.privacy.accounting.budget import Unit
from fedplan.reports.forecasts import forecast
from fedplan.reports.formats import megabytes
from fedplan.sites.signatures import PersonName, PublicKey
from fedplan.studies.field_types import Count, PartText, Positive
from fedplan.studies.schema import Study
from fedplan.studies.section import ConfigError, Section, parse_section

RULE_APPROVER = "rule"
"""Recorded as the approver of a study that the policy approved without a person."""


class LimitsSection(Section):
    """Limits on all studies together, for each dataset, and on the studies that are offered."""

    rounds: Count = Limits.rounds
    """The most rounds that are answered; 0 is no limit."""
    bytes: Annotated[int, Field(ge=0)] = Limits.bytes
    """The most bytes that leave; 0 is no limit."""
    epsilon: Annotated[float, Field(ge=0)] = Limits.epsilon
    """The most epsilon that is spent; 0 is no limit."""
    delta: Annotated[float, Field(gt=0, lt=1)] = Limits.delta
    """The delta at which epsilon is computed."""
    studies_per_day: Count = 100
    """The most studies that may be offered to the site within 24 hours; 0 is no limit."""


class RequiredPrivacySection(Section):
    """The differential privacy that a study must promise: unit, largest epsilon, largest delta."""

    unit: Unit
    """The unit that a study must protect: client or example."""
    epsilon: Annotated[float, Field(gt=0)]
    """The largest epsilon that a study may promise."""
    delta: Annotated[float, Field(gt=0, lt=1)] = Limits.delta
    """The largest delta that a study may promise."""
    allow_ghost_clipping: bool = False
    """Whether a study may run several examples at a time, trusting the values of its server."""


class StatisticsPolicySection(Section):
    """The counts of a study's data dictionary that may leave; without this section, none.

    Each column is counted once for all studies on a dataset.
    """

    min_count: Annotated[int, Field(ge=3, le=10**6)] = CountRule.min_count
    """The least number of people, or of rows, of a count; cells with fewer are joined."""
    person: str = CountRule.person
    """Column that tells people apart, such as "patient_id"; without it, each row is a person."""
    show_zeros: bool = CountRule.show_zeros
    """Whether empty cells are shown as 0, so that joined cells are known to have rows."""

    @property
    def rule(self) -> CountRule:
        """The rule of the counts."""
        return CountRule(**self.model_dump())


class Policy(Section):
    """The rules of a site for all studies, read from policy.toml by `read_policy`.

    A study that violates the policy (see `policy_violations`) never runs. A study that the policy
    allows needs the approval of a person, or runs at once with `auto_approve`.
    """

    auto_approve: bool = False
    """Whether studies that the policy allows are approved without a person; not with `people`."""
    never_share: list[PartText] = Field(default_factory=list[str])
    """Parts of the model, in the plan language, whose values never leave."""
    metrics: list[str] = Field(default_factory=list[str])
    """Metrics of the site's examples that may leave, including the training loss; "counts" lets
    score counts leave, under masks or with noise."""
    min_examples: Count = 20
    """The fewest test examples with which metrics may leave; score counts with noise are of any."""
    reveal_example_count: bool = True
    """Whether a study may reveal the site's number of examples."""
    min_sites_in_sum: Count = 0
    """The fewest sites in a sum that the server sees; 0 lets it see this site's update."""
    colluders: Count = 0
    """How many other sites may collude with the server without breaking masks and noise."""
    approvers: list[str] = Field(default_factory=list[str])
    """Users or people who may approve; empty: everyone who can write the site's state folder, or
    all `people`."""
    people: dict[PersonName, PublicKey] = Field(default_factory=dict[str, str])
    """People by name, with the line of each one's OpenSSH public key. With people, an approval
    counts only with the signature of one of them, whoever runs the command."""
    signatures: Positive = 1
    """How many of the people must sign an approval."""
    require_purpose: bool = False
    """Whether a study must have [purpose]: its question, requester, legal basis and last day."""
    limits: LimitsSection = LimitsSection()
    """Limits that hold for all approved studies together."""
    require_privacy: RequiredPrivacySection | None = None
    """The differential privacy that a study must promise; without it, none."""
    statistics: StatisticsPolicySection | None = None
    """The counts of this site's data that may leave before training; without it, none."""

    @property
    def digest(self) -> str:
        """SHA-256 of all fields."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def account_limits(self) -> Limits:
        """The limits of each dataset's account."""
        return Limits(**self.limits.model_dump(exclude={"studies_per_day"}))

    @model_validator(mode="after")
    def _validate_statistics(self) -> Policy:
        if self.statistics is not None and not self.reveal_example_count:
            raise ValueError("statistics reveal the number of examples: leave [statistics] out")
        return self

    @model_validator(mode="after")
    def _validate_people(self) -> Policy:
        if not self.people:
            if self.signatures > 1:
                raise ValueError("signatures needs [people], with the key of each person")
            return self
        if self.auto_approve:
            raise ValueError(
                "auto_approve asks nobody to sign: leave it out, or leave [people] out"
            )
        if RULE_APPROVER in self.people:
            raise ValueError(
                f"people: {RULE_APPROVER!r} names approvals by rule: rename this person"
            )
        if unknown := set(self.approvers) - self.people.keys():
            raise ValueError(f"approvers: {min(unknown)} has no key in [people]")
        if self.signatures > (count := len(self.approvers or self.people)):
            raise ValueError(f"signatures is {self.signatures}, but {count} people may approve")
        contents = {key.split(" ")[1] for key in self.people.values()}  # without comments
        if len(contents) < len(self.people):
            raise ValueError("people: two people have the same key")
        return self

    def may_approve(self, name: str) -> bool:
        """Whether a user, or a person with `people`, may approve studies."""
        return (not self.people or name in self.people) and (
            not self.approvers or name in self.approvers
        )

    def summary_lines(self) -> list[str]:
        """Return the policy as sentences for a person."""
        anyone = ", ".join(self.people) or "anyone who can write the site's state folder"
        approvers = ", ".join(self.approvers) or anyone
        signed = (
            f"the signatures of {self.signatures} people of"
            if self.signatures > 1
            else ("the signature of one of" if self.people else "the approval of a person")
        )
        metrics = f"from {self.min_examples} examples on: {', '.join(self.metrics)}"
        count = "may leave" if self.reveal_example_count else "never leaves"
        lines = [
            "Studies that this policy allows are approved automatically."
            if self.auto_approve
            else f"Each study needs {signed}: {approvers}.",
            f"Parts of the model that never leave: {', '.join(self.never_share) or 'none'}.",
            f"Metrics that may leave, {metrics}."
            if self.metrics
            else "No metrics or losses leave.",
            f"The number of examples {count}.",
        ]
        if (counts := self.statistics) is not None:
            person = f", who are told apart by {counts.person}" if counts.person else ""
            lines.append(
                "Counts of the columns in a study's data dictionary may leave, once for each "
                f"column; each count is of {counts.rule.least} or more{person}."
            )
        if self.require_purpose:
            lines.append("A study must state its purpose.")
        if "counts" in self.metrics:
            lines.append("Score counts with noise may leave for any number of examples.")
        if self.min_sites_in_sum:
            lines.append(
                f"The server may see only sums of updates of {self.min_sites_in_sum} sites or more."
            )
        if self.colluders:
            lines.append(
                f"The server must not see this site's update, even if {self.colluders} of the "
                "other sites give it all their data."
            )
        fields = self.limits.model_dump(exclude={"delta", "studies_per_day"})
        limits = ", ".join(f"{name} {value:g}" for name, value in fields.items() if value)
        lines.append(f"Limits for each dataset, over all studies: {limits or 'none'}.")
        if self.limits.studies_per_day:
            lines.append(f"At most {self.limits.studies_per_day} studies may be offered in a day.")
        if (required := self.require_privacy) is not None:
            lines.append(
                f"A study must protect each {required.unit} by differential privacy with at most "
                f"epsilon {required.epsilon:g} at delta {required.delta:g}."
            )
        return lines


def read_policy(file: Path) -> Policy:
    """Parse and validate a policy file; ConfigError if missing, unreadable or invalid."""
    try:
        return parse_section(Policy, file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file} does not exist: write this site's policy; with an empty file, every study "
            "waits for the approval of a person"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def policy_violations(
    policy: Policy, study: Study, agreement: Agreement, site: Turn | None = None
) -> list[str]:
    """Return how a study violates a policy, for a site or else any client; empty if allowed."""
    site = site_in_study(study, site)
    purpose = "require_purpose is true, but the study has no [purpose]"
    return [
        *([purpose] if policy.require_purpose and study.purpose is None else []),
        *_never_share_violations(policy, study, agreement, site),
        *_limit_violations(policy.limits, study, agreement),
        *_privacy_violations(policy, study, agreement),
        *_secagg_violations(policy, study, agreement),
    ]


def site_in_study(study: Study, site: Turn | None) -> Turn | None:
    """Return a copy of `site` with the traits that a study gives it; its own traits win."""
    if site is None:
        return None
    return replace(site, traits={**study.clients.traits.get(site.client, {}), **site.traits})


def shareable_params(
    agreement: Agreement, rounds: int, site: Turn | None = None
) -> dict[Param, Turn]:
    """Return the params whose values may leave in a run, each with the first turn that shares it.

    Without `site`, all client classes are checked; every phase in each round, since the server
    decides the phase. With more than MAX_ROUNDS_CHECKED rounds, only rounds in which the plan may
    change are checked; if these cannot be listed, every param that the plan ever shares is
    returned, with an empty Turn.
    """
    plan, params, first_turns = agreement.method.plan, agreement.params, dict[Param, Turn]()
    numbers: Sequence[int] = range(1, rounds + 1)
    if rounds > MAX_ROUNDS_CHECKED:
        changes = rounds_to_check(plan)
        if changes is None:
            return dict.fromkeys(params_with_roles(plan, params, Role.SHARE), Turn())
        numbers = sorted(number for number, _ in changes)
    clients = [turn for _, turn in client_classes(plan, None)] if site is None else [site]
    checked = set[object]()
    for number in numbers:
        for phase in ("", *phase_names(plan)):
            for turn in (replace(client, round=number, phase=phase) for client in clients):
                if (steps := plan.active_steps(turn)) in checked:
                    continue
                checked.add(steps)
                roles = permitted_roles(plan, params, turn)
                for param in (p for p in params if roles[p] is Role.SHARE):
                    first_turns.setdefault(param, turn)
    return first_turns


def _never_share_violations(
    policy: Policy, study: Study, agreement: Agreement, site: Turn | None
) -> Iterator[str]:
    shareable = shareable_params(agreement, study.train.rounds, site) if policy.never_share else {}
    for text in policy.never_share:
        part = parse_part(text)
        shared = {
            p: turn for p, turn in shareable.items() if _is_in_part(part, p, agreement.params)
        }
        uncertain = [p for p in shareable if p not in shared and part.is_uncertain(p)]
        if shared:
            first = min(shared.values(), key=lambda turn: turn.round)
            phase = f' in phase "{first.phase}"' if first.phase else ""
            when = f" from round {first.round} on{phase}" if first.round else " in some round"
            yield (
                f"never_share: {text} must never leave this site, but the plan shares "
                f"{_first_names([p.key for p in shared])}{when}"
            )
        if uncertain:
            yield (
                f"never_share: {text} must never leave this site, but it is not known whether "
                f"{_first_names([p.key for p in uncertain])} belongs to it; the study can set "
                "model.layer_map_like to make it known"
            )


def _is_in_part(part: Part, param: Param, params: Params) -> bool:
    """Whether a param is in a part: itself, by a tied name, or as an adapter of a layer in it."""
    related = [replace(param, name=name, kind=Kind.HEAD) for name in param.tied]
    if param.kind is Kind.ADAPTER:
        for other in params:
            module = other.name.rpartition(".")[0].removesuffix(".base_layer")
            if other.kind is not Kind.ADAPTER and param.name.startswith(f"{module}."):
                related.append(other)
    return any(part.holds(each) for each in (param, *related))


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _limit_violations(limits: LimitsSection, study: Study, agreement: Agreement) -> Iterator[str]:
    rounds, guarantee, upload = study.train.rounds, agreement.guarantee, 0
    if limits.rounds and rounds > limits.rounds:
        yield f"limits.rounds is {limits.rounds}, but the study has {rounds} rounds"
    if limits.bytes:
        run = forecast(
            agreement.method.plan,
            agreement.params,
            rounds=min(rounds, MAX_ROUNDS_CHECKED),
            wire_cost=agreement.wire_cost,
        )
        upload = min(sum(least for least, _ in client.uploads) for client in run.clients)
    if upload > limits.bytes:
        yield (
            f"limits.bytes is {megabytes(limits.bytes)} MB, but the study sends at least "
            f"{megabytes(upload)} MB"
        )
    protected = agreement.distributed_dp or (guarantee is not None and guarantee.unit == "example")
    if limits.epsilon and not protected:
        yield (
            f"limits.epsilon is {limits.epsilon:g}, but the study has no differential privacy that "
            "protects this site's examples from the server"
        )
    elif limits.epsilon and guarantee is not None:
        epsilon = replace(guarantee, delta=limits.delta).forecast_epsilon(rounds)
        if epsilon > limits.epsilon:
            yield (
                f"limits.epsilon is {limits.epsilon:g}, but the study spends epsilon "
                f"{epsilon:.3g} at delta {limits.delta:g}"
            )


def _privacy_violations(policy: Policy, study: Study, agreement: Agreement) -> Iterator[str]:
    guarantee = agreement.guarantee
    reveals_count = not (agreement.equal_weights and agreement.secagg.active)
    if guarantee is not None:
        reveals_count = guarantee.max_weight and not agreement.distributed_dp
    if not policy.reveal_example_count and reveals_count and agreement.secagg.active:
        yield (
            "reveal_example_count is false, but the study reveals the sum of the sites' numbers of "
            "examples for each part of the model: two such sums that differ by this site reveal "
            "its number; a study with [privacy], or with aggregation.equal_weights, does not"
        )
    elif not policy.reveal_example_count and reveals_count:
        yield (
            "reveal_example_count is false, but each update of the study reveals this site's "
            "number of examples; a study with [privacy] does not"
        )
    required, promised = policy.require_privacy, study.privacy
    if required is None:
        return
    if promised is None or promised.unit != required.unit:
        promise = f"protects each {promised.unit}" if promised else "has no differential privacy"
        yield f"require_privacy.unit is {required.unit!r}, but the study {promise}"
    elif promised.epsilon > required.epsilon or promised.delta > required.delta:
        yield (
            f"require_privacy asks for epsilon {required.epsilon:g} at delta {required.delta:g}, "
            f"but the study promises epsilon {promised.epsilon:g} at delta {promised.delta:g}"
        )
    if promised is not None and promised.ghost_clipping and not required.allow_ghost_clipping:
        yield (
            "require_privacy.allow_ghost_clipping is false, but the study has ghost_clipping: its "
            "promise holds only if the server does not choose values to amplify rounding"
        )


def _secagg_violations(policy: Policy, study: Study, agreement: Agreement) -> Iterator[str]:
    required, secagg = policy.min_sites_in_sum, agreement.secagg
    if not secagg.active:
        for name, value in (("min_sites_in_sum", required), ("colluders", policy.colluders)):
            if value:
                yield (
                    f"{name} is {value}, but the study has no secure aggregation: the server would "
                    "see this site's update"
                )
        return
    if secagg.colluders < policy.colluders:
        yield (
            f"colluders is {policy.colluders}, but the study's aggregation.colluders is "
            f"{secagg.colluders}"
        )
    if required:
        names = study.clients.names
        sampled = max(1, round(study.clients.fraction * len(names))) if names else 0
        try:
            threshold = secagg.threshold or (secagg.resolve_threshold(sampled) if sampled else 0)
        except FedplanError as error:
            yield str(error)
            return
        fewest = min(secagg.min_contributors, threshold)
        if fewest < required:
            yield (
                f"min_sites_in_sum is {required}, but the server may see a sum of only {fewest} "
                "sites in this study (aggregation.threshold and floor)"
            )


def example_filters(study: Study) -> list[str]:
    """Return the fields by which a study selects some of a site's examples, as `name = value`."""
    data = study.data
    values = {name: getattr(data, name) for name in ("filter", "train_filter", "max_examples")}
    return [f"data.{name} = {value}" for name, value in values.items() if value]
