# SPDX-License-Identifier: Apache-2.0
"""Where clients are hidden, what is released has one shape, whoever comes and whoever does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zoo
from clients import few, know_secrets, loss
from flwr.app import Context
from grids import InProcess

from fedplan.errors import PrivacyError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, TrainSetup
from fedplan.federation.endpoint import Endpoint
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.ledger.events import CommittedRound
from fedplan.federation.messages import request_message
from fedplan.federation.participation import Timeouts
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.language.parser import parse
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.mechanisms.vote import NoisyVote
from fedplan.runners.flower.apps import client_app
from fedplan.runners.flower.server import ServerLoop
from fedplan.runners.local import Federation
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import SiteRuntime
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.studies.schema import ConfigError, Study, read_study, study_from_dict
from fedplan.tensors.message import Message
from fedplan.training.fit import TrainArguments

NAMES = ("client-0", "client-1", "client-2")
TRAITS = {"client-1": {"site": "a"}, "client-2": {"site": "b"}}
ROUNDS = 2
SOON = Timeouts(sites=0.2, updates=60.0, reconnect=0.1, poll_interval=0.005)
ALL = Guarantee("client", 900.0, 1e-5, 1.0, 1.0)
GUARANTEES = {
    "all": ALL,
    "drawn": replace(ALL, sampling_rate=0.9),
    "moving": replace(ALL, sampling_rate=0.9, clipping_quantile=0.5, max_weight=4),
}
METHODS: dict[str, Method] = {
    "fedavg": method_by_name("fedavg"),
    "fedper": method_by_name("fedper"),
    "fedfrozen": method_by_name("fedfrozen", {"warmup": 1}),
    "fedadam": method_by_name("fedadam"),
    "traits": Method(
        parse('chain(freeze(), by("site", {"a": share(blocks(0))}, share(blocks(1))))')
    ),
    "one client": Method(
        parse('chain(freeze(), share(head), when(client_in("client-1"), share(blocks(0))))')
    ),
    "random": method_by_name("safl", {"k": 1, "probe": "random"}),
    "random, together": method_by_name("safl", {"k": 1, "probe": "random", "joint_choice": True}),
    "last, together": method_by_name("safl", {"k": 1, "probe": "last", "joint_choice": True}),
    "by chance for some": Method(
        parse('chain(freeze(), share(head), when(client_in("client-1"), best(1)))'),
        joint_choice=True,
    ),
    "vote": method_by_name("safl", {"k": 1, "joint_choice": True}),
}
RUNNERS = ("local", "flower")


def make_agreement(made: Method, guarantee: Guarantee) -> Agreement:
    if made is METHODS["vote"]:
        guarantee = replace(guarantee, vote_noise_multiplier=2.0, vote_every=1)
    return Agreement("presence", describe(zoo.build("bert")), made, PACE, guarantee, start="one")


PACE = TrainArguments(lr=1e-2, batch_size=2, steps=1)


def released(server: Server, round_state: RoundState) -> dict[str, Any]:
    """What is out after a round, but for the values: their noise is another in each world."""
    world = server.global_state
    return {
        "round": world.round,
        "phase": world.phase,
        "versions": world.versions,
        "shapes": {k: (tuple(v.shape), v.dtype) for k, v in world.values.items()},
        "memory": {k: sorted(m) for k, m in world.memory.items()},
        "voted": sorted(world.choice),
        "drift": world.drift,
        "clip": world.clipping_norm > 0,
        "charges": [(c.name, c.event) for c in server.aggregation.guard.budget.charges],
        "drawn": sorted(round_state.cohort),
        "asked": {n: told(round_state, n) for n in round_state.cohort if n != NAMES[1]},
    }


def told(round_state: RoundState, name: str) -> tuple[Any, ...]:
    """What another client sees of a round."""
    down = round_state.cohort[name]
    chosen = sorted(down.turn.scores) if down.turn.scores is not None else None
    turn = replace(down.turn, scores=None)
    blank = replace(down, turn=turn)
    return (
        chosen,
        turn,
        down.versions,
        down.versions_digest,
        down.last_update_round,
        request_message(blank).nbytes,
    )


def played(
    runner: str, made: Method, guarantee: Guarantee, there: Iterable[str], folder: Path
) -> list[dict[str, Any]]:
    """Every round's release, of a federation of one roster, some of whom are there."""
    know_secrets(folder, NAMES)
    agreement, there, found = make_agreement(made, guarantee), list(there), list[dict[str, Any]]()
    if runner == "local":
        rows = {n: r for n, r in few("bert", 3).items() if n in there}
        whole = Federation(
            agreement,
            zoo.build("bert"),
            rows,
            loss,
            folder,
            rounds=ROUNDS,
            traits=TRAITS,
            names=NAMES,
        )
        for _ in range(ROUNDS):
            round_state = whole.run_round()
            whole.commit(round_state)
            found.append(released(whole.server, round_state))
        return found
    start = get_values(zoo.build("bert"), agreement.params)
    roster = {name: TRAITS.get(name, {}) for name in NAMES}
    server = Server(agreement, start, folder, rounds=ROUNDS, roster=roster)
    endpoints = {name: desk_at(server.agreement, folder, name) for name in there}

    def answer(context: Context, kind: str, message: Message) -> Message:
        return endpoints[str(context.node_config["name"])].answer(kind, message)

    grid = InProcess(client_app(answer), [{"name": name} for name in there])
    calm = server.commit

    def commit(round_state: RoundState) -> CommittedRound:
        closed = calm(round_state)
        found.append(released(server, round_state))
        return closed

    server.commit = commit  # type: ignore[method-assign,assignment]
    ServerLoop(grid, server, SOON).run()
    return found


def desk_at(
    agreement: Agreement, folder: Path, name: str, traits: dict[str, str] | None = None
) -> Endpoint:
    model = zoo.build("bert")
    start = get_values(model, agreement.params)
    site = Client(
        name=name,
        examples=few("bert", 3)[name],
        journal=Journal(client_state_folder(folder, name), keep_replies=True),
        setup=TrainSetup(model, loss, start, digest_initial_model(model, agreement.params, start)),
        traits=TRAITS.get(name, {}) if traits is None else traits,
    )
    return Endpoint(agreement, site, folder / "sites" / name)


CASES = [
    (runner, name, guarantee)
    for name in METHODS
    for guarantee in GUARANTEES
    for runner in RUNNERS
    if guarantee == "drawn" or (name, guarantee) in (("traits", "all"), ("vote", "moving"))
]


@pytest.mark.parametrize(("runner", "name", "guarantee"), CASES)
def test_what_is_released_has_one_shape_whoever_comes(
    runner: str, name: str, guarantee: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a vote says is noisy, and what follows from it is the same for whom it says the same.
    monkeypatch.setattr(NoisyVote, "release", lambda _, counts, *__: {b: b.number for b in counts})
    run = METHODS[name], GUARANTEES[guarantee]
    whole = played(runner, *run, NAMES, tmp_path / "whole")
    without = played(runner, *run, (NAMES[0], NAMES[2]), tmp_path / "without")
    assert any(NAMES[1] in each["drawn"] for each in whole)
    assert len(whole) == ROUNDS and whole == without


@pytest.mark.parametrize("runner", RUNNERS)
def test_rounds_that_nobody_answers_are_released_too(runner: str, tmp_path: Path) -> None:
    run = METHODS["traits"], GUARANTEES["all"]
    found = [
        [{k: v for k, v in each.items() if k != "asked"} for each in rounds]
        for rounds in (
            played(runner, *run, NAMES, tmp_path / "whole"),
            played(runner, *run, (), tmp_path / "nobody"),
        )
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("fault", ["traits", "study", "model", "run"])
def test_a_hidden_client_that_does_not_fit_is_as_if_it_had_not_come(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = desk_at

    def odd(agreement: Agreement, folder: Path, name: str) -> Endpoint:
        if name != NAMES[1]:
            return calm(agreement, folder, name)
        traits = {"site": "b"} if fault == "traits" else None
        other = {"study": {"study": "another"}, "model": {"start": "two"}, "run": {"run": "other"}}
        return calm(replace(agreement, **other.get(fault, {})), folder, name, traits)

    run = "flower", METHODS["traits"], GUARANTEES["all"]
    without = played(*run, (NAMES[0], NAMES[2]), tmp_path / "without")
    monkeypatch.setitem(globals(), "desk_at", odd)
    assert played(*run, NAMES, tmp_path / "odd") == without


def test_a_quorum_of_hidden_clients_is_refused(tmp_path: Path) -> None:
    agreement = make_agreement(METHODS["fedavg"], GUARANTEES["all"])
    start = get_values(zoo.build("bert"), agreement.params)
    server = Server(agreement, start, tmp_path, rounds=1, roster={n: {} for n in NAMES})
    with pytest.raises(PrivacyError, match=r"leave clients\.min_updates out"):
        ServerLoop(InProcess(client_app(lambda *_: Message(b"")), []), server, SOON, quorum=2)


def said(**sections: Any) -> Study:
    found: dict[str, Any] = {
        "model": {"type": "vit"},
        "task": {"kind": "image-classification", "input": "image", "label": "y", "labels": [0, 1]},
        "clients": {"names": ["north", "south"]},
        "method": {"name": "fedavg"},
        "privacy": {"unit": "client", "epsilon": 1.0},
    }
    for name, fields in sections.items():
        found[name] = found.get(name, {}) | fields
    return study_from_dict(found)


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        ({"clients": {"min_updates": 2}}, "leave it out"),
        ({"clients": {"late_fraction": 0.1}}, "leave out clients.dropout_fraction"),
        (
            {
                "clients": {"names": []},
                "data": {"path": "t.csv", "partition": "column", "partition_column": "who"},
            },
            "in clients.names",
        ),
    ],
)
def test_a_study_whose_releases_would_tell_who_is_there_is_refused(
    sections: dict[str, Any], remedy: str
) -> None:
    said()
    with pytest.raises(ConfigError, match=remedy):
        said(**sections)


def test_a_hidden_site_says_no_traits_of_itself(tmp_path: Path, here: Path) -> None:
    file = here / "hidden.toml"
    settings = (here / "study.toml").read_text()
    file.write_text(
        settings.replace("dropout_fraction = 0.1", "")
        + '\n[privacy]\nunit = "client"\nepsilon = 1.0\n'
    )
    site = Site(name="client-00", state=str(tmp_path / "state"), traits={"ward": "3"})
    with pytest.raises(ConfigError, match=r"must be in the study, in clients\.traits\.client-00"):
        SiteRuntime(site, read_study(file))
