# SPDX-License-Identifier: Apache-2.0
"""What a person at a site types: the inbox, what would leave, yes and no, the policy, the record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run
from sites import NAME, RUN, Anybody, asked, site_of, study_text, words_of, world_of
from studies import approvals_in, offered

from fedplan.federation.endpoint import EVALUATE, HELLO
from fedplan.federation.ledger import egress
from fedplan.federation.ledger.egress import (
    EGRESS_LOG,
    Authorization,
    EgressLog,
    error_entry,
    read_egress,
)
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.secagg.config import SecAggConfig
from fedplan.sites.approvals import current_user
from fedplan.sites.gateway import SiteGateway
from fedplan.sites.review import review_study
from fedplan.studies.schema import parse_toml
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's folder with a policy, where a study was offered and another before it approved."""
    (tmp_path / "site.toml").write_text('name = "north"\n')
    approvals = approvals_in(tmp_path, 'never_share = ["embed"]\nmetrics = ["accuracy"]\n')
    kept = offered("chain(share(), keep(head | embed))")
    approvals.record_offer(kept)
    approvals.approve(kept.full_digest)
    approvals.record_offer(offered("chain(share(), keep(embed))", rounds=4), server="ab" * 32)
    approvals.record_offer(offered("share()"))
    return tmp_path


def typed(site: Path, *words: str) -> tuple[int, str]:
    code, out = run("site", *words, "--site", str(site))
    return code, " ".join(out.split())


def test_a_person_reads_the_inbox_and_decides(site: Path) -> None:
    rows = json.loads(run("site", "inbox", "--json", "--site", str(site))[1])
    assert [row["state"] for row in rows] == [
        f"approved by {current_user()}", "waits for approval", "violates the policy",
    ]  # fmt: skip
    assert rows[1]["server"] == "ab" * 32
    _, waiting, against = (row["study"] for row in rows)
    code, out = typed(site, "approve", waiting[:10])
    assert code == 0 and f"Approved by {current_user()}: {waiting}" in out
    assert typed(site, "withdraw", waiting[:10]) == (0, "Withdrawn.")
    assert typed(site, "refuse", waiting[:10], "--reason", "not yet") == (0, "Refused.")
    code, out = typed(site, "approve", against[:10])
    assert code == 2 and "embed must never leave this site" in out
    code, out = typed(site, "inbox")
    assert code == 0 and f"{waiting[:12]}" in out and "federation: refused" in out
    code, out = typed(site, "policy")
    assert code == 0 and "never leave: embed" in out and "the plan shares" in out


def test_what_would_leave_and_what_is_new_is_shown(site: Path) -> None:
    rows = json.loads(run("site", "inbox", "--json", "--site", str(site))[1])
    code, out = typed(site, "show", rows[1]["study"][:12])
    assert code == 0, out
    assert "head: kept -> shared" in out and "train.rounds: 3 -> 4" in out
    assert "No differential privacy" in out and "only fedplan's own" in out
    assert "how many examples of each label" in out and "not hide this" in out
    code, out = run("site", "show", rows[1]["study"], "--json", "--site", str(site))
    said = json.loads(out)
    parts = {each["part"]: each for each in said["parts"]}
    assert parts["embed"]["roles"] == "kept" and parts["embed"]["bytes_total"] == 0
    assert parts["head"]["bytes_total"] == 4 * parts["head"]["bytes_per_round"] > 0
    assert not any("loss" in each for each in said["disclosures"]), "the policy lets no loss leave"


def test_a_study_with_secure_sums_says_that_no_update_can_be_checked(tmp_path: Path) -> None:
    """At the site that decides, and where the study is explained."""
    secure = '[aggregation]\nkind = "secure"'
    (tmp_path / "site.toml").write_text('name = "north"\n')
    approvals = approvals_in(tmp_path)
    for data in ("", secure):
        study = offered(data=data)
        approvals.record_offer(study)
        code, out = typed(tmp_path, "show", study.full_digest)
        assert code == 0 and ("no defence against bad values" in out) == bool(data), out
        said = json.loads(
            run("site", "show", study.full_digest, "--json", "--site", str(tmp_path))[1]
        )
        assert ("spoil the model" in said.get("secure_aggregation", "")) == bool(data)
        assert "no defence against bad values" in SecAggConfig("secure").cost_text


def test_the_bytes_that_are_shown_are_those_that_leave(tmp_path: Path) -> None:
    text = study_text(privacy="", method="plan = 'chain(share(), keep(head))'", rounds=1)
    endpoint = site_of(tmp_path, text)
    asked(endpoint, world_of(endpoint))
    (line,) = read_egress(tmp_path / "state")
    notice = review_study(offered("chain(share(), keep(head))", rounds=1))
    assert line["parts"] == {
        each.part: each.bytes_total for each in notice.parts if each.bytes_total
    }


def test_a_site_without_a_file_is_told_so(tmp_path: Path) -> None:
    code, out = typed(tmp_path, "inbox")
    assert code == 2 and "site.toml" in out


def test_one_record_has_all_studies_and_runs_refusals_and_failures(tmp_path: Path) -> None:
    home = tmp_path / "state"
    for name in ("one", "two"):
        endpoint = site_of(tmp_path, study_text(name=name, privacy="", rounds=2), limit_rounds=1)
        endpoint.authorization = Authorization(name * 16, "cd" * 32, "ada")
        endpoint.answer(HELLO, pack_message({}, {"run": endpoint.agreement.run}))
        asked(endpoint, world_of(endpoint))
    endpoint.answer("nothing", Message(b""))
    lines = read_egress(home)
    said = [(line["study"][:3], line["kind"], line["code"]) for line in lines]
    assert said == [
        ("one", "hello", ""),
        ("one", "update", ""),
        ("two", "hello", ""),
        ("two", "refused", "limit-rounds"),
        ("two", "refused", "unknown-request"),
    ]
    assert {(x["server"], x["approver"], x["run"]) for x in lines} == {("cd" * 32, "ada", "0" * 16)}
    assert lines[1]["round"] == 1 and lines[1]["parts"] and len(lines[1]["content"]) == 64
    code, out = run("egress", str(home))
    assert code == 0 and "approved by ada" in out and "refused limit-rounds" in out
    (home / EGRESS_LOG).write_bytes((home / EGRESS_LOG).read_bytes().replace(b'"ada"', b'"bob"', 1))
    code, out = run("egress", str(home))
    assert code == 1 and "damaged at line 2" in " ".join(out.split())


def test_the_same_answer_has_the_same_content_and_another_has_not(tmp_path: Path) -> None:
    endpoint = site_of(tmp_path, study_text(privacy=""))
    world = world_of(endpoint)
    down = request_message(make_request(endpoint.agreement, world, "north", {}, full=True))
    for _ in range(2):
        endpoint.answer("train", down)
    asked(endpoint, world_of(endpoint, round=2, scale=1.1))
    one, again, other = (line["content"] for line in read_egress(tmp_path / "state"))
    assert one == again != other


def test_who_is_mute_tells_no_loss(tmp_path: Path) -> None:
    endpoint = site_of(tmp_path, study_text(privacy=""))
    _, said = asked(endpoint, world_of(endpoint))
    endpoint.site.privacy = replace(endpoint.site.privacy, hide_loss=True)
    _, silent = asked(endpoint, world_of(endpoint, round=2))
    assert said["ledger_line"]["loss"] is not None and silent["ledger_line"]["loss"] is None


def test_a_refusal_that_is_told_again_and_again_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, record = [0.0], EgressLog(tmp_path)
    monkeypatch.setattr(egress.time, "monotonic", lambda: now[0])
    answer = pack_message({}, {"refused": "not-approved"})
    for number in range(300):
        now[0] = 5.0 * number
        record.append(error_entry("not-approved", answer, site="north", run="0" * 16))
    record.append(error_entry("limit-rounds", answer, site="north"))
    record.append(error_entry("limit-rounds", answer, site="north"))
    lines = read_egress(tmp_path)
    told = [(line["code"], line["count"]) for line in lines]
    counts = [("not-approved", n) for n in (1, 120, 120, 59)]
    assert told == [*counts, *[("limit-rounds", 1)] * 2], "none of 300 is lost"


def test_a_greeting_tells_how_the_record_ends(tmp_path: Path) -> None:
    endpoint = site_of(tmp_path, study_text(privacy=""))
    hello = pack_message({}, {"run": endpoint.agreement.run})
    ends = [unpack_message(endpoint.answer(HELLO, hello))[1]["egress_head"] for _ in range(3)]
    lines = read_egress(tmp_path / "state")
    assert ends == [line["before"] for line in lines]


def test_no_scores_leave_in_a_study_that_asks_for_none(tmp_path: Path) -> None:
    words, limits = words_of(tmp_path)
    desk, text = SiteGateway(words, Anybody(limits)), study_text(privacy="")
    hello = pack_message({}, {"run": RUN, "study": parse_toml(text)})
    assert "agreement" in unpack_message(desk.answer(HELLO, hello))[1]
    endpoint = site_of(tmp_path, text)
    down = request_message(
        make_request(endpoint.agreement, world_of(endpoint), NAME, {}, full=True)
    )
    assert unpack_message(desk.answer(EVALUATE, down))[1]["refused"] == "metrics-not-allowed"
    assert read_egress(tmp_path / "state")[-1]["code"] == "metrics-not-allowed"
