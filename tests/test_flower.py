# SPDX-License-Identifier: Apache-2.0
"""Carried by Flower's messages, a federation has the bits that it has in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from clients import few, loss
from commands import STUDY, run
from deployment import Deployment
from flwr.app import Context
from grids import InProcess
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplan.agreement import Setup
from fedplan.description import describe
from fedplan.errors import FedplanError
from fedplan.exchange import Down, Update
from fedplan.fit import Pace
from fedplan.journal import Journal, home_of
from fedplan.ledger import digests, read_lines
from fedplan.message import MessageError
from fedplan.method import Method
from fedplan.methods import method
from fedplan.params import Block
from fedplan.rounds import Tally
from fedplan.runners.flower import parcels
from fedplan.runners.flower.client import Seat, client_app
from fedplan.runners.flower.server import Patience, carry, met
from fedplan.runners.local import Federation
from fedplan.server import Server
from fedplan.site import Site
from fedplan.state import take
from fedplan.store import Store
from fedplan.text import parse
from fedplan.turn import Turn

PACE = Pace(optimiser="adamw", rate=1e-2, batch=2, steps=2)
ROUNDS = 5
NAMES = ("client-0", "client-1", "client-2")
METHODS: dict[str, Method] = {
    "fedavg": method("fedavg"),
    "fedper": method("fedper"),
    "fedfrozen": method("fedfrozen", {"warmup": 2}),
    "scaffold": method("scaffold"),
    "together": method("safl", {"k": 1, "together": True}),
    "parts": Method(
        parse('chain(freeze(), by("site", {"a": share(blocks(0))}, share(blocks(1))))')
    ),
}
TRAITS = {"client-1": {"site": "a"}}
SOON = Patience(nodes=2.0, answers=60.0, look=0.01)


def setup_of(made: Method) -> Setup:
    return Setup("flower", describe(zoo.build("bert")), made, PACE)


def seats(made: Method, folder: Path) -> dict[str, Seat]:
    """Three sites with a model, a disk and rows of their own."""
    setup, found = setup_of(made), dict[str, Seat]()
    for name, rows in few("bert", 3).items():
        model = zoo.build("bert")
        start = take(model, setup.params)
        journal = Journal(home_of(folder, name), replies=True)
        site = Site(name, rows, journal, model, start, digests(start), loss, TRAITS.get(name, {}))
        found[name] = Seat(setup, site, Store(folder / "seen" / name))
    return found


def carried(made: Method, folder: Path, *, broken: str = "", kill: int = 0) -> Server:
    """A run over an in-process grid: one node may answer with errors, the server may be killed."""
    held = seats(made, folder)

    def seat_of(context: Context) -> Seat:
        name = str(context.node_config["name"])
        if name == broken and (folder / "ledger.jsonl").read_bytes():
            raise RuntimeError("this node is out of order")
        return held[name]

    # Nodes come in another order than the roster's.
    grid = InProcess(client_app(seat_of), [{"name": name} for name in reversed(NAMES)])
    start = next(iter(held.values())).site.start
    roster = {name: TRAITS.get(name, {}) for name in NAMES}
    server = Server(setup_of(made), start, folder, rounds=ROUNDS, roster=roster)
    if kill:
        _after(server, kill)
    carry(grid, server, SOON)
    return server


def _after(server: Server, count: int) -> None:
    """Have a server end with its so-maniest answer in hand, uncounted."""
    left, calm = [count], server.take

    def take(tally: Tally, update: Update) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        calm(tally, update)

    server.take = take  # type: ignore[method-assign]


@pytest.mark.parametrize("kill", [1, 2, 5, 9, 15])
def test_a_server_that_ends_in_a_round_goes_on_with_the_same_bits(
    kill: int, tmp_path: Path
) -> None:
    made = METHODS["fedper"]
    calm = carried(made, tmp_path / "calm")
    with pytest.raises(KeyboardInterrupt):
        carried(made, tmp_path / "killed", kill=kill)
    again = carried(made, tmp_path / "killed")
    assert digests(again.world.values) == digests(calm.world.values)
    one, other = (tmp_path / where / "ledger.jsonl" for where in ("calm", "killed"))
    assert one.read_bytes() == other.read_bytes()


def test_a_node_that_fails_does_not_end_the_round(tmp_path: Path) -> None:
    server = carried(METHODS["fedavg"], tmp_path, broken="client-1")
    assert server.world.round == ROUNDS
    rounds = [line for line in read_lines(tmp_path / "ledger.jsonl") if "moved" in line]
    assert rounds[0]["counted"] == list(NAMES)
    for line in rounds[1:]:
        assert line["counted"] == ["client-0", "client-2"]
        assert line["rejected"] == {"client-1": "no answer"}


@pytest.mark.parametrize("name", METHODS)
def test_the_same_bits_as_in_one_process(name: str, tmp_path: Path) -> None:
    whole = Federation(
        setup_of(METHODS[name]),
        zoo.build("bert"),
        few("bert", 3),
        loss,
        tmp_path / "local",
        rounds=ROUNDS,
        traits=TRAITS,
        replies=True,
    )
    for _ in range(ROUNDS):
        whole.commit(whole.round())
    server = carried(METHODS[name], tmp_path / "flower")
    assert digests(server.world.values) == digests(whole.world.values)
    one, other = (tmp_path / where / "ledger.jsonl" for where in ("local", "flower"))
    assert one.read_bytes() == other.read_bytes()
    for client in NAMES:
        homes = (
            Journal(home_of(tmp_path / where, client), replies=True).home()[0]
            for where in ("local", "flower")
        )
        first, second = map(digests, homes)
        assert first == second


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    held = seats(METHODS["fedavg"], tmp_path)
    grid = InProcess(client_app(lambda context: held["client-0"]), [{}])
    with pytest.raises(FedplanError, match="have not come: client-1"):
        met(grid, ["client-0", "client-1"], Patience(nodes=0.1, answers=5.0, look=0.01))


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.bool)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    ),
    st.integers(1, 64),
)
@settings(max_examples=300)
def test_what_is_wrapped_comes_out(
    shapes: dict[str, tuple[torch.dtype, list[int]]], size: int
) -> None:
    tensors = {name: torch.ones(shape).to(dtype) for name, (dtype, shape) in shapes.items()}
    before, parcels.BUCKET = parcels.BUCKET, size
    try:
        scores = {Block("encoder", 3): 0.25}
        down = Down("r", "a", Turn(3, "c", "frozen", {"x": "y"}, scores), tensors, {"k": 2})
        update = Update("c", "r", "a", tensors, 7, {"weight": 7, "up": 1})
        for sent, found in (
            (down, parcels.down_of(parcels.down_records(down))),
            (update, parcels.update_of(parcels.update_records(update))),
        ):
            assert found.values.keys() == sent.values.keys()
            for name, value in found.values.items():
                assert value.dtype == tensors[name].dtype and torch.equal(value, tensors[name])
        assert parcels.down_of(parcels.down_records(down)).turn == down.turn
    finally:
        parcels.BUCKET = before


def test_another_apps_message_is_refused() -> None:
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    for records in (
        RecordDict(),
        RecordDict({"arrays": ArrayRecord(), "header": ConfigRecord({"fedplan": 3})}),
        RecordDict({"arrays": ArrayRecord(), "header": ConfigRecord({"fedplan": b"no"})}),
        parcels.wrapped({}, {"client": 3}),
    ):
        with pytest.raises(MessageError):
            parcels.update_of(records)


@pytest.mark.nightly
def test_three_nodes_with_tls_and_keys_have_the_same_bits_too(here: Path) -> None:
    study = STUDY.replace('path = "digits.npz"', f'path = "{here}/digits.npz"')
    study = study.replace("dropped = 0.1", "").replace("attention = 4", "personal = false")
    Path("study.toml").write_text(study)
    assert run("run", "study.toml", "--output", "whole")[0] == 0
    names = [f"client-{i:02}" for i in range(3)]
    with Deployment(here / "fed", names) as deployed:
        out = deployed.run(study)
    assert (out / "ledger.jsonl").read_bytes() == (here / "whole/ledger.jsonl").read_bytes()
    assert run("verify", str(out))[0] == 0
    one, other = (Store(folder / "world").read() for folder in (out, here / "whole"))
    assert one is not None and other is not None
    assert digests(one.tensors) == digests(other.tensors)
    for name in names:
        kept = Journal(here / "fed/sites" / name / "tiny/home", replies=True).home()[0]
        assert kept and digests(kept) == digests(Journal(home_of(here / "whole", name)).home()[0])
