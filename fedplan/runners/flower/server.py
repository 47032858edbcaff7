# SPDX-License-Identifier: Apache-2.0
"""The server's loop on Flower's grid: ask, count what comes as it comes, close, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedplan.errors import FedplanError
from fedplan.rounds import Tally, choose
from fedplan.runners.flower.client import HELLO, POLL
from fedplan.runners.flower.parcels import down_records, scored, unwrapped, update_of, wrapped
from fedplan.server import Server

Watch = Callable[[Server, Tally], None]


@dataclass(frozen=True)
class Patience:
    """How long a server waits: for nodes to come, for answers to a request, between two looks."""

    nodes: float = 600.0
    answers: float = 3600.0
    look: float = 0.5


def met(grid: Grid, names: list[str], patience: Patience) -> dict[str, int]:
    """The node of each client by the name that it says itself; waits until all have come."""
    found, strangers, until = dict[str, int](), set[int](), time.monotonic() + patience.nodes
    while set(names) - found.keys():
        fresh = set(grid.get_node_ids()) - set(found.values()) - strangers
        asked = {node: wrapped({}, {}) for node in fresh}
        for node, records in answers(grid, asked, f"query.{HELLO}", patience):
            _, said = unwrapped(records)
            if said.get("client") in names:
                found[said["client"]] = node
            else:
                strangers.add(node)
        if time.monotonic() > until:
            missing = ", ".join(sorted(set(names) - found.keys()))
            raise FedplanError(f"after {patience.nodes:.0f} s these have not come: {missing}")
        if not fresh:
            time.sleep(patience.look)
    return found


def answers(
    grid: Grid, asked: Mapping[int, RecordDict], kind: str, patience: Patience
) -> Iterator[tuple[int, RecordDict]]:
    """Each node's answer as it comes, one held at a time; those that fail or are late are not."""
    open_ = dict[str, int]()
    for node, records in asked.items():
        (number,) = grid.push_messages([Message(records, node, kind)])
        open_[number] = node
    until = time.monotonic() + patience.answers
    while open_ and time.monotonic() < until:
        came = False
        for number in list(open_):
            for reply in grid.pull_messages([number]):
                came = True
                node = open_.pop(number)
                if not reply.has_error():
                    yield node, reply.content
        if open_ and not came:
            time.sleep(patience.look)


def carry(
    grid: Grid, server: Server, patience: Patience | None = None, watch: Watch | None = None
) -> None:
    """Play every round that is left, committing each before the next."""
    patience = patience or Patience()
    nodes = met(grid, list(server.roster), patience)
    while server.world.round < server.rounds:
        tally = server.begin()
        _choose_together(grid, server, tally, nodes, patience)
        asked = {nodes[name]: down_records(down) for name, down in tally.cohort.items()}
        for node, records in answers(grid, asked, "train", patience):
            _count(server, tally, nodes, node, records)
        silent = tally.cohort.keys() - set(tally.heard) - tally.rejected.keys()
        tally.rejected |= {name: "no answer" for name in silent}
        server.end(tally)
        server.commit(tally)
        if watch is not None:
            watch(server, tally)


def _count(
    server: Server, tally: Tally, nodes: Mapping[str, int], node: int, records: RecordDict
) -> None:
    name = next(name for name, each in nodes.items() if each == node)
    try:
        update = update_of(records)
        if update.client != name:
            raise FedplanError(f"node {node} answers for {update.client!r}")
    except FedplanError as error:
        tally.rejected[name] = str(error).splitlines()[0]
        return
    server.take(tally, update)


def _choose_together(
    grid: Grid, server: Server, tally: Tally, nodes: Mapping[str, int], patience: Patience
) -> None:
    setup, downs = server.setup, tally.cohort
    if not setup.method.together or not any(setup.chooses(d.turn) for d in downs.values()):
        return
    names = {nodes[name]: name for name in downs}
    asked = {nodes[name]: down_records(down) for name, down in downs.items()}
    polled = {
        names[node]: scored(unwrapped(records)[1].get("scores"))
        for node, records in answers(grid, asked, f"query.{POLL}", patience)
    }
    choose(tally, polled)
