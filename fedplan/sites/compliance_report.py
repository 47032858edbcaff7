# SPDX-License-Identifier: Apache-2.0
"""Compliance page of a site: the data that left, its approvals, its privacy, and an audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.federation.ledger.egress import (
    EGRESS_LOG,
    agreement_folders,
    bytes_by_part,
)
from fedplan.reports.explanation import sort_params
from fedplan.reports.figures.charts import Bar, bar_chart
from fedplan.reports.figures.drawing import Drawing
from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid, round_spans
from fedplan.reports.formats import byte_unit, megabytes
from fedplan.reports.pages.page import WIDTHS, Page, PageBlock, PageFigure, PageSection, block
from fedplan.reports.study_explanation import read_privacy_statement
from fedplan.sites.approvals import APPROVALS_FILE, APPROVED, UNDECIDED
from fedplan.sites.egress import (
    DatasetAccount,
    RunEgress,
    SiteRecord,
    format_limits,
    read_decisions,
    read_egress_report,
)
from fedplan.storage.append_log import head_file, read_head
from fedplan.storage.logs import utc_now

MAX_LISTED = 60
"""Answers of a run that the page lists; the egress log has all."""
LEGEND = {"c0": "values of this part left in this round"}
AUDITED = (
    "The hash chains of the egress log ({answers} answers) and of the approvals ({decisions} "
    "entries) are intact. Every update that left had a valid approval for its run, contains only "
    "parts of the model that its plan shares, and is counted in the account of its dataset. Every "
    "answer with counts of columns had a valid approval, and is in that account too. "
    "Metrics and other messages are listed below, but were not checked. A person with write access "
    "to these files could have replaced a whole chain: compare the lengths and hashes below with "
    "copies kept elsewhere."
)
"""Text of the audit badge if no fault was found."""
ROUNDS_CAPTION = "Each row is a part of the model; no values of a part with an empty row have left."
UNDECIDED_TEXT = "Nobody has decided on this study."


def compliance_page(state_folder: Path) -> Page:
    """Return a page on all data that left a site, from the files in the site's state folder.

    `faults` of the page lists all faults that the audit found. Raises DamagedLog if the egress log,
    the approvals or a dataset's privacy account were tampered with.
    """
    report = read_egress_report(state_folder)
    records = [each for each in report if isinstance(each, SiteRecord)]
    accounts = [each for each in report if isinstance(each, DatasetAccount)]
    decisions = read_decisions(state_folder)
    folders = {folder.name: folder for folder in agreement_folders(state_folder)}
    approved = frozenset(entry["study"] for entry in decisions if entry["decision"] == APPROVED)
    runs = [
        RunEgress(
            record,
            tuple(entry for entry in decisions if entry["study"] == record.study),
            state_folder,
            folders.get(record.run),
            tuple(accounts),
            approved,
        )
        for record in records
    ]
    sites = {str(record.agreement["site"]) for record in records if record.agreement}
    answer_count = sum(len(record.entries) for record in records)
    faults = tuple(fault for run in runs for fault in run.faults())
    audited = AUDITED.format(answers=answer_count, decisions=len(decisions))
    heads = (
        f"{name} {head.lines} lines, {head.sha256[:16]}"
        for name in (EGRESS_LOG, APPROVALS_FILE)
        if head_file(state_folder / name).exists()
        for head in [read_head(state_folder / name)]
    )
    audit = (
        block("audit", faults=faults, checked=audited, subject="The record of this site"),
        block("note", text=f"Lengths and hashes: {'; '.join(heads)}."),
    )
    columns = ("time", "decision", "name", "study", "by")
    rows = [
        (
            _minute(each["time"]),
            each["decision"],
            each["name"],
            each["study"][:12],
            each["approver"],
        )
        for each in decisions
        if each["decision"] not in UNDECIDED
    ]
    decided = block("table", columns=columns, rows=rows)
    return Page(
        f"Data that left {', '.join(sorted(sites)) or state_folder.name}",
        tuple(_lead(runs, accounts)),
        (
            PageSection("Audit", audit),
            *(_run_section(run, number) for number, run in enumerate(runs, 1)),
            PageSection("Decisions on studies", (decided,) if rows else ()),
        ),
        f"Written by fedplan at {_minute(utc_now())} UTC from the egress log in {state_folder}.",
        faults=faults,
    )


def _lead(
    runs: Sequence[RunEgress], accounts: Sequence[DatasetAccount]
) -> Iterator[str | PageBlock]:
    entries = [entry for run in runs for entry in run.record.entries]
    value_bytes, header_bytes = (
        sum(entry["count"] * entry[field] for entry in entries)
        for field in ("upload_bytes", "other_bytes")
    )
    update_count = sum(len(run.updates) for run in runs)
    run_count = sum(bool(run.updates) for run in runs)
    yield block(
        "total",
        amount=f"{value_bytes + header_bytes:,} bytes have left this site",
        text=f" in {len(entries)} answers: {value_bytes:,} bytes of model values, in "
        f"{update_count} updates of {run_count} {'run' if run_count == 1 else 'runs'}, and "
        f"{header_bytes:,} bytes of headers, counts, metrics and error codes.",
    )
    if parts := bytes_by_part(entries):
        named = ", ".join(f"{part} {count:,}" for part, count in parts.items())
        yield f"Bytes by part of the model: {named}. No values of other parts have left."
    for account in accounts:
        fields = account.json()
        spent = (
            f"epsilon {fields['epsilon_spent']:.4f} at delta {fields['delta']:g} has been spent"
            if fields["epsilon_spent"] is not None
            else "some answers had no noise, so there is no epsilon for this dataset"
        )
        yield (
            f"Dataset {fields['dataset']}, over all studies: {fields['updates']} training rounds, "
            f"{fields['layer_scores']} sets of layer scores and {fields['statistics']} sets of "
            f"counts; {spent}."
        )


def _run_section(run: RunEgress, number: int) -> PageSection:
    record, agreement = run.record, run.record.agreement
    title = f"{run.name}, {f'run {record.run}' if record.run else 'run without an id'}"
    agreed, server = "The site agreed to nothing in this run.", ""
    if run.statistics:
        title = f"{run.name}, statistics before training"
        agreed = f"Answers with counts of columns: {len(run.statistics)}."
    if agreement:
        agreed = (
            f"The site agreed to the plan {agreement['plan']} ({agreement['fingerprint']}) for the "
            f"model {agreement['model']}. Its own limits: {format_limits(agreement)}."
        )
    decisions = "; ".join(
        f"{each['decision']} by {each['approver']} {_minute(each['time'])}"
        for each in run.decisions
        if each["decision"] not in UNDECIDED
    )
    decisions = f"Study {record.study[:12]}: {decisions}." if decisions else UNDECIDED_TEXT
    if digests := sorted({entry["server"][:16] for entry in record.entries if entry["server"]}):
        server = (
            f"The data went to the server with the TLS certificate {', '.join(digests)} (SHA-256)."
        )
    texts = tuple(filter(None, (agreed, decisions, server, _privacy_text(run))))
    if not run.updates:
        codes = sorted({entry["code"] for entry in record.entries if entry["code"]})
        sent = f" Error codes that were sent: {', '.join(codes)}." if codes else ""
        return PageSection(title, (*texts, f"No model values left.{sent}"))
    parts = bytes_by_part(record.entries)
    size, unit = byte_unit(max(parts.values()))
    largest_first = sorted(parts.items(), key=lambda item: -item[1])
    bars = [Bar(part, count / size) for part, count in largest_first]
    chart = bar_chart("Bytes by part", bars, unit=unit, format_value=lambda value: f"{value:.4g}")
    wide, narrow = (_round_grid(run, width) for width in WIDTHS)
    figures = (
        PageFigure(f"parts-{number}", chart, caption="Bytes of model values, over all rounds."),
        PageFigure(f"rounds-{number}", wide, narrow, ROUNDS_CAPTION),
    )
    return PageSection(title, texts, figures, tuple(_answer_table(record)))


def _privacy_text(run: RunEgress) -> str:
    """The run's privacy statement, or why there is none; "" if agreement or folder are missing."""
    if run.agreement is None or run.folder is None:
        return ""
    if run.agreement.guarantee is None:
        return (
            "Differential privacy: off. The values that left are computed from this site's "
            "examples, without noise."
        )
    try:
        return read_privacy_statement(run.folder).text().partition("\nNot covered")[0]
    except FedplanError as error:
        return f"The spent epsilon is not known: {error}."


def _round_grid(run: RunEgress, width: float) -> Drawing:
    """Return a grid with a row per part; a cell covers rounds in which equally many bytes left."""
    sent = bytes_by_part(run.record.entries)
    parts = dict.fromkeys(sent)
    if run.agreement is not None:
        parts = dict.fromkeys(str(param.kind) for param in sort_params(run.agreement.params))
    rows = list[GridRow]()
    for part in parts:
        bytes_by_round = Counter[int]()
        for entry in run.updates:
            if count := entry["parts"].get(part, 0):
                bytes_by_round[entry["round"]] += count
        cells = (
            GridCell(first, last, (("c0", 1.0),), "left", "✓", f"{count} bytes per round")
            for first, last, count in round_spans(bytes_by_round)
        )
        total = f"{megabytes(sent[part])} MB" if part in sent else "nothing left"
        rows.append(GridRow(part, tuple(cells), total))
    last_round = max(entry["round"] for entry in run.updates)
    return cell_grid("Parts by round", rows, rounds=last_round, legend=LEGEND, width=width)


def _answer_table(record: SiteRecord) -> Iterator[PageBlock]:
    """Yield a heading and a table of the last answers of a run (at most MAX_LISTED), in bytes."""
    parts = list(bytes_by_part(record.entries))
    rows = [
        (
            _minute(entry["time"]),
            f"{entry['kind']} {entry['code']}".strip()
            + (f" ({entry['count']} times)" if entry["count"] > 1 else ""),
            str(entry["round"] or ""),
            *(f"{entry['parts'].get(part, 0):,}" for part in parts),
            f"{entry['count'] * entry['other_bytes']:,}",
        )
        for entry in record.entries[-MAX_LISTED:]
    ]
    yield block("heading", text="Answers, in bytes")
    if len(record.entries) > MAX_LISTED:
        text = f"The last {MAX_LISTED} of {len(record.entries)}: `fedplan egress` lists all."
        yield block("note", text=text)
    columns = ("time", "answer", "round", *parts, "headers")
    yield block("table", columns=columns, rows=rows, numbers=2 + len(parts))


def _minute(time: str) -> str:
    """Return an ISO 8601 time to the minute, as "2026-01-31 12:00"."""
    return time[:16].replace("T", " ")
