# SPDX-License-Identifier: Apache-2.0
"""Scores at sites under masks and noise: sums alone leave, they are right, and noise is charged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import client_of
from commands import STUDY
from flwr.app import Context
from grids import InProcess
from masked import directory, node
from often import first

from fedplan.audits.run import verify_run
from fedplan.data.metrics import Predictions
from fedplan.data.score_counts import ScoreCounts
from fedplan.federation.client import (
    ClientPrivacy,
    MetricPolicy,
    make_example_guard,
)
from fedplan.federation.endpoint import Endpoint, site_run_folder
from fedplan.federation.evaluation import make_eval_request
from fedplan.federation.global_state import GlobalState
from fedplan.federation.ledger.egress import Account, read_egress
from fedplan.federation.ledger.faults import read_faults
from fedplan.federation.messages import read_run_id, request_message
from fedplan.federation.score_sums import ScoreVector
from fedplan.federation.secure_client import SecAggClient
from fedplan.models.values import set_values
from fedplan.privacy.accounting.accountant import Release
from fedplan.privacy.guarantee import evaluation_name
from fedplan.runners.flower.apps import client_app, run_server
from fedplan.runners.simulation import Simulation
from fedplan.sites.policy import Policy
from fedplan.sites.review import review_study
from fedplan.studies.experiment import build_experiment, privacy_statement
from fedplan.studies.run import read_run
from fedplan.studies.run_scores import run_scores
from fedplan.studies.schema import ConfigError, Study, read_study
from fedplan.tensors.message import Message
from fedplan.tensors.named import full_digest
from fedplan.tensors.serialization import unpack_message

PLAIN = (
    STUDY.replace("dropout_fraction = 0.1", "")
    .replace("attention_examples = 4", "on_clients = true\nevery = 2")
    .replace('test_split = "test"', "holdout_fraction = 0.4")
    .replace('partition = "dirichlet"\nalpha = 0.5', 'partition = "iid"')
    + "[timeouts]\nsites = 2.0\nupdates = 60.0\nreconnect = 1.0\npoll_interval = 0.01\n"
)
MASKS = '[aggregation]\nkind = "secure"\nthreshold = 2\nmin_contributors = 2\n'
SECURE = PLAIN + MASKS
NOISY = (
    PLAIN.replace("batch_size = 8", "batch_size = 4\nsteps = 2")
    .replace("every = 2", "every = 2\nnoise_multiplier = 2.0")
    .replace("when(after(1), freeze(query | key)), ", "")
    + '[privacy]\nunit = "example"\nepsilon = 8.0\nexamples_per_site = 12\n'
)


def written(text: str, name: str = "study.toml") -> Study:
    Path(name).write_text(text)
    return read_study(name)


class Sites:
    """The sites of a study, each with a journal, node key and account of its own.

    `accounts`: folder of the accounts, where several runs share them.
    """

    def __init__(
        self, study: Study, folder: Path, accounts: Path | None = None, **policies: MetricPolicy
    ) -> None:
        self.study, self.folder, self.policies = study, folder, policies
        self.accounts = accounts or folder / "accounts"
        self.experiment = build_experiment(study)
        self.names = list(self.experiment.data.train)
        self.endpoints, self.said = dict[str, Endpoint](), list[tuple[str, str, Message]]()
        self.broken: Callable[[str, str], None] = lambda name, kind: None
        nodes = [{"name": name} for name in self.names]
        self.grid = InProcess(client_app(self.answer), nodes)

    def answer(self, context: Context, kind: str, message: Message) -> Message:
        name = str(context.node_config["name"])
        self.broken(name, kind)
        reply = self.endpoint(name, read_run_id(message)).answer(kind, message)
        self.said.append((name, kind, reply))
        return reply

    def endpoint(self, name: str, run: str = "0" * 16) -> Endpoint:
        if name not in self.endpoints:
            experiment, folder = self.experiment, self.folder / "sites" / name
            agreement = replace(experiment.pinned_agreement, run=run)
            account, place = Account(self.accounts / name), site_run_folder(folder, run)
            client = client_of(
                self.study,
                experiment,
                name,
                place,
                ClientPrivacy(
                    guard=make_example_guard(agreement, folder, account),
                    account=account,
                    metric_policy=self.policies.get(name.replace("-", "_"), MetricPolicy()),
                ),
            )
            masker = None
            if agreement.secagg.active:
                known = directory(self.names)
                masker = SecAggClient(
                    agreement, client, node(name), known, place, cohort=lambda _: self.names
                )
            self.endpoints[name] = Endpoint(agreement, client, folder, secagg_client=masker)
        return self.endpoints[name]

    def carry(self) -> list[dict[str, Any]]:
        run_server(self.grid, self.study, self.folder / "run")
        return scores_of(self.folder / "run")

    def asked(self, name: str, scale: float = 1.0, number: int = 2) -> dict[str, Any]:
        """What a site answers to an evaluation of the initial model, scaled, after a round."""
        endpoint = self.endpoint(name)
        start = {key: scale * value for key, value in endpoint.site.setup.start.items()}
        state = replace(GlobalState.initial(endpoint.agreement, start), round=number)
        request = make_eval_request(endpoint.agreement, state, name, {}, full=True)
        digests = {key: full_digest(value) for key, value in state.values.items()}
        request = replace(request, base_digests=digests)
        return unpack_message(endpoint.answer("evaluate", request_message(request)))[1]


def scores_of(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["sites"] for line in lines if "sites" in line]


def pooled(whole: Simulation, model: str, names: list[str]) -> dict[str, float]:
    """The metrics of a model's predictions on the test examples of clients, put together."""
    federation, task, parts = whole.federation, whole.data.task, list[Predictions]()
    for name in names:
        values = federation.personal_values(name)
        values = federation.global_values() if model == "global" else values
        set_values(federation.model, values, federation.agreement.trainable)
        tests = whole.data.client_tests[name]
        parts.append(task.predict(federation.model, tests, batch_size=128))
    layout = ScoreCounts(3)
    return layout.metrics(layout.count(Predictions.join(parts)))


def test_secure_sums_are_the_scores_of_all_examples(here: Path) -> None:
    study = written(SECURE)
    whole, sites = Simulation(study, here / "local").run(), Sites(study, here / "there")
    told = scores_of(here / "local")
    assert [set(line) for line in told] == [
        {"global", "personal", "clients", "senders", "silent"}
    ] * 2
    for model in ("global", "personal"):
        assert told[-1][model] == pytest.approx(pooled(whole, model, sites.names)), model
    shown = run_scores(read_run(here / "local")).scores
    assert [(score.kind, score.value) for score in shown] == [
        (model, told[-1][model]["accuracy"]) for model in ("personal", "global")
    ], "the personal score leads, and there is no worst client"
    assert shown[0].clients == 3
    assert sites.carry() == told, "as between machines"
    assert verify_run(here / "there/run")[0] == []
    # An answer has keys, boxes, masked words of one length, signatures or shares: no number else.
    replies = [(kind, reply) for _, kind, reply in sites.said if kind == "evaluate"]
    assert len(replies) == 2 * len(sites.names)
    assert all(set(unpack_message(reply)[1]) == {"advert"} for _, reply in replies)
    inputs = [reply for _, kind, reply in sites.said if kind == "masked_input"]
    counts = {len(blob) for reply in inputs for blob in reply.blobs if len(blob) < 20000}
    vector = ScoreVector(ScoreCounts(3), ("global", "personal"))
    assert counts == {8 * (2 + vector.size)}, "count and weight, then the vector"
    kinds = [line["kind"] for line in read_egress(here / "there/sites" / sites.names[0])]
    assert kinds.count("evaluation") == 2


@pytest.mark.parametrize("step", first(1, ["masked_input", "evaluate", "unmask"]))
def test_a_site_that_drops_out_is_not_in_the_sum(step: str, here: Path) -> None:
    study = written(SECURE.replace("every = 2", "every = 3"))
    whole = Simulation(study, here / "local").run()
    sites = Sites(study, here / "there")
    lost, left = sites.names[1], [sites.names[0], sites.names[2]]

    def fail(name: str, kind: str) -> None:
        evaluating = any(said == "evaluate" for _, said, _ in sites.said)
        if name == lost and kind == step and (evaluating or step == "evaluate"):
            raise OSError("the site is down")

    sites.broken = fail
    (told,) = sites.carry()
    if step == "unmask":
        assert told == scores_of(here / "local")[-1], "its input has arrived"
    else:
        assert told["senders"] == left and set(told["silent"]) == {lost}
        assert told["personal"] == pytest.approx(pooled(whole, "personal", left))


@pytest.mark.parametrize("away", first(1, ["later", "first"]))
def test_without_noise_all_sums_are_of_the_same_sites(away: str, here: Path) -> None:
    """Else the difference of two sums would be one site's number of examples by label."""
    sites = Sites(written(SECURE.replace("every = 2", "every = 1")), here / "there")
    lost = sites.names[1]

    def fail(name: str, kind: str) -> None:
        evaluations = sum((n, said) == (sites.names[0], "evaluate") for n, said, _ in sites.said)
        if name == lost and kind == "evaluate" and (evaluations < 2) == (away == "first"):
            raise OSError("the site is down")

    sites.broken = fail
    told = sites.carry()
    senders = [line.get("senders") for line in told]
    if away == "first":
        left = [sites.names[0], sites.names[2]]
        assert senders == [left] * 3 and "not requested" in told[-1]["silent"][lost]
    else:
        assert senders[0] == sites.names and senders[1:] == [None, None]
        assert set(told[-1]["silent"]) == set(sites.names)


@pytest.mark.nightly
def test_too_few_sites_give_no_sum(here: Path) -> None:
    sites = Sites(written(SECURE), here / "there")

    def fail(name: str, kind: str) -> None:
        if name != sites.names[0] and kind == "evaluate":
            raise OSError("the site is down")

    sites.broken = fail
    told = sites.carry()
    assert [set(line) for line in told] == [{"silent"}] * 2
    assert set(told[-1]["silent"]) == set(sites.names)


def test_a_policy_decides_and_few_examples_are_not_revealed(here: Path) -> None:
    none = MetricPolicy(frozenset({"accuracy"}))
    few = MetricPolicy(frozenset({"counts"}), min_examples=1000)
    sites = Sites(written(NOISY), here, client_00=none, client_01=few)
    assert sites.asked("client-00") == {"refused": "metrics-not-allowed"}
    answers = [sites.asked(name)["counts"] for name in ("client-01", "client-02")]
    assert {len(each) for each in answers} == {ScoreVector(ScoreCounts(3, bins=20), ("", "")).size}


def test_noise_is_charged_and_covered_by_epsilon(here: Path) -> None:
    study = written(NOISY)
    whole = Simulation(study, here / "local").run()
    statement = privacy_statement(study, here / "local")
    assert statement is not None and len(statement.charges) == 3 + 2
    events = [each["event"] for each in statement.charges if "evaluation" in each["request"]]
    assert events == [{"kind": "gaussian", "noise_multiplier": 2.0, "sampling_rate": None}] * 2
    forecast = statement.guarantee.forecast_epsilon(3)
    assert statement.epsilon_spent == pytest.approx(forecast, abs=1e-9) and forecast <= 8
    silent = replace(statement.guarantee, evaluation_noise_multiplier=0.0)
    assert silent.forecast_epsilon(3) < forecast - 0.1, "training alone costs less"
    assert "noise multiplier of 2" in statement.evaluation
    assert "epsilon covers these counts" in statement.text()
    told = scores_of(here / "local")
    assert set(told[-1]) == {"global", "personal", "clients", "senders", "silent"}
    # The noise may make the count of so few examples negative: then accuracy is undefined.
    metrics = {"accuracy", "accuracy_low", "accuracy_high"}
    rows = [row for row in whole.metrics if "sites.clients" in row]
    for line, row in zip(told, rows, strict=True):
        measured = metrics & set(line["global"])
        assert measured in (metrics, set())
        assert measured == {name for name in metrics if f"sites.global.{name}" in row}
    assert verify_run(here / "local")[0] == []
    names = [line.pop("senders") for line in told]
    assert names == [list(whole.data.train)] * 2, "who took part is public"
    assert not any(name in json.dumps(told) for name in whole.data.train), "no single client"


def test_noise_at_a_site_has_the_promised_size_and_the_same_bits_again(here: Path) -> None:
    study = written(NOISY)
    sites, layout = Sites(study, here), ScoreCounts(3, bins=20)
    name = sites.names[0]
    told = sites.asked(name)["counts"]
    assert sites.asked(name)["counts"] == told
    guard = sites.endpoint(name).site.privacy.guard
    assert guard is not None
    (charge,) = guard.budget.charges
    assert charge.event == Release(2.0) and charge.name.endswith(evaluation_name(name))
    # One example of two models changes as many cells as the noise is for.
    vector = ScoreVector(layout, ("global", "personal"), 2.0)
    tests = sites.experiment.data.client_tests[name]
    task, model = sites.experiment.data.task, sites.experiment.model
    true = layout.count(task.predict(model, tests, batch_size=1))
    noise = np.array(told) - np.concatenate([true, true])
    assert np.std(noise) == pytest.approx(2 * vector.sensitivity, rel=0.15)


def test_an_example_that_fails_counts_nothing_and_an_answer_is_given(here: Path) -> None:
    sites = Sites(written(NOISY), here)
    name = sites.names[0]
    site = sites.endpoint(name).site
    eval_set = site.eval_set
    assert eval_set is not None and eval_set.predict is not None
    predict, seen = eval_set.predict, list[int]()

    def failing(model: Any, examples: Any) -> Predictions:
        seen.append(len(examples))
        if len(seen) % 3 == 0:
            raise RuntimeError("this example is out of memory")
        return predict(model, examples)

    site.eval_set = replace(eval_set, predict=failing)
    assert len(sites.asked(name)["counts"]) == ScoreVector(ScoreCounts(3, bins=20), ("", "")).size
    assert set(seen) == {1}, "one at a time, so that none changes the count of another"
    assert "out of memory" in str(read_faults(here / "sites" / name))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NOISY.replace("noise_multiplier = 2.0\n", ""), "set evaluate.noise_multiplier"),
        (NOISY.replace('unit = "example"', 'unit = "client"'), "client-level privacy cannot bound"),
        (SECURE.replace("every = 2", "noise_multiplier = 2.0"), "privacy.unit"),
        (SECURE.replace('"image-classification"', '"regression"'), "has no such counts"),
        (SECURE.replace('"image-classification"', '"causal-lm"'), "has no such counts"),
    ],
)
def test_what_has_no_counts_is_refused_by_name(text: str, words: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        written(text)


def test_a_review_says_what_leaves(here: Path) -> None:
    names = "[clients]\nnames = ['a', 'b', 'c']\n"
    for text, words in ((SECURE, "only their sum over sites"), (NOISY, "which epsilon covers")):
        study = written(
            text.replace("[clients]\n", names)
            .replace('path = "digits.npz"\n', "")
            .replace('partition = "iid"\nnum_clients = 3\n', "")
        )
        told = " ".join(review_study(study).disclosures)
        assert words in told and "counts of right and wrong predictions" in told
        quiet = review_study(study, policy=Policy(metrics=["accuracy"])).disclosures
        assert "counts of" not in " ".join(quiet)
