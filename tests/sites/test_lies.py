# SPDX-License-Identifier: Apache-2.0
"""A server that lies: whatever it says of a study that was approved, the site refuses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sites import NAME, RUN, Anybody, study_text, words_of, world_of

from fedplan.federation.endpoint import HELLO, POLL, TRAIN, Endpoint
from fedplan.federation.ledger.egress import Limits
from fedplan.federation.ledger.faults import KINDS, read_faults
from fedplan.federation.messages import RequestRefused, request_message
from fedplan.federation.rounds import make_request
from fedplan.models.values import get_values
from fedplan.sites.gateway import SiteGateway, allow_rejoin
from fedplan.studies.schema import Study, study_from_dict
from fedplan.tensors.message import Message
from fedplan.tensors.named import digests
from fedplan.tensors.serialization import pack_message, unpack_message

OTHER = "f" * 16
APPROVED = study_text(
    method='plan = "chain(share(), keep(head))"', train="lr = 0.5", privacy="", rounds=3
)


class Only(Anybody):
    """Approves of one study, word for word."""

    def __init__(self, study: Study, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.whole = study.full_digest

    def require_approval(self, study: Study, server: str = "", run: str = "") -> str:
        if study.full_digest != self.whole:
            raise RequestRefused("nobody has approved of this study").with_code("not-approved")
        return "a person"


def said(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


@pytest.fixture
def desk(tmp_path: Path) -> SiteGateway:
    site, limits = words_of(tmp_path)
    return SiteGateway(site, Only(study_from_dict(said(APPROVED)), limits))


def told(answer: Message) -> str:
    """The code of a refusal or a failure; nothing if there was none."""
    values, found = unpack_message(answer)
    code = next((str(found[kind]) for kind in KINDS if kind in found), "")
    assert not (code and values)
    return code


def offer(desk: SiteGateway, study: dict[str, Any], run: str = RUN) -> str:
    return told(desk.answer(HELLO, pack_message({}, {"run": run, "study": study})))


def endpoint_of(desk: SiteGateway) -> Endpoint:
    assert offer(desk, said(APPROVED)) == ""
    return desk._runtime_for(study_from_dict(said(APPROVED))).endpoint(RUN)  # pyright: ignore[reportPrivateUsage]


def changed(section: str, **words: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        study = said(APPROVED)
        held = study if not section else study.setdefault(section, {})
        held |= words
        return study

    return make


STUDIES: dict[str, Callable[[], dict[str, Any]]] = {
    "a plan that shares what was kept": changed("method", plan="share()"),
    "a plan that keeps it later": changed(
        "method", plan="chain(share(), when(after(2), keep(head)))"
    ),
    "a method that is not the plan": lambda: {**said(APPROVED), "method": {"name": "fedavg"}},
    "another wire": changed("method", compression="int8()"),
    "another loop": changed("method", loop="os:system"),
    "another name": changed("", name="other"),
    "another seed": changed("", seed=7),
    "more rounds": changed("train", rounds=50),
    "another rate": changed("train", lr=5.0),
    "another batch": changed("train", batch_size=1),
    "more steps": changed("train", steps=9),
    "another optimizer": changed("train", optimizer="adamw"),
    "other labels": changed("task", labels=[2, 1, 0]),
    "fewer labels": changed("task", labels=[0]),
    "another column as the label": changed("task", label="patient"),
    "another column as the input": changed("task", input="digit"),
    "another size of pictures": changed("task", image_size=4),
    "some rows alone": changed("data", train_filter={"patient": 3}),
    "some labels alone": changed("data", filter={"digit": [1]}),
    "fewer rows": changed("data", max_examples=1),
    "another part of the table": changed("data", split="test"),
    "other rows held out": changed("data", holdout_fraction=0.5),
    "rows of the server's choice": changed("data", path="/etc/passwd"),
    "another model": changed("model", config={"hidden_size": 32}),
    "another model's weights": changed("model", digest="0" * 16),
    "another precision": changed("model", dtype="bfloat16"),
    "another roster": changed("clients", names=[NAME, "south"]),
    "another site's traits": changed("clients", traits={NAME: {"ward": "3"}}),
    "a promise that is none": changed(
        "privacy", unit="example", epsilon=900.0, noise_multiplier=0.3, examples_per_site=24
    ),
    "other scores": changed("evaluate", personal=False),
    "a word that is no word": changed("", surprise=1),
    "a section that is a number": changed("", train=1),
    "no study": lambda: {},
}


@pytest.mark.parametrize("lie", STUDIES)
def test_another_study_is_refused_before_and_within_a_run(lie: str, desk: SiteGateway) -> None:
    study = STUDIES[lie]()
    assert offer(desk, study), "at the first greeting"
    assert not (desk.state_folder / "runs").exists()
    endpoint = endpoint_of(desk)
    assert offer(desk, study), "in a run that is of the approved one"
    assert offer(desk, study, OTHER), "in another run"
    assert told(desk.answer(TRAIN, request(endpoint))) == "", "the approved one goes on"
    assert len(read_faults(desk.state_folder)) == 3


def request(endpoint: Endpoint, kind: str = TRAIN, **change: Any) -> Message:
    world = world_of(endpoint, round=change.pop("round", 1))
    down = make_request(endpoint.agreement, world, NAME, {}, full=True)
    turn = {k: change.pop(k) for k in ("client", "phase", "traits", "scores") if k in change}
    return request_message(replace(down, turn=replace(down.turn, **turn), **change))


def more_values(endpoint: Endpoint) -> Message:
    down = make_request(endpoint.agreement, world_of(endpoint), NAME, {}, full=True)
    values = get_values(endpoint.site.setup.model, endpoint.agreement.params)
    return request_message(replace(down, values=values, versions=dict.fromkeys(values, 0)))


REQUESTS: dict[str, tuple[Callable[[Endpoint], tuple[str, Message]], str]] = {
    "another run": (lambda e: (TRAIN, request(e, run=OTHER)), "unknown-run"),
    "no run": (lambda e: (TRAIN, request(e, run="")), "message"),
    "a run that is a path": (lambda e: (TRAIN, request(e, run="../../../../x")), "message"),
    "another agreement": (
        lambda e: (TRAIN, request(e, agreement_digest="0" * 64)),
        "another-study",
    ),
    "another site's request": (lambda e: (TRAIN, request(e, name="south")), "another-study"),
    "a round after the last": (lambda e: (TRAIN, request(e, round=4)), "too-many-rounds"),
    "a home that was put back": (
        lambda e: (TRAIN, request(e, round=3, last_update_round=2)),
        "outdated-state",
    ),
    "values that are the site's own": (lambda e: (TRAIN, more_values(e)), "unexpected-values"),
    "a choice that the plan has not": (lambda e: (POLL, request(e)), "no-scoring"),
    "a request that is none": (lambda e: ("rows", request(e)), "unknown-request"),
    "no message": (lambda e: (TRAIN, Message(b"")), "message"),
}


@pytest.mark.parametrize("lie", REQUESTS)
def test_a_request_that_was_not_approved_is_refused(lie: str, desk: SiteGateway) -> None:
    make, code = REQUESTS[lie]
    endpoint = endpoint_of(desk)
    assert told(desk.answer(*make(endpoint))) == code
    assert told(desk.answer(TRAIN, request(endpoint))) == ""


@pytest.mark.parametrize(
    "lie", [{"client": "south"}, {"traits": {"ward": "3"}}, {"scores": {}}], ids=str
)
def test_what_a_site_knows_of_itself_it_is_not_told(
    lie: dict[str, Any], desk: SiteGateway, tmp_path: Path
) -> None:
    """Its name, its traits and its scores are its own: a lie about them changes no bit."""
    endpoint = endpoint_of(desk)
    (tmp_path / "other").mkdir()
    other = SiteGateway(words_of(tmp_path / "other")[0], desk.approver)
    assert offer(other, said(APPROVED)) == ""
    answers = desk.answer(TRAIN, request(endpoint)), other.answer(TRAIN, request(endpoint, **lie))
    one, two = (unpack_message(each)[0] for each in answers)
    assert one and digests(one) == digests(two)


def test_an_older_round_is_refused_and_the_same_one_is_answered_the_same(desk: SiteGateway) -> None:
    endpoint = endpoint_of(desk)
    first, second = (request(endpoint, round=number) for number in (1, 2))
    assert told(desk.answer(TRAIN, first)) == ""
    answer = desk.answer(TRAIN, second)
    assert told(answer) == ""
    assert desk.answer(TRAIN, second) == answer
    third = request(endpoint, round=3)
    assert told(desk.answer(TRAIN, third)) == ""
    assert told(desk.answer(TRAIN, first)) == "past-round"


def test_a_home_that_was_put_back_goes_on_when_a_person_says_so_once(desk: SiteGateway) -> None:
    endpoint = endpoint_of(desk)
    asked = request(endpoint, round=3, last_update_round=2)
    assert told(desk.answer(TRAIN, asked)) == "outdated-state"
    allow_rejoin(desk.site, RUN)
    assert told(desk.answer(TRAIN, asked)) == ""
    assert (desk.state_folder / "rejoin" / RUN).exists(), "a poll or what is lacking may come first"
    assert told(desk.answer(TRAIN, asked)) == ""
    assert not (desk.state_folder / "rejoin" / RUN).exists()


def test_what_is_asked_before_a_greeting_is_refused(desk: SiteGateway, tmp_path: Path) -> None:
    endpoint = endpoint_of(desk)
    asked = request(endpoint, run=OTHER)
    assert told(desk.answer(TRAIN, asked)) == "unknown-run"
    assert told(desk.answer(HELLO, pack_message({}, {"run": RUN}))) == "another-study"


def test_limits_hold_over_names_seeds_runs_and_studies(tmp_path: Path) -> None:
    """Each is approved here, as by a careless person: the dataset's limit is one."""
    site, limits = words_of(tmp_path, limit_rounds=3)
    count = 0
    for number in range(6):
        text = study_text(name=f"n{number}", seed=number, privacy="", rounds=3)
        desk = SiteGateway(site, Only(study_from_dict(said(text)), limits))
        run = f"{number:016x}"
        assert offer(desk, said(text), run) == ""
        worker = desk._runtime_for(study_from_dict(said(text)))  # pyright: ignore[reportPrivateUsage]
        endpoint = worker.endpoint(run)
        code = told(desk.answer(TRAIN, request(endpoint)))
        assert code == ("" if number < 3 else "limit-rounds")
        count += not code
    assert count == 3


def test_there_are_forty_lies() -> None:
    assert len(STUDIES) + len(REQUESTS) >= 40
