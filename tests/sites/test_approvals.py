# SPDX-License-Identifier: Apache-2.0
"""Nothing is admitted that was not approved, word for word, or that the policy no longer admits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sites import study_text
from studies import approvals_in, offered

from fedplan.errors import FedplanError
from fedplan.federation.messages import RequestRefused
from fedplan.sites import approvals as module
from fedplan.sites import inbox
from fedplan.sites.approvals import APPROVALS_FILE, Approvals, current_user
from fedplan.storage.append_log import AppendLog, DamagedLog
from fedplan.studies.schema import Study, parse_toml, study_from_dict

CHANGES: dict[str, Any] = {
    "name": "another",
    "seed": 7,
    "continue_from": "0123456789abcdef",
    "threads": 2,
    "device": "cpu",
    "deterministic": True,
    "model.config": {"image_size": 8, "patch_size": 2, "hidden_size": 16},
    "model.digest": "00",
    "task.labels": [0, 1, 2, 3],
    "task.image_size": 4,
    "data.holdout_fraction": 0.5,
    "data.test_filter": {"patient": 3},
    "method.plan": "share()",
    "method.compression": "bf16()",
    "method.joint_choice": True,
    "train.rounds": 4,
    "train.lr": 0.5,
    "train.batch_size": 3,
    "train.steps": 2,
    "train.max_grad_norm": 1.0,
    "clients.names": ["north", "south"],
    "clients.fraction": 0.5,
    "clients.min_updates": 2,
    "clients.traits": {"north": {"ward": "3"}},
    "purpose": {
        **dict.fromkeys(("question", "requester", "institution", "contact"), "a"),
        **{"legal_basis": "b", "recipients": "c", "ends": "2999-01-01"},
    },
    "statistics.columns": {"age": {"type": "number"}},
    "evaluate.every": 2,
    "evaluate.personal": False,
    "timeouts.sites": 3.0,
    "early_stopping": {"metric": "loss"},
    "defence": {"max_weight_fraction": 0.5},
    "aggregation": {"kind": "secure"},
    "privacy": {"unit": "client", "epsilon": 9.0, "noise_multiplier": 9.0},
}


def refused(approvals: Approvals, study: Study) -> str:
    """The code with which a study is refused."""
    with pytest.raises(RequestRefused) as caught:
        approvals.require_approval(study)
    return caught.value.code


def changed(field: str) -> Study:
    """The study with one field said otherwise."""
    said = parse_toml(
        study_text(method="plan = 'chain(share(), keep(head))'", privacy="", rounds=3)
    )
    *path, last = field.split(".")
    place = said
    for word in path:
        place = place.setdefault(word, {})
    assert place.get(last) != CHANGES[field]
    place[last] = CHANGES[field]
    return study_from_dict(said)


def test_a_study_waits_is_approved_and_can_be_withdrawn(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    assert refused(approvals, study) == refused(approvals, study) == "not-approved"
    assert approvals.status_text(study) == "waits for approval"
    assert approvals.approve(study.full_digest[:6]).approver == current_user()
    assert approvals.require_approval(study) == current_user()
    approvals.withdraw(study.full_digest[:6])
    assert refused(approvals, study) == "not-approved"
    approvals.refuse(study.full_digest, "no")
    assert refused(approvals, study) == "study-refused"
    approvals.approve(study.full_digest)
    assert approvals.require_approval(study) == current_user()
    words = [
        line["decision"]
        for line in AppendLog(tmp_path / "state" / APPROVALS_FILE, chained=True).read()
    ]
    assert words == ["offered", "approved", "withdrawn", "refused", "approved"]


def test_each_changed_field_takes_a_new_approval(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    approvals.record_offer(study)
    approvals.approve(study.full_digest)
    for field in CHANGES:
        assert refused(approvals, changed(field)) in ("not-approved", "policy"), field
    assert approvals.require_approval(study) == current_user()


def test_every_section_of_a_study_is_in_the_table_of_changes() -> None:
    assert {field.partition(".")[0] for field in CHANGES} == set(Study.model_fields)


def test_by_rule_what_is_within_the_policy_and_nobody_has_refused(tmp_path: Path) -> None:
    approvals = approvals_in(tmp_path, 'auto_approve = true\nnever_share = ["head"]')
    kept, shared = offered(), offered("share()")
    assert approvals.require_approval(kept) == "rule"
    assert refused(approvals, shared) == "policy"
    with pytest.raises(FedplanError, match="head must never leave this site"):
        approvals.approve(shared.full_digest)
    approvals.withdraw(kept.full_digest)
    assert refused(approvals, kept) == "not-approved", "a person's word goes before the rule"
    approvals.approve(kept.full_digest)
    assert approvals.require_approval(kept) == current_user()


@pytest.mark.parametrize(
    "stricter",
    [
        'never_share = ["mlp"]',
        "reveal_example_count = false",
        'approvers = ["nobody else"]',
        "[limits]\nrounds = 2",
    ],
)
def test_a_policy_made_stricter_takes_effect_at_once(stricter: str, tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    approvals.record_offer(study)
    approvals.approve(study.full_digest)
    assert approvals.require_approval(study)
    (tmp_path / "policy.toml").write_text(stricter)
    assert refused(approvals, study) in ("policy", "not-approved")
    (tmp_path / "policy.toml").write_text("")
    assert approvals.require_approval(study)


def test_a_rule_that_is_gone_approves_nothing_any_more(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path, "auto_approve = true"), offered()
    assert approvals.require_approval(study) == "rule"
    (tmp_path / "policy.toml").write_text("auto_approve = false")
    assert refused(approvals, study) == "not-approved"
    (tmp_path / "policy.toml").unlink()
    with pytest.raises(FedplanError, match="does not exist: write this site's policy"):
        approvals.require_approval(study)


def test_only_approvers_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    approvals, study = approvals_in(tmp_path, 'approvers = ["ada"]'), offered()
    approvals.record_offer(study)
    acts: list[Callable[[str], object]] = [approvals.approve, approvals.refuse, approvals.withdraw]
    for act in acts:
        with pytest.raises(
            FedplanError, match=r"may not decide on studies: the approvers in .* are ada"
        ):
            act(study.full_digest)
    monkeypatch.setattr(module, "current_user", lambda: "ada")
    assert approvals.approve(study.full_digest).approver == "ada"


def test_an_unknown_or_ambiguous_digest_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    approvals = approvals_in(tmp_path)
    studies = [offered(seed=number) for number in range(17)]
    for study in studies:
        approvals.record_offer(study)
    twice = next(
        w[0]
        for w in (s.full_digest for s in studies)
        if sum(w[0] == o.full_digest[0] for o in studies) > 1
    )
    with pytest.raises(
        FedplanError, match=r"studies have a digest that starts with .*: give more characters"
    ):
        approvals.approve(twice)
    for none in ("", "zz"):
        with pytest.raises(
            FedplanError,
            match=r"no offered study has a digest that starts with .*: `fedplan site inbox` lists",
        ):
            approvals.approve(none)


def test_another_process_is_heard_at_once_and_a_restart_forgets_nothing(tmp_path: Path) -> None:
    desk, study = approvals_in(tmp_path), offered()
    assert refused(desk, study) == "not-approved"
    approvals_in(tmp_path).approve(study.full_digest)
    assert desk.require_approval(study) == current_user()
    approvals_in(tmp_path).withdraw(study.full_digest)
    assert refused(desk, study) == "not-approved"
    assert refused(approvals_in(tmp_path), study) == "not-approved"


def test_what_was_edited_admits_nothing(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    approvals.record_offer(study)
    approvals.refuse(study.full_digest)
    file = tmp_path / "state" / APPROVALS_FILE
    file.write_bytes(file.read_bytes().replace(b'"refused"', b'"approved"'))
    with pytest.raises(DamagedLog):
        approvals_in(tmp_path).require_approval(study)


def test_a_study_that_was_edited_in_the_inbox_is_not_approved(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    approvals.record_offer(study)
    file = tmp_path / "state/inbox" / f"{study.full_digest}.json"
    said = json.loads(file.read_text())
    said["study"]["method"]["plan"] = "share()"
    file.write_text(json.dumps(said))
    with pytest.raises(FedplanError, match="is no longer the study that was offered"):
        approvals.approve(study.full_digest)


def test_an_inbox_is_full_some_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_STUDIES", 3)
    approvals = approvals_in(tmp_path)
    for seed in range(3):
        approvals.record_offer(offered(seed=seed))
    assert refused(approvals, offered(seed=3)) == "not-approved"
    assert len(approvals.inbox.digests()) == 3


def test_a_full_inbox_lets_go_of_what_nobody_spoke_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_STUDIES", 3)
    approvals, mine = approvals_in(tmp_path), offered()
    approvals.record_offer(mine)
    approvals.approve(mine.full_digest)
    for seed in range(1, 6):
        approvals.record_offer(offered(seed=seed))
    assert mine.full_digest in approvals.inbox.digests() and len(approvals.inbox.digests()) == 3
    assert approvals.require_approval(mine) == current_user()
