# SPDX-License-Identifier: Apache-2.0
"""The compliance page has every byte of the egress log; an update without approval is a fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
from commands import run
from sites import NAME, RUN, Anybody, hello, study_text, words_of, world_of

from fedplan.federation.endpoint import HELLO, TRAIN
from fedplan.federation.ledger.egress import bytes_by_part, read_egress
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.language.predicates import Turn
from fedplan.sites.approvals import Approvals, current_user
from fedplan.sites.compliance_report import compliance_page
from fedplan.sites.egress import RunEgress, SiteRecord, is_site_state, read_egress_report
from fedplan.sites.gateway import Approver, SiteGateway
from fedplan.storage.append_log import AppendLog, LogHead, head_file
from fedplan.studies.schema import parse_toml, study_from_dict
from fedplan.tensors.serialization import unpack_message

METHOD = 'plan = "chain(share(), keep(head))"'
TEXT = study_text(method=METHOD, privacy="", rounds=3)


def played(desk: SiteGateway, text: str, *rounds: int) -> None:
    """Have a desk answer some rounds of a study."""
    assert "client" in unpack_message(desk.answer(HELLO, hello(text)))[1]
    study = study_from_dict(parse_toml(text))
    endpoint = desk._runtime_for(study).endpoint(RUN)  # pyright: ignore[reportPrivateUsage]
    for number in rounds:
        down = make_request(
            endpoint.agreement, world_of(endpoint, round=number), NAME, {}, full=True
        )
        assert unpack_message(desk.answer(TRAIN, request_message(down)))[0]


def served(folder: Path, *, approved: bool = True, text: str = TEXT) -> Path:
    """A home that has answered two rounds of a study, approved by a person or by nobody."""
    site, _ = words_of(folder)
    approvals = Approvals(Path(site.state), folder / "policy.toml", site=Turn(client=NAME))
    approver: Approver = approvals if approved else Anybody()
    study = study_from_dict(parse_toml(text))
    if approved:
        approvals.record_offer(study)
        approvals.approve(study.full_digest)
    played(SiteGateway(site, approver), text, 1, 2)
    return Path(site.state)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served(tmp_path_factory.mktemp("officer"))


def test_the_page_tells_what_the_record_tells(home: Path, tmp_path: Path) -> None:
    lines = read_egress(home)
    parts = bytes_by_part(lines)
    page = compliance_page(home)
    text = page.html()
    whole = sum(line["upload_bytes"] + line["other_bytes"] for line in lines)
    assert f"{whole:,} bytes have left this site" in text and "verified<" in text
    bars = next(each for each in page.figures() if each.name == "parts-1").drawing
    assert bars.columns[1] == "kB"
    assert {row[0]: round(float(str(row[1])) * 1e3) for row in bars.rows} == parts
    grid = next(each for each in page.figures() if each.name == "rounds-1").drawing
    assert {row[0] for row in grid.rows} == parts.keys() and "head" not in parts
    assert "nothing left" in grid.svg() and f"approved by {current_user()}" in text
    assert "Differential privacy: off" in text
    code, said = run("report", str(home), "-o", str(tmp_path / "x.html"))
    assert code == 0, said
    assert "Data that left north" in (tmp_path / "x.html").read_text()


def test_what_left_without_an_approval_is_a_fault(tmp_path: Path) -> None:
    page = compliance_page(served(tmp_path, approved=False)).html()
    assert "3 faults" in page and "approved by anybody according to the log" in page
    assert "verified<" not in page


def test_a_broken_chain_is_told_and_nothing_else_is(tmp_path: Path) -> None:
    home = served(tmp_path)
    record = home / "egress.jsonl"
    record.write_text(record.read_text().replace('"round": 2', '"round": 1'))
    code, said = run("report", str(home), "-o", str(tmp_path / "x.html"))
    assert code == 1 and "egress.jsonl" in said and not (tmp_path / "x.html").exists()


def test_a_home_is_reported_by_itself(home: Path, tmp_path: Path) -> None:
    assert is_site_state(home) and not is_site_state(tmp_path)
    for words in ((str(home), str(tmp_path)), (str(home), "--watch", "3")):
        code, said = run("report", *words, "-o", str(tmp_path / "x.html"))
        assert code == 2 and str(home) in said
    assert not list(tmp_path.iterdir())


def _turned(file: str, before: str, after: str) -> Callable[[Path], None]:
    def change(home: Path) -> None:
        (found,) = home.rglob(file)
        assert before in found.read_text()
        lines, head = found.read_text().replace(before, after).splitlines(), LogHead()
        found.write_text("")
        for line in lines:  # who turns a line may chain the file anew
            chained = json.dumps(json.loads(line) | {"before": head.sha256}, sort_keys=True) + "\n"
            head = head.extended_by(chained.encode())
            found.write_text(found.read_text() + chained)
        head_file(found).write_text(head.text)

    return change


def _gone(file: str) -> Callable[[Path], None]:
    return lambda home: next(iter(home.rglob(f"*/{RUN}/{file}"))).unlink()


def _unaccounted(home: Path) -> None:
    next(iter(home.rglob("replies.jsonl"))).unlink()


def _other_plan(home: Path) -> None:
    file = next(iter(home.rglob(f"*/{RUN}/agreement.json")))
    file.write_text(file.read_text().replace("chain(share(), keep(head))", "share(norm)"))


def _other_study(home: Path) -> None:
    file = next(iter(home.rglob(f"*/{RUN}/study.json")))
    file.write_text(file.read_text().replace("chain(share(), keep(head))", "share()"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            _turned("replies.jsonl", '"protected": false', '"protected": true'),
            "no epsilon was charged",
        ),
        (_unaccounted, "missing from the accounts of this site"),
        (_other_plan, "folder has another plan"),
        (_other_study, "was not approved at this site"),
        (_gone("manifest.json"), "cannot be checked"),
        (
            _turned("replies.jsonl", '"kind": "update"', '"kind": "scores"'),
            "missing from the accounts",
        ),
    ],
    ids=["hidden", "no account", "plan", "study", "manifest", "poll"],
)
def test_whatever_lies_beside_the_chains_is_held_to_them(
    change: Callable[[Path], None], told: str, home: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "home"
    copytree(home, copy)
    change(copy)
    text = compliance_page(copy).html()
    assert told in text and "verified<" not in text


def test_a_run_whose_rounds_were_added_and_approved_is_sound(tmp_path: Path) -> None:
    home, longer = served(tmp_path), study_text(method=METHOD, privacy="", rounds=5)
    site, _ = words_of(tmp_path)
    approvals = Approvals(home, tmp_path / "policy.toml", site=Turn(client=NAME))
    study = study_from_dict(parse_toml(longer))
    approvals.record_offer(study)
    approvals.approve(study.full_digest)
    played(SiteGateway(site, approvals), longer, 3)
    assert not compliance_page(home).faults


@pytest.mark.parametrize("line", ["{}", "5", '{"request": 1}'])
def test_a_line_of_an_account_that_no_site_writes_is_a_finding(
    line: str, home: Path, tmp_path: Path
) -> None:
    copytree(home, tmp_path / "home")
    (account,) = tmp_path.rglob("replies.jsonl")
    account.write_text(account.read_text() + line + "\n")
    code, said = run("report", str(tmp_path / "home"), "-o", str(tmp_path / "x.html"))
    assert code == 1
    assert re.search(r"replies\.jsonl (was changed|is damaged at line)", " ".join(said.split()))


def test_a_page_with_faults_is_written_and_ends_in_1(home: Path, tmp_path: Path) -> None:
    copytree(home, tmp_path / "home")
    _unaccounted(tmp_path / "home")
    code, said = run("report", str(tmp_path / "home"), "-o", str(tmp_path / "x.html"))
    assert code == 1 and "faults" in said and (tmp_path / "x.html").exists()


def test_a_second_run_of_an_approved_study_is_a_fault(home: Path) -> None:
    (first,) = (each for each in read_egress_report(home) if isinstance(each, SiteRecord))
    words = tuple(AppendLog(home / "approvals.jsonl", chained=True).read())
    other = replace(first, run="f" * 16)
    assert not list(RunEgress(first, words, home, None).unapproved())
    assert len(list(RunEgress(other, words, home, None).unapproved())) == 2
