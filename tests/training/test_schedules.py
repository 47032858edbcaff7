# SPDX-License-Identifier: Apache-2.0
"""Schedules: the rates that transformers gives, as a function of round and step and nothing else."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from clients import Few, few, know_secrets, loss
from test_simulate import played, values
from torch import Tensor, nn
from transformers import SchedulerType, get_scheduler

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.callbacks import Closed
from fedplan.language.parser import parse
from fedplan.language.resolution import resolve
from fedplan.language.turn import Turn
from fedplan.methods.registry import method_named
from fedplan.models.description import describe
from fedplan.models.values import take
from fedplan.runners.local import Federation
from fedplan.studies import continuation
from fedplan.studies.schema import ConfigError, study_of
from fedplan.tensors.named import digests
from fedplan.tensors.riders import rider
from fedplan.training import Done, Job, Pace, Schedule, controlled, plain, schedule_named, sgd
from fedplan.training.schedules import SCHEDULES, UNFIT
from fedplan.training.wraps import CONTROL

SETTINGS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "polynomial": {"power": 2.0, "lr_end": 1e-4},
}
MOVING = [name for name in SCHEDULES if name != "constant"]
STUDY: dict[str, Any] = {
    "model": {"type": "vit"},
    "task": {"kind": "image-classification", "label": "y"},
    "data": {"path": "rows.parquet"},
    "method": {"name": "fedavg"},
}


def theirs(name: str, warm: int, whole: int, rate: float) -> list[float]:
    """The rates of the loop that anybody would write."""
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    going, found = get_scheduler(name, optimiser, warm, whole, SETTINGS.get(name)), list[float]()
    for _ in range(whole):
        found.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        going.step()
    return found


def job_of(model: nn.Module, pace: Pace, *, round: int = 1, rows: Any = None) -> Job:
    params = describe(model)
    roles = resolve(parse("share()"), params, Turn(round=round, client="a"))
    rows = rows or Few("bert", 0, 8)
    return Job(model, roles, rows, loss, pace, 3, take(model, params), round=round)


def test_every_schedule_of_transformers_can_be_named_or_is_refused_with_a_reason() -> None:
    assert {*SCHEDULES, *UNFIT} == {kind.value for kind in SchedulerType}
    for name, why in UNFIT.items():
        with pytest.raises(FedplanError, match=why[:20]):
            Schedule(name)


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize(("warmup", "rounds"), [(0.0, 0), (0.3, 0), (3, 0), (0.3, 4), (2, 4)])
def test_rates_are_those_of_transformers_to_the_bit(name: str, warmup: float, rounds: int) -> None:
    """Over a turn, or over the rounds of a run that has as many steps in each."""
    steps, rate = 5, 0.01
    made = schedule_named(name, SETTINGS.get(name), warmup=warmup, rounds=rounds)
    whole = steps * (rounds or 1)
    counted = int(warmup) * (steps if rounds else 1)
    warm = ceil(warmup * whole) if warmup < 1 else counted
    found = [
        rate * made.factor(rate, number, steps)(step)
        for number in range(1, (rounds or 1) + 1)
        for step in range(steps)
    ]
    assert found == theirs(name, warm, whole, rate)
    if not rounds:
        again = [rate * made.factor(rate, 7, steps)(step) for step in range(steps)]
        assert again == found


class Rates(torch.optim.SGD):
    """It notes the rate of each step."""

    seen: list[float]

    def step(self, closure: Any = None) -> Any:
        self.seen.append(self.param_groups[0]["lr"])
        return super().step(closure)


def rates(pace: Pace, *, round: int = 1, rows: Any = None) -> tuple[list[float], Done]:
    seen = list[float]()

    def make(leaves: Any, rate: float) -> Rates:
        made = Rates(leaves, lr=rate)
        made.seen = seen
        return made

    noting = replace(pace, optimiser=replace(pace.optimiser, make=make))
    return seen, plain(job_of(zoo.build("bert"), noting, round=round, rows=rows))


def test_a_fit_steps_at_these_rates_and_says_their_sum() -> None:
    pace = Pace(sgd(), rate=0.5, batch=2, schedule=Schedule("linear", 0.25, rounds=3))
    whole = theirs("linear", 3, 12, 0.5)
    for number in (1, 2, 3):
        seen, done = rates(pace, round=number)
        assert seen == whole[4 * number - 4 : 4 * number]
        assert done.steps == 4 and done.distance == pytest.approx(sum(seen), rel=1e-12)
    seen, _ = rates(replace(pace, accumulate=2), round=2)
    assert seen == theirs("linear", 2, 6, 0.5)[2:4]
    assert rates(Pace(sgd(), rate=0.5, batch=2))[0] == [0.5] * 4


def test_clients_of_different_size_are_at_the_same_place_of_the_run() -> None:
    made = Schedule("linear", rounds=10)
    for number in (1, 4, 10):
        begins = {made.factor(1.0, number, steps)(0) for steps in (1, 2, 8, 128)}
        assert begins == {(11 - number) / 10}


def test_no_round_lies_beyond_the_run() -> None:
    with pytest.raises(FedplanError, match="round 5 lies beyond the 4"):
        Schedule("cosine", rounds=4).factor(1.0, 5, 3)


@pytest.mark.parametrize("schedule", [Schedule(), Schedule("linear", rounds=2), Schedule("cosine")])
def test_scaffolds_control_is_the_mean_gradient_weighed_by_the_rates(schedule: Schedule) -> None:
    """The step that the paper takes K times at one rate is here the sum of the rates."""
    model, kept = zoo.build("bert"), list[dict[str, Tensor]]()
    pace = Pace(sgd(), rate=0.1, batch=2, schedule=schedule)
    job = job_of(model, pace, round=1)

    def note(param: Any, value: Tensor, gradient: Tensor) -> None:
        if not kept or param.key in kept[-1]:
            kept.append({})
        kept[-1][param.key] = gradient.clone()

    done = controlled(plain)(replace(job, adjust=(note,)))
    factors = [schedule.factor(0.1, 1, 4)(step) for step in range(4)]
    assert len(kept) == 4
    for param in job.roles:
        pairs = zip(factors, kept, strict=True)
        mean = sum(f * k[param.key] for f, k in pairs if param.key in k) / sum(factors)
        found = done.memory[rider(param.key, CONTROL)]
        assert torch.allclose(found, torch.as_tensor(mean), rtol=1e-2, atol=1e-4), param.key


def test_scaffold_learns_nothing_from_steps_at_a_rate_of_zero() -> None:
    """Of one step, the first of a warm-up: there was a division by zero."""
    pace = Pace(sgd(), rate=0.1, steps=1, schedule=Schedule("linear", 1, rounds=3))
    done = controlled(plain)(job_of(zoo.build("bert"), pace))
    assert done.distance == 0 and not any(each.any() for each in done.riders.values())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"schedule": "linaer"}, "did you mean linear"),
        ({"schedule": "greedy"}, "follows the losses"),
        ({"schedule": "linear", "warmup": 2.5}, "a whole number of rounds"),
        ({"schedule": "linear", "warmup": 11.0}, "11 rounds of 10: give fewer"),
        ({"schedule": "linear", "over": "turn", "warmup": 2.5}, "a whole number of steps"),
        ({"warmup": 0.1}, "say constant_with_warmup"),
        ({"schedule": "cosine", "schedule_settings": {"min_lr": 0.1}}, "cannot be made"),
        ({"schedule": "linear", "over": "year"}, "over: "),
        ({"decay_all": False}, "say the decay of the rest"),
        ({"precision": "fp8"}, "no precision 'fp8'"),
        ({"accumulate": 0}, "accumulate: "),
        ({"bf16": True}, "bf16: "),
    ],
)
def test_what_a_study_cannot_mean_is_refused_where_it_stands(
    said: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        study_of(STUDY | {"train": said})


def test_a_study_says_a_schedule_over_its_rounds_or_over_each_turn() -> None:
    said = {"schedule": "cosine_with_min_lr", "schedule_settings": {"min_lr_rate": 0.1}}
    made = study_of(STUDY | {"train": {**said, "warmup": 2.0, "rounds": 8}}).train.pace
    assert made.schedule == Schedule("cosine_with_min_lr", 2.0, 8, (("min_lr_rate", 0.1),))
    turn = study_of(STUDY | {"train": {"schedule": "linear", "over": "turn"}}).train.pace
    assert turn == Pace(schedule=Schedule("linear"))
    betas = study_of(STUDY | {"train": {"optimiser_settings": {"betas": [0.8, 0.9]}}})
    assert "betas=[0.8, 0.9]" in betas.train.pace.text


@pytest.mark.parametrize(
    ("train", "free"),
    [({}, True), ({"schedule": "linear"}, False), ({"schedule": "linear", "over": "turn"}, True)],
)
def test_rounds_are_added_only_where_no_rate_followed_from_their_number(
    train: dict[str, Any], free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (study_of(STUDY | {"train": {**train, "rounds": n}}) for n in (5, 9))
    assert (old.train.pace.text == new.train.pace.text) is free
    monkeypatch.setattr(continuation, "study_in", lambda folder: old)
    if free:
        return continuation.require_same(tmp_path, new)
    with pytest.raises(ConfigError, match=r"the schedule of .* goes over 5"):
        continuation.require_same(tmp_path, new)


def test_a_federation_gives_each_round_its_rates(tmp_path: Path) -> None:
    """A turn knows its round: with the last rounds at a rate of zero, the world stands still."""
    model, rows = zoo.build("bert"), few("bert", 2)
    pace = Pace(sgd(), rate=0.1, batch=2, schedule=Schedule("linear", 2, rounds=2), steps=1)
    agreement = Agreement("rates", describe(model), method_named("fedavg"), pace)
    know_secrets(tmp_path, rows)
    fed, seen = Federation(agreement, model, rows, loss, tmp_path, rounds=2), list[Any]()
    for _ in range(2):
        fed.commit(fed.round())
        seen.append(digests(fed.world.values))
    start = digests(take(zoo.build("bert"), agreement.params))
    assert {k: seen[0].get(k, v) for k, v in start.items()} == start and seen[1] != seen[0]


TRAIN = {"batch": 2, "accumulate": 2, "rate": 0.05, "schedule": "cosine", "warmup": 0.3}


def halt(closed: Closed) -> str | None:
    return "enough" if closed.round == 2 else None


def test_a_run_that_is_stopped_and_goes_on_has_the_rates_of_one_that_is_not(tmp_path: Path) -> None:
    whole = played(tmp_path / "whole", train=TRAIN)
    halted = played(tmp_path / "halted", train=TRAIN, callbacks=[halt])
    assert halted.federation.world.round == 2
    halted.resume(callbacks=[])
    assert values(halted) == values(whole)
    assert values(whole) != values(played(train={**TRAIN, "schedule": "linear"}))
    with pytest.raises(ConfigError, match="goes over 4, so that its rates were other ones"):
        whole.resume(rounds=6)
