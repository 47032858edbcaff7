# SPDX-License-Identifier: Apache-2.0
"""Edges between a server and its sites: the bits of a simulation, in one process and in many."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import IMAGES, run
from deployment import Deployment, _processes
from flwr.app import Context
from grids import InProcess

from fedplan.federation.edges import read_sum, sum_message
from fedplan.runners.flower.apps import client_app, run_server
from fedplan.runners.flower.edge import Edge
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import SiteRuntime
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.store import Store
from fedplan.studies.schema import Study, read_study
from fedplan.tensors.message import Message
from fedplan.tensors.named import digests
from fedplan.tensors.serialization import pack_message

EDGES = {"east": ["site-0", "site-1", "site-2"], "west": ["site-3", "site-4", "site-5"]}
SITES = [*EDGES["east"], *EDGES["west"]]
Alter = Callable[[str, str, Message], Message]
"""What becomes of the reply of an edge to a kind of request."""


def study_text(method: str, more: str = "", rounds: int = 3) -> str:
    edges = "\n".join(f"{edge} = {names}" for edge, names in EDGES.items())
    return f"""{IMAGES}labels = [0, 1, 2]
[data]
partition = "column"
partition_column = "site"
num_clients = 6
[method]
name = "{method}"
[train]
rounds = {rounds}
batch_size = 4
[evaluate]
personal = false
[timeouts]
sites = 20.0
updates = 60.0
reconnect = 1.0
poll_interval = 0.05
[clients]
names = {SITES}
{more}
[clients.edges]
{edges}
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each site's rows, and with those of all."""
    folder, draw = tmp_path_factory.mktemp("edges"), np.random.default_rng(0)
    image = draw.integers(0, 255, (48, 8, 8), dtype=np.uint8)
    digit, site = draw.integers(0, 3, 48), np.array([SITES[row % 6] for row in range(48)])
    np.savez(folder / "all.npz", image=image, digit=digit, site=site)
    for name in SITES:
        np.savez(folder / f"{name}.npz", image=image[site == name], digit=digit[site == name])
    return folder


def read(folder: Path, text: str) -> Study:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.toml").write_text(text)
    return read_study(folder / "study.toml")


def simulated(here: Path, folder: Path, text: str) -> Path:
    """The run of the same study without edges, where all rows are in one place."""
    text = text[: text.index("[clients.edges]")]
    read(folder, text.replace("[data]\n", f'[data]\npath = "{here}/all.npz"\n'))
    code, words = run("run", str(folder / "study.toml"), "--output", str(folder / "run"))
    assert code == 0, words
    return folder / "run"


def lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    """A ledger without edges, and without digests that a site keys by its own secret."""
    for line in read_json_lines(folder / "ledger.jsonl"):
        for which in ("before", "after") if "roles" in line else ():
            words = [line[which][i : i + 16] for i in range(0, len(line[which]), 16)]
            line[which] = [w for w, r in zip(words, line["roles"], strict=True) if r in "SF"]
        yield {key: value for key, value in line.items() if key != "edges"}


def require_same(folder: Path, expected: Path) -> None:
    assert list(lines_of(folder)) == list(lines_of(expected))
    one, other = (Store(each / "global").read_newest() for each in (folder, expected))
    assert one is not None and other is not None
    assert digests(one.tensors) == digests(other.tensors)


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(folder / "ledger.jsonl") if line["kind"] == "round"]


class Tree:
    """A server, two edges and their sites in one process; `alter` may spoil what an edge replies."""

    def __init__(
        self, here: Path, folder: Path, text: str, absent: tuple[str, ...] = (), odd: str = ""
    ) -> None:
        self.here, self.folder, self.study = here, folder, read(folder, text)
        self.sites = dict[str, SiteRuntime]()
        self.absent, self.odd, self.trained = absent, odd, list[str]()
        self.edges = {name: self.make_edge(name) for name in EDGES}

    def make_edge(self, name: str) -> Edge:
        nodes = [{"name": each} for each in EDGES[name] if each not in self.absent]
        grid = InProcess(client_app(self.answer_at_site), nodes)
        registered = [str(node["name"]) for node in nodes]
        return Edge(Site(name=name), self.folder, lambda: grid, lambda: registered)

    def answer_at_site(self, context: Context, kind: str, message: Message) -> Message:
        name = str(context.node_config["name"])
        if name not in self.sites:
            state = str(self.folder / "sites" / name)
            traits = {"ward": "a"} if name == self.odd else {}
            data = str(self.here / f"{name}.npz")
            site = Site(name=name, data=data, state=state, traits=traits)
            self.sites[name] = SiteRuntime(site, self.study)
        self.trained += [name] if kind == "train" else []
        return self.sites[name].answer(kind, message)

    def run(self, alter: Alter = lambda name, kind, reply: reply) -> Path:
        def answer(context: Context, kind: str, message: Message) -> Message:
            name = str(context.node_config["name"])
            return alter(name, kind, self.edges[name].answer(kind, message))

        grid = InProcess(client_app(answer), [{"name": name} for name in EDGES])
        run_server(grid, self.study, self.folder / "run")
        return self.folder / "run"


@pytest.mark.parametrize("method", ["fedper", "scaffold"])
def test_edges_leave_the_bits_of_a_simulation(method: str, here: Path, tmp_path: Path) -> None:
    text = study_text(method)
    folder = Tree(here, tmp_path / "tree", text).run()
    require_same(folder, simulated(here, tmp_path / "flat", text))
    assert [line["edges"] for line in rounds_of(folder)] == [EDGES] * 3


def test_an_edge_that_starts_again_in_a_round_sends_the_same_sum(
    here: Path, tmp_path: Path
) -> None:
    """The sum is lost with the edge; the sites give the replies that they have stored."""
    tree, replies = Tree(here, tmp_path / "tree", text := study_text("fedavg")), list[str]()

    def lose(name: str, kind: str, reply: Message) -> Message:
        replies.append(f"{name} {kind}")
        if replies.count("west train") == 2 and replies[-1] == "west train":
            tree.edges["west"] = tree.make_edge("west")
            raise ConnectionError
        return reply

    folder = tree.run(lose)
    assert tree.trained.count("site-3") == 4 and tree.trained.count("site-0") == 3
    require_same(folder, simulated(here, tmp_path / "flat", text))


def test_a_site_that_is_away_or_unlike_the_study_is_left_out_of_its_edge(
    here: Path, tmp_path: Path
) -> None:
    text = study_text("fedavg", rounds=1)
    (line,) = rounds_of(Tree(here, tmp_path, text, absent=("site-4",), odd="site-1").run())
    assert line["rejected"].keys() == {"site-1", "site-4"}
    assert line["rejected"]["site-4"] == "no answer"
    assert "traits of its own, and it is below an edge" in line["rejected"]["site-1"]
    assert line["edges"] == {"east": ["site-0", "site-2"], "west": ["site-3", "site-5"]}


def test_a_sum_that_its_records_contradict_is_left_out(here: Path, tmp_path: Path) -> None:
    def lie(name: str, kind: str, reply: Message) -> Message:
        if (name, kind) != ("east", "train"):
            return reply
        tensors, fields = read_sum(reply, 2**30)
        fields["clients"]["site-0"]["turn"]["weight"] += 1
        return sum_message(tensors, fields)

    (line,) = rounds_of(Tree(here, tmp_path, study_text("fedavg", rounds=1)).run(lie))
    assert line["aggregated"] == EDGES["west"] and line["edges"] == {"west": EDGES["west"]}
    assert set(line["rejected"]) == set(EDGES["east"])


def test_an_edge_answers_only_what_is_its_own(here: Path, tmp_path: Path) -> None:
    study = read(tmp_path, study_text("fedavg")).model_dump(mode="json")
    hello = {"run": "ab" * 8, "study": study}
    edge = Edge(Site(name="north"), tmp_path, lambda: pytest.fail("it asks sites"))

    def reply(kind: str, fields: dict[str, Any]) -> str:
        return str(edge.answer(kind, pack_message({}, fields)).header)

    assert "another-study" in reply("hello", hello), "no study names it"
    assert "another-study" in reply("hello", {"run": "ab" * 8})
    assert "unknown-request" in reply("evaluate", hello)
    assert "message" in str(edge.answer("train", Message(b"")).header)


class Edges(Deployment):
    """A deployment whose sites are edges, each with a deployment of its own sites below."""

    def __init__(self, folder: Path, here: Path) -> None:
        super().__init__(folder, list(EDGES), dict.fromkeys(EDGES, here), insecure=True)
        self.below = {
            edge: Deployment(
                folder / edge, names, {n: here / f"{n}.npz" for n in names}, insecure=True
            )
            for edge, names in EDGES.items()
        }

    def start_site(self, name: str) -> None:
        place = self.folder / "sites" / name
        server = self.below[name].folder / "server"
        (place / "edge.sh").write_text(
            f"#!/bin/sh\ncd {place}\nexec fedplan server edge --server {server} --site .\n"
        )
        (place / "edge.sh").chmod(0o755)
        self.keep(name, f"sites/{name}/edge.sh")

    def pids(self, what: str) -> list[int]:
        if what not in EDGES:
            return super().pids(what)
        place = str(self.folder / "sites" / what)
        return [p for p, line, cwd in _processes() if "server edge" in line and cwd == place]


@pytest.mark.nightly
def test_real_edges_one_of_which_is_killed_leave_the_bits_of_a_simulation(
    here: Path, tmp_path: Path
) -> None:
    text = study_text("fedper", "min_updates = 6").replace(" = 20.0", " = 240.0")
    text = text.replace("updates = 60.0", "updates = 240.0")
    tree = Edges(tmp_path / "tree", here)
    with tree.below["east"], tree.below["west"], tree:
        begun = tree.begin(text)
        ledger = tmp_path / "tree" / "run" / "ledger.jsonl"
        while begun.poll() is None and not (ledger.exists() and ledger.stat().st_size):
            time.sleep(0.2)
        assert tree.kill("east")
        folder = tree.finish(begun, "run")
    require_same(folder, simulated(here, tmp_path / "flat", text))
    assert [line["edges"] for line in rounds_of(folder)] == [EDGES] * 3
