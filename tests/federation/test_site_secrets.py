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
from fedplan.federation.endpoint import read_personal_model
from fedplan.federation.ledger.records import split_digests
from fedplan.federation.messages import Update
from fedplan.federation.rounds import RoundState
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.privacy.guarantee import Guarantee
from fedplan.runners.local import Federation
from fedplan.storage.encryption import Encryption, new_key_file
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.message import Message
from fedplan.tensors.named import digest
from fedplan.training.fit import TrainArguments

PACE = TrainArguments(lr=1e-2, batch_size=2, steps=2)


class Heard(Federation):
    """A federation whose server keeps every update and all that was private when it was made."""

    def __init__(
        self,
        made: Method,
        folder: Path,
        *,
        guarantee: Guarantee | None = None,
        train_arguments: TrainArguments = PACE,
        prompted: bool = False,
    ) -> None:
        torch.manual_seed(0)
        model = duals.build("clip") if prompted else zoo.build("bert")
        model = made.adapt(model) if made.adapt else model
        rows = duals.pictures_of("ann", "berta") if prompted else few("bert")
        agreement = Agreement("own", describe(model), made, train_arguments, guarantee)
        score = duals.ASKED.loss if prompted else loss
        super().__init__(agreement, model, rows, score, folder, rounds=3)
        self.updates = list[Update]()
        self.private = list[dict[str, Tensor]]()
        self._counted, self.server.take = self.server.take, self._take  # type: ignore[method-assign]

    def _take(self, round_state: RoundState, update: Update, **more: bool) -> None:
        # Values are lent: the next turn writes over them.
        values = {key: value.clone() for key, value in update.values.items()}
        self.updates.append(replace(update, values=values))
        self.private.append(get_values(self.model, self.agreement.params))
        self._counted(round_state, update, **more)


@pytest.mark.parametrize("name", KEPT)
def test_no_digest_of_what_a_client_keeps_can_be_guessed(name: str, tmp_path: Path) -> None:
    prompted = "prompts" in name or "pfeddc" in name
    fed = Heard(method_by_name(name, KEPT[name]), tmp_path, prompted=prompted)
    guesses = {digest(value) for value in fed.server.start.values()}
    told = dict[tuple[str, str], str]()
    for _ in range(3):
        fed.commit(fed.run_round())
    for values in fed.private:
        guesses |= {digest(value) for value in values.values()}
    for update in fed.updates:
        before, after = (
            split_digests(fed.agreement.params, update.ledger_line[k]) for k in ("before", "after")
        )
        for p, letter in zip(fed.agreement.params, update.ledger_line["roles"], strict=True):
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
    made = replace(method_by_name("fedavg"), compression=parse_codec(wire))
    hidden = replace(guarantee, vote_noise_multiplier=0.0) if guarantee else None
    fed = Heard(made, tmp_path, guarantee=hidden)
    global_state = dict(fed.global_state.values)
    fed.run_round()
    for update in fed.updates:
        after = split_digests(fed.agreement.params, update.ledger_line["after"])
        sent = made.compression.decode(update.values, global_state)
        assert sent and all(after[key] == digest(value) for key, value in sent.items())


@pytest.mark.parametrize("name", GUARANTEES)
def test_under_a_promise_no_number_of_a_line_follows_from_the_rows(
    name: str, tmp_path: Path
) -> None:
    guarantee, told = GUARANTEES[name], list[dict[str, object]]()
    rate = guarantee.sampling_rate if guarantee.unit == "example" else None
    train_arguments = PACE if guarantee.unit == "example" else TrainArguments(lr=1e-2, batch_size=2)
    guarantee = replace(guarantee, vote_noise_multiplier=0.0, sampling_rate=rate)
    for count in (3, 9):
        folder = tmp_path / str(count)
        fed = Heard(
            method_by_name("fedavg"), folder, guarantee=guarantee, train_arguments=train_arguments
        )
        fed.clients.examples["client-0"] = Few("bert", 0, count)
        fed.run_round()
        (line,) = (update.ledger_line for update in fed.updates if update.client == "client-0")
        told.append({key: said for key, said in line.items() if key != "after"})
    assert told[0] == told[1]


def test_verify_knows_the_key_and_sees_a_home_that_was_changed(here: Path) -> None:
    assert run("run", "study.toml", "--output", "run")[0] == 0
    assert run("verify", "run")[0] == 0
    place = client_state_folder(here / "run", "client-01")
    key = (place / "key").read_bytes()
    (place / "key").write_bytes(bytes(32))
    code, told = run("verify", "run")
    assert code == 1 and "is not the value that its last turn left" in " ".join(told.split())
    (place / "key").unlink()
    code, told = run("verify", "run")
    assert (
        code == 1 and "has lost the key" in " ".join(told.split()) and not (place / "key").exists()
    )
    (place / "key").touch(0o600)
    (place / "key").write_bytes(key)
    home, notes = Journal(place).client_state()
    changed = {k: v + 1 for k, v in home.items()}
    Journal(place).commit("another", changed, notes, {}, {"weight": 1})
    code, told = run("verify", "run")
    assert code == 1 and "client-01's" in told


def test_nothing_of_a_sealed_site_is_read_without_the_key(tmp_path: Path) -> None:
    new_key_file(tmp_path / "state.key")
    plan = 'plan = "chain(share(), keep(head))"'
    endpoint = site_of(
        tmp_path, study_text(method=plan), encryption_key=str(tmp_path / "state.key")
    )
    for number in (1, 2):
        assert asked(endpoint, world_of(endpoint, round=number, scale=number, version=number))[0]
    endpoint.answer("strange", Message(b""))
    home, site = tmp_path / "state", endpoint.site
    kept, _ = site.journal.client_state()
    guard = site.privacy.guard
    assert kept and site.received and guard is not None
    private = [*kept.values(), *site.received.values()]
    needles = [value.numpy().tobytes()[:64] for value in private if value.numel() >= 16]
    needles += [guard._secret, site.digest_key]
    for each in (home, *home.rglob("*")):
        assert not stat.S_IMODE(each.stat().st_mode) & 0o077, each
        if each.is_file():
            content = each.read_bytes()
            assert not any(needle in content for needle in needles), each
        if each.suffix == ".safetensors":
            with pytest.raises(SafetensorError):
                load_file(each)
    found = read_personal_model(endpoint.agreement, endpoint.folder, tmp_path / "state.key")
    assert kept.keys() & found.keys()
    assert all(torch.equal(found[key], value) for key, value in kept.items() if key in found)


def test_another_key_opens_nothing_and_throws_nothing_away(tmp_path: Path) -> None:
    for name in ("a.key", "b.key"):
        new_key_file(tmp_path / name)
    text = study_text(method='plan = "chain(share(), keep(head))"', privacy="")
    endpoint = site_of(tmp_path, text, encryption_key=str(tmp_path / "a.key"))
    assert asked(endpoint, world_of(endpoint))[0]
    files = {p: p.read_bytes() for p in (tmp_path / "state").rglob("*.safetensors")}
    with pytest.raises(StoreError, match="another key"):
        site_of(tmp_path, text, encryption_key=str(tmp_path / "b.key"))
    endpoint = site_of(tmp_path, text, encryption_key=str(tmp_path / "a.key"))
    endpoint.site.journal.encryption = Encryption.from_file(tmp_path / "b.key")
    endpoint.received_store = endpoint._open_store()
    endpoint.site.journal = Journal(
        endpoint.folder / "state", encryption=Encryption.from_file(tmp_path / "b.key")
    )
    assert not asked(endpoint, world_of(endpoint, round=2))[0]
    assert files == {p: p.read_bytes() for p in files}
