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

from fedplan.agreement import Setup
from fedplan.config import ConfigError, Study, study_of
from fedplan.description import describe
from fedplan.desk import Desk
from fedplan.errands import Order
from fedplan.fit import Pace
from fedplan.journal import Journal, home_of
from fedplan.ledger import digests
from fedplan.mail import down_parcel
from fedplan.method import Method
from fedplan.methods import method
from fedplan.parcel import Parcel
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.promise import Promise
from fedplan.privacy.vote import Vote
from fedplan.rounds import Tally
from fedplan.runners.flower.calls import Patience
from fedplan.runners.flower.client import client_app
from fedplan.runners.flower.server import Carrier
from fedplan.runners.local import Federation
from fedplan.server import Server
from fedplan.site import Site
from fedplan.state import take
from fedplan.text import parse
from fedplan.trainer import Office

NAMES = ("client-0", "client-1", "client-2")
TRAITS = {"client-1": {"site": "a"}, "client-2": {"site": "b"}}
ROUNDS = 2
SOON = Patience(sites=0.2, answers=60.0, absent=0.1, look=0.005)
ALL = Promise("client", 900.0, 1e-5, 1.0, 1.0)
PROMISES = {
    "all": ALL,
    "drawn": replace(ALL, rate=0.9),
    "moving": replace(ALL, rate=0.9, quantile=0.5, cap=4),
}
METHODS: dict[str, Method] = {
    "fedavg": method("fedavg"),
    "fedper": method("fedper"),
    "fedfrozen": method("fedfrozen", {"warmup": 1}),
    "fedadam": method("fedadam"),
    "traits": Method(
        parse('chain(freeze(), by("site", {"a": share(blocks(0))}, share(blocks(1))))')
    ),
    "one client": Method(
        parse('chain(freeze(), share(head), when(client_in("client-1"), share(blocks(0))))')
    ),
    "random": method("safl", {"k": 1, "probe": "random"}),
    "random, together": method("safl", {"k": 1, "probe": "random", "together": True}),
    "last, together": method("safl", {"k": 1, "probe": "last", "together": True}),
    "by chance for some": Method(
        parse('chain(freeze(), share(head), when(client_in("client-1"), best(1)))'), together=True
    ),
    "vote": method("safl", {"k": 1, "together": True}),
}
RUNNERS = ("local", "flower")


def setup_of(made: Method, promise: Promise) -> Setup:
    if made is METHODS["vote"]:
        promise = replace(promise, vote=2.0, period=1)
    return Setup("presence", describe(zoo.build("bert")), made, PACE, promise, start="one")


PACE = Pace(optimiser="adamw", rate=1e-2, batch=2, steps=1)


def released(server: Server, tally: Tally) -> dict[str, Any]:
    """What is out after a round, but for the values: their noise is another in each world."""
    world = server.world
    return {
        "round": world.round,
        "phase": world.phase,
        "versions": world.versions,
        "shapes": {k: (tuple(v.shape), v.dtype) for k, v in world.values.items()},
        "memory": {k: sorted(m) for k, m in world.memory.items()},
        "voted": sorted(world.choice),
        "drift": world.drift,
        "clip": world.clip > 0,
        "charges": [(c.about, c.event) for c in server.veil.budget.charges if server.veil],
        "drawn": sorted(tally.cohort),
        "asked": {n: told(tally, n) for n in tally.cohort if n != NAMES[1]},
    }


def told(tally: Tally, name: str) -> tuple[Any, ...]:
    """What another client sees of a round."""
    down = tally.cohort[name]
    chosen = sorted(down.turn.scores) if down.turn.scores is not None else None
    turn = replace(down.turn, scores=None)
    blank = replace(down, turn=turn)
    return chosen, turn, down.versions, down.basis, down.heard, down_parcel(blank).nbytes


def played(
    runner: str, made: Method, promise: Promise, there: Iterable[str], folder: Path
) -> list[dict[str, Any]]:
    """Every round's release, of a federation of one roster, some of whom are there."""
    know_secrets(folder, NAMES)
    setup, there, found = setup_of(made, promise), list(there), list[dict[str, Any]]()
    if runner == "local":
        rows = {n: r for n, r in few("bert", 3).items() if n in there}
        whole = Federation(
            setup, zoo.build("bert"), rows, loss, folder, rounds=ROUNDS, traits=TRAITS, names=NAMES
        )
        for _ in range(ROUNDS):
            tally = whole.round()
            whole.commit(tally)
            found.append(released(whole, tally))
        return found
    start = take(zoo.build("bert"), setup.params)
    roster = {name: TRAITS.get(name, {}) for name in NAMES}
    server = Server(setup, start, folder, rounds=ROUNDS, roster=roster)
    desks = {name: desk_at(server.setup, folder, name) for name in there}

    def answer(context: Context, kind: str, parcel: Parcel) -> Parcel:
        return desks[str(context.node_config["name"])].answer(kind, parcel)

    grid = InProcess(client_app(answer), [{"name": name} for name in there])
    Carrier(grid, server, SOON).carry(lambda s, tally: found.append(released(s, tally)))
    return found


def desk_at(setup: Setup, folder: Path, name: str, traits: dict[str, str] | None = None) -> Desk:
    model = zoo.build("bert")
    start = take(model, setup.params)
    site = Site(
        name=name,
        rows=few("bert", 3)[name],
        journal=Journal(home_of(folder, name), replies=True),
        model=model,
        start=start,
        marks=digests(start),
        loss=loss,
        traits=TRAITS.get(name, {}) if traits is None else traits,
    )
    return Desk(setup, site, folder / "sites" / name)


CASES = [
    (runner, name, promise)
    for name in METHODS
    for promise in PROMISES
    for runner in RUNNERS
    if promise == "drawn" or (name, promise) in (("traits", "all"), ("vote", "moving"))
]


@pytest.mark.parametrize(("runner", "name", "promise"), CASES)
def test_what_is_released_has_one_shape_whoever_comes(
    runner: str, name: str, promise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a vote says is noisy, and what follows from it is the same for whom it says the same.
    monkeypatch.setattr(Vote, "release", lambda _, counts, *__: {b: b.number for b in counts})
    run = METHODS[name], PROMISES[promise]
    whole = played(runner, *run, NAMES, tmp_path / "whole")
    without = played(runner, *run, (NAMES[0], NAMES[2]), tmp_path / "without")
    assert any(NAMES[1] in each["drawn"] for each in whole)
    assert len(whole) == ROUNDS and whole == without


@pytest.mark.parametrize("runner", RUNNERS)
def test_rounds_that_nobody_answers_are_released_too(runner: str, tmp_path: Path) -> None:
    run = METHODS["traits"], PROMISES["all"]
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

    def odd(setup: Setup, folder: Path, name: str) -> Desk:
        if name != NAMES[1]:
            return calm(setup, folder, name)
        traits = {"site": "b"} if fault == "traits" else None
        other = {"study": {"study": "another"}, "model": {"start": "two"}, "run": {"run": "other"}}
        return calm(replace(setup, **other.get(fault, {})), folder, name, traits)

    run = "flower", METHODS["traits"], PROMISES["all"]
    without = played(*run, (NAMES[0], NAMES[2]), tmp_path / "without")
    monkeypatch.setitem(globals(), "desk_at", odd)
    assert played(*run, NAMES, tmp_path / "odd") == without


def test_a_quorum_of_hidden_clients_is_refused(tmp_path: Path) -> None:
    setup = setup_of(METHODS["fedavg"], PROMISES["all"])
    start = take(zoo.build("bert"), setup.params)
    server = Server(setup, start, tmp_path, rounds=1, roster={n: {} for n in NAMES})
    with pytest.raises(PrivacyError, match=r"leave clients\.quorum out"):
        Carrier(InProcess(client_app(lambda *_: Parcel(b"")), []), server, SOON, quorum=2)


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
    return study_of(found)


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        ({"clients": {"quorum": 2}}, "leave it out"),
        ({"clients": {"late": 0.1}}, "no clients.dropped"),
        (
            {"clients": {"names": []}, "data": {"path": "t.csv", "by": "column", "column": "who"}},
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
        settings.replace("dropped = 0.1", "") + '\n[privacy]\nunit = "client"\nepsilon = 1.0\n'
    )
    node = {"name": "client-00", "ward": "3"}
    with pytest.raises(ConfigError, match=r"stand in the study, in clients\.traits\.client-00"):
        Office(Order(str(file), str(tmp_path / "home"), node))
