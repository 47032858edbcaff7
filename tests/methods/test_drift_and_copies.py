# SPDX-License-Identifier: Apache-2.0
"""FedDyn, FedNova, Ditto and DiLoCo: each against a plain loop of its own in float64, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import GUARANTEES
from torch import Tensor, nn

from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError, PrivacyError
from fedplan.federation.aggregation.defence import Defence
from fedplan.federation.agreement import Agreement, require_private_method
from fedplan.federation.client import EXAMPLE_COUNT, EvalSet
from fedplan.federation.client_round import train_round
from fedplan.federation.evaluation import EvalConfig
from fedplan.federation.global_state import continued_state
from fedplan.federation.participation import Participation
from fedplan.language import chain, freeze, keep, named, phase, share, when
from fedplan.methods import (
    Method,
    diloco,
    ditto,
    fedavg,
    feddyn,
    fednova,
    fedprox,
    fedrep,
    method_by_name,
)
from fedplan.methods.phases import PlannedPhases
from fedplan.models.description import describe
from fedplan.reports.explanation import explain
from fedplan.runners.local import Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.tensors.named import is_aux
from fedplan.training import (
    TrainArguments,
    adamw,
    get_client_hook,
    make_client_optimizer,
    plain_fit,
    sgd,
)

ROUNDS, LR = 6, 0.1
SIZES = {"a": 3, "b": 5, "c": 9, "d": 4}
ALL = Participation(1.0)
ARGUMENTS = TrainArguments(sgd(), lr=LR, batch_size=100, epochs=4)
"""Whole batches, so that the order of examples does not matter."""


class Rows:
    """Examples of a regression in float64; each client has other slopes."""

    def __init__(self, seed: int, count: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 3, generator=draw, dtype=torch.float64)
        self.y = self.x @ torch.randn(3, generator=draw, dtype=torch.float64) + seed

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"x": self.x[indices], "y": self.y[indices]}


ROWS = {name: Rows(i, count) for i, (name, count) in enumerate(SIZES.items())}


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]).square().mean()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def federation(method: Method, folder: Path, **settings: Any) -> Federation:
    model, arguments = linear(), settings.pop("arguments", ARGUMENTS)
    agreement = Agreement("drift", describe(model), method, arguments)
    folder.mkdir(exist_ok=True)
    return Federation(agreement, model, ROWS, loss, folder, rounds=ROUNDS, **settings)


Weights = tuple[Tensor, Tensor]
"""Slopes and intercept."""


def gradient(rows: Rows, weights: Weights) -> Weights:
    """The gradient of the mean squared error, by hand."""
    error = rows.x @ weights[0] + weights[1] - rows.y
    return 2 * rows.x.T @ error / len(rows), 2 * error.mean()


def descend(rows: Rows, at: Weights, steps: int, *pulls: Any, slopes_only: bool = False) -> Weights:
    """Plain gradient descent; each of `pulls` adds its own gradient."""
    for _ in range(steps):
        moves = [gradient(rows, at), *(pull(at) for pull in pulls)]
        intercept = at[1] - LR * sum(m[1] for m in moves)
        at = at[0] - LR * sum(m[0] for m in moves), at[1] if slopes_only else intercept
    return at


def mean_of(each: Mapping[str, Weights], weigh: Mapping[str, float]) -> Weights:
    total = sum(weigh[name] for name in each)
    return tuple(sum(weigh[n] * w[i] for n, w in each.items()) / total for i in range(2))  # type: ignore[return-value]


def initial() -> Weights:
    model: Any = linear()
    return model.weight.detach()[0], model.bias.detach()[0]


def weights_of(values: Mapping[str, Tensor], kind: str = "") -> Weights:
    return values[f"weight{kind}"][0], values[f"bias{kind}"][0]


def close(one: Weights, other: Weights) -> bool:
    # The exact sum rounds to its grid, and the server keeps FedDyn's sum in float32.
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)


def play(method: Method, folder: Path, rounds: int = ROUNDS, **settings: Any) -> Federation:
    fed = federation(method, folder, **settings)
    for _ in range(rounds):
        round_state = fed.run_round()
        assert not round_state.rejected
        fed.commit(round_state)
    assert not verify_ledger(fed.agreement, read_json_lines(folder / "ledger.jsonl"))
    return fed


# FedDyn


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_feddyn_is_the_loop_of_the_paper(fraction: float, tmp_path: Path) -> None:
    """With its own h and its own gradients of clients, of which only some come in a round."""
    alpha, taking = 0.3, Participation(fraction)
    fed = play(feddyn(alpha), tmp_path, participation=taking)
    zero = torch.zeros(3, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    duals, h, theta = dict.fromkeys(ROWS, zero), zero, initial()
    for number in range(1, ROUNDS + 1):
        trained = dict[str, Weights]()
        for name in taking.cohort("drift", number, [*ROWS]):
            dual = duals[name]

            def pull(at: Weights, dual: Weights = dual, theta: Weights = theta) -> Weights:
                return tuple(alpha * (at[i] - theta[i]) - dual[i] for i in range(2))  # type: ignore[return-value]

            trained[name] = descend(ROWS[name], theta, 4, pull)
            moved = [trained[name][i] - theta[i] for i in range(2)]
            duals[name] = dual[0] - alpha * moved[0], dual[1] - alpha * moved[1]
        change = [sum(t[i] - theta[i] for t in trained.values()) / len(ROWS) for i in range(2)]
        h = h[0] - alpha * change[0], h[1] - alpha * change[1]
        average = mean_of(trained, dict.fromkeys(ROWS, 1.0))
        theta = average[0] - h[0] / alpha, average[1] - h[1] / alpha
    assert close(weights_of(fed.global_values()), theta)
    assert not close(theta, mean_of(trained, dict.fromkeys(ROWS, 1.0)))


def test_feddyn_finds_the_minimum_of_all_clients_that_fedavg_misses(tmp_path: Path) -> None:
    arguments = replace(ARGUMENTS, epochs=40)
    x = torch.cat(
        [torch.cat([r.x, torch.ones(len(r), 1)], 1) / len(r) ** 0.5 for r in ROWS.values()]
    )
    y = torch.cat([r.y / len(r) ** 0.5 for r in ROWS.values()])
    best = torch.linalg.lstsq(x, y).solution
    far = dict[str, float]()
    for method in (feddyn(2.0), replace(fedavg(), equal_weights=True)):
        folder = tmp_path / str(len(far))
        fed = federation(method, folder, arguments=arguments)
        for _ in range(25):
            fed.commit(fed.run_round())
        slopes, intercept = weights_of(fed.global_values())
        far[(method.client_hooks and "feddyn") or "fedavg"] = float(
            (torch.cat([slopes, intercept[None]]) - best).norm()
        )
    assert far["feddyn"] < 1e-3 < 0.05 < far["fedavg"]


def test_feddyn_sends_as_much_as_fedavg_and_no_linear_term(tmp_path: Path) -> None:
    one = play(feddyn(), tmp_path / "dyn", keep_replies=True)
    other = play(fedavg(), tmp_path / "avg")
    sums = [
        sum(line.get("upload_bytes", 0) for line in read_json_lines(each / "ledger.jsonl"))
        for each in (tmp_path / "dyn", tmp_path / "avg")
    ]
    assert sums[0] == sums[1] > 0 and one.agreement.wire_cost.text == ""
    for client in ROWS:
        journal = one.clients[client].journal
        reply = journal.reply_for(one.agreement.request_name(ROUNDS, client))
        assert reply is not None and set(reply[0]) == {"weight", "bias"}
        assert {n for n in journal.client_state()[0] if is_aux(n)} == {
            "weight#linear",
            "bias#linear",
        }
    assert not other.agreement.equal_weights and one.agreement.equal_weights


def test_feddyn_is_refused_by_name_where_its_sum_would_not_hold() -> None:
    params = describe(linear())
    for defence in (Defence(rule="median"), Defence(max_norm_ratio=2.0), Defence(max_weight=3)):
        with pytest.raises(FedplanError, match="FedDyn's server adds up"):
            Agreement("drift", params, feddyn(), ARGUMENTS, defence=defence)
    with pytest.raises(PrivacyError, match="FedDyn's server counts the clients"):
        require_private_method(replace(GUARANTEES["veiled"], vote_noise_multiplier=0.0), feddyn())
    for change in ({"equal_weights": False}, {"absent": True}):
        with pytest.raises(FedplanError, match="set equal_weights, and leave absent out"):
            replace(feddyn(), **change)


@pytest.mark.parametrize("name", ["feddyn", "fednova", "ditto", "diloco"])
def test_example_level_privacy_refuses_a_fit_of_ones_own(name: str) -> None:
    guarantee = replace(GUARANTEES["cloaked"], vote_noise_multiplier=0.0)
    with pytest.raises(PrivacyError, match="DP-SGD covers only the built-in one"):
        require_private_method(guarantee, method_by_name(name))


def test_a_weight_other_than_one_is_rejected_where_all_weigh_alike(tmp_path: Path) -> None:
    fed = federation(replace(fedavg(), equal_weights=True), tmp_path)
    round_state = fed.server.begin_round()

    honest = train_round(fed.agreement, fed.clients["a"], round_state.cohort["a"])
    assert honest.weight == 1
    greedy = replace(honest, weight=9, ledger_line={**honest.ledger_line, "weight": 9})
    fed.server.take(round_state, greedy)
    assert "all clients weigh 1" in round_state.rejected["a"]


# FedNova


def test_fednova_is_the_loop_of_the_paper(tmp_path: Path) -> None:
    arguments = replace(ARGUMENTS, batch_size=2, epochs=2)
    fed = play(fednova(steps=5), tmp_path, rounds=1, arguments=arguments)
    # The plain run of each client alone gives the change, which here counts by its own steps.
    theta, changes = initial(), dict[str, Weights]()
    for name, rows in ROWS.items():
        alone = federation(fedavg(), tmp_path / name, arguments=arguments)
        round_state = alone.server.begin_round()

        update = train_round(alone.agreement, alone.clients[name], round_state.cohort[name])
        steps = 2 * -(-len(rows) // 2)
        assert update.ledger_line["steps"] == steps
        moved = weights_of(update.values)
        changes[name] = (moved[0] - theta[0]) / steps, (moved[1] - theta[1]) / steps
    step = mean_of(changes, {n: float(c) for n, c in SIZES.items()})
    expected = theta[0] + 5 * step[0], theta[1] + 5 * step[1]
    assert close(weights_of(fed.global_values()), expected)


# Ditto


def ditto_loop(
    lam: float, late: int = ROUNDS, taking: Participation = ALL
) -> tuple[Weights, dict[str, Weights]]:
    """The paper's algorithm 1, but that a client's own model begins at its first turn.

    Returns the global model, and each client's own. Trains slopes alone when late.
    """
    w, own = initial(), dict[str, Weights]()
    for number in range(ROUNDS):
        still = number >= late
        cohort = {name: ROWS[name] for name in taking.cohort("drift", number + 1, [*ROWS])}

        def pull(at: Weights, w: Weights = w) -> Weights:
            return lam * (at[0] - w[0]), lam * (at[1] - w[1])

        own |= {
            name: descend(rows, own.get(name, w), 4, pull, slopes_only=still)
            for name, rows in cohort.items()
        }
        trained = {name: descend(rows, w, 4, slopes_only=still) for name, rows in cohort.items()}
        w = mean_of(trained, {name: float(count) for name, count in SIZES.items()})
    return w, own


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_ditto_is_the_loop_of_the_paper(lam: float, fraction: float, tmp_path: Path) -> None:
    taking = Participation(fraction)
    fed = play(ditto(lam), tmp_path, participation=taking)
    w, own = ditto_loop(lam, taking=taking)
    assert own.keys() == ROWS.keys()
    assert close(weights_of(fed.global_values()), w)
    for name in ROWS:
        assert close(weights_of(fed.personal_values(name)), own[name])
        assert not close(own[name], w)


def test_dittos_global_model_has_the_bits_of_fedavg_and_no_copy_is_sent(tmp_path: Path) -> None:
    one = play(ditto(), tmp_path / "ditto", keep_replies=True)
    other = play(fedavg(), tmp_path / "avg")
    for key, value in other.global_values().items():
        assert torch.equal(one.global_values()[key], value)
    for client in ROWS:
        reply = one.clients[client].journal.reply_for(one.agreement.request_name(ROUNDS, client))
        assert reply is not None and set(reply[0]) == {"weight", "bias"}
    assert set(one.global_state.values) == {"weight", "bias"}


def test_a_frozen_part_keeps_its_copy_and_a_kept_part_is_trained_once(tmp_path: Path) -> None:
    """In the phase, the intercept is frozen: the copy's too, and the personal model has it."""
    frozen = chain(share(), when(phase("late"), freeze(named("bias"))))
    made = replace(ditto(0.7), plan=frozen, phase_rule=PlannedPhases({"late": 2}))
    early, late = play(made, tmp_path / "early", rounds=2), play(made, tmp_path / "late")
    w, own = ditto_loop(0.7, late=2)
    assert close(weights_of(late.global_values()), w)
    for name in ROWS:
        assert close(weights_of(late.personal_values(name)), own[name])
        assert torch.equal(*(run.personal_values(name)["bias"] for run in (early, late)))
    kept = replace(fedavg(), plan=chain(share(), keep(named("bias"))))
    plain, copied = (
        play(kept, tmp_path / "kept"),
        play(kept.with_training_of(ditto()), tmp_path / "k"),
    )
    for name in ROWS:
        one, other = plain.personal_values(name), copied.personal_values(name)
        assert torch.equal(one["bias"], other["bias"])
        assert not torch.equal(one["weight"], other["weight"])
        assert "bias#copy" not in copied.clients[name].journal.client_state()[0]


def test_personal_scores_of_ditto_are_of_the_copy(tmp_path: Path) -> None:
    """At a client itself, by its journal; the global score beside it is of the global model."""

    def score(model: nn.Module, rows: Any) -> dict[str, float]:
        with torch.no_grad():
            return {
                "loss": float(loss(model, rows.batch(torch.arange(len(rows))))),
                EXAMPLE_COUNT: 1.0,
            }

    sets = {name: EvalSet(rows, score, every=1, rounds=ROUNDS) for name, rows in ROWS.items()}
    fed = play(ditto(0.1), tmp_path, eval_sets=sets)
    _, answers = fed.joint_scores(EvalConfig(on_clients=True))
    w, own = ditto_loop(0.1)
    for name, rows in ROWS.items():
        for model, (slopes, intercept) in (("global", w), ("personal", own[name])):
            error = (rows.x @ slopes + intercept - rows.y).square().mean()
            assert answers[name][model]["loss"] == pytest.approx(float(error), rel=1e-3)
        assert answers[name]["personal"]["loss"] < answers[name]["global"]["loss"]


def test_explain_says_that_the_part_is_shared_and_copied() -> None:
    model = linear()
    agreement = Agreement("drift", describe(model), ditto(), ARGUMENTS)
    text = str(explain(ditto().plan, model, rounds=3, wire_cost=agreement.wire_cost))
    assert "SHARE" in text and "its own copy of each shared param, which it never sends" in text
    assert (
        agreement.has_personal
        and not Agreement("d", describe(model), fedprox(), ARGUMENTS).has_personal
    )


def test_a_continued_run_takes_the_copies_with_it_if_its_method_has_copies(tmp_path: Path) -> None:
    made = feddyn().with_training_of(ditto())
    made = replace(made, client_hooks=(*ditto().client_hooks, *feddyn().client_hooks))
    fed = play(made, tmp_path, rounds=1)
    state = fed.clients["a"].journal.client_state()[0]
    assert {"weight#copy", "weight#linear"} <= state.keys()
    assert continued_state(fed.agreement, state).keys() == {"weight#copy", "bias#copy"}
    plain = replace(fed.agreement, method=fedprox())
    assert not continued_state(plain, state), "a method without copies has no use for them"


# DiLoCo

ADAMW = replace(ARGUMENTS, optimizer=adamw(weight_decay=0.01))
MOMENTS = {"optimizer_step", "optimizer_exp_avg", "optimizer_exp_avg_sq"}


class PlainAdamW:
    """AdamW by its formula, whose moments and number of steps stay from round to round."""

    def __init__(self) -> None:
        self.count, self.first, self.second = 0, [0.0, 0.0], [0.0, 0.0]

    def train(self, rows: Rows, at: Weights) -> Weights:
        for _ in range(4):
            self.count += 1
            moved = list[Tensor]()
            for i, slope in enumerate(gradient(rows, at)):
                self.first[i] = 0.9 * self.first[i] + 0.1 * slope  # type: ignore[call-overload]
                self.second[i] = 0.999 * self.second[i] + 0.001 * slope**2  # type: ignore[call-overload]
                first = self.first[i] / (1 - 0.9**self.count)
                root = (self.second[i] / (1 - 0.999**self.count)) ** 0.5
                moved.append(at[i] * (1 - LR * 0.01) - LR * first / (root + 1e-8))
            at = moved[0], moved[1]
        return at


@pytest.mark.parametrize("kept", [True, False])
def test_diloco_is_the_loop_of_the_paper(kept: bool, tmp_path: Path) -> None:
    """And not one whose clients forget: the run then differs by more than a hundredth."""
    fed = play(diloco(lr=0.7, momentum=0.9), tmp_path, arguments=ADAMW)
    inner = {name: PlainAdamW() for name in ROWS}
    theta, buffer = initial(), [torch.zeros(3).double(), torch.zeros(()).double()]
    for _ in range(ROUNDS):
        inner = inner if kept else {name: PlainAdamW() for name in ROWS}
        trained = {name: inner[name].train(rows, theta) for name, rows in ROWS.items()}
        average = mean_of(trained, {name: float(count) for name, count in SIZES.items()})
        outer = [theta[i] - average[i] for i in range(2)]
        buffer = [0.9 * buffer[i] + outer[i] for i in range(2)]
        step = [outer[i] + 0.9 * buffer[i] for i in range(2)]
        theta = theta[0] - 0.7 * step[0], theta[1] - 0.7 * step[1]
    values = weights_of(fed.global_values())
    far = max(float((values[i] - theta[i]).abs().max()) for i in range(2))
    assert far < 1e-6 if kept else far > 1e-2


def test_the_optimizers_state_stays_at_the_client_with_its_number_of_steps(tmp_path: Path) -> None:
    one = play(diloco(), tmp_path / "one", keep_replies=True, arguments=ADAMW)
    other = play(fedavg(), tmp_path / "other", arguments=ADAMW)
    sums = [
        sum(line.get("upload_bytes", 0) for line in read_json_lines(each / "ledger.jsonl"))
        for each in (tmp_path / "one", tmp_path / "other")
    ]
    assert sums[0] == sums[1] > 0
    for client in ROWS:
        journal = one.clients[client].journal
        reply = journal.reply_for(one.agreement.request_name(ROUNDS, client))
        assert reply is not None and set(reply[0]) == {"weight", "bias"}
        state = journal.client_state()[0]
        assert state.keys() == {f"{key}#{kind}" for key in ("weight", "bias") for kind in MOMENTS}
        assert state["weight#optimizer_step"] == 4 * ROUNDS
        assert not continued_state(one.agreement, state)
        assert not other.clients[client].journal.client_state()[0]


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adafactor", "nadam", "rprop"])
def test_any_optimizer_goes_on_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    """One client and the server's mean: rounds of 4 steps are one turn of all steps, to the bit."""
    settings = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = make_client_optimizer(name, settings)
    method = Method(share(), client_hooks=(get_client_hook("keep_optimizer"),))
    runs = list[Federation]()
    for kept, rounds, epochs in ((True, 3, 4), (False, 1, 12), (False, 3, 4)):
        arguments = replace(ARGUMENTS, optimizer=optimizer, epochs=epochs)
        model, folder = linear(), tmp_path / str(len(runs))
        folder.mkdir()
        used = method if kept else fedavg()
        agreement = Agreement("drift", describe(model), used, arguments)
        runs.append(Federation(agreement, model, {"a": ROWS["a"]}, loss, folder, rounds=rounds))
        for _ in range(rounds):
            runs[-1].commit(runs[-1].run_round())
    kept, whole, forgetful = (torch.cat([*weights_of(r.global_values())[:1]]) for r in runs)
    assert torch.allclose(kept, whole, rtol=0, atol=1e-9)
    assert not torch.allclose(forgetful, whole, rtol=0, atol=1e-6)


def test_a_part_that_rests_finds_its_state_again(tmp_path: Path) -> None:
    resting = when(phase("late"), freeze(named("bias")))
    method = replace(diloco(), plan=chain(share(), resting))
    method = replace(method, phase_rule=PlannedPhases({"late": 2}))
    fed = play(method, tmp_path, arguments=ADAMW)
    state = fed.clients["a"].journal.client_state()[0]
    assert (state["bias#optimizer_step"], state["weight#optimizer_step"]) == (8, 4 * ROUNDS)


def test_diloco_is_refused_by_name_beside_another_fit() -> None:
    for other, word in ((fedrep(), "another client hook"), (ditto(), "another client hook")):
        with pytest.raises(FedplanError, match=f"keep_optimizer .DiLoCo.*{word}"):
            other.with_training_of(diloco())
    with pytest.raises(FedplanError, match=r"keep_optimizer .DiLoCo.*an own loop"):
        replace(diloco(), loop=lambda job: plain_fit(job))
    require_private_method(replace(GUARANTEES["veiled"], vote_noise_multiplier=0.0), diloco())


# A part begun afresh


def test_a_kept_part_begins_every_turn_with_its_first_value(tmp_path: Path) -> None:
    """Three rounds of a personal intercept, whose slopes go on; a loop of our own beside it."""
    hook = get_client_hook("begin_afresh")
    method = Method(chain(share(), keep(named("bias"))), client_hooks=(hook,))
    fed, (slopes, first) = play(method, tmp_path, rounds=3), initial()
    trained = dict[str, Weights]()
    for _ in range(3):
        trained = {name: descend(rows, (slopes, first), 4) for name, rows in ROWS.items()}
        slopes = mean_of(trained, {name: float(count) for name, count in SIZES.items()})[0]
    for name in ROWS:
        assert close(weights_of(fed.personal_values(name)), (slopes, trained[name][1]))
    plain = play(replace(method, client_hooks=()), tmp_path / "plain", rounds=3)
    assert not torch.allclose(plain.personal_values("a")["bias"], fed.personal_values("a")["bias"])
