# SPDX-License-Identifier: Apache-2.0
"""A client's optimisers: values with a text, of torch or of the user, and plain loops as before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from clients import Few, loss
from torch import nn

from fedplan.errors import FedplanError
from fedplan.language.parser import parse
from fedplan.language.resolution import resolve
from fedplan.language.turn import Turn
from fedplan.models.description import describe
from fedplan.models.values import take
from fedplan.studies.schema import ConfigError, study_of
from fedplan.training import (
    ClientOptimiser,
    Job,
    Pace,
    adamw,
    controlled,
    mark,
    optimiser_named,
    optimisers,
    plain,
    register_optimiser,
    sgd,
)

STUDY: dict[str, Any] = {
    "model": {"type": "vit"},
    "task": {"kind": "image-classification", "label": "y"},
    "data": {"path": "rows.parquet"},
    "method": {"name": "fedavg"},
}
PAIRS: dict[str, tuple[ClientOptimiser, Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (adamw(), lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.0)),
    "decay": (adamw(decay=0.1), lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1)),
    "sgd": (sgd(), lambda ps: torch.optim.SGD(ps, lr=0.01)),
    "momentum": (
        sgd(decay=0.1, momentum=0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.01, weight_decay=0.1, momentum=0.9),
    ),
    "adam": (
        optimiser_named("adam", {"betas": [0.8, 0.9]}),
        lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(0.8, 0.9)),
    ),
    "rmsprop": (optimiser_named("rmsprop"), lambda ps: torch.optim.RMSprop(ps, lr=0.01)),
}


@pytest.fixture
def registered() -> Iterator[dict[str, Any]]:
    held: dict[str, Any] = optimisers.OPTIMISER_NAMES.registered
    yield held
    held.clear()


def job_of(model: nn.Module, pace: Pace, plan: str = "share()") -> Job:
    params = describe(model)
    roles = resolve(parse(plan), params, Turn(round=1, client="a"))
    return Job(model, roles, Few("bert", 0, 8), loss, pace, 3, take(model, params))


@pytest.mark.parametrize("name", PAIRS)
def test_a_fit_is_the_loop_that_anybody_would_write_to_the_bit(name: str) -> None:
    made, obvious = PAIRS[name]
    ours, theirs, pace = zoo.build("bert"), zoo.build("bert"), Pace(made, rate=0.01, batch=2)
    job = job_of(ours, pace)
    plain(job)
    torch.manual_seed(3)
    running = obvious(p for p in theirs.parameters() if p.requires_grad)
    theirs.train()
    for indices in pace.draw(job.rows, 3):
        loss(theirs, job.rows.batch(indices)).backward()
        running.step()
        running.zero_grad()
    for (key, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), key


def test_the_text_tells_settings_apart_and_nothing_else() -> None:
    made = [each for each, _ in PAIRS.values()]
    made += [sgd(momentum=0.9), sgd(decay=0.1), adamw(decay=0.2), optimiser_named("adam")]
    assert len({each.text for each in made}) == len(made)
    assert optimiser_named("sgd", {"momentum": 0.9}) == sgd(momentum=0.9)
    assert optimiser_named("adamw", {"weight_decay": 1}).text == adamw(decay=1.0).text
    assert adamw(decay=0.1).text == "adamw(weight_decay=0.1)"
    adam = ({"eps": 1e-6, "betas": (0.9, 0.95)}, {"betas": [0.9, 0.95], "eps": 1e-6})
    assert len({optimiser_named("adam", each).text for each in adam}) == 1
    paces = [
        replace(Pace(), **{k: v}) for k, v in {"rate": 1.0, "steps": 3, "precision": "bf16"}.items()
    ]
    assert len({pace.text for pace in (Pace(), Pace(sgd()), *paces)}) == 5


@pytest.mark.parametrize("name", ["adamw", "adam", "rmsprop", "nadam"])
def test_no_step_is_divided_by_what_float16_cannot_tell_from_zero(name: str) -> None:
    model = zoo.build("bert").half()
    job = job_of(model, Pace(optimiser_named(name)))
    with (
        mark(model, job.roles) as marked,
        pytest.raises(FedplanError, match=f"{name} cannot train .* in float16"),
    ):
        job.pace.start(marked)


@pytest.mark.parametrize("made", [sgd(), optimiser_named("adam", {"eps": 1e-4})])
def test_float16_is_trained_where_it_can_be(made: ClientOptimiser) -> None:
    model = zoo.build("bert").half()
    with mark(model, job_of(model, Pace(made)).roles) as marked:
        assert Pace(made).start(marked).defaults["lr"] == Pace.rate


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("admw", {}, "no optimiser 'admw': did you mean adamw"),
        ("optimizer", {}, "no optimiser 'optimizer'"),
        ("lbfgs", {}, "cannot train clients: it asks for the loss"),
        ("adamw", {"momentum": 0.9}, "adamw takes no 'momentum'"),
        ("rprop", {"decay": 0.1}, "rprop takes no 'decay'"),
        ("sgd", {"lr": 0.1}, "sgd takes no 'lr'"),
        ("sgd", {"decay": 0.1, "weight_decay": 0.2}, "sgd takes no 'weight_decay'"),
        ("adam", {"betas": object()}, "a setting of adam is no plain value"),
        ("sgd", {"momentum": float("nan")}, "a setting of sgd is no plain value"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_named(
    name: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(FedplanError, match=words):
        optimiser_named(name, settings)


def test_what_torch_refuses_is_told_with_the_settings() -> None:
    model = zoo.build("bert")
    made = optimiser_named("adam", {"betas": [2.0, 0.9]})
    with (
        mark(model, job_of(model, Pace(made)).roles) as marked,
        pytest.raises(FedplanError, match=r"adam\(betas=\[2.0, 0.9\].*cannot be made"),
    ):
        made.start(marked, 0.1)


def test_an_optimiser_of_the_user_has_a_name(registered: dict[str, Any]) -> None:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Iterable[nn.Parameter], lr: float, pull: float = 0.0) -> None:
            super().__init__(params, {"lr": lr, "pull": pull})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.sub_(group["lr"] * (each.grad.sign() + group["pull"] * each))

    with pytest.raises(ConfigError, match="no optimiser 'signs'"):
        study_of(STUDY | {"train": {"optimiser": "signs"}})
    register_optimiser("signs", Signs)
    register_optimiser("signs", Signs)
    study = study_of(STUDY | {"train": {"optimiser": "signs", "rate": 0.5}})
    assert study.train.pace == Pace(optimiser_named("signs"), rate=0.5)
    assert optimiser_named("signs", {"pull": 0.5}).text.startswith("signs(pull=0.5; by ")
    model = zoo.build("bert")
    job = job_of(model, replace(study.train.pace, batch=8))
    plain(job)
    steps = {float((take(model, [p])[p.key] - job.start[p.key]).abs().max()) for p in job.roles}
    assert max(steps) == pytest.approx(0.5)
    for name, make in {"signs": torch.optim.SGD, "sgd": Signs}.items():
        with pytest.raises(FedplanError, match="already: give yours another name"):
            register_optimiser(name, make)
    register_optimiser("any", lambda params, **said: Signs(params, **said))
    assert optimiser_named("any", {"pull": 1.0}).text.startswith("any(pull=1.0; by ")
    with pytest.raises(FedplanError, match="takes no lr"):
        register_optimiser("fixed", lambda params: Signs(params, 1.0))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, Pace()),
        ({"optimiser": "sgd", "rate": 0.1, "decay": 0.2}, Pace(sgd(decay=0.2), rate=0.1)),
        ({"optimiser": "sgd", "momentum": 0.9}, Pace(sgd(momentum=0.9))),
        ({"decay": 0.1, "steps": 2}, Pace(adamw(decay=0.1), steps=2)),
        ({"optimiser": "adam"}, Pace(optimiser_named("adam"))),
        ({"optimiser": "rprop"}, Pace(optimiser_named("rprop"))),
    ],
)
def test_a_study_says_an_optimiser_by_its_name(said: dict[str, Any], meant: Pace) -> None:
    study = study_of(STUDY | {"train": said})
    assert study.train.pace == meant and study.train.pace.text == meant.text
    assert study_of(study.model_dump()).digest == study.digest


def test_a_study_that_says_what_its_optimiser_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="adamw takes no 'momentum'"):
        study_of(STUDY | {"train": {"momentum": 0.9}})


def test_scaffolds_controls_are_by_the_rate_of_the_pace() -> None:
    """With one plain step the client's control is the gradient itself, whatever the rate."""
    found = list[dict[str, torch.Tensor]]()
    for rate in (0.5, 0.25):
        model = zoo.build("bert")
        found.append(controlled(plain)(job_of(model, Pace(sgd(), rate=rate, steps=1))).riders)
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-3, atol=1e-6), key
