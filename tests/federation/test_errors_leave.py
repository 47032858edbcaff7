# SPDX-License-Identifier: Apache-2.0
"""Of an error only a code leaves a site, whatever is raised and wherever; its text stays there."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sites
import zoo
from commands import run
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from grids import InProcess
from sites import PRIVATE, SAFL, VOTE, site_of, study_text, world_of

from fedplan.errors import FedplanError
from fedplan.federation import endpoint
from fedplan.federation.endpoint import HELLO, POLL, TRAIN
from fedplan.federation.ledger.faults import (
    KINDS,
    decode_reason,
    describe_code,
    encode_code,
    error_fields,
    read_faults,
)
from fedplan.federation.messages import RequestRefused, request_message
from fedplan.federation.rounds import make_request
from fedplan.runners.flower.apps import client_app
from fedplan.runners.flower.records import from_records, to_records
from fedplan.runners.flower.strategy import Partial, partial
from fedplan.storage.encryption import Encryption, new_key_file
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message

SECRET = "Ann-Cooper"


def every(kind: type[FedplanError] = FedplanError) -> list[type[FedplanError]]:
    """All errors of fedplan."""
    return [kind, *(each for sub in kind.__subclasses__() for each in every(sub))]


class Rude(Exception):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        raise ValueError(SECRET)


def raised() -> list[Exception]:
    text = f"label {SECRET!r} in column 'patient'\nof {SECRET}"
    found: list[Exception] = [kind(text) for kind in dict.fromkeys(every())]
    found += [kind(text) for kind in (ValueError, KeyError, RuntimeError, AssertionError)]
    found += [kind(text) for kind in (MemoryError, RecursionError, ImportError, StopIteration)]
    found += [FileNotFoundError(2, "No such file", f"/ward/{SECRET}.csv"), Rude()]
    found += [UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET)]
    found += [ExceptionGroup(SECRET, [ValueError(SECRET)])]
    found += [
        RequestRefused(text).with_code("limit-rounds"),
        RequestRefused(text).with_code(SECRET),
    ]
    chained = ValueError(text)
    chained.__cause__ = KeyError(SECRET)
    return [*found, chained]


def require_code(answer: Message | FlowerMessage) -> str:
    """The code that an answer is, and nothing else."""
    if isinstance(answer, FlowerMessage):
        assert answer.has_error()
        said = answer.error.reason
        kind, _, code = said.partition(": ")
        whole = said.encode()
    else:
        values, held = unpack_message(answer)
        assert not values
        ((kind, code),) = held.items()
        whole = answer.header + b"".join(answer.blobs)
    assert code in KINDS[kind] and SECRET.encode() not in whole
    assert SECRET not in describe_code(kind, code) and decode_reason(
        encode_code(code)
    ) == describe_code(kind, code)
    return code


PLACES = {
    HELLO: ("read_run_id", "_load_received", "_log_answer"),
    POLL: ("read_request", "score_layers", "_load_received", "_store_received", "_log_answer"),
    TRAIN: ("read_request", "train_round", "_load_received", "_store_received", "_log_answer"),
}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> endpoint.Endpoint:
    folder = tmp_path_factory.mktemp("site")
    return site_of(folder, study_text(method=SAFL, privacy=PRIVATE + VOTE))


@pytest.mark.parametrize("kind", [HELLO, POLL, TRAIN])
def test_whatever_a_desk_raises(
    kind: str, held: endpoint.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = make_request(held.agreement, world_of(held), sites.NAME, {}, full=True)
    for place in PLACES[kind]:
        # Who fails after all the work was done is asked for it less often.
        for error in raised()[:: 9 if place in ("_store_received", "_log_answer") else 1]:

            def fail(*_: Any, error: Exception = error) -> Any:
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(held if place.startswith("_") else endpoint, place, fail)
                require_code(held.answer(kind, request_message(down)))
    assert require_code(held.answer(SECRET, request_message(down))) == "unknown-request"
    for message in (Message(SECRET.encode()), pack_message({}, {"request": SECRET}), Message(b"")):
        if kind != HELLO or message.header != pack_message({}, {"request": SECRET}).header:
            assert require_code(held.answer(kind, message)) == "message"


def test_whatever_a_clients_app_raises() -> None:
    for error in raised():

        def fail(
            context: Context, kind: str, message: Message, error: Exception = error
        ) -> Message:
            raise error

        grid = InProcess(client_app(fail), [{"name": SECRET}])
        for kind in ("query.hello", "query.poll", "train"):
            envelope = FlowerMessage(to_records(pack_message({}, {})), 100, kind)
            require_code(grid.send_and_receive([envelope])[0])
    heard = list[Message]()
    grid = InProcess(
        client_app(lambda _, kind, message: heard.append(message) or Message(b"")), [{}]
    )
    strange = FlowerMessage(RecordDict({SECRET: ConfigRecord({"a": SECRET})}), 100, "train")
    assert not grid.send_and_receive([strange])[0].has_error()
    assert heard == [Message(b"")], "what is no message of ours, a site refuses and writes down"


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_whatever_an_app_under_the_mod_raises(kind: str, tmp_path: Path) -> None:
    plan = "chain(share(), keep(head))"
    strategy = Partial(
        plan, zoo.build("bert"), min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1
    )
    arrays = ArrayRecord(zoo.build("bert").state_dict())
    for number, error in enumerate(raised()):

        def app(
            envelope: FlowerMessage, context: Context, error: Exception = error
        ) -> FlowerMessage:
            raise error

        mod = partial(plan, lambda: zoo.build("bert"), tmp_path)
        grid = InProcess(lambda m, c: mod(m, c, app), [{"name": "a"}])  # noqa: B023
        asks = strategy.configure_train if kind == "train" else strategy.configure_evaluate
        (envelope,) = asks(number + 1, arrays, ConfigRecord(), grid)
        require_code(grid.send_and_receive([envelope])[0])


Order = tuple[dict[str, Any], str]
"""What a site says of itself, and the study that it is offered."""


def order_of(folder: Path, study: str = "", **said: Any) -> Order:
    return said, study or study_text(privacy="")


def by_labels(folder: Path) -> Order:
    sites.write_rows(folder / "rows.npz", digit=np.array([SECRET] * 24))
    return order_of(folder)


def by_column(folder: Path) -> Order:
    sites.write_rows(folder / "rows.npz")
    with np.load(folder / "rows.npz") as rows:
        np.savez(folder / "rows.npz", **{SECRET: rows["digit"], "image": rows["image"]})
    return order_of(folder)


def by_bytes(folder: Path) -> Order:
    (folder / "rows.npz").write_bytes(SECRET.encode() * 9)
    return order_of(folder)


def by_reader(folder: Path) -> Order:
    (folder / "read.py").write_text(f"def read(path):\n    raise KeyError({SECRET!r})\n")
    return order_of(folder, reader=f"{folder / 'read.py'}:read")


BROKEN: dict[str, tuple[Callable[[Path], Order], str]] = {
    "a label that the study does not name": (by_labels, "data"),
    "a column that is not there": (by_column, "data"),
    "no table": (by_bytes, "data"),
    "no file": (lambda f: order_of(f, data=f"/ward/{SECRET}.npz"), "data"),
    "a reader that fails": (by_reader, "internal"),
    "a study with a word too many": (
        lambda f: order_of(f, study_text(privacy="") + f'[{SECRET}]\na = "{SECRET}"\n'),
        "settings",
    ),
    "no data": (lambda f: order_of(f, data=""), "settings"),
}


@pytest.mark.parametrize("sealed", [False, True], ids=["", "sealed"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_keeps_a_site_from_starting(
    name: str, sealed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole way: a message of Flower's, the desk of a site, and the reply."""
    make, wanted = BROKEN[name]
    said, study = make(tmp_path)
    if sealed:
        new_key_file(tmp_path / "state.key")
        said["encryption_key"] = str(tmp_path / "state.key")
    desk = sites.make_gateway(tmp_path, **said)
    grid = InProcess(client_app(lambda _, *asked: desk.answer(*asked)), [{}])
    envelope = FlowerMessage(to_records(sites.hello(study)), 100, "query.hello")
    reply = from_records(grid.send_and_receive([envelope])[0].content)
    (way,) = error_fields(wanted)
    assert unpack_message(reply) == ({}, {"client": sites.NAME, way: wanted})
    encryption = Encryption.from_file(tmp_path / "state.key") if sealed else None
    assert encode_code(wanted) in read_faults(tmp_path / "state", encryption)[0]
    require_private(tmp_path / "state", hidden=sealed)
    assert SECRET not in "".join(capfd.readouterr())
    words = ["--key", str(tmp_path / "state.key")] if sealed else []
    code, shown = run("faults", str(tmp_path / "state"), *words)
    assert code == 0 and encode_code(wanted) in shown
    if sealed:
        assert SECRET not in run("faults", str(tmp_path / "state"))[1]


def require_private(home: Path, *, hidden: bool) -> None:
    """Nobody else may read what lies in a home; what is hidden nobody may read without the key."""
    for each in (home, *home.rglob("*")):
        assert not stat.S_IMODE(each.stat().st_mode) & 0o077, each
        if hidden and each.is_file():
            assert SECRET.encode() not in each.read_bytes(), each


def test_a_server_believes_no_words_of_a_site() -> None:
    for kind in ("failed", "refused", "missing", "strange"):
        assert SECRET not in describe_code(kind, SECRET)
    assert all(describe_code(kind, code) for kind, known in KINDS.items() for code in known)


def test_the_codes_of_fedplans_errors_are_codes() -> None:
    known = {code for each in KINDS.values() for code in each}
    assert all(kind.code in known for kind in every())


def test_a_log_does_not_grow_without_end(
    held: endpoint.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedplan.federation.ledger.faults.MAX_LOG_BYTES", 10_000)
    for _ in range(60):
        held.answer("strange", Message(b""))
    files = list(held.faults.folder.glob("faults.*"))
    assert len(files) == 2 and all(file.stat().st_size < 20_000 for file in files)
    shutil.rmtree(held.faults.folder)
    assert from_records(to_records(held.answer("strange", Message(b"")))).header
