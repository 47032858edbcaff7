# SPDX-License-Identifier: Apache-2.0
"""A driver of real sites says how each of them does, and stops when it is asked to."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import zoo
from clients import few, loss
from flwr.app import Context, Error
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.run import Run, RunNotRunningException
from grids import InProcess
from heard import Heard

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, TrainSetup
from fedplan.federation.endpoint import Endpoint
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.ledger.events import RunChanged
from fedplan.federation.ledger.status import (
    RunState,
    RunStatus,
    SiteState,
    ask_to_stop,
    read_status,
)
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.messages import local_versions, package_differences
from fedplan.federation.participation import Timeouts
from fedplan.federation.server import Server
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.runners.flower import rpc, supernode
from fedplan.runners.flower._internals import ReplyGrid
from fedplan.runners.flower.apps import client_app
from fedplan.runners.flower.records import ConnectedSite
from fedplan.runners.flower.rpc import FlowerRunEnded, LinkUnreachable
from fedplan.runners.flower.server import ServerLoop
from fedplan.runners.site import Site
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.storage.logs import read_log
from fedplan.tensors.message import Message
from fedplan.tensors.named import digests, nbytes
from fedplan.tensors.serialization import pack_message
from fedplan.training.fit import TrainArguments

NAMES = ("client-0", "client-1", "client-2")
SOON = Timeouts(sites=0.3, updates=0.2, reconnect=0.05, poll_interval=0.005)
ROUNDS = 3

Say = Callable[[str, str], str]
"""The code that a site gives in place of an answer of a kind; nothing if it answers."""


class Driven:
    """A federation on a grid of one process, of which some are there."""

    def __init__(self, folder: Path, there: tuple[str, ...], say: Say = lambda *_: "") -> None:
        self.folder, self.heard = folder, Heard()
        agreement = Agreement(
            "driven",
            describe(zoo.build("bert")),
            method_by_name("fedavg"),
            TrainArguments(batch_size=2, steps=1),
            start="one",
        )
        start = get_values(zoo.build("bert"), agreement.params)
        roster: dict[str, dict[str, str]] = {name: {} for name in NAMES}
        self.server = Server(agreement, start, folder, rounds=ROUNDS, roster=roster)
        sites = {name: self._endpoint(name) for name in there}

        def answer(context: Context, kind: str, message: Message) -> Message:
            name = str(context.node_config["name"])
            if code := say(name, kind):
                return pack_message({}, {"client": name, code.split(":")[0]: code.split(":")[1]})
            return sites[name].answer(kind, message)

        self.grid = InProcess(client_app(answer), [{"name": name} for name in there])
        self.stream = EventStream(folder, [self.heard])

    def _endpoint(self, name: str) -> Endpoint:
        model = zoo.build("bert")
        start = get_values(model, self.server.agreement.params)
        journal = Journal(client_state_folder(self.folder, name), keep_replies=True)
        rows = few("bert", 3)[name]
        site = Client(
            name=name,
            examples=rows,
            journal=journal,
            setup=TrainSetup(
                model, loss, start, digest_initial_model(model, self.server.agreement.params, start)
            ),
        )
        return Endpoint(self.server.agreement, site, self.folder / "sites" / name)

    def drive(
        self,
        quorum: int = 1,
        patience: Timeouts = SOON,
        renew: Callable[[], InProcess] | None = None,
        *,
        has_grid: bool = True,
    ) -> RunStatus:
        grid = self.grid if has_grid else None
        carrier = ServerLoop(grid, self.server, patience, quorum=quorum, events=self.stream)
        carrier.rpc.renew_grid = renew
        with self.stream.track_run(self.server, "driven", patience, has_examples=False):
            carrier.run()
        found = read_status(self.folder)
        assert found is not None
        return found

    def events(self, name: str) -> list[str]:
        return [each.event for each in self.heard if each.site == name]


def test_each_site_is_told_as_it_is(tmp_path: Path) -> None:
    """One answers, one fails at each turn, and one never comes."""

    def say(name: str, kind: str) -> str:
        return "failed:disk" if (name, kind) == ("client-1", "train") else ""

    driven = Driven(tmp_path, NAMES[:2], say)
    found = driven.drive()
    assert (found.state, found.round, found.rounds) == (RunState.DONE, ROUNDS, ROUNDS)
    well, broken, away = (found.sites[name] for name in NAMES)
    assert (well.state, well.round, well.error) == (SiteState.RESPONDED, ROUNDS, "")
    assert well.upload_bytes > 0 and well.download_bytes > 0
    assert broken.state == SiteState.FAILED and broken.error.startswith("failed: disk")
    assert (away.state, away.round) == (SiteState.NOT_CONNECTED, 0)
    turns = ["site requested", "site responded"] * ROUNDS
    assert driven.events(NAMES[0]) == ["site hello", "site connected", *turns]
    assert driven.events(NAMES[1]).count("site failed") == ROUNDS
    lines = read_json_lines(driven.server.ledger.file)
    whole = next(line["download_bytes"] for line in lines if line["kind"] == "turn")
    rounds = [line["download_bytes"] for line in lines if line["kind"] == "round"]
    assert rounds == [2 * whole] * ROUNDS, "nothing was sent to the one that never came"
    events = [entry.event for entry in read_log(tmp_path)]
    assert events[:2] == ["run started", "run waiting for sites"] and events[-1] == "run done"
    assert events.count("round closed") == ROUNDS


def test_a_site_with_other_packages_takes_part_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends must have the wire alike; all else that differs an operator hears of."""
    said = {**local_versions(), "fedplan": "99.0"}
    monkeypatch.setattr("fedplan.federation.endpoint.local_versions", lambda: said)
    driven = Driven(tmp_path, NAMES)
    assert driven.drive(quorum=3).state == RunState.DONE
    told = [each for each in driven.heard if each.event == "site versions"]
    assert [each.site for each in told] == list(NAMES)
    assert all("fedplan 99.0, and here" in each.text for each in told)


def test_a_site_with_another_wire_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {**local_versions(), "protocol": "99"}
    monkeypatch.setattr("fedplan.federation.endpoint.local_versions", lambda: said)
    with pytest.raises(FedplanError, match="messages of version 99, and here they are"):
        Driven(tmp_path, NAMES).drive(quorum=3)


def test_a_driver_that_waits_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    driven = Driven(tmp_path, NAMES[:1])
    waiting = RunChanged(RunState.WAITING)
    driven.stream.subscribe(
        lambda event, _: ask_to_stop(tmp_path, at_once=True) if event == waiting else None
    )
    found = driven.drive()
    assert (found.state, found.round) == (RunState.STOPPED, 0) and "operator" in found.reason


def test_while_the_link_is_in_trouble_a_run_says_so_and_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, told = Driven(tmp_path, NAMES), list[str]()

    def down(numbers: Any) -> list[Any]:
        found = read_status(tmp_path)
        told.append(found.reason if found else "")
        if len(told) == 3:
            ask_to_stop(tmp_path, at_once=True)
        raise ConnectionError("503, say")

    monkeypatch.setattr(driven.grid, "pull_messages", down)
    found = driven.drive(patience=replace(SOON, sites=60.0))
    assert (found.state, found.round) == (RunState.STOPPED, 0) and "operator" in found.reason
    assert all(re.fullmatch(AWAY, each) for each in told[1:])


AWAY = "the SuperLink does not answer since ..:.. UTC; trying again"


def status_error(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://link")
    return httpx.HTTPStatusError("told", request=request, response=httpx.Response(code))


class Clock:
    """Virtual time: an hour of waiting passes at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(rpc, "time", made := Clock())
    return made


class Broken(InProcess):
    """The grid of a driven federation, whose calls fail while `fails` says so.

    The first site's answer is there at the first pull, the second's at the second, and so on.
    """

    def __init__(self, grid: InProcess, error: BaseException, fails: Callable[[], bool]) -> None:
        super().__init__(grid.app, [dict(each.node_config) for each in grid.contexts.values()])
        self.error, self.fails, self.pulls = error, fails, Counter[str]()

    def _check(self) -> None:
        if self.fails():
            raise self.error

    def get_node_ids(self) -> list[int]:
        self._check()
        return super().get_node_ids()

    def push_messages(self, messages: Any) -> list[str]:
        self._check()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> list[Any]:
        self._check()
        self.pulls.update(message_ids)
        there = {n: self.sent[n].metadata.dst_node_id for n in message_ids if n in self.sent}
        return super().pull_messages(n for n, node in there.items() if self.pulls[n] + 99 >= node)


class Counting(InProcess):
    """A grid that counts how many replies are asked for at a time; `trained`: those of updates."""

    def __init__(self, grid: InProcess) -> None:
        super().__init__(grid.app, [dict(each.node_config) for each in grid.contexts.values()])
        self.asked, self.trained = list[int](), list[int]()

    def pull_messages(self, message_ids: Any) -> list[Any]:
        self.asked.append(len(message_ids))
        if {self.sent[n].metadata.message_type for n in message_ids} == {"train"}:
            self.trained.append(len(message_ids))
        return super().pull_messages(message_ids)


@pytest.mark.parametrize("room", [2**26, 1])
def test_replies_are_fetched_together_if_they_are_small(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as fit by the first one: else one after the other, whatever the number of sites."""
    monkeypatch.setattr(rpc, "BATCH_BYTES", room)
    driven = Driven(tmp_path, NAMES)
    driven.grid = grid = Counting(driven.grid)
    assert driven.drive(quorum=3).state == RunState.DONE
    assert max(grid.asked) == (3 if room > 1 else 1)


@pytest.mark.parametrize("code", ["refused:limit-rounds", "an error of the app"])
def test_a_small_reply_does_not_say_how_large_the_others_are(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal or an error may come first, and an update alone exceeds the room here."""
    monkeypatch.setattr(rpc, "BATCH_BYTES", 2000)

    def say(name: str, kind: str) -> str:
        return code if (name, kind) == (NAMES[0], "train") else ""

    driven = Driven(tmp_path, NAMES, say)
    driven.grid = grid = Counting(driven.grid)
    assert driven.drive(quorum=2).state == RunState.DONE
    assert len(grid.trained) >= 3 * ROUNDS and set(grid.trained) == {1}


@pytest.mark.parametrize("sites", [1, 3])
def test_a_waiting_server_leaves_a_slow_link_to_the_sites(
    tmp_path: Path, sites: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll of many sites takes many calls, as long as no site has replied."""
    driven, asked = Driven(tmp_path, NAMES[:sites]), list[float]()
    pull, sent = driven.grid.pull_messages, driven.grid.sent

    def slow(message_ids: list[str]) -> list[FlowerMessage]:
        if {sent[n].metadata.message_type for n in message_ids if n in sent} != {"train"}:
            return pull(message_ids)
        asked.append(clock.now)
        clock.sleep(0.2)
        return pull(message_ids) if clock.now > 3600.0 else []

    monkeypatch.setattr(driven.grid, "pull_messages", slow)
    patience = Timeouts(updates=20000.0, poll_interval=0.5)
    assert driven.drive(sites, patience).state == RunState.DONE
    waiting = [each for each in asked if each < 3600.0]
    assert 0.15 < 0.2 * len(waiting) / 3600.0 < 0.3


class Lossy(InProcess):
    """A grid whose link breaks when updates are first pulled: the SuperLink has given them out."""

    def __init__(self, grid: InProcess, code: int) -> None:
        super().__init__(grid.app, [dict(each.node_config) for each in grid.contexts.values()])
        self.code, self.lost, self.breaks = code, dict[str, FlowerMessage](), 2

    def pull_messages(self, message_ids: Any) -> list[Any]:
        sent = {n: self.sent[n] for n in message_ids if n in self.sent}
        train = [n for n, message in sent.items() if message.metadata.message_type == "train"]
        if train and self.breaks:
            self.breaks -= 1
            self.lost |= {n: self.sent.pop(n) for n in train}
            raise httpx.ReadError("the connection broke")
        lost = [self.lost.pop(n) for n in message_ids if n in self.lost]
        errors = [FlowerMessage(Error(self.code, "unavailable"), reply_to=each) for each in lost]
        return errors + super().pull_messages(message_ids)


@pytest.mark.parametrize("code", [3, 4])
def test_replies_that_a_broken_link_loses_are_no_failures_of_sites(
    tmp_path: Path, code: int
) -> None:
    driven = Driven(tmp_path, NAMES)
    driven.grid = grid = Lossy(driven.grid, code)
    patience = Timeouts(sites=60.0, updates=60.0, reconnect=60.0, poll_interval=0.005, tries=1)
    assert driven.drive(len(NAMES), patience).state == RunState.DONE
    assert not grid.breaks and not grid.lost
    assert not [each for each in driven.heard if each.event == "site failed"]


LIMIT = 2**20
"""Bytes of a reply that are fetched."""
MALFORMED = {
    "too large": f"is larger than {LIMIT} bytes",
    "bad json": "cannot be read: JSONDecodeError",
    "wrong type": "cannot be read: MessageInitializationError",
    "bad proto": "cannot be read: DecodeError",
    "no message": "is no message",
    "another request": "names another request or sender",
    "another sender": "names another request or sender",
    "a code of the SuperLink": "has an error code of the SuperLink",
}
"""Malformed replies, and what is said of each."""


def flower_object(kind: str, children: str, body: bytes) -> bytes:
    return f"{kind} {children} {len(body)}".encode() + b"\0" + body


def forge(reply: FlowerMessage, how: str) -> list[bytes]:
    """The objects of a malformed reply, the message first; a SuperLink accepts each of them."""
    if how == "no message":
        return [flower_object("ArrayChunk", "", b"chunk")]
    if how == "a code of the SuperLink":
        error = FlowerMessage(Error(3, "unavailable"), reply_to=reply)
        error.__dict__["_metadata"] = reply.metadata
        return [error.deflate()]
    children = {
        "bad json": flower_object("RecordDict", "", b"not json"),
        "too large": flower_object("RecordDict", "", b"{}".ljust(LIMIT)),
        "wrong type": flower_object("ArrayChunk", "", b"chunk"),
        "bad proto": flower_object("ConfigRecord", "", b"\xff\xff\xff"),
    }
    child = children.get(how) or flower_object("RecordDict", "", b"{}")
    said = {"another request": "_reply_to_message_id", "another sender": "_src_node_id"}.get(how)
    metadata = dict(reply.metadata.__dict__)
    if said:
        reply.metadata.__dict__[said] = type(metadata[said])(1)
    body = reply.deflate().split(b"\0", 1)[1]
    reply.metadata.__dict__ |= metadata
    return [flower_object("Message", get_object_id(child), body), child]


class Wire(InProcess):
    """A grid whose replies are decoded as those of a SuperLink; one site's updates are malformed."""

    def __init__(self, grid: InProcess, how: str) -> None:
        super().__init__(grid.app, [dict(each.node_config) for each in grid.contexts.values()])
        self.how, self.most = how, 0

    def pull_messages(self, message_ids: Any) -> list[Any]:
        contents, protos, trees = dict[str, bytes](), list[Any](), list[ObjectTree]()
        for reply in super().pull_messages(message_ids):
            tree = get_object_tree(reply)
            if (reply.metadata.src_node_id, reply.metadata.message_type) == (102, "train"):
                objects = {get_object_id(each): each for each in forge(reply, self.how)}
                top, *rest = objects
                tree = ObjectTree(object_id=top, children=[ObjectTree(object_id=i) for i in rest])
            else:
                objects = {i: each.deflate() for i, each in get_all_nested_objects(reply).items()}
            contents |= objects
            reply.metadata.__dict__["_message_id"] = tree.object_id
            protos.append(message_to_proto(remove_content_from_message(reply)))
            trees.append(tree)
        grid = ReplyGrid(token="token")
        grid.set_run(Run.create_empty(1))
        grid.reply_limit = LIMIT
        grid._client = SimpleNamespace(
            PullMessages=lambda _: SimpleNamespace(
                messages_list=protos, message_object_trees=trees
            ),
            PullObject=lambda asked: PullObjectResponse(
                object_found=True,
                object_available=True,
                object_content=contents[asked.object_id],
            ),
            ConfirmMessageReceived=lambda _: None,
        )
        replies = grid.pull_messages(message_ids)
        assert len(replies) == len(protos)
        self.most = max(self.most, len(replies))
        return replies


@pytest.mark.parametrize("how", MALFORMED)
def test_a_malformed_reply_is_a_failure_of_its_site_alone(tmp_path: Path, how: str) -> None:
    """The others of its batch arrive, and a site answers for no other one."""
    driven = Driven(tmp_path, NAMES)
    driven.grid = grid = Wire(driven.grid, how)
    patience = Timeouts(sites=60.0, updates=60.0, reconnect=60.0, poll_interval=0.005, tries=1)
    found = driven.drive(2, patience)
    assert (found.state, found.round) == (RunState.DONE, ROUNDS) and grid.most > 1
    assert [found.sites[name].state for name in NAMES[:2]] == [SiteState.RESPONDED] * 2
    bad = found.sites[NAMES[2]]
    assert bad.state == SiteState.FAILED and bad.error == f"no answer: the reply {MALFORMED[how]}"


def test_of_a_site_no_more_is_fetched_than_an_update_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of an edge may take many times as much: with LoRA it has the products of factors."""
    monkeypatch.setattr("fedplan.runners.flower.server.sum_limit", lambda _: 2**40)
    server = Driven(tmp_path, ()).server
    grid = ReplyGrid(token="token")
    monkeypatch.setattr(grid, "pull_messages", lambda _: [])
    loop = ServerLoop(grid, server, SOON)
    assert not list(loop.rpc._pull("train", ["1"]))
    assert 0 < grid.reply_limit - 2 * nbytes(server.global_state.values) < 2**27


ESCAPE = "x\n2026 north: \x1b[31mforged\x1b[0m"
"""A text of a site that would forge a line of the operator's log."""


def test_a_site_writes_no_lines_and_escapes_to_the_operator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(tmp_path, NAMES)
    pull = driven.grid.pull_messages

    def replies(message_ids: Iterable[str]) -> list[FlowerMessage]:
        found = pull(message_ids)
        for reply in found:
            if reply.metadata.src_node_id == 102:
                kind = reply.metadata.message_type
                if kind == "train" or not caplog.records:  # and at first its hello
                    reply.__dict__ |= {"_content": None, "_error": Error(2, ESCAPE)}
        return found

    monkeypatch.setattr(driven.grid, "pull_messages", replies)
    monkeypatch.setattr(rpc, "HELLO_RETRY", 0.01)
    assert driven.drive(2, replace(SOON, sites=5.0, tries=1)).state == RunState.DONE
    texts = [record.getMessage() for record in caplog.records] + [e.text for e in driven.heard]
    assert sum("forged" in text for text in texts) >= 3
    assert all(text.isprintable() for text in texts), texts


@pytest.mark.parametrize(
    "change",
    [
        {"initial_digest": ESCAPE},
        {"run": ESCAPE},
        {"agreement_digest": ESCAPE},
        {"versions": {"protocol": ESCAPE}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_site_says_of_itself_is_printable(tmp_path: Path, change: dict[str, Any]) -> None:
    server = Driven(tmp_path, ()).server
    agreement = server.agreement
    site = ConnectedSite(100, agreement.fingerprint, agreement.start, agreement.run, {})
    loop = ServerLoop(None, server, SOON)
    assert loop._mismatch(NAMES[0], site) == ""
    text = loop._mismatch(NAMES[0], replace(site, **change))
    assert "north" in text and text.isprintable()


def test_versions_of_a_site_are_printable() -> None:
    text = package_differences({"fedplan": ESCAPE})
    assert "north" in text and text.isprintable()


def require_undisturbed(driven: Driven, expected: Driven) -> None:
    ours, theirs = (each.server for each in (driven, expected))
    assert digests(ours.global_state.values) == digests(theirs.global_state.values)
    assert read_json_lines(ours.ledger.file) == read_json_lines(theirs.ledger.file)


@pytest.mark.parametrize(
    "error", [RunNotRunningException(), status_error(401), status_error(403)], ids=repr
)
def test_a_run_that_flower_ends_goes_on_with_another(
    tmp_path: Path, clock: Clock, error: BaseException
) -> None:
    """Flower ends each of its runs, at whichever call; some begin when the SuperLink is away."""
    expected = Driven(tmp_path / "whole", NAMES)
    assert expected.drive(quorum=3).state == RunState.DONE
    driven, runs, told = Driven(tmp_path / "ended", NAMES), list[Broken](), list[str]()
    whole, away = driven.grid, [True, False] * 20

    def next_grid() -> InProcess:
        if away.pop():
            raise LinkUnreachable("no SuperLink answers")
        calls = count()
        over = 2 + 3 * len(runs)
        runs.append(Broken(whole, error, lambda: next(calls) >= over))
        return runs[-1]

    driven.grid = next_grid()
    driven.stream.subscribe(lambda _, now: told.append(now.reason))
    assert driven.drive(3, Timeouts(), next_grid).state == RunState.DONE
    require_undisturbed(driven, expected)
    assert len(runs) > 4
    assert "the SuperLink has ended Flower's run; another one is started" in told
    assert any(re.fullmatch(AWAY, each) for each in told) and told[-1] == ""


def watched(folder: Path) -> tuple[Driven, Driven, list[tuple[bool, str]]]:
    """A run that is over, one that is to be disturbed, and health and reason at each event of it."""
    expected = Driven(folder / "whole", NAMES)
    assert expected.drive(quorum=3).state == RunState.DONE
    driven, healths = Driven(folder / "away", NAMES), list[tuple[bool, str]]()
    stream = driven.stream
    stream.subscribe(lambda *_: healths.append((stream.healthy, stream.status.reason)))
    return expected, driven, healths


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), status_error(503)], ids=repr)
def test_time_without_the_superlink_costs_no_site_its_place(
    tmp_path: Path, clock: Clock, error: BaseException
) -> None:
    """Away for an hour, after the first of three updates of a round that waits for a minute."""
    expected, driven, healths = watched(tmp_path)
    stream = driven.stream
    ends = list[float]()

    def fails() -> bool:
        if stream.status.responded == 1 and not ends:
            ends.append(clock.now + 3600.0)
        return bool(ends) and clock.now < ends[0]

    driven.grid = Broken(driven.grid, error, fails)
    assert (
        driven.drive(1, Timeouts(sites=60.0, updates=60.0, reconnect=60.0)).state == RunState.DONE
    )
    require_undisturbed(driven, expected)
    assert ends and clock.now > 3600.0
    away = [healthy for healthy, reason in healths if reason]
    assert away and not any(away) and any(healthy for healthy, _ in healths)


def test_a_superlink_that_is_away_at_the_first_start_is_waited_for(
    tmp_path: Path, clock: Clock
) -> None:
    """For an hour; then the run is that of a SuperLink that was there."""
    expected, driven, healths = watched(tmp_path)

    def first_grid() -> InProcess:
        if clock.now < 3600.0:
            raise LinkUnreachable("no SuperLink answers at 127.0.0.1:1: start it first")
        return driven.grid

    assert driven.drive(3, Timeouts(), first_grid, has_grid=False).state == RunState.DONE
    require_undisturbed(driven, expected)
    reasons = {reason for healthy, reason in healths if not healthy and reason}
    assert len(reasons) == 1 and re.fullmatch(AWAY, reasons.pop()) and healths[-1][1] == ""
    notes = [entry.text for entry in read_log(driven.folder) if entry.event == "note"]
    assert "trying again: no SuperLink answers at 127.0.0.1:1: start it first" in notes[0]


def test_a_run_that_waits_for_its_first_superlink_stops_when_it_is_asked_to(
    tmp_path: Path, clock: Clock
) -> None:
    driven = Driven(tmp_path, NAMES)

    def no_grid() -> InProcess:
        if clock.now > 60.0:
            ask_to_stop(tmp_path, at_once=False)
        if clock.now > 600.0:
            raise ValueError("the run did not stop")
        raise LinkUnreachable("no SuperLink answers")

    found = driven.drive(3, Timeouts(), no_grid, has_grid=False)
    assert (found.state, found.round) == (RunState.STOPPED, 0) and "operator" in found.reason


def test_a_superlink_that_rejects_all_calls_ends_the_run_with_one_sentence(
    tmp_path: Path, clock: Clock
) -> None:
    driven, calls = Driven(tmp_path, NAMES), count()
    driven.grid = Broken(driven.grid, status_error(404), lambda: next(calls) > 8)
    sentence = "the SuperLink answers 404 since ..:.. UTC, for longer than timeouts.sites "
    with pytest.raises(LinkUnreachable, match=rf"^{sentence}\(600 s\): .*told"):
        driven.drive(patience=Timeouts())
    assert 600.0 < clock.now < 700.0
    found = read_status(tmp_path)
    assert found is not None and found.state == RunState.FAILED and re.match(sentence, found.reason)


def test_a_run_that_flower_itself_drives_ends_with_flowers(tmp_path: Path) -> None:
    driven, calls = Driven(tmp_path, NAMES), count()
    driven.grid = Broken(driven.grid, RunNotRunningException(), lambda: next(calls) > 8)
    with pytest.raises(FlowerRunEnded, match="start it again"):
        driven.drive()


def test_a_request_that_flower_loses_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, lost = Driven(tmp_path, NAMES), list[str]()
    push = driven.grid.push_messages

    def lose_first(messages: Iterable[FlowerMessage]) -> list[str]:
        (message,) = messages
        if message.metadata.message_type == "train" and not lost:
            lost.append("the id of a message that never arrives")
            return lost
        return push([message])

    monkeypatch.setattr(driven.grid, "push_messages", lose_first)
    found = driven.drive(len(NAMES), replace(SOON, sites=20.0, updates=0.6))
    assert lost and (found.state, found.round) == (RunState.DONE, ROUNDS)


def test_a_run_without_enough_answers_has_failed_and_says_why(tmp_path: Path) -> None:
    driven = Driven(
        tmp_path, NAMES[:1], lambda _, kind: "refused:limit-rounds" if kind == "train" else ""
    )
    with pytest.raises(FedplanError):
        driven.drive()
    found = read_status(tmp_path)
    assert found is not None and found.state == RunState.FAILED and "have answered" in found.reason
    assert found.sites[NAMES[0]].state == SiteState.REFUSED
    assert "limit-rounds" in found.sites[NAMES[0]].reason
    assert "limit-rounds" in "".join(e.text for e in read_log(tmp_path) if e.event == "note")
    assert [each.event for each in driven.heard][-1] == "run failed"


def test_a_site_is_not_deaf_for_a_message_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "STALL_INTERVAL", 0.0)
    waits, asked = PullObjectResponse(object_found=True), PullObjectRequest()
    there = PullObjectResponse(object_found=True, object_available=True)
    over, tasks = threading.Event(), ["", "", "another"]
    guard = supernode.StalledPullGuard(lambda: tasks.pop(0), over)
    pull = guard.wrap(lambda request: waits)
    assert [pull(asked).object_found for _ in range(3)] == [True, True, False]
    assert guard.next_token == "another"
    assert guard.wrap(lambda request: there)(asked).object_available
    over.set()
    assert (
        not supernode.StalledPullGuard(lambda: "", over)
        .wrap(lambda request: waits)(asked)
        .object_found
    )


def test_a_node_that_has_lost_a_message_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperLink's error while a message is taken: nobody would send that message again."""
    said = "print('ERROR: Failed to receive message 5da: 500', flush=True); import time; time.sleep(99)"
    started, over = list[object](), threading.Event()

    def start(*_: object) -> subprocess.Popen[str]:
        started.append(0)
        if len(started) == 2:
            over.set()
        return subprocess.Popen([sys.executable, "-c", said], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(supernode, "_start_node", start)
    monkeypatch.setattr(supernode, "RESTART_DELAY", 0.0)
    site = Site(name="north", state=str(tmp_path))
    keeper = threading.Thread(target=supernode._keep_running, args=(site, tmp_path, 1, over))
    keeper.start()
    keeper.join(60.0)
    over.set()
    assert len(started) == 2
