# SPDX-License-Identifier: Apache-2.0
"""The officer's page: what left a site, under which plan and guarantee, and by whose word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.egress import RECORD, UPDATE, agreements_in, by_part
from fedplan.language.plan import Role
from fedplan.language.resolution import touched
from fedplan.naming import allowing
from fedplan.reports.egress import Balance, SiteRecord, limits_said, told_of
from fedplan.reports.explanation import in_order
from fedplan.reports.figures.bars import Bar, bar_chart
from fedplan.reports.figures.drawing import Drawing
from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid
from fedplan.reports.pages.markup import Html, paragraphs, table, tag
from fedplan.reports.pages.page import Page, PageSection, Shown
from fedplan.reports.pages.verdict import badge
from fedplan.reports.preview import stated
from fedplan.reports.units import byte_unit, megabytes
from fedplan.sites.approvals import APPROVALS, APPROVED, ASIDE, BEGUN
from fedplan.sites.inbox import Inbox
from fedplan.storage.chain import BrokenChain, head_file, read_chain, read_head
from fedplan.storage.logs import now
from fedplan.studies.folder import agreement_in, study_in

MOST = 60
"""Answers of a run that a page lists; the record has all."""
SAID = ("word", "time", "study", "name", "approver", "run")
"""What every line of the approvals says."""
LEGEND = {"share": "values of this part left in this round"}


@dataclass(frozen=True)
class Departure:
    """What left a home in one run: the record, what was said to its study, and where it lies."""

    record: SiteRecord
    words: tuple[dict[str, Any], ...]
    home: Path
    folder: Path | None
    balances: tuple[Balance, ...] = ()
    approved: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.record.agreed.get("experiment") or "no study")

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        """The answers in which values left."""
        return [line for line in self.record.lines if line["kind"] == UPDATE]

    @property
    def agreement(self) -> Agreement | None:
        """What the site agreed to, by the study as it came, if that is still here."""
        return None if isinstance(self._found, str) else self._found

    @cached_property
    def _found(self) -> Agreement | str:
        """The same, or why it cannot be told. Code that a study names is not run for a page."""
        if self.folder is None:
            return f"{self.home} has no folder of it"
        try:
            study = Inbox(self.home).read(self.record.study).study
            return agreement_in(self.folder, study)
        except FedplanError as error:
            return str(error)

    def _is_of_an_approved_study(self) -> bool:
        """Whether its folder, which keeps the last of a run's studies, has one of those."""
        try:
            with allowing(()):
                return self.folder is not None and study_in(self.folder).whole in self.approved
        except FedplanError:
            return False

    def faults(self) -> Iterator[str]:
        """What left without a word, or of a part that the plan does not share."""
        yield from self.unapproved()
        if not self.updates:
            return
        yield from self._uncounted()
        if self.agreement is None:
            yield f"{self.name}: what its plan shares cannot be checked: {self._found}"
            return
        if not self._is_of_an_approved_study():
            yield f"{self.name}: what lies in its folder is no study that was approved here"
        plan, params = self.agreement.method.plan, self.agreement.params
        if self.record.agreed["plan"] != plan.text:
            yield f"{self.name}: its folder says another plan than that of the approved study"
        shared = {str(p.kind) for p in touched(plan, params, Role.SHARE)}
        for part in by_part(self.record.lines):
            if part not in shared:
                yield f"{self.name}: {part} left, and the plan shares none of it"

    def unapproved(self) -> Iterator[str]:
        """Updates that left without an approval of this run that stood by then."""
        for line in self.updates:
            if not self._is_approved(line):
                who = line["approver"] or "nobody"
                yield (
                    f"{self.name}, round {line['round']}: it left by the word of {who}, and no "
                    f"such approval stood in {APPROVALS} by then"
                )

    def _uncounted(self) -> Iterator[str]:
        """Updates that the accounts do not know, or that are called hidden without a charge."""
        answered = {k: hidden for each in self.balances for k, hidden in each.answered.items()}
        charged = {about for each in self.balances for about in each.charged}
        guarded = self.agreement is not None and self.agreement.guarantee is not None
        for line in self.updates:
            where, request = f"{self.name}, round {line['round']}", line["request"]
            if request not in answered:
                yield f"{where}: no account of a dataset has a line of it"
            elif answered[request] and not (guarded and request in charged):
                yield f"{where}: its account says that noise hides it, and nothing was charged"

    def _is_approved(self, line: Mapping[str, Any]) -> bool:
        """Whether the last word on the study, when an update left, was the approval it names.

        An approval is of one run: the first that was begun by it.
        """
        before = [each for each in self.words if each["time"] <= line["time"]]
        said = [each for each in before if each["word"] not in ASIDE]
        last = said[-1] if said else {"word": "", "approver": ""}
        if last["word"] != APPROVED or last["approver"] != line["approver"]:
            return False
        begun = [each["run"] for each in before[before.index(last) :] if each["word"] == BEGUN]
        return begun[:1] == [self.record.run]


def is_home(folder: Path) -> bool:
    """Whether a folder is a site's home: whether it has a record of what left it."""
    return (folder / RECORD).exists() or head_file(folder / RECORD).exists()


def officer_page(home: Path) -> Page:
    """What left a home, in words and numbers. A record that is broken raises, and tells nothing."""
    found = told_of(home)
    records = [each for each in found if isinstance(each, SiteRecord)]
    balances = [each for each in found if isinstance(each, Balance)]
    said = _approvals(home)
    folders = _folders(home)
    approved = frozenset(line["study"] for line in said if line["word"] == APPROVED)
    departures = [
        Departure(
            each,
            tuple(line for line in said if line["study"] == each.study),
            home,
            folders.get(each.run),
            tuple(balances),
            approved,
        )
        for each in records
    ]
    sites = {str(each.agreed["site"]) for each in records if each.agreed}
    lines = sum(len(each.lines) for each in records)
    faults = tuple(fault for each in departures for fault in each.faults())
    return Page(
        f"What left {', '.join(sorted(sites)) or home.name}",
        tuple(_lead(departures, balances)),
        (
            _verdict(faults, lines, len(said), _heads(home)),
            *(_section(each, number) for number, each in enumerate(departures, 1)),
            _said(said),
        ),
        f"Written by fedplan {now()[:16].replace('T', ' ')} UTC from the record in {home}.",
        faults=faults,
    )


def _approvals(home: Path) -> list[dict[str, Any]]:
    """All that was said to studies here, from a chain that is proved."""
    file = home / APPROVALS
    said = read_chain(file) if file.exists() or head_file(file).exists() else []
    for number, line in enumerate(said, 1):
        if lacking := [name for name in SAID if not isinstance(line.get(name), str)]:
            raise BrokenChain(f"line {number} of {file} has no {lacking[0]}: it was changed")
    return said


def _heads(home: Path) -> str:
    """How far both chains go: whoever was told so earlier can compare."""
    told = (
        f"{name} {head.lines} lines, {head.sha256[:16]}"
        for name in (RECORD, APPROVALS)
        if head_file(home / name).exists()
        for head in [read_head(home / name)]
    )
    return f"Heads: {'; '.join(told)}."


def _folders(home: Path) -> dict[str, Path]:
    """Where the site keeps what it has of each run."""
    return {folder.name: folder for folder in agreements_in(home)}


def _lead(departures: Sequence[Departure], balances: Sequence[Balance]) -> Iterator[Html]:
    lines = [line for each in departures for line in each.record.lines]
    up, said = (sum(line["times"] * line[what] for line in lines) for what in ("up", "said"))
    updates = sum(len(each.updates) for each in departures)
    runs = sum(bool(each.updates) for each in departures)
    parts = by_part(lines)
    named = ", ".join(f"{part} {count:,}" for part, count in parts.items())
    yield tag(
        "p",
        tag("b", f"{up + said:,} bytes have left this site"),
        f" in {len(lines)} answers. {up:,} of them are values of the model, in {updates} updates "
        f"of {runs} {'run' if runs == 1 else 'runs'}; {said:,} are headers, words and codes.",
    )
    if parts:
        yield tag(
            "p", f"In bytes, by part: {named}. Of parts that are not named here nothing has left."
        )
    for each in balances:
        told = each.json()
        hidden = (
            f"epsilon {told['epsilon']:.4f} at delta {told['delta']:g} is spent"
            if told["epsilon"] is not None
            else "not all of it is hidden by noise, so no epsilon can be told"
        )
        yield tag(
            "p",
            f"Of the dataset {told['account']}, over all studies: {told['turns']} turns and "
            f"{told['polls']} polls; {hidden}.",
        )


def _verdict(faults: Sequence[str], lines: int, said: int, heads: str) -> PageSection:
    words = (
        f"The record of {lines} answers and the {said} words on studies are each a whole chain. "
        "Every update left by an approval of its run that stands there, of parts that its plan "
        "shares, and is counted in an account. Scores and other words are listed below, and not "
        "checked. Whoever may write here could write another chain: compare the heads below with "
        "those that others were told."
    )
    return PageSection(
        "Verdict", (badge(faults, words, "What left this site"), tag("p", heads, class_="faint"))
    )


def _section(departure: Departure, number: int) -> PageSection:
    record, agreed = departure.record, departure.record.agreed
    run = f"run {record.run}" if record.run else "a run of no id"
    title = f"{departure.name}, {run}"
    words = paragraphs(
        _agreed(agreed), _by_whom(departure), _servers(record), _guarantee(departure)
    )
    if not departure.updates:
        codes = sorted({line["code"] for line in record.lines if line["code"]})
        told = f"No value left. Codes that were told: {', '.join(codes)}." if codes else ""
        return PageSection(title, (*words, *paragraphs(told or "No value left.")))
    figures = (
        Shown(f"parts-{number}", _bars(departure), "Bytes of values that left, over all rounds."),
        Shown(f"rounds-{number}", _rounds(departure), ROUNDS, whole=True),
    )
    return PageSection(title, tuple(words), figures, tuple(_answers(record)))


ROUNDS = "A row is a part of the model; of a row without a mark nothing has left."


def _agreed(agreed: Mapping[str, Any]) -> str:
    if not agreed:
        return "Nothing was agreed to in it."
    return (
        f"The site agreed to the plan {agreed['plan']} ({agreed['fingerprint']}) for the model "
        f"{agreed['model']}. Its own limits: {limits_said(agreed)}."
    )


def _by_whom(departure: Departure) -> str:
    said = [line for line in departure.words if line["word"] not in ASIDE]
    if not said:
        return "Nobody has said a word to this study."
    told = "; ".join(f"{line['word']} by {line['approver']} {_time(line['time'])}" for line in said)
    return f"Study {departure.record.study[:12]}: {told}."


def _servers(record: SiteRecord) -> str:
    servers = sorted({line["server"][:16] for line in record.lines if line["server"]})
    return f"It went to the server with the certificate {', '.join(servers)}." if servers else ""


def _guarantee(departure: Departure) -> str:
    agreement = departure.agreement
    if agreement is None or departure.folder is None:
        return ""
    if agreement.guarantee is None:
        return "No noise hides what left: it follows from this site's rows."
    try:
        return stated(departure.folder).text().partition("\nNot covered")[0]
    except FedplanError as error:
        return f"What it spent cannot be told: {error}."


def _bars(departure: Departure) -> Drawing:
    parts = by_part(departure.record.lines)
    size, unit = byte_unit(max(parts.values()))
    bars = [Bar(part, count / size) for part, count in sorted(parts.items(), key=lambda e: -e[1])]
    told = "Values that left, by part"
    return bar_chart(told, bars, unit=unit, told=lambda each: f"{each:.4g}")


def _rounds(departure: Departure) -> Drawing:
    """Every part of the model, and the rounds in which something of it left."""
    parts = by_part(departure.record.lines)
    kinds = dict.fromkeys(parts)
    if departure.agreement is not None:
        kinds = dict.fromkeys(str(p.kind) for p in in_order(departure.agreement.params))
    rows = [
        GridRow(
            kind,
            tuple(_cells(departure.updates, kind)),
            f"{megabytes(parts[kind])} MB" if kind in parts else "nothing left",
        )
        for kind in kinds
    ]
    last = max(line["round"] for line in departure.updates)
    return cell_grid("Values that left, by part and round", rows, rounds=last, legend=LEGEND)


def _cells(updates: Sequence[Mapping[str, Any]], kind: str) -> Iterator[GridCell]:
    sent = dict[int, int]()
    for line in updates:
        if count := line["parts"].get(kind, 0):
            sent[line["round"]] = sent.get(line["round"], 0) + count
    order = enumerate(sorted(sent))
    for (count, _), found in groupby(order, key=lambda each: (sent[each[1]], each[1] - each[0])):
        numbers = [number for _, number in found]
        tip = f"{count} bytes a round"
        yield GridCell(numbers[0], numbers[-1], (("share", 1.0),), "left", "✓", tip)


def _answers(record: SiteRecord) -> Iterator[Html]:
    """Each answer that left, the last ones if there are many."""
    parts = list(by_part(record.lines))
    rows = [
        (
            _time(line["time"]),
            f"{line['kind']} {line['code']}".strip()
            + (f" ({line['times']} times)" if line["times"] > 1 else ""),
            str(line["round"] or ""),
            *(f"{line['parts'].get(part, 0):,}" for part in parts),
            f"{line['times'] * line['said']:,}",
        )
        for line in record.lines[-MOST:]
    ]
    yield tag("h3", "Every answer, in bytes")
    if len(record.lines) > MOST:
        words = f"The last {MOST} of {len(record.lines)}: fedplan egress tells all."
        yield tag("p", words, class_="faint")
    yield table(("time", "answer", "round", *parts, "words"), rows, numbers=2 + len(parts))


def _said(lines: Sequence[Mapping[str, Any]]) -> PageSection:
    """What was said to studies here, by whom and when, refusals too."""
    told = [line for line in lines if line["word"] not in ASIDE]
    rows = [
        (_time(line["time"]), line["word"], line["name"], line["study"][:12], line["approver"])
        for line in told
    ]
    if not rows:
        return PageSection("Words on studies")
    return PageSection("Words on studies", (table(("time", "word", "name", "study", "by"), rows),))


def _time(told: str) -> str:
    return told[:16].replace("T", " ")
