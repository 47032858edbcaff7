# SPDX-License-Identifier: Apache-2.0
"""Whole runs under attack: sums that are masked, and a trusted server with a hostile client.

With secure aggregation the server is hostile: it begins with values of its own choice, and asks
everything again when the run is over. Two worlds differ in one row of a site, or in whether one
site has any rows. Where the server adds the noise it is trusted, and a client is hostile: it sends
what it likes, and two worlds differ in whether another client comes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hostile import SITE, VALUES, Attack, Attacker, odd_row
from hostile_worlds import Outcome, Transcript, alike, attacked, charges_in, outcome, plain
from neighbours import ROWS, TASKS, Row, Said, Wire, write_table
from sites import Anybody

from fedplan.errors import FedplanError
from fedplan.federation import client_round, identity
from fedplan.federation.server import Server
from fedplan.models.values import get_values, set_values
from fedplan.runners.flower.apps import client_app, run_server
from fedplan.runners.site import ServerSection, Site
from fedplan.sites.gateway import SiteGateway
from fedplan.storage.append_log import read_json_lines
from fedplan.studies.schema import read_study
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import unpack_message

SITES = (SITE, "south", "east")
HOSTILE, VICTIM = "south", "east"
"""A client that sends what it likes, and one that is in one world alone."""
STEADY = {("up", "query.share_keys"), ("up", "query.masked_input")}
"""Messages of the protocol whose sizes are the same in every run."""
LONG = 16
"""Texts of this length are keys, shares and signatures: they differ in every run."""


def carried(attack: Attack, here: Path) -> Outcome:
    """What an attack comes to: one on a site, or one on a whole run; `here` was prepared."""
    whole = (attack.unit, attack.aggregation) != ("example", "plain")
    return (attacked_run if whole else attacked)(attack, here)


def attacked_run(attack: Attack, here: Path) -> Outcome:
    """Carry an attack on a whole run against both worlds; `here` was prepared."""
    place = here / f"run-{len(list(here.iterdir()))}"
    place.mkdir()
    file = place / "study.toml"
    names = f"clients.names = {json.dumps(SITES)}"
    case = replace(attack.case, more=f"{attack.case.more}\ntrain.rounds = 2\n{names}")
    file.write_text(case.study(here))
    tables = {
        name: [TASKS[attack.task].row(100 * n + i) for i in range(ROWS)]
        for n, name in enumerate(SITES)
    }
    if attack.unit == "example":
        other = {**tables, SITE: [odd_row(attack), *tables[SITE]]}
    elif attack.aggregation == "secure":
        other = {**tables, VICTIM: list[Row]()}
    else:
        other = {name: rows for name, rows in tables.items() if name != VICTIM}
    worlds = [_world(attack, file, place / str(n), t) for n, t in enumerate((tables, other))]
    shutil.rmtree(place)
    return outcome(*worlds)


def _world(attack: Attack, file: Path, folder: Path, tables: Mapping[str, list[Row]]) -> Transcript:
    """Carry a run with these tables to its end, and ask everything again."""
    folder.mkdir()
    gateways = {name: _gateway(attack, folder, name, rows) for name, rows in tables.items()}
    wire = Wire(
        client_app(lambda context, *a: gateways[str(context.node_config["name"])].answer(*a)),
        [{"name": name} for name in gateways],
    )
    seen, fault = Transcript(), ""
    with alike(seen.releases), _hostile(attack, file):
        try:
            run_server(wire, read_study(file), folder / "server")
        except FedplanError as error:
            fault = str(error)
        if attack.aggregation == "secure":
            _ask_again(wire, attack.seed)
    if attack.aggregation == "secure":
        blank = _Blank(keyed=attack.unit == "client")
        seen.answers = [(s.kind, blank.message(s)) for s in wire.said]
        seen.bytes = b"".join(s.bytes for s in wire.said if s.way == "up")
        for name in ("ledger", "metrics"):
            with suppress(FileNotFoundError):
                lines = read_json_lines(folder / "server" / f"{name}.jsonl")
                seen.answers.append((name, ((), {"lines": blank.words(lines)})))
        seen.answers.append(("fault", ((), {"text": fault})))
        seen.charges = charges_in(folder / "state")
    else:
        # The server is trusted, and its folder is no release: others see the models that it sends.
        others = [s for s in wire.said if s.site != VICTIM and s.way == "down" and s.message]
        seen.answers = [(s.kind, plain(s.message)) for s in others if s.message]
        seen.charges = charges_in(folder / "server")
    return seen


def _gateway(attack: Attack, folder: Path, name: str, rows: list[Row]) -> SiteGateway:
    """A site with its rows, its node key and the keys of all."""
    table = folder / f"{name}{TASKS[attack.task].suffix}"
    if rows or table.suffix != ".npz":
        write_table(rows, table)
    else:
        columns = TASKS[attack.task].row(0).items()
        np.savez(table, **{key: np.array([value])[:0] for key, value in columns})
    peers = folder / "peers"
    peers.mkdir(exist_ok=True)
    for number, each in enumerate(SITES):
        key = ec.derive_private_key(number + 1000, ec.SECP384R1())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (peers / f"{each}.pub").write_bytes(public)
        if each == name:
            own = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
            (folder / f"{name}.key").write_bytes(own)
    server = ServerSection(address="here:1", node_key=str(folder / f"{name}.key"))
    state = str(folder / "state" / name)
    site = Site(name=name, state=state, data=str(table), peer_keys=str(peers), server=server)
    return SiteGateway(site, Anybody())


@contextmanager
def _hostile(attack: Attack, file: Path) -> Generator[None]:
    """A server that begins with values of its choice; or, where it is trusted, such a client."""
    attacker = Attacker(attack, file)
    real, fit = Server.__init__, client_round.StartedTurn.fit

    def begin(self: Server, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        state = self.global_state
        chosen = VALUES[attack.values]({k: v.clone() for k, v in state.values.items()}, attacker)
        versions = dict.fromkeys(state.versions, 10**6)  # so that all are sent
        self.global_state = replace(state, values=chosen, versions=versions)

    def trained(started: client_round.StartedTurn) -> Any:
        result, client = fit(started), started.client
        if client.name == HOSTILE:
            params = [p for p in started.agreement.trainable if started.roles[p].is_trained]
            values = get_values(client.setup.model, params, copy=True)
            set_values(client.setup.model, VALUES[attack.values](values, attacker), params)
        return result

    change = (
        patch.object(Server, "__init__", begin)
        if attack.aggregation == "secure"
        else patch.object(client_round.StartedTurn, "fit", trained)
    )
    with change, patch.object(identity, "token_hex", lambda size: "ab" * size):
        yield


def _ask_again(wire: Wire, seed: int) -> None:
    """Send the requests of the run once more, in another order."""
    asked = [s for s in wire.said if s.way == "down"]
    for each in Random(seed).sample(asked, min(len(asked), 20)):
        assert each.message is not None
        wire.ask(each.site, each.kind, each.message)


class _Blank:
    """Messages without what no two runs have in common: keys, shares, masked numbers, signatures.

    `keyed`: digests under a site's own key are of values that never leave, and are compared by
    where the site had each first.
    """

    def __init__(self, *, keyed: bool) -> None:
        self.keyed, self.known = keyed, dict[tuple[str, str], int]()

    def message(self, said: Said) -> Any:
        if said.message is None:
            return (), {"error": said.error}
        try:
            sizes, words, bits = plain(said.message)
        except FedplanError:  # a message of the protocol: signatures are of varying length
            sizes = [len(blob) for blob in said.message.blobs]
            words = unpack_message(Message(said.message.header))[1]
            return sizes if (said.way, said.kind) in STEADY else len(sizes), self.words(words)
        return sizes[1], self.words(words), bits

    def words(self, words: Any, name: str = "", site: str = "") -> Any:
        """`site`: whose ledger line it is in; "" for none."""
        if isinstance(words, dict):
            site = words["client"] if name == "ledger_line" or "roles" in words else site
            return {k: self.words(v, k, site) for k, v in words.items()}
        if isinstance(words, list):
            return [self.words(each, name, site) for each in words]
        if not isinstance(words, str) or len(words) < LONG:
            return words
        if not site:
            return name
        if self.keyed and name in ("before", "after"):
            digests = [(site, words[i : i + LONG]) for i in range(0, len(words), LONG)]
            return [self.known.setdefault(each, len(self.known)) for each in digests]
        return words
