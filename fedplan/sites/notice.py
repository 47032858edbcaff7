# SPDX-License-Identifier: Apache-2.0
"""Notices: what a study would let leave a site, and what is new in it, for who is to approve it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.federation.agreement import Agreement
from fedplan.language.crowds import Crowd
from fedplan.language.horizon import MANY
from fedplan.language.plan import Role
from fedplan.language.turn import Turn
from fedplan.methods.phases import Planned
from fedplan.models.params import Param
from fedplan.reports.explanation import in_order
from fedplan.reports.forecasts import forecast
from fedplan.reports.units import megabytes
from fedplan.reports.views import Forecast, Segment
from fedplan.sites.policy import Policy, seen_in
from fedplan.studies.names import found_in
from fedplan.studies.plain import flat
from fedplan.studies.schema import Study
from fedplan.studies.stage import outline_of, statement_of

MEANINGS = {
    "shared": "this site trains it, and its values leave",
    "kept": "this site trains its own, and nobody else sees it",
    "held": "this site's own, at rest, and nobody else sees it",
    "frozen": "nobody trains it, and nothing of it leaves",
}


@dataclass(frozen=True)
class PartNotice:
    """What becomes of one part: its roles, and the bytes of it that leave in a round and in all."""

    part: str
    roles: str
    each: int
    total: int


@dataclass(frozen=True)
class Notice:
    """All that a person should know of a study before saying yes: print it, or ask for `json`."""

    study: Study
    parts: tuple[PartNotice, ...]
    plan: str
    privacy: str
    code: tuple[str, ...]
    tells: tuple[str, ...]
    news: tuple[str, ...]
    against: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        return {
            "study": self.study.whole,
            "name": self.study.name,
            "plan": self.plan,
            "parts": [vars(each) for each in self.parts],
            "privacy": self.privacy,
            "code": list(self.code),
            "tells": list(self.tells),
            "news": list(self.news),
            "against": list(self.against),
        }

    def __rich__(self) -> RenderableType:
        study, total = self.study, sum(each.total for each in self.parts)
        earlier = [study.continues] if study.continues else []
        used = {word for each in self.parts for word in each.roles.split(" or ")}
        return Group(
            Text(f"{study.name}: study {study.whole}", style="bold"),
            Text(f"{self.plan}\n{study.train.rounds} rounds, {megabytes(total)} MB leave in all\n"),
            *(Text(f"It begins with what this site kept in the run {n}.\n") for n in earlier),
            self._table(),
            Text("".join(f"\n{word}: {MEANINGS[word]}" for word in MEANINGS if word in used)),
            _listed("Beside the parts there leave", self.tells),
            Text(f"\nPrivacy: {self.privacy}"),
            _listed("Code that it names", self.code or ("none but fedplan's own",)),
            _listed("New against the last study that was approved", self.news),
            _listed("Against the policy", self.against or ("nothing",)),
        )

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in ("part", "", "MB a round", "MB in all"):
            table.add_column(name, justify="right" if name.startswith("MB") else "left")
        for each in self.parts:
            sizes = (megabytes(n) if n else "-" for n in (each.each, each.total))
            table.add_row(each.part, each.roles, *sizes)
        return table


def shown(
    study: Study,
    last: Study | None = None,
    *,
    site: Turn | None = None,
    policy: Policy | None = None,
    against: Sequence[str] = (),
) -> Notice:
    """What a study would let leave, from names and shapes, and what is new against another.

    `site` is the site as plans see it; without it, the client that sends most is meant.
    """
    agreement = outline_of(study)
    parts = _parts(_forecast(study, agreement, site))
    before = _parts(_forecast(last, outline_of(last), site)) if last else ()
    return Notice(
        study,
        parts,
        agreement.method.plan.text,
        _privacy(study),
        tuple(f"{each.name} ({each.origin})" for each in found_in(study) if each.content),
        tuple(_tells(study, agreement, policy)),
        tuple(_news(study, last, parts, before)),
        tuple(against),
    )


def _forecast(study: Study, agreement: Agreement, site: Turn | None) -> Forecast:
    announce, site = agreement.method.announce, seen_in(study, site)
    return forecast(
        agreement.method.plan,
        agreement.params,
        rounds=min(study.train.rounds, MANY),
        phases=announce.after if isinstance(announce, Planned) else None,
        crowd=Crowd({site.client: site.traits}) if site else None,
        fare=agreement.fare,
    )


def _parts(found: Forecast) -> tuple[PartNotice, ...]:
    view = max(found.views, key=lambda each: each.up)
    kinds = dict[str, list[Param]]()
    for param in in_order(found.params):
        kinds.setdefault(str(param.kind), []).append(param)

    def sent(params: list[Param], stage: Segment) -> int:
        return sum(found.fare.up(p) for p in params if stage.heaviest[p] is Role.SHARE)

    def notice(part: str, params: list[Param]) -> PartNotice:
        had = {stage.permitted[p] for stage in view.stages for p in params}
        roles = " or ".join(role.word for role in Role if role in had)
        each = max(sent(params, stage) for stage in view.stages)
        total = sum(len(stage.rounds) * sent(params, stage) for stage in view.stages)
        return PartNotice(part, roles, each, total)

    return tuple(notice(part, params) for part, params in kinds.items())


def _privacy(study: Study) -> str:
    said = statement_of(study)
    if said is None:
        return "nothing is hidden: what leaves follows from this site's rows"
    return said.text()


def _tells(study: Study, agreement: Agreement, policy: Policy | None) -> Iterator[str]:
    """What leaves beside values: a few words and numbers."""
    yield "this site's name, its traits and the versions of its packages"
    yield "digests of what it trains, keyed by a secret where it is the site's own"
    if agreement.in_shares:
        yield (
            "keys and shares of a masked sum: its change, clipped here and with noise that this "
            "site adds, of which the server learns the sum with all other sites' alone"
        )
    elif agreement.masking.active:
        of = "values" if agreement.masking.alike else "values and of rows"
        yield f"keys and shares of a masked sum: of {of} the server learns sums alone"
    elif agreement.guarantee is None:
        yield "how many rows it has, and how many steps it took"
        if policy is None or "loss" in policy.metrics:
            yield "the mean loss of its training"
    if agreement.most and agreement.masking.active:
        yield "which layers it has chosen"
    elif agreement.most:
        yield "scores of the model's blocks, by which layers are chosen"
    yield from _scores(study, agreement, policy)


def _scores(study: Study, agreement: Agreement, policy: Policy | None) -> Iterator[str]:
    """What leaves of the site's held-out rows."""
    if not study.evaluate.sites or agreement.guarantee is not None:
        return
    asked = f"every {study.evaluate.every} rounds, scores of the rows that it holds out"
    if policy is None:
        yield f"{asked}, and how many these are"
    elif policy.metrics:
        allowed, least = ", ".join(policy.metrics), policy.least_rows
        yield f"{asked}, if they are {least} or more, and how many these are: {allowed}"


def _news(
    study: Study,
    last: Study | None,
    parts: tuple[PartNotice, ...],
    before: tuple[PartNotice, ...],
) -> Iterator[str]:
    """What is new, part by part and then field by field."""
    if last is None:
        yield "all of it: no study was approved here before"
        return
    one, other = ({each.part: each.roles for each in parts_} for parts_ in (before, parts))
    for part in {**one, **other}:
        if one.get(part) != other.get(part):
            yield f"{part}: {one.get(part, 'not there')} -> {other.get(part, 'not there')}"
    was, now = (flat(each.model_dump(mode="json")) for each in (last, study))
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            yield f"{name}: {_short(was.get(name))} -> {_short(now.get(name))}"
    if study.digest != last.digest and was == now:
        yield "the code that it names has changed"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _listed(heading: str, lines: Sequence[str]) -> Text:
    return Text(f"\n{heading}:" + "".join(f"\n  - {line}" for line in lines))
