# SPDX-License-Identifier: Apache-2.0
"""A study says why it runs, and no site answers it after its last day."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run
from studies import approvals_in, offered

from fedplan.errors import FedplanError
from fedplan.federation.messages import RequestRefused
from fedplan.sites import approvals as module
from fedplan.sites.approvals import APPROVALS_FILE
from fedplan.storage.append_log import AppendLog
from fedplan.studies.schema import Study, study_from_dict

PURPOSE = {
    "question": "Which patients return within 30 days?",
    "requester": "Eva Lind",
    "institution": "University Hospital",
    "contact": "eva@uh.example",
    "legal_basis": "ethics approval 2026-117",
    "recipients": "the three hospitals",
    "ends": "2999-06-30",
}


def with_purpose(**changes: Any) -> Study:
    """A study with a purpose."""
    return study_from_dict(
        {**offered().model_dump(mode="json", exclude_none=True), "purpose": PURPOSE | changes}
    )


def test_a_purpose_needs_an_approval_of_its_own_and_changes_no_result() -> None:
    plain, first, second = offered(), with_purpose(), with_purpose(recipients="anybody")
    assert len({plain.full_digest, first.full_digest, second.full_digest}) == 3
    assert plain.digest == first.digest == second.digest


def test_a_policy_may_require_it(tmp_path: Path) -> None:
    approvals = approvals_in(tmp_path, "require_purpose = true\nauto_approve = true")
    with pytest.raises(RequestRefused, match=r"the study has no \[purpose\]") as caught:
        approvals.require_approval(offered())
    assert caught.value.code == "policy"
    assert approvals.require_approval(with_purpose()) == "rule"


@pytest.mark.parametrize("policy", ["", "auto_approve = true"])
def test_no_site_answers_after_the_last_day(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    approvals, study = approvals_in(tmp_path, policy), with_purpose()
    approvals.record_offer(study)
    approvals.approve(study.full_digest)
    monkeypatch.setattr(module, "_today", lambda: "2999-06-30")
    assert approvals.require_approval(study, run="a" * 16)
    monkeypatch.setattr(module, "_today", lambda: "2999-07-01")
    log = AppendLog(tmp_path / "state" / APPROVALS_FILE, chained=True)
    length = len(log.read())
    for _ in range(2):
        with pytest.raises(RequestRefused, match="is over") as caught:
            approvals.require_approval(study, run="a" * 16)
        assert caught.value.code == "not-approved"
    with pytest.raises(FedplanError, match="is over"):
        approvals.approve(study.full_digest)
    assert approvals.status_text(study) == "has ended" and len(log.read()) == length


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("question", ""),
        ("legal_basis", "  "),
        ("question", "x" * 501),
        ("requester", "Eva\nDoes the policy allow it?  Yes."),
        ("contact", "\x1b[2J"),
        ("recipients", "nobody \u202eydobyna"),
        ("ends", "next year"),
        ("ends", "2027-02-30"),
    ],
)
def test_a_purpose_cannot_forge_the_screen(name: str, value: str) -> None:
    with pytest.raises(FedplanError, match=f"purpose.{name}: "):
        with_purpose(**{name: value})


def test_show_answers_the_questions_of_an_officer_first(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('name = "north"\n')
    approvals, study = approvals_in(tmp_path), with_purpose()
    approvals.record_offer(study)
    code, screen = run("site", "show", "--site", str(tmp_path))
    assert code == 0
    places = [
        screen.find(text)
        for text in (
            *(
                f" {PURPOSE[name]}"
                for name in ("question", "requester", "legal_basis", "recipients")
            ),
            "until 2999-06-30",
            "Columns image, digit",
            "Up to 0.0",
            "lets the server infer",
            "No differential privacy;",
            "Does the policy allow it?",
            "Plan: ",
        )
    ]
    assert -1 not in places and places == sorted(places), screen
    code, text = run("site", "show", "--json", "--site", str(tmp_path))
    assert json.loads(text)["purpose"] == PURPOSE
