# SPDX-License-Identifier: Apache-2.0
"""A report is one file that fetches nothing, tells what the folder tells, and hides who is hidden."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from commands import STUDY, run
from jinja2 import UndefinedError

import fedplan as fp
from fedplan.errors import FedplanError
from fedplan.federation.ledger.records import TurnRecord
from fedplan.federation.ledger.status import STATUS, RunState, RunStatus
from fedplan.reports.pages.facts import RunFacts, group_runs, read_run_facts
from fedplan.reports.pages.page import Page, PageBlock, PageSection, block
from fedplan.reports.pages.round_grids import (
    MAX_CLIENTS,
    participation_section,
    roles_section,
    turn_outcome,
)
from fedplan.reports.pages.run_report import report_page, watch_report
from fedplan.reports.pages.traffic import count_traffic
from fedplan.storage.locks import current_process
from fedplan.studies.run import read_run

BAD = '<script>alert("1")</script>'
NAMES = [BAD, "north & south", "=cmd()"]
CLIENT = '[privacy]\nunit = "client"\nepsilon = 50.0\nnoise_multiplier = 2.0\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of a tiny study, by the names of their folders: all tests read the same ones."""
    folder, before = tmp_path_factory.mktemp("pages"), Path.cwd()
    os.chdir(folder)
    draw = np.random.default_rng(0)
    whose = np.array([NAMES[i % 3] for i in range(60)])
    tables = {"image": lambda n: draw.integers(0, 255, (n, 8, 8), dtype=np.uint8)}
    tables["digit"] = lambda n: draw.integers(0, 3, n)
    rows = {
        f"{k}_{s}": make(n) for k, make in tables.items() for s, n in (("train", 60), ("test", 20))
    }
    np.savez("digits.npz", **rows, whose_train=whose, whose_test=whose[:20])
    named = STUDY.replace(
        'partition = "dirichlet"\nalpha = 0.5\nnum_clients = 3',
        'partition = "column"\npartition_column = "whose"\nnum_clients = 3',
    )
    named = named.replace("[clients]", f"[clients]\nnames = {json.dumps(NAMES)}")
    private = named.replace("dropout_fraction = 0.1", "fraction = 0.7") + CLIENT
    for name, text, seed in (("a", named, 0), ("b", named, 1), ("hidden", private, 0)):
        Path(f"{name}.toml").write_text(text)
        fp.run_study(fp.read_study(Path(f"{name}.toml"), [f"seed={seed}"]), name)
    yield folder
    os.chdir(before)


class Seen(HTMLParser):
    """The elements of a page, the attributes that could fetch, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.fetched, self.words = list[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.fetched += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def headings(text: str) -> list[str]:
    return [part.partition("</h2>")[0] for part in text.split("<h2>")[1:]]


def files(folder: Path) -> dict[Path, str]:
    found = (file for file in folder.rglob("*") if file.is_file())
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in found}


def test_a_report_is_one_file_that_fetches_and_runs_nothing(place: Path) -> None:
    before = files(place / "a")
    text = fp.report(place / "a", place / "a.html").read_text()
    seen = Seen(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(seen.elements)
    assert not seen.fetched and "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text and files(place / "a") == before
    assert headings(text) == [
        *("Roles of model parts", "Learning curves", "Test scores", "Clients", "Client drift"),
        *("Upload and download", "Participation", "Record", "Audit"),
    ]


def test_a_client_of_any_name_stays_a_text(place: Path) -> None:
    text = report_page([place / "a"]).html()
    assert "<script" not in text and BAD in "".join(Seen(text).words)


def test_every_kind_of_block_escapes_its_texts() -> None:
    bad = f"{BAD}\u202e"
    blocks = (
        bad,
        block("note", text=bad),
        block("heading", text=bad),
        block("total", amount=bad, text=bad),
        block("bullets", title=bad, items=[bad]),
        block("table", columns=[bad], rows=[[bad]], numbers=1),
        block("audit", faults=[bad] * 30, checked=bad, subject=bad),
        block("audit", faults=[], checked=bad),
    )
    text = Page(bad, blocks, (PageSection(bad, blocks, after=blocks),), bad).html()
    assert "<script" not in text and "\u202e" not in text
    assert text.count("&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;\ufffd") == 3 * 31 + 4
    with pytest.raises(UndefinedError):
        Page("x", (PageBlock("unknown", {}),), ()).html()


def test_where_clients_are_hidden_no_page_and_no_table_names_one(place: Path) -> None:
    page = report_page([place / "hidden"])
    page.write(place / "hidden.html", csv=place / "hidden-csv")
    told = (place / "hidden.html").read_text()
    told += "".join(file.read_text() for file in (place / "hidden-csv").iterdir())
    words = "".join(Seen(told).words)
    assert not [name for name in NAMES if name in words]
    assert "Differential privacy" in headings(told) and "epsilon.csv" in os.listdir(
        place / "hidden-csv"
    )
    assert "participation.csv" not in os.listdir(place / "hidden-csv")
    turns = sum(map(len, read_run_facts(read_run(place / "hidden")).turns))
    assert "worst" not in words and f"{turns} turns" not in words
    assert not {"upload-by-part.csv", "drift.csv", "clients.csv"} & set(
        os.listdir(place / "hidden-csv")
    )


@pytest.mark.parametrize("folder", ["a", "b", "hidden"])
def test_bytes_by_part_are_those_of_the_ledger(place: Path, folder: str) -> None:
    facts = read_run_facts(read_run(place / folder))
    turns = [turn for held in facts.turns for turn in held]
    found = count_traffic(facts)
    assert found.up.total() == sum(turn.upload_bytes for turn in turns) > 0
    assert found.down.total() == sum(turn.download_bytes for turn in turns) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["scaffold", "safl", "fedrep", "fedbabu", "fedit"])
def test_bytes_by_part_are_those_of_the_ledger_whatever_travels(here: Path, method: str) -> None:
    """Riders, blocks that are chosen, parts that come back, and adapters."""
    said = f'name = "{method}"' + ("\nsettings = { k = 1 }" if method == "safl" else "")
    text = re.sub('plan = ".*"', said, (here / "study.toml").read_text())
    (here / "study.toml").write_text(text.replace("[clients]", "[clients]\nlate_fraction = 0.2"))
    fp.run_study("study.toml", "out")
    facts = read_run_facts(read_run("out"))
    turns, found = [turn for held in facts.turns for turn in held], count_traffic(facts)
    assert found.up.total() == sum(turn.upload_bytes for turn in turns)
    assert found.down.total() == sum(turn.download_bytes for turn in turns)
    assert "verified<" in report_page(["out"]).html()


def test_the_grid_of_roles_is_what_the_ledger_says(place: Path) -> None:
    """The study freezes query and key after its first round, and keeps the head."""
    (figure,) = roles_section(read_run_facts(read_run(place / "a"))).figures
    told = {(row[0], row[1], row[2]): row[3] for row in figure.drawing.rows}
    assert told["query", 1, 1] == "shared" and told["query", 2, 3] == "frozen"
    assert told["head", 1, 3] == "kept" and told["mlp", 1, 3] == "shared"
    assert "all clients had the same roles" in figure.caption


def test_the_tables_of_a_report_have_the_numbers_of_the_run(place: Path) -> None:
    code, said = run(
        "report",
        str(place / "a"),
        "-o",
        str(place / "x.html"),
        "--csv",
        str(place / "csv"),
        "--json",
    )
    assert code == 0 and json.loads(said) == {"file": str(place / "x.html"), "fault_count": 0}
    with (place / "csv" / "scores.csv").open() as out:
        rows = [row for row in csv.DictReader(out) if row["series"] == "global (common test)"]
    metrics = read_run(place / "a").metrics
    assert [float(row["accuracy"]) for row in rows] == [row["global.accuracy"] for row in metrics]
    with (place / "csv" / "clients.csv").open() as out:
        assert {row["series"] for row in csv.DictReader(out)} >= {BAD, "'=cmd()"}


def test_runs_that_differ_by_their_seed_alone_are_one_line_with_a_band(place: Path) -> None:
    both = [read_run_facts(read_run(place / name)) for name in ("a", "b")]
    (group,) = group_runs(both)
    band = group.scores("global").band
    ends = [dict(each.score_series("", "global").points) for each in both]
    assert band == tuple(
        (min(a, b), max(a, b)) for a, b in zip(*(e.values() for e in ends), strict=True)
    )
    assert len(group_runs([*both, read_run_facts(read_run(place / "hidden"))])) == 2
    text = report_page([place / "a", place / "b"]).html()
    assert "mean of 2 runs" in text and "Audit, tiny, seed 1" in headings(text)


def test_a_fault_of_the_folder_is_the_verdict(place: Path, tmp_path: Path) -> None:
    assert "verified<" in report_page([place / "a"]).html()
    copy = tmp_path / "copy"
    shutil.copytree(place / "a", copy)
    scores = copy / "metrics.jsonl"
    scores.write_text(scores.read_text().replace("0.", "1.", 1))
    text = report_page([copy]).html()
    assert "metrics.jsonl differs from its content at round 3" in text and "verified<" not in text


def live(folder: Path, state: RunState) -> None:
    told = RunStatus(study="tiny", rounds=3, state=state, round=3, driver=current_process())
    (folder / STATUS).write_text(json.dumps(told.json()))


def test_a_run_that_goes_on_is_written_again_until_it_ends(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([RunState.RUNNING, RunState.DONE])
    before = (place / "b" / STATUS).read_bytes()
    monkeypatch.setattr("time.sleep", lambda _: live(place / "b", next(states)))
    try:
        live(place / "b", next(states))
        pages = [p.html() for p in watch_report([place / "b"], tmp_path / "x.html", 7)]
    finally:
        (place / "b" / STATUS).write_bytes(before)
    assert len(pages) == 2 and 'http-equiv="refresh" content="7"' in pages[0]
    assert "in progress" in pages[0] and "verified<" not in pages[0]
    assert "refresh" not in pages[1] and "verified<" in pages[1]
    assert (tmp_path / "x.html").read_text() == pages[1]


def many(facts: RunFacts, count: int) -> RunFacts:
    """The same run with more clients, of whom some refuse, fail or are late."""
    whys = ["late", "dropped", "refused: policy (no)", f"failed: {BAD}", "moved what is frozen"]
    names = [f"client {n}" for n in range(count)]
    rounds = tuple(
        replace(
            r, aggregated=tuple(names[len(whys) :]), rejected=dict(zip(names, whys, strict=False))
        )
        for r in facts.rounds
    )
    turns = tuple(tuple[TurnRecord, ...]() for _ in rounds)
    return replace(facts, rounds=rounds, turns=turns)


def test_of_many_clients_those_that_were_missing_are_shown(place: Path) -> None:
    section = participation_section(many(read_run_facts(read_run(place / "a")), 100))
    (figure,) = section.figures
    shown = dict.fromkeys(row[0] for row in figure.drawing.rows)
    assert len(shown) <= MAX_CLIENTS and {f"client {n}" for n in range(5)} <= set(shown)
    assert "40 of 103 clients" in figure.caption
    told = {row[0]: row[3] for row in figure.drawing.rows}
    assert [told[f"client {n}"] for n in range(6)] == [
        *("late", "dropped", "refused", "failed", "rejected", "aggregated")
    ]
    assert "<script" not in Page("x", (), (section,)).html()


def test_every_reason_of_a_ledger_has_a_state() -> None:
    assert turn_outcome("not requested: it runs another version") == "dropped"
    assert turn_outcome("no answer in time") == "dropped"


def test_what_cannot_be_reported_is_named(place: Path, tmp_path: Path) -> None:
    code, said = run("report", str(tmp_path))
    assert code == 2 and "is not the folder of a run" in said and str(tmp_path) in said
    with pytest.raises(FedplanError, match="at least one run"):
        fp.report([], tmp_path / "x.html")
    ledger = (place / "a/ledger.jsonl").read_bytes()
    with pytest.raises(fp.FedplanError, match=r"ending in \.html"):
        fp.report(place / "a", place / "a/ledger.jsonl")
    assert (place / "a/ledger.jsonl").read_bytes() == ledger
    code, said = run("report", str(place / "a"), "-o", str(tmp_path / "no" / "x.html"))
    assert code == 2 and "cannot be written" in said
    assert not list(tmp_path.iterdir())
