# SPDX-License-Identifier: Apache-2.0
"""Edges: a tree of servers gives the bits of a flat federation, and an edge that lies is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import zoo
from clients import few, know_secrets, loss
from commands import STUDY, some_digits
from studies import SITE, offered

from fedplan.audits.ledger import verify_ledger
from fedplan.federation.aggregation.defence import Defence
from fedplan.federation.agreement import Agreement
from fedplan.federation.client_round import train_round
from fedplan.federation.edges import accept_sum, open_edge_round, read_sum, report_sum, sum_message
from fedplan.federation.participation import Edges, Participation
from fedplan.federation.rounds import RoundState
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.runners.executors.executor import PoolConfig
from fedplan.runners.local import Faults, Federation
from fedplan.runners.simulation import Simulation
from fedplan.sites.review import review_study
from fedplan.storage.append_log import read_json_lines
from fedplan.studies.experiment import build_experiment
from fedplan.studies.schema import ConfigError, study_from_dict
from fedplan.studies.section import parse_toml
from fedplan.tensors.named import digests
from fedplan.training.fit import TrainArguments

NAMES = [f"client-{i}" for i in range(7)]
ARGUMENTS = TrainArguments(lr=1e-2, batch_size=2, steps=1)
PLAIN = ("fedavg", "fedper", "scaffold", "fedadam", "fedfrozen")


def federation(folder: Path, edges: Edges, method: Method, defence: Defence) -> Federation:
    folder.mkdir(parents=True)
    know_secrets(folder, NAMES)
    model = zoo.build("vit")
    agreement = Agreement("tree", describe(model), method, ARGUMENTS, defence=defence)
    return Federation(
        agreement,
        model,
        few("vit", len(NAMES)),
        loss,
        folder,
        rounds=3,
        participation=Participation(0.9, edges),
        faults=Faults(dropped=0.1, late=0.15),
    )


def drawn_edges(draw: Random) -> dict[str, list[str]]:
    """Some clients under one to four edges, of which one may be empty; the others have none."""
    edges = {f"edge-{i}": list[str]() for i in range(draw.randint(1, 4))}
    for name in draw.sample(NAMES, draw.randint(2, len(NAMES))):
        edges[draw.choice(list(edges))].append(name)
    return edges


def run(fed: Federation) -> tuple[dict[str, str], list[dict[str, Any]]]:
    for _ in range(3):
        fed.commit(fed.run_round())
    lines = read_json_lines(fed.server.folder / "ledger.jsonl")
    assert verify_ledger(fed.agreement, lines) == []
    return digests(fed.global_state.values), lines


@pytest.mark.parametrize("name", [*PLAIN, "capped", "bf16"])
def test_any_tree_leaves_the_bits_and_the_ledger_of_the_flat_federation(
    name: str, tmp_path: Path
) -> None:
    method = method_by_name(name if name in PLAIN else "fedavg")
    if name == "bf16":
        text = parse_toml(
            STUDY.replace("[train]", 'compression = "pipe(delta(), bf16())"\n[train]')
        )
        method = build_method(text)
    defence = Defence(max_weight=4) if name == "capped" else Defence()
    flat = run(federation(tmp_path / "flat", {}, method, defence))
    for seed in range(3):
        edges = drawn_edges(Random(f"{name}{seed}"))
        values, lines = run(federation(tmp_path / str(seed), edges, method, defence))
        assert values == flat[0]
        for line, expected in zip(lines, flat[1], strict=True):
            if line["kind"] == "round":
                said, summed = line.pop("edges", {}), set(line["aggregated"])
                below = {e: [n for n in NAMES if n in edges[e] and n in summed] for e in edges}
                assert {e: c for e, c in said.items() if c} == {e: c for e, c in below.items() if c}
            assert line == expected


def test_a_ledger_whose_edges_and_updates_disagree_is_wrong(tmp_path: Path) -> None:
    edges = {"east": ["client-00", "client-01"], "west": ["client-02"]}
    fed = federation(tmp_path / "run", edges, method_by_name("fedavg"), Defence())
    _, lines = run(fed)
    for claimed, fault in {
        ("client-00", "client-00"): "2 edges summed its update",
        ("nobody",): "an edge summed its update, and it was not aggregated",
    }.items():
        changed = {f"edge-{i}": [name] for i, name in enumerate(claimed)}
        forged = [e | {"edges": changed} if e["kind"] == "round" else e for e in lines]
        assert fault in " ".join(verify_ledger(fed.agreement, forged))


def build_method(values: dict[str, Any]) -> Method:
    from fedplan.studies.experiment import make_method

    return make_method(study_from_dict(values))


REFUSED = {
    'aggregation.kind = "secure"': {"aggregation": {"kind": "secure"}},
    'privacy.unit = "client"': {"privacy": {"unit": "client", "epsilon": 8.0}},
    "cannot be used with defence": {"defence": {"rule": "median"}},
    "max_weight works": {"defence": {"max_norm_ratio": 2.0}},
    "evaluate.on_clients": {"evaluate": {"on_clients": True}, "data": {"holdout_fraction": 0.2}},
    "listed twice": {"clients": {"edges": {"a": ["client-00"], "b": ["client-00"]}}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_an_edge_cannot_sum_is_refused_by_name(words: str) -> None:
    values = parse_toml(STUDY)
    values["clients"] = {"edges": {"east": ["client-00"]}}
    for section, fields in REFUSED[words].items():
        values[section] = values.get(section, {}) | fields
    with pytest.raises(ConfigError, match=words):
        study_from_dict(values)


def test_a_choice_of_layers_by_all_clients_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_digits(tmp_path)
    monkeypatch.chdir(tmp_path)
    values = parse_toml(STUDY)
    values["method"] = {"name": "safl", "settings": {"k": 1, "joint_choice": True}}
    build_experiment(study_from_dict(values))
    values["clients"] = {"edges": {"east": ["client-00"]}}
    with pytest.raises(ConfigError, match=r"clients\.edges: the method chooses layers"):
        build_experiment(study_from_dict(values))


def test_edges_leave_the_digest_of_training_and_change_what_a_site_approves() -> None:
    flat, values = study_from_dict(parse_toml(STUDY)), parse_toml(STUDY)
    values["clients"]["edges"] = {"east": ["client-00"]}
    tree = study_from_dict(values)
    assert tree.digest == flat.digest and tree.full_digest != flat.full_digest


def test_a_site_sees_who_receives_its_update_before_it_approves() -> None:
    values = offered().model_dump(mode="json")
    values["clients"]["edges"] = {"hub": [SITE.client], "other": []}
    review = review_study(study_from_dict(values), offered(), site=SITE)
    words = f"hub receives the updates of {SITE.client}. The server above receives their sum, and "
    words += "what each site reports."
    assert review.edges == review.json()["edges"] == words and "clients.edges.hub" in str(
        review.changes
    )
    assert review_study(offered(), site=SITE).edges == ""


def test_a_client_of_an_edge_that_is_not_in_the_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_digits(tmp_path)
    monkeypatch.chdir(tmp_path)
    values = parse_toml(STUDY)
    values["clients"]["edges"] = {"east": ["client-0"]}
    with pytest.raises(ConfigError, match=r"clients\.edges: there is no client 'client-0'"):
        Simulation(study_from_dict(values), tmp_path / "run")
    values["clients"]["edges"] = {"east": ["client-00"]}
    with pytest.raises(ConfigError, match="workers of a pool sum their own clients"):
        Simulation(study_from_dict(values), tmp_path / "run", pool_config=PoolConfig(count=1))


def client(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any, Any], Any]:
    return lambda tensors, fields: change(fields["clients"][NAMES[1]])


def fact(**changes: Any) -> Callable[[Any, Any], Any]:
    def change(tensors: Any, fields: Any) -> None:
        facts = fields["sums"]["values"]
        facts[min(facts)].update(changes)

    return change


def tensor(change: Callable[[torch.Tensor], Any]) -> Callable[[Any, Any], Any]:
    def changed(tensors: Any, fields: Any) -> None:
        key = min(key for key in tensors if key.startswith("values/"))
        tensors[key] = change(tensors[key])

    return changed


def first_turn(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any, Any], Any]:
    return client(lambda entry: change(entry["turn"]))


LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "a client of another edge": lambda t, f: f["clients"].update(
        {NAMES[6]: f["clients"][NAMES[1]]}
    ),
    "a client less": lambda t, f: f["clients"].pop(NAMES[1]),
    "a client that is not in the sum": client(lambda c: c.update(summed=False)),
    "a summed client without a record": client(lambda c: c.update(turn=None)),
    "no report of a client": client(lambda c: c.clear()),
    "a word for a truth": client(lambda c: c.update(summed="yes")),
    "the turn of another client": first_turn(lambda t: t.update(client=NAMES[0])),
    "the turn of another round": first_turn(lambda t: t.update(round=2)),
    "a larger weight in a record": first_turn(lambda t: t.update(weight=t["weight"] + 1)),
    "a huge weight in a record": first_turn(lambda t: t.update(weight=2**40)),
    "another role": first_turn(lambda t: t.update(roles=t["roles"].replace("S", "K", 1))),
    "another base": first_turn(lambda t: t.update(before="0" * len(t["before"]))),
    "fewer bytes": first_turn(lambda t: t.update(download_bytes=0)),
    "another kind": lambda t, f: f.update(kind="buffered"),
    "no sums": lambda t, f: f.update(sums=[]),
    "no facts": lambda t, f: f["sums"].update(values=None),
    "a record of a client that it did not ask": client(lambda c: c.update(requested=False)),
    "a sum without facts": lambda t, f: f["sums"].update(values={}),
    "another weight": fact(weight=1),
    "a weight that is no whole number": fact(weight=9.5),
    "another number of clients": fact(senders=1),
    "another shape": fact(shape=[1]),
    "no shape": fact(shape=3),
    "another dtype": fact(dtype="float16"),
    "an overflow": fact(reach=2**98),
    "a negative reach": fact(reach=-1),
    "a reach that is no number": fact(reach=None),
    "fewer numbers": tensor(lambda t: t[:-1]),
    "floats": tensor(lambda t: t.double()),
    "values that no client could send": lambda t, f: t.update(
        {min(t).replace(".lower", ".upper"): torch.full_like(t[min(t)], 2**60)}
    ),
    "counts twice": lambda t, f: t.update({f"{min(t)}.lower": t[min(t)]}),
    "a param that nobody shared": lambda t, f: t.update({"values/x.lower": torch.zeros(1).long()}),
    "no counts": lambda t, f: t.pop(min(t)),
    "no squares": lambda t, f: f.update(squares=None),
    "squares of others": lambda t, f: f["squares"].update(x=1),
    "a square below zero": lambda t, f: f["squares"].update({min(f["squares"]): -1}),
    "an endless square": lambda t, f: f["squares"].update({min(f["squares"]): 2**4000}),
}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, Any]:
    """A federation whose edge has summed three clients; and what it reports, as a message."""
    folder = tmp_path_factory.mktemp("lies") / "run"
    fed = federation(
        folder, {"east": NAMES[:3], "west": NAMES[3:5]}, method_by_name("scaffold"), Defence()
    )
    part = open_edge_round(opened(fed), NAMES[:3])
    for name in NAMES[:3]:
        update = train_round(fed.agreement, fed.clients[name], part.cohort[name])
        fed.server.take(part, update)
    assert part.aggregated == NAMES[:3], part.rejected
    return fed, sum_message(*report_sum(part, NAMES[:3]))


def opened(fed: Federation) -> RoundState:
    """The first round, in which all are requested."""
    whole = Participation(1.0, fed.server.aggregation.participation.edges)
    object.__setattr__(fed.server.aggregation, "participation", whole)
    return fed.server.begin_round()


@pytest.mark.parametrize("lie", [None, *LIES])
def test_an_edge_that_lies_is_left_out_whole(
    lie: str | None, reported: tuple[Federation, Any]
) -> None:
    fed, message = reported
    round_state = opened(fed)
    tensors, fields = read_sum(message, 2**30)
    tensors, fields = dict(tensors), copy.deepcopy(fields)
    if lie is not None:
        LIES[lie](tensors, fields)
    requested = accept_sum(fed.server, round_state, "east", tensors, fields)
    result = round_state.aggregator.close()
    if lie is None:
        assert requested == round_state.aggregated == NAMES[:3] and result.means
        assert round_state.edges == {"east": tuple(NAMES[:3])} and not round_state.rejected
        return
    assert not requested and not round_state.records and not round_state.aggregated
    assert round_state.rejected.keys() == set(NAMES[:3]) and not round_state.edges
    assert all("the sum of east is rejected" in r for r in round_state.rejected.values())
    assert not result.means and not result.aux and not result.drift


def test_a_claim_of_a_large_sum_leaves_room_for_the_others(
    reported: tuple[Federation, Any],
) -> None:
    fed, message = reported
    round_state = opened(fed)
    tensors, fields = read_sum(message, 2**30)
    for facts in fields["sums"]["values"].values():
        facts["reach"] = 2**98 - 2**50
    accept_sum(fed.server, round_state, "east", tensors, fields)
    update = train_round(fed.agreement, fed.clients[NAMES[5]], round_state.cohort[NAMES[5]])
    fed.server.take(round_state, update)
    assert round_state.aggregated == [*NAMES[:3], NAMES[5]], round_state.rejected


def test_a_sum_counts_once_and_for_its_own_edge(reported: tuple[Federation, Any]) -> None:
    fed, message = reported
    round_state = opened(fed)
    for edge, words in (("west", "clients that were requested"), ("east", ""), ("east", "already")):
        before = list(round_state.aggregated)
        accept_sum(fed.server, round_state, edge, *read_sum(message, 2**30))
        if words:
            assert round_state.aggregated == before
            assert any(words in reason for reason in round_state.rejected.values())
    assert round_state.aggregated == NAMES[:3]
