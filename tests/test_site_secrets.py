# SPDX-License-Identifier: Apache-2.0
"""What is a site's own cannot be guessed from what it says, nor read from its disk without the key."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import duals
import pytest
import torch
import zoo
from clients import PROMISES, Few, few, loss
from commands import run
from safetensors import SafetensorError
from safetensors.torch import load_file
from sites import asked, site_of, study_text, world_of
from test_leaks import KEPT
from torch import Tensor

from fedplan.agreement import Setup
from fedplan.description import describe
from fedplan.desk import own_values
from fedplan.errors import StoreError
from fedplan.exchange import Update
from fedplan.fit import Pace
from fedplan.journal import Journal, home_of
from fedplan.ledger import digest, parted
from fedplan.method import Method
from fedplan.methods import method
from fedplan.parcel import Parcel
from fedplan.privacy.promise import Promise
from fedplan.rounds import Tally
from fedplan.runners.local import Federation
from fedplan.seals import Seal, new_key_file
from fedplan.state import take
from fedplan.wire import parse_wire

PACE = Pace(rate=1e-2, batch=2, steps=2)


class Heard(Federation):
    """A federation whose server keeps every update and all that was private when it was made."""

    def __init__(
        self,
        made: Method,
        folder: Path,
        *,
        promise: Promise | None = None,
        pace: Pace = PACE,
        prompted: bool = False,
    ) -> None:
        torch.manual_seed(0)
        model = duals.build("clip") if prompted else zoo.build("bert")
        model = made.adapt(model) if made.adapt else model
        rows = duals.pictures_of("ann", "berta") if prompted else few("bert")
        setup = Setup("own", describe(model), made, pace, promise)
        score = duals.ASKED.loss if prompted else loss
        super().__init__(setup, model, rows, score, folder, rounds=3)
        self.updates = list[Update]()
        self.private = list[dict[str, Tensor]]()

    def take(self, tally: Tally, update: Update) -> None:
        self.updates.append(update)
        self.private.append(take(self.model, self.setup.params))
        super().take(tally, update)


@pytest.mark.parametrize("name", KEPT)
def test_no_digest_of_what_a_client_keeps_can_be_guessed(name: str, tmp_path: Path) -> None:
    prompted = "prompts" in name or "pfeddc" in name
    fed = Heard(method(name, KEPT[name]), tmp_path, prompted=prompted)
    guesses = {digest(value) for value in fed.start.values()}
    told = dict[tuple[str, str], str]()
    for _ in range(3):
        fed.commit(fed.round())
    for values in fed.private:
        guesses |= {digest(value) for value in values.values()}
    for update in fed.updates:
        before, after = (parted(fed.setup.params, update.line[k]) for k in ("before", "after"))
        for p, letter in zip(fed.setup.params, update.line["roles"], strict=True):
            said = {before[p.key], after[p.key]}
            if letter not in "KH":
                continue
            assert not said & guesses, "a digest of its own value, or of the start, as it is"
            last = told.get((update.client, p.key))
            assert last is None or last == before[p.key], "the same value has the same digest"
            assert letter == "K" or before[p.key] == after[p.key]
            told[update.client, p.key] = after[p.key]
    assert len(told) == len(set(told.values())), "no two clients or params are told to be alike"


@pytest.mark.parametrize(
    "wire", ["plain()", "half()", "pipe(delta(), int8())", "pipe(delta(), topk(0.2))"]
)
@pytest.mark.parametrize("promise", [None, PROMISES["weighed"]], ids=["", "weighed"])
def test_a_digest_of_what_is_shared_is_of_what_was_sent(
    wire: str, promise: Promise | None, tmp_path: Path
) -> None:
    """More bits, or the change before its weight, would tell what the wire or the weight hides."""
    made = replace(method("fedavg"), wire=parse_wire(wire))
    hidden = replace(promise, vote=0.0) if promise else None
    fed = Heard(made, tmp_path, promise=hidden)
    world = dict(fed.world.values)
    fed.round()
    for update in fed.updates:
        after = parted(fed.setup.params, update.line["after"])
        sent = made.wire.decode(update.values, world)
        assert sent and all(after[key] == digest(value) for key, value in sent.items())


@pytest.mark.parametrize("name", PROMISES)
def test_under_a_promise_no_number_of_a_line_follows_from_the_rows(
    name: str, tmp_path: Path
) -> None:
    promise, told = PROMISES[name], list[dict[str, object]]()
    rate = promise.rate if promise.unit == "example" else None
    pace = PACE if promise.unit == "example" else Pace(rate=1e-2, batch=2)
    promise = replace(promise, vote=0.0, rate=rate)
    for count in (3, 9):
        folder = tmp_path / str(count)
        fed = Heard(method("fedavg"), folder, promise=promise, pace=pace)
        fed.sites["client-0"].rows = Few("bert", 0, count)
        fed.round()
        (line,) = (update.line for update in fed.updates if update.client == "client-0")
        told.append({key: said for key, said in line.items() if key != "after"})
    assert told[0] == told[1]


def test_verify_knows_the_key_and_sees_a_home_that_was_changed(here: Path) -> None:
    assert run("run", "study.toml", "--output", "run")[0] == 0
    assert run("verify", "run")[0] == 0
    place = home_of(here / "run", "client-01")
    key = (place / "key").read_bytes()
    (place / "key").write_bytes(bytes(32))
    code, told = run("verify", "run")
    assert code == 1 and "is not what its last turn left" in " ".join(told.split())
    (place / "key").unlink()
    code, told = run("verify", "run")
    assert (
        code == 1 and "has lost the key" in " ".join(told.split()) and not (place / "key").exists()
    )
    (place / "key").touch(0o600)
    (place / "key").write_bytes(key)
    home, notes = Journal(place).home()
    changed = {k: v + 1 for k, v in home.items()}
    Journal(place).commit("another", changed, notes, {}, {"weight": 1})
    code, told = run("verify", "run")
    assert code == 1 and "client-01's" in told


def test_nothing_of_a_sealed_site_is_read_without_the_key(tmp_path: Path) -> None:
    new_key_file(tmp_path / "home.key")
    plan = 'plan = "chain(share(), keep(head))"'
    desk = site_of(tmp_path, study_text(method=plan), key=str(tmp_path / "home.key"))
    for number in (1, 2):
        assert asked(desk, world_of(desk, round=number, scale=number, version=number))[0]
    desk.answer("strange", Parcel(b""))
    home, site = tmp_path / "home", desk.site
    kept, _ = site.journal.home()
    cloak = site.cloak
    assert kept and site.seen and cloak is not None
    private = [*kept.values(), *site.seen.values()]
    needles = [value.numpy().tobytes()[:64] for value in private if value.numel() >= 16]
    needles += [cloak._secret, site.key]
    for each in (home, *home.rglob("*")):
        assert not stat.S_IMODE(each.stat().st_mode) & 0o077, each
        if each.is_file():
            content = each.read_bytes()
            assert not any(needle in content for needle in needles), each
        if each.suffix == ".safetensors":
            with pytest.raises(SafetensorError):
                load_file(each)
    found = own_values(desk.setup, desk.folder, tmp_path / "home.key")
    assert kept.keys() & found.keys()
    assert all(torch.equal(found[key], value) for key, value in kept.items() if key in found)


def test_another_key_opens_nothing_and_throws_nothing_away(tmp_path: Path) -> None:
    for name in ("a.key", "b.key"):
        new_key_file(tmp_path / name)
    text = study_text(method='plan = "chain(share(), keep(head))"', privacy="")
    desk = site_of(tmp_path, text, key=str(tmp_path / "a.key"))
    assert asked(desk, world_of(desk))[0]
    files = {p: p.read_bytes() for p in (tmp_path / "home").rglob("*.safetensors")}
    with pytest.raises(StoreError, match="another key"):
        site_of(tmp_path, text, key=str(tmp_path / "b.key"))
    desk = site_of(tmp_path, text, key=str(tmp_path / "a.key"))
    desk.site.journal.seal = Seal.from_file(tmp_path / "b.key")
    desk.seen = desk._store()
    desk.site.journal = Journal(desk.folder / "home", seal=Seal.from_file(tmp_path / "b.key"))
    assert not asked(desk, world_of(desk, round=2))[0]
    assert files == {p: p.read_bytes() for p in files}
