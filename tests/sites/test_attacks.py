# SPDX-License-Identifier: Apache-2.0
"""Ways round an approval that were found by attacking: each is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sites import NAME, RUN, study_text, words_of, world_of

from fedplan.federation.codes import KINDS
from fedplan.federation.endpoint import EVALUATE, HELLO, TRAIN
from fedplan.federation.evaluation import scores_of
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import push
from fedplan.sites.desk import Desk, approvals_of
from fedplan.storage.chain import ChainFile, read_chain
from fedplan.studies.plain import read_toml
from fedplan.studies.schema import study_of
from fedplan.tensors.serialization import SerializationError, packed, unpacked

KEEP = 'plan = "chain(share(), keep(head))"'


def desk_of(tmp_path: Path, policy: str) -> Desk:
    """A desk with a policy of its own, and real approvals."""
    (tmp_path / "policy.toml").write_text(policy)
    site, _ = words_of(tmp_path, policy=str(tmp_path / "policy.toml"))
    return Desk(site, approvals_of(site))


def offer(desk: Desk, text: str, run: str = RUN, **more: Any) -> dict[str, Any]:
    study = read_toml(text)
    for name, value in more.items():
        study.setdefault(name, {}).update(value)
    return unpacked(desk.answer(HELLO, packed({}, {"run": run, "study": study})))[1]


def code(said: dict[str, Any]) -> str:
    return next((str(said[kind]) for kind in KINDS if kind in said), "")


def test_an_approval_is_of_one_run(tmp_path: Path) -> None:
    desk = desk_of(tmp_path, "by_rule = true")
    text = study_text(method=KEEP, privacy="", rounds=1)
    assert code(offer(desk, text)) == ""
    assert code(offer(desk, text)) == "", "the same run goes on"
    assert code(offer(desk, text, "1" * 16)) == "not-approved"
    approvals_of(desk.site).approve(study_of(read_toml(text)).whole)
    assert code(offer(desk, text, "1" * 16)) == ""
    assert code(offer(desk, text, "2" * 16)) == "not-approved"
    assert code(offer(desk, text)) == "not-approved", "the first run has had its word"


@pytest.mark.parametrize(
    "data",
    [{"test_path": "/etc/passwd"}, {"test_split": "test"}, {"test": {"patient": 3}}],
    ids=str,
)
def test_a_common_test_is_no_affair_of_a_site(data: dict[str, Any], tmp_path: Path) -> None:
    desk = desk_of(tmp_path, "by_rule = true")
    assert code(offer(desk, study_text(privacy=""), data=data)) == "policy"


@pytest.mark.parametrize("data", [{"only": {"patient": [7]}}, {"limit": 1}], ids=str)
def test_no_rule_lets_a_study_pick_rows(data: dict[str, Any], tmp_path: Path) -> None:
    desk = desk_of(tmp_path, "by_rule = true")
    assert code(offer(desk, study_text(privacy=""), data=data)) == "not-approved"


def test_a_layer_that_never_leaves_does_not_leave_as_an_adapter(tmp_path: Path) -> None:
    lora = {"adapter": {"type": "lora", "r": 3, "target_modules": ["classifier"]}}
    text = study_text(method='plan = "chain(freeze(), share(adapter))"', privacy="")
    for number, (part, wanted) in enumerate({"head": "policy", "embed": ""}.items()):
        (tmp_path / str(number)).mkdir()
        desk = desk_of(tmp_path / str(number), f'by_rule = true\nnever_share = ["{part}"]')
        assert code(offer(desk, text, model=lora)) == wanted


def test_scores_are_asked_once_and_never_of_what_does_not_leave(tmp_path: Path) -> None:
    barred = 'never_share = ["head"]\n'
    for number, extra in enumerate(("", barred)):
        (tmp_path / str(number)).mkdir()
        desk = desk_of(
            tmp_path / str(number), f'by_rule = true\nmetrics = ["loss"]\nleast_rows = 1\n{extra}'
        )
        text = study_text(method=KEEP, privacy="", rounds=2).replace(
            "own_test = 0.0", "own_test = 0.5"
        )
        assert code(offer(desk, text, evaluate={"sites": True})) == ""
        study = study_of({**read_toml(text), "evaluate": {"sites": True}})
        endpoint = desk._worker_of(study).endpoint(RUN)  # pyright: ignore[reportPrivateUsage]
        found = list[dict[str, Any]]()
        for scale in (1.0, 1.0, 2.0):
            world = world_of(endpoint, scale=scale)
            down = push(endpoint.agreement, world, NAME, {}, anew=True)
            found.append(unpacked(desk.answer(EVALUATE, request_message(down)))[1])
        assert [code(said) for said in found] == ["", "", "unasked"]
        assert found[0] == found[1] and ("own" in found[0]["scores"]) == (not extra)
        assert code(unpacked(desk.answer(TRAIN, request_message(down)))[1]) == ""


@pytest.mark.parametrize(
    "said", [{"accuracy": 9.0, "examples": 3}, {"\x1b[2J": 1.0, "examples": 3}, {"examples": 2**40}]
)
def test_a_site_says_scores_that_can_be(said: dict[str, float]) -> None:
    with pytest.raises(SerializationError):
        scores_of({"world": said})


def test_a_record_outlives_a_disk_that_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line fitted, and the head beside it did not: three times."""
    from fedplan.storage import chain

    record, whole = ChainFile(tmp_path / "record.jsonl"), chain.put_file
    record.append({"a": 0})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chain, "put_file", full)
    for _ in range(3):
        with pytest.raises(Exception, match="cannot be written"):
            record.append({"a": 1})
    monkeypatch.setattr(chain, "put_file", whole)
    record.append({"a": 2})
    assert [line["a"] for line in read_chain(tmp_path / "record.jsonl")] == [0, 2]
