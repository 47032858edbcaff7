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
from fedplan.federation.ledger.events import CommittedRound
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.runners.local import Federation
from fedplan.studies import resume
from fedplan.studies.schema import ConfigError, study_from_dict
from fedplan.tensors.named import aux_name, digests
from fedplan.training import (
    FitResult,
    Job,
    LRSchedule,
    TrainArguments,
    control_variates,
    make_lr_schedule,
    plain_fit,
    sgd,
)
from fedplan.training.client_hooks import CONTROL
from fedplan.training.optimizers import SCHEDULES, UNSUPPORTED

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
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    going, found = get_scheduler(name, optimizer, warm, whole, SETTINGS.get(name)), list[float]()
    for _ in range(whole):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        going.step()
    return found


def job_of(
    model: nn.Module, train_arguments: TrainArguments, *, round: int = 1, rows: Any = None
) -> Job:
    params = describe(model)
    roles = resolve(parse("share()"), params, Turn(round=round, client="a"))
    rows = rows or Few("bert", 0, 8)
    return Job(model, roles, rows, loss, train_arguments, 3, get_values(model, params), round=round)


def test_every_schedule_of_transformers_can_be_named_or_is_refused_with_a_reason() -> None:
    assert {*SCHEDULES, *UNSUPPORTED} == {kind.value for kind in SchedulerType}
    for name, why in UNSUPPORTED.items():
        with pytest.raises(FedplanError, match=why[:20]):
            LRSchedule(name)


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize(("warmup", "rounds"), [(0.0, 0), (0.3, 0), (3, 0), (0.3, 4), (2, 4)])
def test_rates_are_those_of_transformers_to_the_bit(name: str, warmup: float, rounds: int) -> None:
    """Over a turn, or over the rounds of a run that has as many steps in each."""
    steps, rate = 5, 0.01
    made = make_lr_schedule(name, SETTINGS.get(name), warmup=warmup, rounds=rounds)
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


def rates(
    train_arguments: TrainArguments, *, round: int = 1, rows: Any = None
) -> tuple[list[float], FitResult]:
    seen = list[float]()

    def make(leaves: Any, rate: float) -> Rates:
        made = Rates(leaves, lr=rate)
        made.seen = seen
        return made

    noting = replace(train_arguments, optimizer=replace(train_arguments.optimizer, make=make))
    return seen, plain_fit(job_of(zoo.build("bert"), noting, round=round, rows=rows))


def test_a_fit_steps_at_these_rates_and_says_their_sum() -> None:
    train_arguments = TrainArguments(
        sgd(), lr=0.5, batch_size=2, lr_scheduler=LRSchedule("linear", 0.25, rounds=3)
    )
    whole = theirs("linear", 3, 12, 0.5)
    for number in (1, 2, 3):
        seen, done = rates(train_arguments, round=number)
        assert seen == whole[4 * number - 4 : 4 * number]
        assert done.steps == 4 and done.lr_sum == pytest.approx(sum(seen), rel=1e-12)
    seen, _ = rates(replace(train_arguments, gradient_accumulation_steps=2), round=2)
    assert seen == theirs("linear", 2, 6, 0.5)[2:4]
    assert rates(TrainArguments(sgd(), lr=0.5, batch_size=2))[0] == [0.5] * 4


def test_clients_of_different_size_are_at_the_same_place_of_the_run() -> None:
    made = LRSchedule("linear", rounds=10)
    for number in (1, 4, 10):
        begins = {made.factor(1.0, number, steps)(0) for steps in (1, 2, 8, 128)}
        assert begins == {(11 - number) / 10}


def test_no_round_lies_beyond_the_run() -> None:
    with pytest.raises(FedplanError, match="round 5 is beyond the 4"):
        LRSchedule("cosine", rounds=4).factor(1.0, 5, 3)


@pytest.mark.parametrize(
    "schedule", [LRSchedule(), LRSchedule("linear", rounds=2), LRSchedule("cosine")]
)
def test_scaffolds_control_is_the_mean_gradient_weighed_by_the_rates(schedule: LRSchedule) -> None:
    """The step that the paper takes K times at one rate is here the sum of the rates."""
    model, kept = zoo.build("bert"), list[dict[str, Tensor]]()
    train_arguments = TrainArguments(sgd(), lr=0.1, batch_size=2, lr_scheduler=schedule)
    job = job_of(model, train_arguments, round=1)

    def note(param: Any, value: Tensor, gradient: Tensor) -> None:
        if not kept or param.key in kept[-1]:
            kept.append({})
        kept[-1][param.key] = gradient.clone()

    done = control_variates(plain_fit)(replace(job, gradient_hooks=(note,)))
    factors = [schedule.factor(0.1, 1, 4)(step) for step in range(4)]
    assert len(kept) == 4
    for param in job.roles:
        pairs = zip(factors, kept, strict=True)
        mean = sum(f * k[param.key] for f, k in pairs if param.key in k) / sum(factors)
        found = done.memory[aux_name(param.key, CONTROL)]
        assert torch.allclose(found, torch.as_tensor(mean), rtol=1e-2, atol=1e-4), param.key


def test_scaffold_learns_nothing_from_steps_at_a_rate_of_zero() -> None:
    """Of one step, the first of a warm-up: there was a division by zero."""
    train_arguments = TrainArguments(
        sgd(), lr=0.1, steps=1, lr_scheduler=LRSchedule("linear", 1, rounds=3)
    )
    done = control_variates(plain_fit)(job_of(zoo.build("bert"), train_arguments))
    assert done.lr_sum == 0 and not any(each.any() for each in done.aux.values())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"lr_scheduler": "linaer"}, "did you mean linear"),
        ({"lr_scheduler": "greedy"}, "depend on the losses"),
        ({"lr_scheduler": "linear", "warmup": 2.5}, "a whole number of rounds"),
        ({"lr_scheduler": "linear", "warmup": 11.0}, "11 rounds of 10: give fewer"),
        (
            {"lr_scheduler": "linear", "lr_scheduler_span": "round", "warmup": 2.5},
            "a whole number of steps",
        ),
        ({"warmup": 0.1}, "use constant_with_warmup"),
        ({"lr_scheduler": "cosine", "lr_scheduler_settings": {"min_lr": 0.1}}, "cannot be created"),
        ({"lr_scheduler": "linear", "lr_scheduler_span": "year"}, "lr_scheduler_span: "),
        ({"decay_norm_and_bias": False}, "set weight_decay, too"),
        ({"precision": "fp8"}, "no precision 'fp8'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: "),
        ({"bf16": True}, "bf16: "),
    ],
)
def test_what_a_study_cannot_mean_is_refused_where_it_stands(
    said: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        study_from_dict(STUDY | {"train": said})


def test_a_study_says_a_schedule_over_its_rounds_or_over_each_turn() -> None:
    said = {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_settings": {"min_lr_rate": 0.1}}
    made = study_from_dict(
        STUDY | {"train": {**said, "warmup": 2.0, "rounds": 8}}
    ).train.train_arguments
    assert made.lr_scheduler == LRSchedule("cosine_with_min_lr", 2.0, 8, (("min_lr_rate", 0.1),))
    turn = study_from_dict(
        STUDY | {"train": {"lr_scheduler": "linear", "lr_scheduler_span": "round"}}
    ).train.train_arguments
    assert turn == TrainArguments(lr_scheduler=LRSchedule("linear"))
    betas = study_from_dict(STUDY | {"train": {"optimizer_settings": {"betas": [0.8, 0.9]}}})
    assert "betas=[0.8, 0.9]" in betas.train.train_arguments.text


@pytest.mark.parametrize(
    ("train", "free"),
    [
        ({}, True),
        ({"lr_scheduler": "linear"}, False),
        ({"lr_scheduler": "linear", "lr_scheduler_span": "round"}, True),
    ],
)
def test_rounds_are_added_only_where_no_rate_followed_from_their_number(
    train: dict[str, Any], free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (study_from_dict(STUDY | {"train": {**train, "rounds": n}}) for n in (5, 9))
    assert (old.train.train_arguments.text == new.train.train_arguments.text) is free
    monkeypatch.setattr(resume, "read_run_study", lambda folder: old)
    if free:
        return resume.require_same_study(tmp_path, new)
    with pytest.raises(ConfigError, match=r"were scheduled over 5"):
        resume.require_same_study(tmp_path, new)


def test_a_federation_gives_each_round_its_rates(tmp_path: Path) -> None:
    """A turn knows its round: with the last rounds at a rate of zero, the world stands still."""
    model, rows = zoo.build("bert"), few("bert", 2)
    train_arguments = TrainArguments(
        sgd(), lr=0.1, batch_size=2, lr_scheduler=LRSchedule("linear", 2, rounds=2), steps=1
    )
    agreement = Agreement("rates", describe(model), method_by_name("fedavg"), train_arguments)
    know_secrets(tmp_path, rows)
    fed, seen = Federation(agreement, model, rows, loss, tmp_path, rounds=2), list[Any]()
    for _ in range(2):
        fed.commit(fed.run_round())
        seen.append(digests(fed.global_state.values))
    start = digests(get_values(zoo.build("bert"), agreement.params))
    assert {k: seen[0].get(k, v) for k, v in start.items()} == start and seen[1] != seen[0]


TRAIN = {
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "lr": 0.05,
    "lr_scheduler": "cosine",
    "warmup": 0.3,
}


def halt(closed: CommittedRound) -> str | None:
    return "enough" if closed.round == 2 else None


def test_a_run_that_is_stopped_and_goes_on_has_the_rates_of_one_that_is_not(tmp_path: Path) -> None:
    whole = played(tmp_path / "whole", train=TRAIN)
    halted = played(tmp_path / "halted", train=TRAIN, callbacks=[halt])
    assert halted.round == 2
    halted.resume(callbacks=[])
    assert values(halted) == values(whole)
    assert values(whole) != values(played(train={**TRAIN, "lr_scheduler": "linear"}))
    with pytest.raises(ConfigError, match="were scheduled over 4"):
        whole.resume(rounds=6)
