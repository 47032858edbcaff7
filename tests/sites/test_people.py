# SPDX-License-Identifier: Apache-2.0
"""With people in the policy, nothing runs without their signatures of exactly this study."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from commands import run
from sites import NAME
from studies import approvals_in, offered

from fedplan.errors import FedplanError
from fedplan.federation.messages import RequestRefused
from fedplan.runners.site import Site, read_site
from fedplan.sites import approvals as module
from fedplan.sites.approvals import APPROVALS_FILE, Approvals
from fedplan.sites.doctor import check_site
from fedplan.sites.egress import RunEgress, SiteRecord, read_decisions
from fedplan.sites.policy import read_policy
from fedplan.sites.signatures import is_signed, sign_statement
from fedplan.storage.append_log import AppendLog
from fedplan.studies.schema import Study

TODAY = datetime.now(UTC).date()
ENDS = str(TODAY + timedelta(days=30))
RUN = "0123456789abcdef"


def policy_of(folder: Path, *names: str, more: str = "") -> str:
    """A policy with people, whose keys are made in a folder."""
    lines = [more, "[people]"]
    for name in names:
        if not (file := folder / name).exists():
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", file], check=True
            )
        lines.append(f'{name} = "{file.with_suffix(".pub").read_text().strip()}"')
    return "\n".join(lines) + "\n"


def signature(approvals: Approvals, study: Study, key: Path, person: str, ends: str = ENDS) -> str:
    """A person's signature of the statement that approves a study now."""
    return sign_statement(approvals.statement(study.full_digest, person, ends), key)


def approve(approvals: Approvals, study: Study, folder: Path, person: str) -> int:
    """Approve a study as a person does; return the number of signatures that are missing."""
    signed = signature(approvals, study, folder / person, person)
    return approvals.approve(study.full_digest, person=person, ends=ENDS, signature=signed).missing


def is_refused(approvals: Approvals, study: Study, run: str = RUN) -> bool:
    """Whether a site does not answer a study, for want of an approval."""
    try:
        approvals.require_approval(study, run=run)
    except RequestRefused as error:
        return error.code == "not-approved"
    return False


@pytest.fixture
def site(tmp_path: Path) -> tuple[Approvals, Study, Path]:
    """A site whose policy has ada and ben, and a study that waits there."""
    approvals, study = approvals_in(tmp_path, policy_of(tmp_path, "ada", "ben")), offered()
    assert is_refused(approvals, study)
    return approvals, study, tmp_path


Place = tuple[Approvals, Study, Path]


def test_a_signature_of_a_person_approves_one_run_until_its_end(
    site: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    approvals, study, folder = site
    assert approve(approvals, study, folder, "ada") == 0
    assert approvals.require_approval(study, run=RUN) == "ada"
    assert is_refused(approvals, study, "f" * 16)
    for day, refused in ((date.fromisoformat(ENDS), False), (TODAY + timedelta(days=31), True)):
        monkeypatch.setattr(module, "_today", day.isoformat)
        assert is_refused(approvals, study) is refused


def test_the_service_cannot_approve_whatever_it_writes(site: Place) -> None:
    approvals, study, folder = site
    for person in ("", "ada"):
        with pytest.raises(FedplanError, match=r"its last day|no signature by"):
            approvals.approve(study.full_digest, person=person, ends=ENDS if person else "")
    log = AppendLog(folder / "state" / APPROVALS_FILE, chained=True)
    offer = log.read()[-1]
    forged = {k: v for k, v in offer.items() if k != "before"} | {"decision": "approved"}
    wrong = signature(approvals, study, folder / "ben", "ada")
    for more in (
        {"approver": "ada"},
        {"approver": "ada", "ends": ENDS, "signature": wrong},
        {"approver": "root"},
        {"approver": "rule"},
    ):
        log.append(forged | more)
        assert is_refused(approvals, study), more


@pytest.mark.parametrize("how", ["study", "site", "person", "date", "key", "namespace", "text"])
def test_a_signature_of_anything_else_is_refused(how: str, site: Place) -> None:
    approvals, study, folder = site
    other = offered(rounds=4)
    assert is_refused(approvals, other)
    statement = approvals.statement(study.full_digest, "ada", ENDS)
    texts = {
        "study": approvals.statement(other.full_digest, "ada", ENDS),
        "site": statement.replace(NAME, "another"),
        "person": approvals.statement(study.full_digest, "ben", ENDS),
        "date": approvals.statement(study.full_digest, "ada", str(TODAY)),
        "text": statement + " ",
    }
    signed = sign_statement(texts.get(how, statement), folder / ("ben" if how == "key" else "ada"))
    if how == "namespace":
        file = folder / "statement"
        file.write_text(statement)
        subprocess.run(
            ["ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", folder / "ada", file], check=True
        )
        signed = file.with_suffix(".sig").read_text()
    with pytest.raises(FedplanError, match="no signature by ada's key"):
        approvals.approve(study.full_digest, person="ada", ends=ENDS, signature=signed)
    assert is_refused(approvals, study)


@pytest.mark.parametrize("event", ["withdraw", "refuse", "start"])
def test_no_signature_counts_again_after_a_withdrawal_refusal_or_start(
    event: str, site: Place
) -> None:
    approvals, study, folder = site
    old = signature(approvals, study, folder / "ada", "ada")
    approvals.approve(study.full_digest, person="ada", ends=ENDS, signature=old)
    if event == "start":
        assert approvals.require_approval(study, run="a" * 16)
    else:
        getattr(approvals, event)(study.full_digest)
    with pytest.raises(FedplanError, match="of the present statement"):
        approvals.approve(study.full_digest, person="ada", ends=ENDS, signature=old)
    log = AppendLog(folder / "state" / APPROVALS_FILE, chained=True)
    entry = next(e for e in log.read() if e["decision"] == "approved")
    log.append({k: v for k, v in entry.items() if k != "before"})
    with pytest.raises(RequestRefused):
        approvals.require_approval(study, run=RUN)
    approve(approvals, study, folder, "ada")
    assert approvals.require_approval(study, run=RUN) == "ada"


def test_an_approval_is_of_the_first_run_whatever_is_written_behind_it(site: Place) -> None:
    approvals, study, folder = site
    approve(approvals, study, folder, "ada")
    assert approvals.require_approval(study, run=RUN)
    log = AppendLog(folder / "state" / APPROVALS_FILE, chained=True)
    start = {k: v for k, v in log.read()[-1].items() if k != "before"}
    log.append(start | {"run": "f" * 16})
    with pytest.raises(RequestRefused):
        approvals.require_approval(study, run="f" * 16)
    assert not is_refused(approvals, study)


def test_an_approval_of_who_left_does_not_carry_the_run_of_another(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    with pytest.MonkeyPatch.context() as patch:
        for user, run_id in (("ada", "a" * 16), ("ben", "b" * 16)):
            patch.setattr(module, "current_user", lambda user=user: user)
            approvals.record_offer(study)
            approvals.approve(study.full_digest)
            assert approvals.require_approval(study, run=run_id) == user
    (tmp_path / "policy.toml").write_text('approvers = ["ada"]')
    with pytest.raises(RequestRefused):
        approvals.require_approval(study, run="b" * 16)


def test_another_last_day_takes_a_withdrawal(site: Place) -> None:
    approvals, study, folder = site
    approve(approvals, study, folder, "ada")
    sooner = signature(approvals, study, folder / "ada", "ada", str(TODAY))
    with pytest.raises(FedplanError, match=f"until {ENDS}: to change that, withdraw it first"):
        approvals.approve(study.full_digest, person="ada", ends=str(TODAY), signature=sooner)
    approvals.withdraw(study.full_digest)
    sooner = signature(approvals, study, folder / "ada", "ada", str(TODAY))
    approvals.approve(study.full_digest, person="ada", ends=str(TODAY), signature=sooner)
    approval = approvals.find_approval(study)
    assert approval is not None and approval.ends == str(TODAY)


def test_two_signatures_are_of_two_people(site: Place) -> None:
    approvals, study, folder = site
    (folder / "policy.toml").write_text(policy_of(folder, "ada", "ben", more="signatures = 2"))
    for _ in range(2):
        assert approve(approvals, study, folder, "ada") == 1
        assert is_refused(approvals, study)
    assert approvals.status_text(study) == "waits for approval: 1 of 2 signatures"
    assert approve(approvals, study, folder, "ben") == 0
    assert approvals.require_approval(study, run=RUN) == "ada, ben"
    # A second run needs both again, and the first goes on meanwhile.
    assert approve(approvals, study, folder, "ben") == 1
    assert is_refused(approvals, study, "f" * 16) and not is_refused(approvals, study)


def test_who_is_no_longer_in_the_policy_has_approved_nothing(site: Place) -> None:
    approvals, study, folder = site
    approve(approvals, study, folder, "ada")
    for text in (
        policy_of(folder, "ben"),
        policy_of(folder, "ada", "ben", more='approvers = ["ben"]'),
    ):
        (folder / "policy.toml").write_text(text)
        assert is_refused(approvals, study)
    new = policy_of(folder, "ada").replace((folder / "ada.pub").read_text().split()[1], "AAAA")
    (folder / "policy.toml").write_text(new)
    assert is_refused(approvals, study)


def test_a_policy_with_wrong_people_is_refused(tmp_path: Path) -> None:
    file, ada = tmp_path / "policy.toml", policy_of(tmp_path, "ada")
    key = (tmp_path / "ada.pub").read_text().strip()
    for text, message in {
        "signatures = 2": r"signatures needs \[people\]",
        f"signatures = 2\n{ada}": "but 1 people may approve",
        f'approvers = ["eve"]\n{ada}': "eve has no key",
        f"auto_approve = true\n{ada}": "asks nobody to sign",
        f'[people]\nrule = "{key}"': "'rule' names approvals by rule",
        f'{ada}eve = "{key}"': "two people have the same key",
        f'{ada}eve = "x {key}"': "people.eve",
        '[people]\neve = "ssh-ed25519 AAAA\\nben ssh-ed25519 BBBB"': "people.eve",
    }.items():
        file.write_text(text)
        with pytest.raises(FedplanError, match=message):
            read_policy(file)


def test_a_person_signs_elsewhere_and_the_operator_hands_it_in(site: Place) -> None:
    _, study, folder = site
    (folder / "site.toml").write_text(f'name = "{NAME}"\n')
    at = ("--site", str(folder), "--person", "ada", "--until", ENDS)
    code, statement = run("site", "statement", study.full_digest[:8], *at)
    assert code == 0 and json.loads(statement)["approve study"] == study.full_digest
    file = folder / "statement"
    file.write_text(statement)
    subprocess.run(
        ["ssh-keygen", "-q", "-Y", "sign", "-n", "fedplan-approval", "-f", folder / "ada", file],
        check=True,
    )
    code, screen = run(
        "site", "approve", study.full_digest[:8], *at, "--signature", str(folder / "statement.sig")
    )
    assert (code, screen.split(":")[0]) == (0, "Approved by ada")
    both = (*at, "--key", str(folder / "ada"), "--signature", str(folder / "statement.sig"))
    assert run("site", "approve", study.full_digest[:8], *both)[0] == 2
    assert f"approved by ada until {ENDS}" in run("site", "inbox", "--site", str(folder))[1]
    ben = ("--site", str(folder), "--person", "ben", "--until", ENDS, "--key", str(folder / "ben"))
    assert run("site", "approve", study.full_digest[:8], *ben)[0] == 0
    assert run("site", "approve", study.full_digest[:8], "--site", str(folder))[0] == 2


def test_the_record_names_updates_that_nobody_signed_for(site: Place) -> None:
    approvals, study, folder = site
    approve(approvals, study, folder, "ada")
    approvals.require_approval(study, run=RUN)
    decisions = read_decisions(folder / "state")
    tomorrow = str(TODAY + timedelta(days=1))
    update = {"kind": "update", "round": 1, "time": f"{tomorrow}T00:00:00", "approver": "ada"}
    record = SiteRecord(study.full_digest, RUN, {"site": NAME}, [update])

    def faults(entries: Sequence[dict[str, Any]]) -> list[str]:
        run_egress = RunEgress(record, tuple(entries), folder / "state", None)
        return list(run_egress.unapproved())

    assert not faults(decisions)
    for change in (
        {"signature": ""},
        {"signature": 3},
        {"key": "x"},
        {"study": "0" * 64},
        {"site": "another"},
        {"ends": "2999-01-01"},
        {"ends": str(TODAY)},
    ):
        forged = [e | change if e["decision"] == "approved" else e for e in decisions]
        assert faults(forged), change
    started = {"decision": "started", "run": RUN, "time": decisions[0]["time"]}
    assert faults([*decisions[:1], started]), "a start without an approval"
    assert faults([*decisions[:-1], started | {"run": "f" * 16}, started]), "a start of two runs"
    assert faults([*decisions[:-1], started | {"signatures": 2}])


def test_the_doctor_warns_if_the_service_can_change_the_policy(site: Place) -> None:
    _, _, folder = site
    findings = check_site(Site(name=NAME, policy=str(folder / "policy.toml"), state=str(folder)))
    finding = next(f for f in findings if f.name == "policy" and f.state == "warn")
    assert "can change" in finding.message
    elsewhere = folder / "config" / "site.toml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(f'name = "{NAME}"\npolicy = "../policy.toml"\n')
    finding = next(f for f in check_site(read_site(elsewhere)) if f.state == "warn")
    assert f"{elsewhere} and" in finding.message, "who changes it can name another policy"


def test_a_signature_that_is_no_signature_is_none(tmp_path: Path) -> None:
    policy_of(tmp_path, "ada")
    key = (tmp_path / "ada.pub").read_text().strip()
    good = sign_statement("text", tmp_path / "ada")
    assert is_signed("text", good, key)
    for bad in ("", "x", good * 2, good + "-", good.replace("U1NI", "U1NJ"), "A" * 100_000):
        assert not is_signed("text", bad, key)
    with pytest.raises(FedplanError, match="cannot sign"):
        sign_statement("text", tmp_path / "nobody")
