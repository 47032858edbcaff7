# SPDX-License-Identifier: Apache-2.0
"""Scores at sites: the same in one process and over messages, of no consequence for any turn."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import duals
import pytest
import torch
from chat import chat_tokenizer, pairs, tiny_chat
from clients import GUARANTEES, RUN, client_of
from commands import STUDY
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from grids import InProcess
from hypothesis import given
from hypothesis import strategies as st
from often import first
from sites import NAME, hello, make_gateway, study_text
from sites import RUN as SITE_RUN

from fedplan.audits.run import verify_run
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, ClientPrivacy, EvalSet, MetricPolicy, TrainSetup
from fedplan.federation.endpoint import Endpoint, open_journal, site_run_folder
from fedplan.federation.evaluation import (
    EvalConfig,
    Scores,
    make_eval_request,
    metrics_from_json,
    metrics_to_json,
)
from fedplan.federation.global_state import ClientSync, GlobalState
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.ledger.egress import Account, Limits, read_egress, read_replies
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.messages import Request, read_run_id, request_message
from fedplan.federation.server import Server
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.values import get_values, set_values
from fedplan.reports.formats import sites_line
from fedplan.runners.flower.apps import client_app, run_server
from fedplan.runners.flower.server import ServerLoop
from fedplan.runners.local import Federation
from fedplan.runners.simulation import Simulation
from fedplan.sites.policy import Policy
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.store import Store
from fedplan.studies.experiment import Experiment, build_experiment
from fedplan.studies.export import export_run
from fedplan.studies.model_card import describe_export
from fedplan.studies.run import read_run
from fedplan.studies.run_scores import ScoreRules
from fedplan.studies.schema import ConfigError, Study, read_study
from fedplan.tensors.message import Message
from fedplan.tensors.named import digests
from fedplan.tensors.serialization import SerializationError, unpack_message
from fedplan.training.fit import TrainArguments

QUICK = "[timeouts]\nsites = 2.0\nupdates = 60.0\nreconnect = 1.0\npoll_interval = 0.01\nevaluations = 20.0\n"
SITES = "on_clients = true\n"
FEDPER = STUDY.replace("dropout_fraction = 0.1", "").replace("attention_examples = 4", "")
VALIDATED = FEDPER.replace("num_clients = 3", "num_clients = 3\nvalidation_fraction = 0.3")
NUMBERS = """
name = "numbers"
[model]
type = "bert"
config = {{ vocab_size = {size}, hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 16 }}
[task]
kind = "regression"
input = "prompt"
label = "n"
tokenizer = "chat"
[data]
path = "pairs.jsonl"
num_clients = 2
holdout_fraction = 0.4
[method]
plan = "chain(share(), keep(head))"
[train]
rounds = 3
batch_size = 4
lr = 0.01
[evaluate]
"""


def write_numbers() -> str:
    """Rows of a task of numbers beside its tokenizer; the study of them."""
    tiny_chat(Path("chat"))
    rows = [{**row, "n": i} for i, row in enumerate(pairs(24))]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return NUMBERS.format(size=len(chat_tokenizer()))


def wrote(text: str, name: str = "study.toml", *, evaluate: str = SITES, more: str = "") -> Path:
    """A study file; what is said of evaluation stands in its last section."""
    file = Path(name)
    file.write_text(text + evaluate + QUICK + more)
    return file


STAGES = dict[str, Experiment]()
"""What was built once: a study of the same words has the same rows in every test."""


def staged(text: str, study: Study) -> Experiment:
    if text not in STAGES:
        STAGES[text] = build_experiment(study)
    return STAGES[text]


class Grid(InProcess):
    """A grid on which messages of a kind to some nodes never arrive."""

    lost: tuple[str, Iterable[int]] = ("", ())

    def pull_messages(self, message_ids: Iterable[str]) -> list[FlowerMessage]:
        kind, nodes = self.lost
        there = {n: self.sent[n].metadata for n in message_ids if n in self.sent}
        lost = {n for n, m in there.items() if m.message_type == kind and m.dst_node_id in nodes}
        return super().pull_messages(n for n in there if n not in lost)


class Sites:
    """The sites of a study whose rows are here, each with a experiment, a home and an account."""

    def __init__(self, file: Path, folder: Path, **disclosures: MetricPolicy) -> None:
        self.file, self.folder, self.disclosures = file, folder, disclosures
        self.study = read_study(file)
        self.experiment = staged(file.read_text(), self.study)
        self.names = list(self.experiment.data.train)
        self.endpoints, self.asked = dict[str, Endpoint](), list[tuple[str, str]]()
        self.broken: Callable[[str, str], None] = lambda name, kind: None
        self.limits: Limits | None = None
        nodes = [{"name": name} for name in reversed(self.names)]
        self.grid = Grid(client_app(self.answer), nodes)

    def answer(self, context: Context, kind: str, message: Message) -> Message:
        name = str(context.node_config["name"])
        self.asked.append((name, kind))
        self.broken(name, kind)
        return self.endpoint(name, read_run_id(message)).answer(kind, message)

    def endpoint(self, name: str, run: str = RUN) -> Endpoint:
        if name not in self.endpoints:
            experiment, folder = self.experiment, self.folder / "sites" / name
            client = client_of(
                self.study,
                experiment,
                name,
                site_run_folder(folder, run),
                ClientPrivacy(
                    account=Account(self.folder / "accounts" / name, self.limits),
                    metric_policy=self.disclosures.get(name.replace("-", "_"), MetricPolicy()),
                ),
            )
            client.__dict__["digest_key"] = name.encode().ljust(32)
            self.endpoints[name] = Endpoint(
                replace(experiment.pinned_agreement, run=run), client, folder
            )
        return self.endpoints[name]

    def carry(self) -> Path:
        run = self.folder / "run"
        run_server(self.grid, self.study, run)
        return run


def lines(run: Path) -> list[dict[str, Any]]:
    return read_json_lines(run / "metrics.jsonl")


def homes(sites: Sites) -> dict[str, dict[str, str]]:
    return {n: digests(sites.endpoints[n].site.journal.client_state()[0]) for n in sites.names}


def scored(model: Any, experiment: Any, values: Any, rows: Any) -> dict[str, float]:
    set_values(model, values, experiment.agreement.trainable)
    return experiment.data.task.score(model, rows, batch_size=128)


@pytest.mark.parametrize("kind", ["kept head", "numbers"])
def test_scores_over_messages_are_those_of_one_process(kind: str, here: Path) -> None:
    text = FEDPER if kind == "kept head" else write_numbers()
    file = wrote(text)
    whole = Simulation(read_study(file), here / "local").run()
    run = Sites(file, here / "there").carry()
    assert (here / "local/metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert read_run(run).metrics == whole.metrics
    assert all(verify_run(folder)[0] == [] for folder in (run, here / "local"))
    experiment, last = staged(file.read_text(), read_study(file)), lines(run)[-1]["sites"]
    model = copy.deepcopy(experiment.model)
    for name, rows in whole.data.client_tests.items():
        obvious = {
            "global": scored(model, experiment, whole.federation.global_values(), rows),
            "personal": scored(model, experiment, whole.federation.personal_values(name), rows),
        }
        assert last["by"][name] == obvious, "as the obvious way has it"
    for model in ("global", "personal"):
        held, key = [each[model] for each in last["by"].values()], experiment.data.task.primary
        total = sum(each["examples"] for each in held)
        mean = sum(each[key] * each["examples"] for each in held) / total
        assert last[model][key] == pytest.approx(mean) and last[model]["examples"] == total
        pick = min if experiment.data.task.higher_is_better else max
        assert last["spread"][model][f"{key}_worst"] == pick(each[key] for each in held)
    assert last["global"] != last["personal"] and "loss" in whole.metrics[-1]
    closed = whole.federation.server.last_round()
    assert closed is not None
    key = experiment.data.task.primary
    told = sites_line(closed.record, closed.row, ScoreRules(key, True, personal=True))
    places = [told.index(word) for word in (f"personal {key} ", "worst client ", f"global {key} ")]
    assert "loss " in told and places == sorted(places)


class Pictures:
    """A prompted method on tiny towers: four rows to train on and four to test on, for each."""

    names = ("a", "bb", "ccc")

    def __init__(self, name: str) -> None:
        self.made = method_by_name(name, {"warmup": 1} if name == "pfeddc-held" else {})
        self.rows = duals.pictures_of(*self.names)
        self.tests = duals.pictures_of(*(4 * name for name in self.names))
        score = partial(duals.ASKED.score, batch_size=2)
        self.eval_sets = {n: EvalSet(self.tests[4 * n], score) for n in self.names}

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        model = duals.build("clip")
        return self.made.adapt(model) if self.made.adapt else model

    def agreement(self) -> Agreement:
        train_arguments = TrainArguments(lr=1e-2, batch_size=2, steps=2)
        return Agreement("pictures", describe(self.model()), self.made, train_arguments, run=RUN)


@pytest.mark.parametrize("name", first(1, ["pfeddc", "promptfl"]))
def test_prompts_are_scored_alike_in_one_process_and_over_messages(
    name: str, tmp_path: Path
) -> None:
    setting, scoring = (
        Pictures(name),
        EvalConfig(on_clients=True, primary="accuracy", higher_is_better=True),
    )
    agreement, rows, loss = setting.agreement(), setting.rows, duals.ASKED.loss
    whole = Federation(
        agreement,
        setting.model(),
        rows,
        loss,
        tmp_path / "a",
        rounds=2,
        eval_sets=setting.eval_sets,
    )
    told = list[tuple[dict[str, Scores], dict[str, str]]]()
    for _ in range(2):
        round_state = whole.run_round()
        told.append(whole.evaluate())
        whole.commit(round_state)
    sites = dict[str, Endpoint]()
    for client in setting.names:
        model, folder = setting.model(), tmp_path / "sites" / client
        start = get_values(model, agreement.params)
        site = Client(
            name=client,
            examples=rows[client],
            journal=open_journal(site_run_folder(folder, RUN)),
            setup=TrainSetup(
                model, loss, start, digest_initial_model(model, agreement.params, start)
            ),
            eval_set=setting.eval_sets[client],
        )
        sites[client] = Endpoint(agreement, site, folder)

    def answer(context: Context, kind: str, message: Message) -> Message:
        return sites[str(context.node_config["name"])].answer(kind, message)

    (tmp_path / "b").mkdir()
    start = get_values(setting.model(), agreement.params)
    roster = {client: dict[str, str]() for client in setting.names}
    server = Server(agreement, start, tmp_path / "b", rounds=2, roster=roster)
    grid = InProcess(client_app(answer), [{"name": client} for client in setting.names])
    ServerLoop(grid, server, scoring=scoring).run()
    assert [line["sites"]["by"] for line in lines(tmp_path / "b")] == [said for said, _ in told]
    assert digests(server.global_state.values) == digests(whole.global_state.values)
    assert not any(silent for _, silent in told)


def test_no_turn_follows_from_scores_and_the_world_comes_down_once(here: Path) -> None:
    found = dict[str, Any]()
    for name, evaluate in (("with", SITES + 'keep_best = "personal"\n'), ("without", "")):
        sites = Sites(wrote(VALIDATED, f"{name}.toml", evaluate=evaluate), here / name)
        run = sites.carry()
        egress = [line for n in sites.names for line in read_egress(here / name / "sites" / n)]
        global_state = read_run(run).global_state
        found[name] = {
            "global": digests(global_state.values),
            "known": (global_state.client_sync, global_state.versions),
            "ledger": (run / "ledger.jsonl").read_bytes(),
            "homes": homes(sites),
            "up": sum(line["upload_bytes"] for line in egress),
            "trained down": sum(line["download_bytes"] for line in egress if line["round"] <= 3),
        }
        asked = {kind for _, kind in sites.asked}
        assert ("evaluate" in asked) == (name == "with")
    # After the last round the world comes down for its scores alone.
    extra = found["with"].pop("trained down") - found["without"].pop("trained down")
    values = read_run(here / "with/run").global_state.values.values()
    assert found["with"] == found["without"]
    assert extra <= 3 * sum(v.numel() * v.element_size() for v in values)


def test_who_is_away_or_slow_is_left_out_and_named(here: Path) -> None:
    calm = Sites(wrote(FEDPER, "calm.toml", evaluate=""), here / "calm").carry()
    file = wrote(FEDPER, "late.toml")
    file.write_text(file.read_text().replace("evaluations = 20.0", "evaluations = 0.3"))
    sites = Sites(file, here / "late")
    first, second, third = sites.names
    # Nodes stand in the reverse order of names: the first is the last node.
    sites.grid.lost = ("evaluate", [102])

    def broken(name: str, kind: str) -> None:
        if (name, kind) == (second, "evaluate"):
            raise RuntimeError("it has no memory left for rows of Mr Smith")

    sites.broken = broken
    began = time.monotonic()
    run = sites.carry()
    assert time.monotonic() - began < 30.0
    for line in lines(run):
        assert set(line["sites"]["by"]) == {third}
        assert line["sites"]["silent"][first] == "no answer"
        assert line["sites"]["silent"][second].startswith("no answer")
    assert "Smith" not in (run / "metrics.jsonl").read_text()
    assert digests(read_run(run).global_state.values) == digests(read_run(calm).global_state.values)


def test_a_site_lets_leave_what_it_allows(here: Path) -> None:
    file = wrote(FEDPER)
    names = Sites(file, here / "names").names
    words = [name.replace("-", "_") for name in names]
    sites = Sites(
        file,
        here / "there",
        **{
            words[0]: MetricPolicy(frozenset({"accuracy"})),
            words[1]: MetricPolicy(min_examples=10_000),
            words[2]: MetricPolicy(frozenset({"nothing"})),
        },
    )
    run = sites.carry()
    last = lines(run)[-1]["sites"]
    assert last["by"] == {names[0]: last["by"][names[0]]}
    assert (
        set(last["by"][names[0]]["personal"]) == {"accuracy", "examples"} == set(last["personal"])
    )
    assert last["silent"][names[1]].startswith("refused: few-examples")
    assert last["silent"][names[2]].startswith("refused: metrics-not-allowed")
    assert last["spread"]["personal"]["clients"] == 1.0 and "loss" not in last["global"]
    # A simulation may say the same of its clients, and has the same bytes.
    whole = Simulation(read_study(file), here / "local")
    for name, word in zip(names, words, strict=True):
        client = whole.federation.clients[name]
        client.privacy = replace(client.privacy, metric_policy=sites.disclosures[word])
        whole.federation.clients[name] = client
    whole.run()
    assert (here / "local/metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def left_in(run: Path) -> list[Any]:
    """The scores of a run, and the world that it keeps."""
    best = read_run(run).best_state
    return [(run / "metrics.jsonl").read_bytes(), best.round, digests(best.values)]


CALM = list[Any]()


def left_by_calm(here: Path) -> list[Any]:
    """What a run leaves that nobody kills: played once, for rows are the same in every test."""
    CALM[:] = CALM or left_in(Sites(Path("calm.toml"), here / "calm").carry())
    return CALM


KILLS = ("before the line", "before the mark", "before it is kept")
BEST = SITES + 'keep_best = "global"\n'


@pytest.mark.parametrize("at", KILLS)
@pytest.mark.parametrize("kill", first(1, [2, 1, 3]))
def test_a_kill_between_a_round_and_its_scores_asks_again(
    at: str, kill: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote(VALIDATED, "calm.toml", evaluate=BEST)
    calm = left_by_calm(here)
    place, name = {
        "before the line": (Server, "add_scores"),
        "before the mark": (Store, "replace_meta"),
        "before it is kept": (Server, "keep_best"),
    }[at]
    true, left = getattr(place, name), [kill]

    def killed(*said: Any, **more: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return true(*said, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, name, killed)
        Sites(Path("calm.toml"), here / "killed").carry()
    run = Sites(Path("calm.toml"), here / "killed").carry()
    assert left_in(run) == calm and verify_run(run)[0] == []
    assert [line["round"] for line in lines(run)] == [1, 2, 3]


@pytest.mark.parametrize("by", first(1, ["personal", "global"]))
def test_the_best_round_is_kept_exported_and_checked(by: str, here: Path) -> None:
    more = f'[early_stopping]\nmetric = "validation.{by}.accuracy"\npatience = 3\n'
    text = VALIDATED.replace("rounds = 3", "rounds = 6").replace(
        "batch_size = 8", "batch_size = 8\nlr = 0.02"
    )
    text = text.replace('test_split = "test"\n', "")
    file = wrote(text, evaluate=SITES + f'keep_best = "{by}"\n', more=more)
    seen = dict[int, dict[str, str]]()
    whole = Simulation(read_study(file), here / "local")
    for closed in whole.rounds():
        seen[closed.round] = digests(whole.federation.global_state.values)
    run = Sites(file, here / "there").carry()
    rows = read_run(run).metrics
    scores = {row["round"]: row[f"validation.{by}.accuracy"] for row in rows}
    best = max(scores, key=lambda number: (scores[number], -number))
    for folder in (run, here / "local"):
        found = read_run(folder)
        assert (
            found.best_state.round == best
            and found.round == len(scores) == whole.metrics[-1]["round"]
        )
        assert digests(found.best_state.values) == seen[best] and verify_run(folder)[0] == []
    assert len(scores) == min(6, best + 3), "it stops when three rounds were no better"
    export_run(here / "local", here / "out", best=True)
    said = describe_export(here / "local", best=True)[0]
    score = f"{by} accuracy {scores[best]:.3f} on validation examples"
    assert said == f"Best round: {best}, by {score}."
    from safetensors.torch import load_file

    written = digests(load_file(here / "out/model.safetensors"))
    assert set(seen[best].values()) <= set(written.values())
    with pytest.raises(ConfigError, match="--best is for the global model"):
        export_run(
            here / "local",
            here / "other",
            whole.federation.server.last_round().turns[0].client,
            best=True,
        )  # type: ignore[union-attr]
    shutil.rmtree(run / "best")
    with pytest.raises(ConfigError, match="has no best round"):
        export_run(run, here / "other", best=True)


def test_verify_sees_a_best_world_that_was_changed(here: Path) -> None:
    file = wrote(VALIDATED, evaluate=SITES + 'keep_best = "global"\n')
    Simulation(read_study(file), here / "run").run()
    store = Store(here / "run/best", keep=1)
    found = store.read_newest()
    assert found is not None
    key = next(name for name in found.tensors if name.startswith("value/"))
    store.write({**found.tensors, key: found.tensors[key] + 1}, found.meta, number=found.number)
    faults, _ = verify_run(here / "run")
    assert faults and all(fault.startswith("the best global model's") for fault in faults)


def asked(endpoint: Endpoint, request: Request) -> dict[str, Any]:
    return unpack_message(endpoint.answer("evaluate", request_message(request)))[1]


def trained(sites: Sites, name: str, rounds: int) -> tuple[Endpoint, GlobalState]:
    """A site that has taken turns, and the world that the last of them made."""
    site = sites.endpoint(name)
    global_state, agreement = (
        GlobalState.initial(site.agreement, site.site.setup.start),
        site.agreement,
    )
    for number in range(rounds):
        request = make_eval_request(
            agreement, replace(global_state, round=number + 1), name, {}, full=True
        )
        values, said = unpack_message(site.answer("train", request_message(request)))
        assert values, said
        versions = global_state.versions | dict.fromkeys(values, number + 1)
        global_state = replace(
            global_state, values=global_state.values | values, round=number + 1, versions=versions
        )
        global_state = replace(global_state, client_sync={name: ClientSync(number + 1)})
    return site, global_state


def test_a_server_that_asks_more_often_than_the_study_says_is_refused(here: Path) -> None:
    for evaluate, codes in (
        ("every = 2\n" + SITES, ["no-evaluation", "", ""]),
        ("", ["no-evaluation"] * 3),
    ):
        sites = Sites(wrote(FEDPER, evaluate=evaluate), here / str(len(evaluate)))
        site = sites.endpoint(name := sites.names[0])
        for number, code in enumerate(codes, 1):
            global_state = replace(
                GlobalState.initial(site.agreement, site.site.setup.start), round=number
            )
            said = asked(site, make_eval_request(site.agreement, global_state, name, {}, full=True))
            assert said.get("refused", "") == code, "the last round is always due"


LIES: dict[str, tuple[Callable[[Request], Request], str]] = {
    "another plan": (lambda r: replace(r, agreement_digest="0" * 16), "another-study"),
    "another name": (lambda r: replace(r, name=f"{r.name}0"), "another-study"),
    "another run": (lambda r: replace(r, run="c" * 16), "refused"),
    "an earlier round": (
        lambda r: replace(r, name=r.name.replace("/2/", "/1/"), turn=replace(r.turn, round=1)),
        "later-round",
    ),
    "older values": (lambda r: replace(r, versions=dict.fromkeys(r.versions, 1)), "later-round"),
    "what is kept": (
        lambda r: replace(r, values=r.values | {"classifier.weight": torch.zeros(1)}),
        "unexpected-values",
    ),
    "another shape": (
        lambda r: replace(r, values={k: v.double() for k, v in r.values.items()}),
        "unexpected-values",
    ),
}


def test_lies_of_a_server_change_nothing_and_the_truth_has_one_answer(here: Path) -> None:
    sites = Sites(wrote(FEDPER), here)
    name = sites.names[0]
    site, global_state = trained(sites, name, 2)
    truth = make_eval_request(site.agreement, global_state, name, {}, full=True)
    said = asked(site, truth)
    assert set(said["scores"]) == {"global", "personal"}
    held, home = dict(site.site.received_versions), digests(site.site.journal.client_state()[0])
    for lie, (change, code) in LIES.items():
        assert asked(site, change(truth)) == {"refused": code}, lie
    assert asked(site, truth) == said and site.site.received_versions == held
    assert digests(site.site.journal.client_state()[0]) == home
    # It starts again: the same question has the same answer.
    del sites.endpoints[name]
    assert asked(sites.endpoint(name), truth) == said
    counted = read_replies(here / "accounts" / name)
    told = {line["content"] for line in counted if line["kind"] == "evaluation"}
    assert len(told) == 1, "the same answer is counted once"


def test_limits_of_a_site_hold_for_scores(here: Path) -> None:
    file = wrote(FEDPER)
    for limits, code in (
        (Limits(epsilon=1.0), "unprotected"),
        (Limits(bytes=100), "limit-bytes"),
    ):
        sites = Sites(file, here / code)
        sites.limits = limits
        site = sites.endpoint(name := sites.names[0])
        global_state = replace(GlobalState.initial(site.agreement, site.site.setup.start), round=1)
        truth = make_eval_request(site.agreement, global_state, name, {}, full=True)
        assert asked(site, truth) == {"refused": code}


def test_a_policy_says_which_scores_leave_and_each_time_anew(tmp_path: Path) -> None:
    text = study_text(privacy="", data="", rounds=3).replace(
        "holdout_fraction = 0.0", "holdout_fraction = 0.5"
    )
    text += "[evaluate]\non_clients = true\n"
    desk = make_gateway(tmp_path)
    _, said = unpack_message(desk.answer("hello", hello(text)))
    assert said["client"] == NAME, said
    worker = desk._runtime
    assert worker is not None
    site = worker[1].endpoint(SITE_RUN)
    global_state = replace(GlobalState.initial(site.agreement, site.site.setup.start), round=1)
    truth = request_message(make_eval_request(site.agreement, global_state, NAME, {}, full=True))
    told = list[dict[str, Any]]()
    for metrics, least in ((["accuracy"], 2), (["accuracy"], 100), ([], 2), (["f1", "loss"], 2)):
        desk.approver.policy = Policy.model_validate({"metrics": metrics, "min_examples": least})  # type: ignore[misc]
        told.append(unpack_message(desk.answer("evaluate", truth))[1])
    assert told[1:3] == [{"refused": "few-examples"}, {"refused": "metrics-not-allowed"}]
    assert set(told[0]["scores"]["personal"]) == {"accuracy", "examples"}
    assert set(told[3]["scores"]["global"]) == {"f1", "loss", "examples"}
    left = [line["kind"] for line in read_egress(tmp_path / "state")]
    assert left.count("evaluation") == 2


@pytest.mark.parametrize("name", GUARANTEES)
def test_under_a_guarantee_no_scores_leave(name: str, here: Path) -> None:
    sites = Sites(wrote(FEDPER), here)
    site = sites.endpoint(client := sites.names[0])
    site.agreement = replace(site.agreement, guarantee=GUARANTEES[name])
    global_state = replace(GlobalState.initial(site.agreement, site.site.setup.start), round=1)
    truth = make_eval_request(site.agreement, global_state, client, {}, full=True)
    assert asked(site, truth) == {"refused": "metrics-not-private"}
    assert not site.site.received and not read_replies(here / "accounts" / client)


@pytest.mark.parametrize(
    ("evaluate", "more", "words"),
    [
        (SITES, '[privacy]\nunit = "client"\nepsilon = 9.0\n', "cannot bound"),
        (
            'keep_best = "personal"\n',
            '[privacy]\nunit = "client"\nepsilon = 9.0\n',
            "the privacy guarantee does not cover",
        ),
        (SITES, "[data_]\n", "data_"),
    ],
)
def test_a_study_that_asks_for_too_much_is_refused(
    evaluate: str, more: str, words: str, here: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_study(wrote(FEDPER, evaluate=evaluate, more=more))


def test_what_nobody_measures_is_neither_kept_nor_stopped_by(here: Path) -> None:
    bare = FEDPER.replace('test_split = "test"\n', "holdout_fraction = 0.0\n")
    with pytest.raises(ConfigError, match="held-out examples of the clients"):
        read_study(wrote(bare))
    file = wrote(bare, evaluate='keep_best = "global"\n')
    with pytest.raises(ConfigError, match=r"set data.validation_fraction = 0.1"):
        Simulation(read_study(file), here / "a")
    stop = '[early_stopping]\nmetric = "{}personal.accuracy"\n'
    for runner in (lambda f: Simulation(read_study(f), here / "b").run(), partial(_carried, here)):
        with pytest.raises(FedplanError, match=r"use validation.personal.accuracy, and set data"):
            runner(wrote(FEDPER, more=stop.format("sites.")))
        with pytest.raises(FedplanError, match=r"does not measure it: set data.validation"):
            runner(wrote(FEDPER, more=stop.format("validation.")))
    file = wrote(VALIDATED, evaluate='keep_best = "personal"\n')
    with pytest.raises(ConfigError, match=r"set evaluate.on_clients = true, and"):
        _carried(here, file)


def _carried(here: Path, file: Path) -> None:
    Sites(file, here / "c").carry()


def test_a_site_that_has_lost_the_world_is_sent_it_for_its_scores(here: Path) -> None:
    calm = Sites(wrote(FEDPER), here / "calm").carry()
    sites = Sites(Path("study.toml"), here / "lost")

    def broken(name: str, kind: str) -> None:
        if kind == "evaluate" and name == sites.names[1] and name in sites.endpoints:
            with suppress(FileNotFoundError):
                shutil.rmtree(sites.endpoints.pop(name).folder / "received")

    sites.broken = broken
    run = sites.carry()
    assert (run / "metrics.jsonl").read_bytes() == (calm / "metrics.jsonl").read_bytes()
    assert digests(read_run(run).global_state.values) == digests(read_run(calm).global_state.values)
    assert verify_run(run)[0] == []


def test_every_so_many_rounds_and_after_the_last(here: Path) -> None:
    file = wrote(FEDPER, evaluate=SITES + "every = 2\npersonal = false\n")
    run = Sites(file, here / "there").carry()
    whole = Simulation(read_study(file), here / "local").run()
    assert [line["round"] for line in lines(run)] == [2, 3]
    assert all(
        "personal" not in each for line in lines(run) for each in line["sites"]["by"].values()
    )
    assert read_run(run).metrics == whole.metrics


WORDS = st.sampled_from(["global", "personal", "loss", "examples", "other", "x" * 65, ""])
JSON = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.lists(WORDS, max_size=2)


@given(JSON | st.dictionaries(WORDS, st.dictionaries(WORDS, JSON | st.integers(1, 9)) | JSON))
def test_whatever_a_site_says_it_is_scores_or_an_error(said: Any) -> None:
    try:
        found = metrics_from_json(said)
    except SerializationError:
        return
    assert metrics_from_json(metrics_to_json(found)).keys() == found.keys()
    assert all(each["examples"] >= 1 for each in found.values())


ROWS = st.lists(st.none() | st.floats(-2, 2) | st.just(float("nan")), min_size=1, max_size=8)


@given(ROWS, st.booleans())
def test_the_best_round_is_the_first_that_none_is_better_than(
    told: list[float | None], higher: bool
) -> None:
    rows = [{"round": float(n + 1)} | ({"validation.personal.x": t} if t is not None else {})
            for n, t in enumerate(told)]  # fmt: skip
    found = EvalConfig(keep_best="personal", primary="x", higher_is_better=higher).best_round(
        Metrics(rows)
    )
    good = {n + 1: t for n, t in enumerate(told) if t is not None and t == t}
    if not good:
        assert found == 0
        return
    edge = (max if higher else min)(good.values())
    assert found == min(n for n, t in good.items() if t == edge)


def test_a_study_is_the_same_with_and_without_scores(here: Path) -> None:
    """Scores change no turn: a run may begin to ask for them, and go on."""
    plain: Study = read_study(wrote(FEDPER, evaluate=""))
    asking = read_study(wrote(FEDPER))
    assert plain.digest == asking.digest
    first = plain.model_copy(update={"train": plain.train.model_copy(update={"rounds": 2})})
    Simulation(first, here / "run").run()
    Simulation(asking, here / "run").run()
    assert [set(line) - {"round"} for line in lines(here / "run")][-1] >= {"sites"}
