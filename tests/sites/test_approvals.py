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
from fedplan.federation.messages import Refused
from fedplan.sites import approvals as module
from fedplan.sites import inbox
from fedplan.sites.approvals import APPROVALS, Approvals, user
from fedplan.storage.chain import BrokenChain, read_chain
from fedplan.studies.plain import read_toml
from fedplan.studies.schema import Study, study_of

CHANGES: dict[str, Any] = {
    "name": "another",
    "seed": 7,
    "continues": "0123456789abcdef",
    "threads": 2,
    "device": "cpu",
    "deterministic": True,
    "model.settings": {"image_size": 8, "patch_size": 2, "hidden_size": 16},
    "model.digest": "00",
    "task.labels": [0, 1, 2, 3],
    "task.image_size": 4,
    "data.own_test": 0.5,
    "data.test": {"patient": 3},
    "method.plan": "share()",
    "method.wire": "bf16()",
    "method.together": True,
    "train.rounds": 4,
    "train.rate": 0.5,
    "train.batch": 3,
    "train.steps": 2,
    "train.clip": 1.0,
    "clients.names": ["north", "south"],
    "clients.share": 0.5,
    "clients.quorum": 2,
    "clients.traits": {"north": {"ward": "3"}},
    "evaluate.every": 2,
    "evaluate.personal": False,
    "patience.sites": 3.0,
    "stop": {"metric": "loss"},
    "defence": {"share_cap": 0.5},
    "aggregation": {"kind": "masked"},
    "privacy": {"unit": "client", "epsilon": 9.0, "noise": 9.0},
}


def refused(approvals: Approvals, study: Study) -> str:
    """The code with which a study is refused."""
    with pytest.raises(Refused) as caught:
        approvals.admit(study)
    return caught.value.code


def changed(field: str) -> Study:
    """The study with one field said otherwise."""
    said = read_toml(study_text(method="plan = 'chain(share(), keep(head))'", privacy="", rounds=3))
    *path, last = field.split(".")
    place = said
    for word in path:
        place = place.setdefault(word, {})
    assert place.get(last) != CHANGES[field]
    place[last] = CHANGES[field]
    return study_of(said)


def test_a_study_waits_is_approved_and_can_be_withdrawn(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    assert refused(approvals, study) == refused(approvals, study) == "not-approved"
    assert approvals.state(study) == "waits for approval"
    assert approvals.approve(study.whole[:6]).approver == user()
    assert approvals.admit(study) == user()
    approvals.withdraw(study.whole[:6])
    assert refused(approvals, study) == "not-approved"
    approvals.refuse(study.whole, "no")
    assert refused(approvals, study) == "refused-here"
    approvals.approve(study.whole)
    assert approvals.admit(study) == user()
    words = [line["word"] for line in read_chain(tmp_path / "home" / APPROVALS)]
    assert words == ["offered", "approved", "withdrawn", "refused", "approved"]


def test_each_changed_field_takes_a_new_approval(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    approvals.offer(study)
    approvals.approve(study.whole)
    for field in CHANGES:
        assert refused(approvals, changed(field)) in ("not-approved", "policy"), field
    assert approvals.admit(study) == user()


def test_every_section_of_a_study_is_in_the_table_of_changes() -> None:
    assert {field.partition(".")[0] for field in CHANGES} == set(Study.model_fields)


def test_by_rule_what_is_within_the_policy_and_nobody_has_refused(tmp_path: Path) -> None:
    approvals = approvals_in(tmp_path, 'by_rule = true\nnever_share = ["head"]')
    kept, shared = offered(), offered("share()")
    assert approvals.admit(kept) == "rule"
    assert refused(approvals, shared) == "policy"
    with pytest.raises(FedplanError, match="head never leaves this site"):
        approvals.approve(shared.whole)
    approvals.withdraw(kept.whole)
    assert refused(approvals, kept) == "not-approved", "a person's word goes before the rule"
    approvals.approve(kept.whole)
    assert approvals.admit(kept) == user()


@pytest.mark.parametrize(
    "stricter",
    [
        'never_share = ["mlp"]',
        "weight = false",
        'approvers = ["nobody else"]',
        "[limits]\nrounds = 2",
    ],
)
def test_a_policy_made_stricter_takes_effect_at_once(stricter: str, tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    approvals.offer(study)
    approvals.approve(study.whole)
    assert approvals.admit(study)
    (tmp_path / "policy.toml").write_text(stricter)
    assert refused(approvals, study) in ("policy", "not-approved")
    (tmp_path / "policy.toml").write_text("")
    assert approvals.admit(study)


def test_a_rule_that_is_gone_approves_nothing_any_more(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path, "by_rule = true"), offered()
    assert approvals.admit(study) == "rule"
    (tmp_path / "policy.toml").write_text("by_rule = false")
    assert refused(approvals, study) == "not-approved"
    (tmp_path / "policy.toml").unlink()
    with pytest.raises(FedplanError, match="is not there: write what this site lets happen"):
        approvals.admit(study)


def test_only_approvers_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    approvals, study = approvals_in(tmp_path, 'approvers = ["ada"]'), offered()
    approvals.offer(study)
    acts: list[Callable[[str], object]] = [approvals.approve, approvals.refuse, approvals.withdraw]
    for act in acts:
        with pytest.raises(FedplanError, match=r"is none of the approvers of .*: ada"):
            act(study.whole)
    monkeypatch.setattr(module, "user", lambda: "ada")
    assert approvals.approve(study.whole).approver == "ada"


def test_an_unknown_or_ambiguous_digest_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    approvals = approvals_in(tmp_path)
    studies = [offered(seed=number) for number in range(17)]
    for study in studies:
        approvals.offer(study)
    twice = next(
        w[0] for w in (s.whole for s in studies) if sum(w[0] == o.whole[0] for o in studies) > 1
    )
    with pytest.raises(FedplanError, match=r"begins .* studies: say more of "):
        approvals.approve(twice)
    for none in ("", "zz"):
        with pytest.raises(FedplanError, match="was offered here: `fedplan site inbox` lists"):
            approvals.approve(none)


def test_another_process_is_heard_at_once_and_a_restart_forgets_nothing(tmp_path: Path) -> None:
    desk, study = approvals_in(tmp_path), offered()
    assert refused(desk, study) == "not-approved"
    approvals_in(tmp_path).approve(study.whole)
    assert desk.admit(study) == user()
    approvals_in(tmp_path).withdraw(study.whole)
    assert refused(desk, study) == "not-approved"
    assert refused(approvals_in(tmp_path), study) == "not-approved"


def test_what_was_edited_admits_nothing(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    approvals.offer(study)
    approvals.refuse(study.whole)
    file = tmp_path / "home" / APPROVALS
    file.write_bytes(file.read_bytes().replace(b'"refused"', b'"approved"'))
    with pytest.raises(BrokenChain):
        approvals_in(tmp_path).admit(study)


def test_a_study_that_was_edited_in_the_inbox_is_not_approved(tmp_path: Path) -> None:
    approvals, study = approvals_in(tmp_path), offered()
    approvals.offer(study)
    file = tmp_path / "home/inbox" / f"{study.whole}.json"
    said = json.loads(file.read_text())
    said["study"]["method"]["plan"] = "share()"
    file.write_text(json.dumps(said))
    with pytest.raises(FedplanError, match="is no longer the study that came"):
        approvals.approve(study.whole)


def test_an_inbox_is_full_some_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedplan.sites import inbox

    monkeypatch.setattr(inbox, "MOST", 3)
    approvals = approvals_in(tmp_path)
    for seed in range(3):
        approvals.offer(offered(seed=seed))
    assert refused(approvals, offered(seed=3)) == "not-approved"
    assert len(approvals.inbox.wholes()) == 3


def test_a_full_inbox_lets_go_of_what_nobody_spoke_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MOST", 3)
    approvals, mine = approvals_in(tmp_path), offered()
    approvals.offer(mine)
    approvals.approve(mine.whole)
    for seed in range(1, 6):
        approvals.offer(offered(seed=seed))
    assert mine.whole in approvals.inbox.wholes() and len(approvals.inbox.wholes()) == 3
    assert approvals.admit(mine) == user()
