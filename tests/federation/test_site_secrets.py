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
from clients import GUARANTEES, Few, few, loss
from commands import run
from safetensors import SafetensorError
from safetensors.torch import load_file
from sites import asked, site_of, study_text, world_of
from test_leaks import KEPT
from torch import Tensor

from fedplan.errors import StoreError
from fedplan.federation.agreement import Agreement
from fedplan.federation.endpoint import own_values
from fedplan.federation.messages import Update
from fedplan.federation.record import parted
from fedplan.federation.rounds import Tally
from fedplan.methods.method import Method
from fedplan.methods.registry import method_named
from fedplan.models.description import describe
from fedplan.models.values import take
from fedplan.privacy.guarantee import Guarantee
from fedplan.runners.local import Federation
from fedplan.storage.encryption import Encryption, new_key_file
from fedplan.storage.journal import Journal, home_of
from fedplan.tensors.message import Message
from fedplan.tensors.named import digest
from fedplan.tensors.wire import parse_wire
from fedplan.training.fit import Pace

PACE = Pace(rate=1e-2, batch=2, steps=2)


class Heard(Federation):
    """A federation whose server keeps every update and all that was private when it was made."""

    def __init__(
        self,
        made: Method,
        folder: Path,
        *,
        guarantee: Guarantee | None = None,
        pace: Pace = PACE,
        prompted: bool = False,
    ) -> None:
        torch.manual_seed(0)
        model = duals.build("clip") if prompted else zoo.build("bert")
        model = made.adapt(model) if made.adapt else model
        rows = duals.pictures_of("ann", "berta") if prompted else few("bert")
        agreement = Agreement("own", describe(model), made, pace, guarantee)
        score = duals.ASKED.loss if prompted else loss
        super().__init__(agreement, model, rows, score, folder, rounds=3)
        self.updates = list[Update]()
        self.private = list[dict[str, Tensor]]()
        self._counted, self.server.take = self.server.take, self._take  # type: ignore[method-assign]

    def _take(self, tally: Tally, update: Update, **more: bool) -> None:
        # Values are lent: the next turn writes over them.
        values = {key: value.clone() for key, value in update.values.items()}
        self.updates.append(replace(update, values=values))
        self.private.append(take(self.model, self.agreement.params))
        self._counted(tally, update, **more)


@pytest.mark.parametrize("name", KEPT)
def test_no_digest_of_what_a_client_keeps_can_be_guessed(name: str, tmp_path: Path) -> None:
    prompted = "prompts" in name or "pfeddc" in name
    fed = Heard(method_named(name, KEPT[name]), tmp_path, prompted=prompted)
    guesses = {digest(value) for value in fed.server.start.values()}
    told = dict[tuple[str, str], str]()
    for _ in range(3):
        fed.commit(fed.round())
    for values in fed.private:
        guesses |= {digest(value) for value in values.values()}
    for update in fed.updates:
        before, after = (parted(fed.agreement.params, update.line[k]) for k in ("before", "after"))
        for p, letter in zip(fed.agreement.params, update.line["roles"], strict=True):
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
@pytest.mark.parametrize("guarantee", [None, GUARANTEES["weighed"]], ids=["", "weighed"])
def test_a_digest_of_what_is_shared_is_of_what_was_sent(
    wire: str, guarantee: Guarantee | None, tmp_path: Path
) -> None:
    """More bits, or the change before its weight, would tell what the wire or the weight hides."""
    made = replace(method_named("fedavg"), wire=parse_wire(wire))
    hidden = replace(guarantee, vote=0.0) if guarantee else None
    fed = Heard(made, tmp_path, guarantee=hidden)
    world = dict(fed.world.values)
    fed.round()
    for update in fed.updates:
        after = parted(fed.agreement.params, update.line["after"])
        sent = made.wire.decode(update.values, world)
        assert sent and all(after[key] == digest(value) for key, value in sent.items())


@pytest.mark.parametrize("name", GUARANTEES)
def test_under_a_promise_no_number_of_a_line_follows_from_the_rows(
    name: str, tmp_path: Path
) -> None:
    guarantee, told = GUARANTEES[name], list[dict[str, object]]()
    rate = guarantee.rate if guarantee.unit == "example" else None
    pace = PACE if guarantee.unit == "example" else Pace(rate=1e-2, batch=2)
    guarantee = replace(guarantee, vote=0.0, rate=rate)
    for count in (3, 9):
        folder = tmp_path / str(count)
        fed = Heard(method_named("fedavg"), folder, guarantee=guarantee, pace=pace)
        fed.clients.rows["client-0"] = Few("bert", 0, count)
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
    endpoint = site_of(tmp_path, study_text(method=plan), key=str(tmp_path / "home.key"))
    for number in (1, 2):
        assert asked(endpoint, world_of(endpoint, round=number, scale=number, version=number))[0]
    endpoint.answer("strange", Message(b""))
    home, site = tmp_path / "home", endpoint.site
    kept, _ = site.journal.home()
    guard = site.guard
    assert kept and site.seen and guard is not None
    private = [*kept.values(), *site.seen.values()]
    needles = [value.numpy().tobytes()[:64] for value in private if value.numel() >= 16]
    needles += [guard._secret, site.key]
    for each in (home, *home.rglob("*")):
        assert not stat.S_IMODE(each.stat().st_mode) & 0o077, each
        if each.is_file():
            content = each.read_bytes()
            assert not any(needle in content for needle in needles), each
        if each.suffix == ".safetensors":
            with pytest.raises(SafetensorError):
                load_file(each)
    found = own_values(endpoint.agreement, endpoint.folder, tmp_path / "home.key")
    assert kept.keys() & found.keys()
    assert all(torch.equal(found[key], value) for key, value in kept.items() if key in found)


def test_another_key_opens_nothing_and_throws_nothing_away(tmp_path: Path) -> None:
    for name in ("a.key", "b.key"):
        new_key_file(tmp_path / name)
    text = study_text(method='plan = "chain(share(), keep(head))"', privacy="")
    endpoint = site_of(tmp_path, text, key=str(tmp_path / "a.key"))
    assert asked(endpoint, world_of(endpoint))[0]
    files = {p: p.read_bytes() for p in (tmp_path / "home").rglob("*.safetensors")}
    with pytest.raises(StoreError, match="another key"):
        site_of(tmp_path, text, key=str(tmp_path / "b.key"))
    endpoint = site_of(tmp_path, text, key=str(tmp_path / "a.key"))
    endpoint.site.journal.seal = Encryption.from_file(tmp_path / "b.key")
    endpoint.seen = endpoint._store()
    endpoint.site.journal = Journal(
        endpoint.folder / "home", seal=Encryption.from_file(tmp_path / "b.key")
    )
    assert not asked(endpoint, world_of(endpoint, round=2))[0]
    assert files == {p: p.read_bytes() for p in files}
