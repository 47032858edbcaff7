# SPDX-License-Identifier: Apache-2.0
"""A client's optimizers: values with a text, of torch or of the user, and plain loops as before."""

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
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.studies.schema import ConfigError, study_from_dict
from fedplan.training import (
    ClientOptimizer,
    Job,
    TrainArguments,
    adamw,
    control_variates,
    make_client_optimizer,
    optimizers,
    plain_fit,
    register_optimizer,
    sgd,
    trainable,
)

STUDY: dict[str, Any] = {
    "model": {"type": "vit"},
    "task": {"kind": "image-classification", "label": "y"},
    "data": {"path": "rows.parquet"},
    "method": {"name": "fedavg"},
}
PAIRS: dict[str, tuple[ClientOptimizer, Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (adamw(), lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.0)),
    "decay": (adamw(weight_decay=0.1), lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1)),
    "sgd": (sgd(), lambda ps: torch.optim.SGD(ps, lr=0.01)),
    "momentum": (
        sgd(weight_decay=0.1, momentum=0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.01, weight_decay=0.1, momentum=0.9),
    ),
    "adam": (
        make_client_optimizer("adam", {"betas": [0.8, 0.9]}),
        lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(0.8, 0.9)),
    ),
    "rmsprop": (make_client_optimizer("rmsprop"), lambda ps: torch.optim.RMSprop(ps, lr=0.01)),
}


@pytest.fixture
def registered() -> Iterator[dict[str, Any]]:
    held: dict[str, Any] = optimizers.OPTIMIZER_NAMES.registered
    yield held
    held.clear()


def job_of(model: nn.Module, train_arguments: TrainArguments, plan: str = "share()") -> Job:
    params = describe(model)
    roles = resolve(parse(plan), params, Turn(round=1, client="a"))
    return Job(model, roles, Few("bert", 0, 8), loss, train_arguments, 3, get_values(model, params))


@pytest.mark.parametrize("name", PAIRS)
def test_a_fit_is_the_loop_that_anybody_would_write_to_the_bit(name: str) -> None:
    made, obvious = PAIRS[name]
    ours, theirs, train_arguments = (
        zoo.build("bert"),
        zoo.build("bert"),
        TrainArguments(made, lr=0.01, batch_size=2),
    )
    job = job_of(ours, train_arguments)
    plain_fit(job)
    torch.manual_seed(3)
    running = obvious(p for p in theirs.parameters() if p.requires_grad)
    theirs.train()
    for indices in train_arguments.draw_steps(job.examples, 3):
        loss(theirs, job.examples.batch(indices)).backward()
        running.step()
        running.zero_grad()
    for (key, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), key


def test_the_text_tells_settings_apart_and_nothing_else() -> None:
    made = [each for each, _ in PAIRS.values()]
    made += [
        sgd(momentum=0.9),
        sgd(weight_decay=0.1),
        adamw(weight_decay=0.2),
        make_client_optimizer("adam"),
    ]
    assert len({each.text for each in made}) == len(made)
    assert make_client_optimizer("sgd", {"momentum": 0.9}) == sgd(momentum=0.9)
    assert make_client_optimizer("adamw", {"weight_decay": 1}).text == adamw(weight_decay=1.0).text
    assert adamw(weight_decay=0.1).text == "adamw(weight_decay=0.1)"
    adam = ({"eps": 1e-6, "betas": (0.9, 0.95)}, {"betas": [0.9, 0.95], "eps": 1e-6})
    assert len({make_client_optimizer("adam", each).text for each in adam}) == 1
    paces = [
        replace(TrainArguments(), **{k: v})
        for k, v in {"lr": 1.0, "steps": 3, "precision": "bf16"}.items()
    ]
    assert (
        len(
            {
                train_arguments.text
                for train_arguments in (TrainArguments(), TrainArguments(sgd()), *paces)
            }
        )
        == 5
    )


@pytest.mark.parametrize("name", ["adamw", "adam", "rmsprop", "nadam"])
def test_no_step_is_divided_by_what_float16_cannot_tell_from_zero(name: str) -> None:
    model = zoo.build("bert").half()
    job = job_of(model, TrainArguments(make_client_optimizer(name)))
    with (
        trainable(model, job.roles) as trainable_params,
        pytest.raises(FedplanError, match=f"{name} cannot train .* in float16"),
    ):
        job.train_arguments.make_optimizer(trainable_params)


@pytest.mark.parametrize("made", [sgd(), make_client_optimizer("adam", {"eps": 1e-4})])
def test_float16_is_trained_where_it_can_be(made: ClientOptimizer) -> None:
    model = zoo.build("bert").half()
    with trainable(model, job_of(model, TrainArguments(made)).roles) as trainable_params:
        assert (
            TrainArguments(made).make_optimizer(trainable_params).defaults["lr"]
            == TrainArguments.lr
        )


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("admw", {}, "no optimizer 'admw': did you mean adamw"),
        ("optimizer", {}, "no optimizer 'optimizer'"),
        ("lbfgs", {}, "cannot train clients: it evaluates the loss"),
        ("adamw", {"momentum": 0.9}, "adamw takes no 'momentum'"),
        ("rprop", {"decay": 0.1}, "rprop takes no 'decay'"),
        ("sgd", {"lr": 0.1}, "sgd takes no 'lr'"),
        ("sgd", {"decay": 0.1, "weight_decay": 0.2}, "sgd takes no 'decay'"),
        ("adam", {"betas": object()}, "a setting of adam is no JSON value"),
        ("sgd", {"momentum": float("nan")}, "a setting of sgd is no JSON value"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_named(
    name: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(FedplanError, match=words):
        make_client_optimizer(name, settings)


def test_what_torch_refuses_is_told_with_the_settings() -> None:
    model = zoo.build("bert")
    made = make_client_optimizer("adam", {"betas": [2.0, 0.9]})
    with (
        trainable(model, job_of(model, TrainArguments(made)).roles) as trainable_params,
        pytest.raises(FedplanError, match=r"adam\(betas=\[2.0, 0.9\].*cannot be created"),
    ):
        made.make_optimizer(trainable_params, 0.1)


def test_an_optimizer_of_the_user_has_a_name(registered: dict[str, Any]) -> None:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Iterable[nn.Parameter], lr: float, pull: float = 0.0) -> None:
            super().__init__(params, {"lr": lr, "pull": pull})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.sub_(group["lr"] * (each.grad.sign() + group["pull"] * each))

    with pytest.raises(ConfigError, match="no optimizer 'signs'"):
        study_from_dict(STUDY | {"train": {"optimizer": "signs"}})
    register_optimizer("signs", Signs)
    register_optimizer("signs", Signs)
    study = study_from_dict(STUDY | {"train": {"optimizer": "signs", "lr": 0.5}})
    assert study.train.train_arguments == TrainArguments(make_client_optimizer("signs"), lr=0.5)
    assert make_client_optimizer("signs", {"pull": 0.5}).text.startswith("signs(pull=0.5; by ")
    model = zoo.build("bert")
    job = job_of(model, replace(study.train.train_arguments, batch_size=8))
    plain_fit(job)
    steps = {
        float((get_values(model, [p])[p.key] - job.start[p.key]).abs().max()) for p in job.roles
    }
    assert max(steps) == pytest.approx(0.5)
    for name, make in {"signs": torch.optim.SGD, "sgd": Signs}.items():
        with pytest.raises(FedplanError, match="already: give yours another name"):
            register_optimizer(name, make)
    register_optimizer("any", lambda params, **said: Signs(params, **said))
    assert make_client_optimizer("any", {"pull": 1.0}).text.startswith("any(pull=1.0; by ")
    with pytest.raises(FedplanError, match="takes no lr"):
        register_optimizer("fixed", lambda params: Signs(params, 1.0))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, TrainArguments()),
        (
            {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.2},
            TrainArguments(sgd(weight_decay=0.2), lr=0.1),
        ),
        ({"optimizer": "sgd", "momentum": 0.9}, TrainArguments(sgd(momentum=0.9))),
        ({"weight_decay": 0.1, "steps": 2}, TrainArguments(adamw(weight_decay=0.1), steps=2)),
        ({"optimizer": "adam"}, TrainArguments(make_client_optimizer("adam"))),
        ({"optimizer": "rprop"}, TrainArguments(make_client_optimizer("rprop"))),
    ],
)
def test_a_study_says_an_optimizer_by_its_name(said: dict[str, Any], meant: TrainArguments) -> None:
    study = study_from_dict(STUDY | {"train": said})
    assert study.train.train_arguments == meant and study.train.train_arguments.text == meant.text
    assert study_from_dict(study.model_dump()).digest == study.digest


def test_a_study_that_says_what_its_optimizer_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="adamw takes no 'momentum'"):
        study_from_dict(STUDY | {"train": {"momentum": 0.9}})


def test_scaffolds_controls_are_by_the_rate_of_the_pace() -> None:
    """With one plain step the client's control is the gradient itself, whatever the rate."""
    found = list[dict[str, torch.Tensor]]()
    for rate in (0.5, 0.25):
        model = zoo.build("bert")
        found.append(
            control_variates(plain_fit)(job_of(model, TrainArguments(sgd(), lr=rate, steps=1))).aux
        )
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-3, atol=1e-6), key
