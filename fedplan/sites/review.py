# SPDX-License-Identifier: Apache-2.0
"""Review of a study for an approver: the data that would leave the site, and the changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.errors import printable
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import SCORE_COUNTS
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.language.resolution import MAX_ROUNDS_CHECKED, Participants
from fedplan.methods.phases import PlannedPhases
from fedplan.models.params import Param
from fedplan.reports.explanation import sort_params
from fedplan.reports.forecasts import Forecast, StageForecast, forecast
from fedplan.reports.formats import megabytes
from fedplan.reports.plan_warnings import study_exposure
from fedplan.secagg.config import NO_DEFENCE
from fedplan.sites.policy import (
    Policy,
    StatisticsPolicySection,
    example_filters,
    site_in_study,
)
from fedplan.studies.dictionary import dictionary, statistics_refusal
from fedplan.studies.experiment import outline_agreement, privacy_statement
from fedplan.studies.field_types import named_objects
from fedplan.studies.schema import Study, flatten_fields

ROLE_MEANINGS = {
    "shared": "trained at this site; its values are sent to the server",
    "kept": "trained at this site; its values stay at this site",
    "held": "values of this site that are not trained; they stay at this site",
    "frozen": "not trained; none of its values are sent",
}
"""Explanations of the role words in the table of parts."""
SECURE_SUMS = f"{NO_DEFENCE}: one site can spoil the model for all"
"""What a site should know of a study with secure aggregation."""
NO_PRIVACY = "No differential privacy; the values that leave are computed from this site's examples"


@dataclass(frozen=True)
class PartReview:
    """One part of the model: `roles` joined by " or ", and its largest uploads in bytes."""

    part: str
    roles: str
    bytes_per_round: int
    bytes_total: int


@dataclass(frozen=True)
class StudyReview:
    """The facts about a study that an approver needs; printing with rich shows a page of text.

    `disclosures` are all data that leaves besides model values, `changes` the differences from the
    last approved study, `warning` what the server can read from model values, `edges` which
    edges receive updates before it.
    """

    study: Study
    parts: tuple[PartReview, ...]
    plan: str
    privacy: str
    code: tuple[str, ...]
    disclosures: tuple[str, ...]
    changes: tuple[str, ...]
    violations: tuple[str, ...] = ()
    warning: str = ""
    edges: str = ""

    def json(self) -> dict[str, Any]:
        """Return the review as plain values, with the study's full digest."""
        purpose = self.study.purpose
        return {
            "study": self.study.full_digest,
            "name": self.study.name,
            "purpose": purpose.model_dump(mode="json") if purpose else None,
            "plan": self.plan,
            "parts": [asdict(part) for part in self.parts],
            "privacy": self.privacy,
            **({"secure_aggregation": SECURE_SUMS} if self._is_secure else {}),
            **({"edges": self.edges} if self.edges else {}),
            "warning": self.warning,
            "code": list(self.code),
            "disclosures": list(self.disclosures),
            "changes": list(self.changes),
            "violations": list(self.violations),
        }

    @property
    def _is_secure(self) -> bool:
        return self.study.aggregation.config.active

    def _answers(self) -> Iterator[tuple[str, str]]:
        """Yield questions of a data protection officer, each with the answer of this study."""
        study, purpose = self.study, self.study.purpose
        if purpose is None:
            yield "Why?", "The study states no purpose: it has no [purpose]."
        else:
            yield "Why?", purpose.question
            yield "Who asks?", f"{purpose.requester}, {purpose.institution}; {purpose.contact}"
            yield "By what right?", purpose.legal_basis
            yield "Who gets the model?", purpose.recipients
        days = f", until {purpose.ends}" if purpose else ""
        yield "For how long?", f"At most {study.train.rounds} rounds{days}."
        names = printable(", ".join(study.clients.names))
        yield "Which sites?", names or "Any that the server admits."
        chosen = "; ".join(example_filters(study))
        columns = (*study.task.input_columns, study.task.label, study.data.group)
        names = ", ".join(filter(None, dict.fromkeys((*columns, *dictionary(study)))))
        filtered = f"; training only on rows that {chosen} selects" if chosen else ""
        yield "What is read here?", printable(f"Columns {names}{filtered}.")
        total = megabytes(sum(part.bytes_total for part in self.parts))
        yield (
            "What leaves?",
            f"Up to {total} MB of model values, computed from the rows, and the items listed "
            f"below. Rows do not leave{', unless code below hides them' if self.code else ''}.",
        )
        yield "Can the values reveal a person?", self.warning or "The noise below bounds that."
        secure = f"\nSecure aggregation: {SECURE_SUMS}" if self._is_secure else ""
        yield "What protects them?", f"{self.privacy}{secure}"
        if self.edges:
            yield "Who else sees them?", self.edges
        yield "Does the policy allow it?", "\n".join(map(printable, self.violations)) or "Yes."

    def __rich__(self) -> RenderableType:
        study = self.study
        roles = {role for part in self.parts for role in part.roles.split(" or ")}
        meanings = (f"\n{role}: {text}" for role, text in ROLE_MEANINGS.items() if role in roles)
        continued = (
            f"\nThe study continues run {study.continue_from}: this site starts from its state of "
            "that run."
        )
        answers = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        answers.add_column(no_wrap=True, style="bold")
        answers.add_column(overflow="fold")
        for question, answer in self._answers():
            answers.add_row(question, Text(answer))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in ("part", "role", "MB per round", "MB in total"):
            table.add_column(name, justify="right" if name.startswith("MB") else "left")
        for part in self.parts:
            sizes = (megabytes(n) if n else "-" for n in (part.bytes_per_round, part.bytes_total))
            table.add_row(part.part, part.roles, *sizes)
        return Group(
            Text(f"{study.name}: study {study.full_digest}\n", style="bold"),
            answers,
            _bullet_list("Also sent to the server", self.disclosures),
            _bullet_list("Changes since the last approved study", self.changes),
            _bullet_list("Code that the study runs", self.code or ("only fedplan's own",)),
            Text(f"\nPlan: {self.plan}{continued if study.continue_from else ''}\n"),
            table,
            Text("".join(meanings)),
        )


def review_study(
    study: Study,
    last: Study | None = None,
    *,
    site: Turn | None = None,
    policy: Policy | None = None,
    violations: Sequence[str] = (),
) -> StudyReview:
    """Return the review of a study, computed from names and shapes without loading weights.

    `last` is the last approved study. Without `site`, the site's name and traits, the review is for
    the client with the largest upload. `policy` limits the metrics that leave. Raises FedplanError
    if the study cannot be built.
    """
    agreement = outline_agreement(study)
    parts = _review_parts(_forecast(study, agreement, site))
    last_parts = _review_parts(_forecast(last, outline_agreement(last), site)) if last else ()
    statement = privacy_statement(study)
    return StudyReview(
        study,
        parts,
        agreement.method.plan.text,
        statement.text() if statement else NO_PRIVACY,
        tuple(
            f"{each.name} ({each.origin})" for each in named_objects(study) if each.code_fingerprint
        ),
        tuple(_disclosures(study, agreement, policy)),
        tuple(_changes(study, last, parts, last_parts)),
        tuple(violations),
        study_exposure(agreement),
        _edges_text(study, site),
    )


def _edges_text(study: Study, site: Turn | None) -> str:
    """Return which edges see the updates of the site, or without `site` of any; "" if none."""
    edges = {
        edge: ", ".join(names)
        for edge, names in study.clients.edges.items()
        if site is None or site.client in names
    }
    texts = (f"{edge} receives the updates of {names}" for edge, names in edges.items())
    if not edges:
        return ""
    return f"{'; '.join(texts)}. The server above receives their sum, and what each site reports."


def _forecast(study: Study, agreement: Agreement, site: Turn | None) -> Forecast:
    phase_rule, site = agreement.method.phase_rule, site_in_study(study, site)
    return forecast(
        agreement.method.plan,
        agreement.params,
        rounds=min(study.train.rounds, MAX_ROUNDS_CHECKED),
        phases=phase_rule.after if isinstance(phase_rule, PlannedPhases) else None,
        participants=Participants({site.client: site.traits}) if site else None,
        wire_cost=agreement.wire_cost,
    )


def _review_parts(run: Forecast) -> tuple[PartReview, ...]:
    client = max(run.clients, key=lambda each: each.max_upload)
    params_by_kind = dict[str, list[Param]]()
    for param in sort_params(run.params):
        params_by_kind.setdefault(param.label, []).append(param)

    def upload(params: list[Param], stage: StageForecast) -> int:
        shared = (param for param in params if stage.heaviest[param] is Role.SHARE)
        return sum(map(run.wire_cost.upload_bytes, shared))

    def review(kind: str, params: list[Param]) -> PartReview:
        permitted = {stage.permitted[param] for stage in client.stages for param in params}
        roles = " or ".join(role.word for role in Role if role in permitted)
        per_round = max(upload(params, stage) for stage in client.stages)
        total = sum(len(stage.rounds) * upload(params, stage) for stage in client.stages)
        return PartReview(kind, roles, per_round, total)

    return tuple(review(kind, params) for kind, params in params_by_kind.items())


def _disclosures(study: Study, agreement: Agreement, policy: Policy | None) -> Iterator[str]:
    """Yield a phrase for each piece of data that leaves besides the model's values."""
    yield "this site's name, its traits, and the versions of its software packages"
    yield (
        "digests of the values that it trains; those of values that stay here are keyed with a "
        "secret of this site"
    )
    if agreement.distributed_dp:
        yield (
            "messages of secure aggregation: this site clips its update and adds noise to it, and "
            "the server learns only the sum over the sites"
        )
    elif agreement.secagg.active:
        summed = "values" if agreement.equal_weights else "values and of numbers of examples"
        yield f"messages of secure aggregation: of {summed}, the server learns only sums over sites"
    elif agreement.guarantee is None:
        yield "its number of training examples, and its number of training steps"
        if policy is None or "loss" in policy.metrics:
            yield "its mean training loss"
    if agreement.max_k and agreement.secagg.active:
        yield "the layers that it has chosen to train"
    elif agreement.max_k:
        yield "a score of each block of the model, by which the layers to train are chosen"
    counts = policy.statistics if policy else StatisticsPolicySection()
    if counts and study.statistics and not statistics_refusal(study):
        columns, sections = dictionary(study), study.statistics.columns
        yield (
            "once, if the server asks: its number of rows, and how many have each code, range or "
            f"length of these columns, in counts of {counts.rule.least} or more: "
            f"{', '.join(columns)}"
        )
        for name, column in columns.items():
            unit = sections[name].unit if name in sections else None
            yield f"the counts of {name}{f', in {unit}' if unit else ''}: {', '.join(column.cells)}"
        if study.statistics.require:
            yield "whether these counts show a difference from the study's data dictionary"
    if not study.evaluate.on_clients:
        return
    if agreement.hides_metrics:
        if policy is None or SCORE_COUNTS in policy.metrics:
            noise = study.evaluate.noise_multiplier
            noisy = f", with noise of multiplier {noise:g}, which epsilon covers" if noise else ""
            masks = "; the server learns only their sum over sites"
            yield (
                f"every {study.evaluate.every} rounds, counts of right and wrong predictions and "
                f"of predicted probabilities on its test examples{noisy}"
                f"{masks if agreement.secagg.active else ''}"
            )
        return
    if policy is None:
        yield f"every {study.evaluate.every} rounds, metrics and number of its test examples"
    elif policy.metrics:
        yield (
            f"every {study.evaluate.every} rounds, the number of its test examples and these "
            f"metrics of them, if there are {policy.min_examples} or more: "
            f"{', '.join(policy.metrics)}"
        )


def _changes(
    study: Study,
    last: Study | None,
    parts: tuple[PartReview, ...],
    last_parts: tuple[PartReview, ...],
) -> Iterator[str]:
    """Yield each difference from the last approved study: roles of parts, then fields."""
    if last is None:
        yield "everything: no study was approved at this site before"
        return
    old_roles, new_roles = (
        {part.part: part.roles for part in reviewed} for reviewed in (last_parts, parts)
    )
    for part in {**old_roles, **new_roles}:
        if old_roles.get(part) != new_roles.get(part):
            yield f"{part}: {old_roles.get(part, 'absent')} -> {new_roles.get(part, 'absent')}"
    old, new = (flatten_fields(each.model_dump(mode="json")) for each in (last, study))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"{name}: {_short_repr(old.get(name))} -> {_short_repr(new.get(name))}"
    if study.digest != last.digest and old == new:
        yield "the code that the study names has changed"


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _bullet_list(heading: str, lines: Sequence[str]) -> Text:
    return Text(f"\n{heading}:" + "".join(f"\n  - {printable(line)}" for line in lines))
