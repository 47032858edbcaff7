# SPDX-License-Identifier: Apache-2.0
"""A study that names code, at a site: what it lacks or does not allow it refuses, and says a code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packages import METHOD, forget, install, on_path
from sites import NAME, PRIVATE, hello, make_gateway, site_of, study_text, world_of, write_rows

from fedplan.audits.run import verify_run
from fedplan.errors import FedplanError
from fedplan.federation.endpoint import TRAIN, Endpoint
from fedplan.federation.ledger.faults import describe_code, read_faults
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.run import run_study
from fedplan.sites.gateway import SiteGateway
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import unpack_message

LOOP = (
    METHOD
    + """
import torch
from fedplan.training import attach


def steps(model, rows, marked):
    optimizer = torch.optim.SGD(marked.parameters(), lr=0.5)
    loss = model(**rows.batch(torch.arange(4))).loss
    loss.backward()
    optimizer.step()
    return loss


loop = attach(steps)
rounds = []


def told(closed):
    rounds.append((closed.round, sorted(closed.scores["global"])))


def right(truth, guess):
    return float((truth == guess).mean())
"""
)
BY_PLACE = 'name = "mypackage.mine:mine"'
OFFERED = {"fedplan.methods": {"yours": "mypackage.mine:mine"}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield on_path(monkeypatch, tmp_path / "packages")
    forget("mypackage")


def offered(
    folder: Path, method: str, privacy: str = "", **said: Any
) -> tuple[SiteGateway, Message]:
    """A desk, and the request that offers it a study with a method."""
    return make_gateway(folder, **said), hello(study_text(method=method, privacy=privacy))


def trained(sender: Endpoint, site: Endpoint) -> dict[str, object]:
    """What a site says to a request of another's agreement."""
    down = make_request(sender.agreement, world_of(sender), NAME, {}, full=True)
    return dict(unpack_message(site.answer(TRAIN, request_message(down)))[1])


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (BY_PLACE, "'mypackage', which this site does not let a study import"),
        ('name = "os:system"', "'os', which this site does not let"),
        ('plan = "share()"\nloop = "antigravity:geohash"', "'antigravity', which this site"),
        ('plan = "share()"\nloop = "./loops.py:mine"', "there is no loop './loops.py:mine'"),
        ('name = "nobodys"', "there is no method 'nobodys'"),
    ],
)
def test_a_site_refuses_what_it_does_not_allow(
    method: str, words: str, place: Path, tmp_path: Path
) -> None:
    install(place, "mypackage", LOOP)
    desk, request = offered(tmp_path, method)
    _, said = unpack_message(desk.answer("hello", request))
    assert said == {"client": NAME, "refused": "unknown-name"}
    assert words in read_faults(desk.state_folder)[-1]
    assert "mypackage" not in sys.modules and "antigravity" not in sys.modules
    assert "does not have or allow" in describe_code("refused", "unknown-name")


@pytest.mark.parametrize("how", ["offered", "allowed"])
def test_a_site_takes_what_it_has_installed_for_it(how: str, place: Path, tmp_path: Path) -> None:
    install(place, "mypackage", LOOP, OFFERED if how == "offered" else None)
    allow = ["another", "mypackage"] if how == "allowed" else []
    site = site_of(tmp_path, study_text(method=BY_PLACE, privacy=""), allow_packages=allow)
    assert "server optimizer mean(lr=0.5)" in site.agreement.text
    assert "update" not in trained(site, site) and "refused" not in trained(site, site)
    assert site.site.traits == {}


def test_what_is_allowed_and_not_there_is_refused_too(tmp_path: Path) -> None:
    desk, request = offered(tmp_path, BY_PLACE, allow_packages=["mypackage"])
    assert unpack_message(desk.answer("hello", request))[1]["refused"] == "unknown-name"
    assert "ModuleNotFoundError" in read_faults(desk.state_folder)[-1]


def test_two_sites_with_one_name_and_other_code_do_not_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops differ in what they call, in a file beside theirs; the plans are the same."""
    sites = list[Endpoint]()
    method = 'plan = "share()"\nloop = "mypackage.mine:loop"'
    for end in ("a", "b", "c"):
        (tmp_path / end).mkdir()
        with monkeypatch.context() as here:
            folder = on_path(here, tmp_path / end / "packages")
            install(folder, "mypackage", LOOP)
            (folder / "mypackage" / "beside.py").write_text("x = 1" if end == "c" else "")
            study = study_text(method=method, privacy="")
            sites.append(site_of(tmp_path / end, study, allow_packages=["mypackage"]))
            forget("mypackage")
    one, same, other = sites
    assert one.agreement.fingerprint == same.agreement.fingerprint
    assert one.agreement.fingerprint != other.agreement.fingerprint
    assert trained(one, other) == {"refused": "another-study"}
    assert "refused" not in trained(one, same)


def test_a_loop_that_a_study_names_trains_at_a_site(place: Path, tmp_path: Path) -> None:
    install(place, "mypackage", LOOP)
    method = 'plan = "chain(share(), freeze(query))"\nloop = "mypackage.mine:loop"'
    site = site_of(tmp_path, study_text(method=method, privacy=""), allow_packages=["mypackage"])
    said = trained(site, site)
    line = said["ledger_line"]
    assert isinstance(line, dict) and line["steps"] == 1 and line["loss"] > 0
    assert "loop attach(mypackage.mine.steps#" in site.agreement.text


@pytest.mark.parametrize("of", ["loop", "client_hooks"])
def test_steps_of_ones_own_are_not_known_to_be_hidden(of: str, place: Path, tmp_path: Path) -> None:
    install(place, "mypackage", LOOP)
    named = '"mypackage.mine:loop"' if of == "loop" else '["mypackage.mine:loop"]'
    method = f'plan = "share()"\n{of} = {named}'
    desk, request = offered(tmp_path, method, PRIVATE, allow_packages=["mypackage"])
    assert unpack_message(desk.answer("hello", request))[1]["failed"] == "privacy"
    assert "no client hooks, no loop" in read_faults(desk.state_folder)[-1]


def test_a_run_of_a_study_file_is_tracked_and_measured_by_what_it_names(
    place: Path, tmp_path: Path
) -> None:
    """On one machine, as the command line runs it; what was named goes on with the same bits."""
    install(place, "mypackage", LOOP, {"fedplan.trackers": {"mine": "mypackage.mine:told"}})
    write_rows(tmp_path / "rows.npz", count=48)
    method = f'{BY_PLACE}\nloop = "mypackage.mine:loop"'
    data = f'path = "{tmp_path / "rows.npz"}"\nnum_clients = 2\ntest_filter = {{ patient = 3 }}'
    text = study_text(method=method, privacy="", data=data, rounds=2)
    text = text.replace(f'[clients]\nnames = ["{NAME}"]', "")
    text += '[evaluate]\nmetrics = ["mypackage.mine:right"]\ntrackers = ["mine"]\n'
    (tmp_path / "study.toml").write_text(text)
    run_study(tmp_path / "study.toml", tmp_path / "run")
    found = __import__("mypackage.mine", fromlist=["mine"]).rounds
    assert [number for number, _ in found] == [1, 2] and "right" in found[0][1]
    assert verify_run(tmp_path / "run")[0] == []
    (place / "mypackage" / "mine.py").write_text(LOOP.replace("lr=0.5", "lr=0.25"))
    forget("mypackage")
    with pytest.raises(FedplanError, match="the code that this one names has changed"):
        run_study(tmp_path / "study.toml", tmp_path / "run", resume=True)
