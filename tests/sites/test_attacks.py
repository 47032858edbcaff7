# SPDX-License-Identifier: Apache-2.0
"""Ways round an approval that were found by attacking: each is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sites import NAME, RUN, asked, study_text, words_of, world_of

from fedplan.federation.endpoint import EVALUATE, HELLO, POLL, TRAIN
from fedplan.federation.evaluation import metrics_from_json
from fedplan.federation.ledger.faults import KINDS
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.models.values import get_values
from fedplan.sites.approvals import site_approvals
from fedplan.sites.gateway import SiteGateway
from fedplan.storage.append_log import AppendLog
from fedplan.studies.schema import parse_toml, study_from_dict
from fedplan.tensors.serialization import SerializationError, pack_message, unpack_message

KEEP = 'plan = "chain(share(), keep(head))"'


def make_gateway(tmp_path: Path, policy: str) -> SiteGateway:
    """A desk with a policy of its own, and real approvals."""
    (tmp_path / "policy.toml").write_text(policy)
    site, _ = words_of(tmp_path, policy=str(tmp_path / "policy.toml"))
    return SiteGateway(site, site_approvals(site))


def offer(desk: SiteGateway, text: str, run: str = RUN, **more: Any) -> dict[str, Any]:
    study = parse_toml(text)
    for name, value in more.items():
        study.setdefault(name, {}).update(value)
    return unpack_message(desk.answer(HELLO, pack_message({}, {"run": run, "study": study})))[1]


def code(said: dict[str, Any]) -> str:
    return next((str(said[kind]) for kind in KINDS if kind in said), "")


def test_an_approval_is_of_one_run(tmp_path: Path) -> None:
    desk = make_gateway(tmp_path, "auto_approve = true")
    text = study_text(method=KEEP, privacy="", rounds=1)
    assert code(offer(desk, text)) == ""
    assert code(offer(desk, text)) == "", "the same run goes on"
    assert code(offer(desk, text, "1" * 16)) == "not-approved"
    site_approvals(desk.site).approve(study_from_dict(parse_toml(text)).full_digest)
    assert code(offer(desk, text, "1" * 16)) == ""
    assert code(offer(desk, text, "2" * 16)) == "not-approved"
    assert code(offer(desk, text)) == "not-approved", "the first run has had its word"


@pytest.mark.parametrize(
    "data",
    [{"test_path": "/etc/passwd"}, {"test_split": "test"}, {"test_filter": {"patient": 3}}],
    ids=str,
)
def test_a_common_test_is_no_affair_of_a_site(data: dict[str, Any], tmp_path: Path) -> None:
    desk = make_gateway(tmp_path, "auto_approve = true")
    assert code(offer(desk, study_text(privacy=""), data=data)) == "policy"


@pytest.mark.parametrize("data", [{"filter": {"patient": [7]}}, {"max_examples": 1}], ids=str)
def test_no_rule_lets_a_study_pick_rows(data: dict[str, Any], tmp_path: Path) -> None:
    desk = make_gateway(tmp_path, "auto_approve = true")
    assert code(offer(desk, study_text(privacy=""), data=data)) == "not-approved"


def test_a_layer_that_never_leaves_does_not_leave_as_an_adapter(tmp_path: Path) -> None:
    lora = {"adapter": {"type": "lora", "r": 3, "target_modules": ["classifier"]}}
    text = study_text(method='plan = "chain(freeze(), share(adapter))"', privacy="")
    for number, (part, wanted) in enumerate({"head": "policy", "embed": ""}.items()):
        (tmp_path / str(number)).mkdir()
        desk = make_gateway(
            tmp_path / str(number), f'auto_approve = true\nnever_share = ["{part}"]'
        )
        assert code(offer(desk, text, model=lora)) == wanted


def test_scores_are_asked_once_and_never_of_what_does_not_leave(tmp_path: Path) -> None:
    barred = 'never_share = ["head"]\n'
    for number, extra in enumerate(("", barred)):
        (tmp_path / str(number)).mkdir()
        desk = make_gateway(
            tmp_path / str(number),
            f'auto_approve = true\nmetrics = ["loss"]\nmin_examples = 1\n{extra}',
        )
        text = study_text(method=KEEP, privacy="", rounds=2).replace(
            "holdout_fraction = 0.0", "holdout_fraction = 0.5"
        )
        assert code(offer(desk, text, evaluate={"on_clients": True})) == ""
        study = study_from_dict({**parse_toml(text), "evaluate": {"on_clients": True}})
        endpoint = desk._runtime_for(study).endpoint(RUN)  # pyright: ignore[reportPrivateUsage]
        found = list[dict[str, Any]]()
        for scale in (1.0, 1.0, 2.0):
            world = world_of(endpoint, scale=scale)
            down = make_request(endpoint.agreement, world, NAME, {}, full=True)
            found.append(unpack_message(desk.answer(EVALUATE, request_message(down)))[1])
        assert [code(said) for said in found] == ["", "", "no-evaluation"]
        assert found[0] == found[1] and ("personal" in found[0]["scores"]) == (not extra)
        assert code(unpack_message(desk.answer(TRAIN, request_message(down)))[1]) == ""


@pytest.mark.parametrize("barred", ["", 'never_share = ["head"]'], ids=["", "barred"])
def test_layer_scores_are_not_of_what_never_leaves(barred: str, tmp_path: Path) -> None:
    method = 'plan = "chain(share(), keep(head), best(1))"\nprobe = "gradient"\njoint_choice = true'
    desk = make_gateway(tmp_path, f"auto_approve = true\n{barred}")
    text = study_text(method=method, privacy="")
    assert code(offer(desk, text)) == ""
    endpoint = desk._runtime_for(study_from_dict(parse_toml(text))).endpoint(RUN)  # pyright: ignore[reportPrivateUsage]
    assert asked(endpoint, world_of(endpoint))[0]
    own, _ = endpoint.site.journal.client_state()
    assert "scores" in asked(endpoint, world_of(endpoint, round=2), POLL)[1]
    scored = get_values(endpoint.site.setup.model, endpoint.agreement.trainable)
    assert own and all(
        torch.equal(scored[key], value) != bool(barred) for key, value in own.items()
    )


@pytest.mark.parametrize(
    "said", [{"accuracy": 9.0, "examples": 3}, {"\x1b[2J": 1.0, "examples": 3}, {"examples": 2**40}]
)
def test_a_site_says_scores_that_can_be(said: dict[str, float]) -> None:
    with pytest.raises(SerializationError):
        metrics_from_json({"world": said})


def test_a_record_outlives_a_disk_that_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line fitted, and the head beside it did not: three times."""
    from fedplan.storage import append_log as chain

    record, whole = AppendLog(tmp_path / "record.jsonl", chained=True), chain.write_atomic
    record.append({"a": 0})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chain, "write_atomic", full)
    for _ in range(3):
        with pytest.raises(Exception, match="cannot be written"):
            record.append({"a": 1})
    monkeypatch.setattr(chain, "write_atomic", whole)
    record.append({"a": 2})
    assert [line["a"] for line in AppendLog(tmp_path / "record.jsonl", chained=True).read()] == [
        0,
        2,
    ]
