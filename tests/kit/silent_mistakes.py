# SPDX-License-Identifier: Apache-2.0
"""Mistakes that no check refuses, each with the code of its warning; and studies without any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from commands import IMAGES
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedplan as fp
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases, SettledPhase
from fedplan.methods.server_optimizer import mean
from fedplan.run import Run
from fedplan.tensors.compression import parse_codec

Clients = dict[str, dict[str, TensorDataset]]


class Net(nn.Module):
    """A body, a head that may be personal, and a layer that the forward pass does not use."""

    def __init__(self, *, unused: bool = False, labels: int = 2) -> None:
        super().__init__()
        self.body, self.top = nn.Linear(4, 8), nn.Linear(8, labels)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.top(torch.tanh(self.body(inputs)))


def net(**settings: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(**settings)


def rows(count: int, seed: int, *, labels: int = 2) -> TensorDataset:
    """Examples whose label follows from their numbers."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=draw)
    classes = (inputs[:, 0] > 0).long() + (labels > 2) * (inputs[:, 1] > 0).long()
    return TensorDataset(inputs, classes)


def clients(count: int = 2, *, train: int = 40, test: int = 32, **how: Any) -> Clients:
    """Clients with their own training and test examples."""
    return {
        f"site-{i}": {"train": rows(train, i, **how), "test": rows(test, 100 + i, **how)}
        for i in range(count)
    }


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])


def accuracy(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    right = model(batch["inputs"]).argmax(1) == batch["labels"]
    return {"accuracy": right.float().mean()}


TASK = fp.CustomTask(metrics=accuracy, primary="accuracy")
TRAIN = fp.TrainConfig(rounds=2, batch_size=8, lr=0.05)


def played(
    plan: str | Method = "share()",
    data: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    *,
    train: Mapping[str, Any] | None = None,
    **more: Any,
) -> Run:
    """A run from Python: by default one of which there is nothing to warn of."""
    method = fp.parse(plan) if isinstance(plan, str) else plan
    more = {"task": TASK, "test": None, **more}
    task_loss = more.pop("loss", loss)
    how = fp.TrainConfig(**{**TRAIN.model_dump(), **(train or {})})
    return fp.simulate(method, model or net(), data or clients(), task_loss, train=how, **more)


STUDY = (
    IMAGES.replace("size = 16", "size = 8").replace("digit", "shade")
    + """\
[data]
path = "shades.npz"
split = "train"
test_split = "test"
num_clients = 2
[method]
name = "fedavg"
[train]
rounds = 3
batch_size = 8
lr = 0.01
"""
)


def some_shades(folder: Path) -> None:
    """Dark and bright images, in a folder."""
    draw = np.random.default_rng(0)

    def images(count: int) -> tuple[Any, Any]:
        shades = draw.integers(0, 2, count)
        pixels = draw.integers(0, 100, (count, 8, 8)) + 150 * shades[:, None, None]
        return pixels.astype(np.uint8), shades

    (train, train_shades), (test, test_shades) = images(320), images(60)
    np.savez(
        folder / "shades.npz",
        image_train=train,
        shade_train=train_shades,
        image_test=test,
        shade_test=test_shades,
    )


def from_file(folder: Path, *changes: str) -> Run:
    """A run of the study file in a folder, with fields set as by --set."""
    from fedplan.studies.schema import parse_toml, resolve_paths, study_from_dict
    from fedplan.studies.section import apply_overrides

    study = study_from_dict(apply_overrides(parse_toml(STUDY), list(changes)))
    if not (folder / "shades.npz").exists():
        some_shades(folder)
    number = sum(1 for each in folder.iterdir() if each.is_dir())
    return fp.run_study(resolve_paths(study, folder), folder / f"run-{number}")


@dataclass(frozen=True)
class SilentMistake:
    """A mistake in a person's words, the code of its warning, and a run that makes it.

    `folder` is for files of the run; most need none.
    """

    what: str
    code: str
    play: Callable[[Path], Run]


def mistake(what: str, code: str, **how: Any) -> SilentMistake:
    """A mistake of a run from Python."""
    return SilentMistake(what, code, lambda _: played(**how))


def in_file(what: str, code: str, *changes: str) -> SilentMistake:
    """A mistake of a study file."""
    return SilentMistake(what, code, lambda folder: from_file(folder, *changes))


def with_client(name: str, **splits: TensorDataset) -> Clients:
    """The usual clients, with other examples of one."""
    data = clients()
    return {**data, name: {**data.get(name, {}), **splits}}


def no_numbers(count: int) -> TensorDataset:
    inputs, labels = rows(count, 1).tensors
    return TensorDataset(inputs * float("nan"), labels)


def only(label: int, count: int, seed: int, shown: int | None = None) -> TensorDataset:
    """Examples of one label, which may be `shown` as another."""
    inputs, labels = rows(count * 4, seed).tensors
    chosen = (labels == label).nonzero()[:count, 0]
    return TensorDataset(
        inputs[chosen], torch.full((len(chosen),), label if shown is None else shown)
    )


def mean_of_nothing(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A metric that is 0 / 0: no example has the label that it looks for."""
    of_label = batch["labels"] == 7
    right = (model(batch["inputs"]).argmax(1) == 7) & of_label
    return {"recall": right.sum() / of_label.sum()}


def one_in_nine(count: int, seed: int) -> TensorDataset:
    """Examples of which a ninth has another label, which does not follow from the numbers."""
    inputs, _ = rows(count, seed).tensors
    return TensorDataset(inputs, (torch.arange(count) % 9 == 0).long())


def stop_at_once(_: Any) -> str:
    return "enough"


def negated(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return -loss(model, batch)


def shut(model: Net) -> Net:
    """A model whose body is never active, so that nothing below its top learns."""
    with torch.no_grad():
        model.body.weight.zero_()
        model.body.bias.fill_(-30.0)  # tanh is flat there
    return model


def tiny_values(model: Net) -> Net:
    """A model with values so small that a small step still changes them."""
    with torch.no_grad():
        for value in model.parameters():
            value *= 1e-4
    return model


def log_of_zero(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return loss(model, batch) + torch.zeros(()).log()


FROZEN = 'chain(share(), when(phase("frozen"), freeze(named("body*"))))'
MISTAKES = (
    mistake("The plan freezes everything.", "nothing-trained", plan="freeze()"),
    mistake("The plan holds everything.", "nothing-trained", plan="hold()"),
    mistake(
        "Training begins after the last round.", "nothing-trained", plan="when(after(5), share())"
    ),
    mistake(
        "The plan trains in every second round only.",
        "idle-rounds",
        plan="cycle(share(), freeze())",
    ),
    mistake(
        "The plan freezes everything after round 1.",
        "idle-rounds",
        plan="chain(share(), when(after(1), freeze()))",
    ),
    in_file(
        "FedFrozen has a warm-up as long as the run.",
        "phase-not-reached",
        "method.name=fedfrozen",
        "method.settings.warmup=3",
    ),
    mistake(
        "A phase begins after the last round.",
        "phase-not-reached",
        plan=Method(fp.parse(FROZEN), phase_rule=PlannedPhases({"frozen": 9})),
    ),
    mistake(
        "A phase waits for clients to settle, and they never do.",
        "phase-not-reached",
        plan=Method(fp.parse(FROZEN), phase_rule=SettledPhase("frozen", ("other",), 1e-9, 1)),
    ),
    mistake(
        "A condition begins after the last round.",
        "branch-not-reached",
        plan='chain(share(), when(after(20), freeze(named("body*"))))',
    ),
    mistake(
        "The plan names a client that does not exist.",
        "branch-not-reached",
        plan='chain(share(), when(client_in("sited-1"), keep(named("top*"))))',
    ),
    mistake(
        "The plan asks for a trait that no client has.",
        "branch-not-reached",
        plan='chain(share(), when(trait("size", "small"), freeze(named("body*"))))',
    ),
    mistake(
        "The plan has a case that no client has.",
        "branch-not-reached",
        plan='chain(share(), by("size", {"small": freeze(named("body*"))}))',
    ),
    mistake(
        "A cycle is longer than the run.",
        "branch-not-reached",
        plan='cycle(share(), share(named("top*")), share(named("body*")), share(bias))',
    ),
    mistake(
        "A personal part is shared again at the end of the plan.",
        "step-overridden",
        plan='chain(keep(named("top*")), share())',
    ),
    mistake("A shared layer is not used by the model.", "param-not-moved", model=net(unused=True)),
    mistake(
        "A personal layer is not used by the model.",
        "param-not-moved",
        model=net(unused=True),
        plan='chain(share(), keep(named("unused*")))',
    ),
    mistake("No unit of a layer is ever active.", "param-not-moved", model=shut(net())),
    mistake(
        "The learning rate is far too small.",
        "param-not-moved",
        train={"lr": 1e-12, "optimizer": "sgd"},
    ),
    mistake(
        "Compression rounds every update to zero.",
        "param-not-moved",
        plan=Method(fp.share(), compression=parse_codec("pipe(delta(), half())")),
        model=tiny_values(net()),
        train={"lr": 1e-9, "optimizer": "sgd"},
    ),
    mistake(
        "The server's learning rate is far too small.",
        "update-without-effect",
        plan=Method(fp.share(), server_optimizer=mean(1e-12)),
    ),
    mistake(
        "The learning rate is far too high.",
        "loss-exploded",
        train={"lr": 300.0, "optimizer": "sgd"},
    ),
    mistake("The loss has the logarithm of zero in it.", "loss-not-finite", loss=log_of_zero),
    mistake(
        "The learning rate makes all values infinite.",
        "update-not-finite",
        train={"lr": 1e38, "optimizer": "sgd"},
    ),
    mistake(
        "The learning rate is so high that the loss grows.",
        "loss-grew",
        train={"lr": 10.0, "optimizer": "sgd"},
    ),
    mistake(
        "A metric divides by zero.",
        "score-not-finite",
        task=fp.CustomTask(metrics=mean_of_nothing, primary="recall", higher_is_better=True),
    ),
    mistake("The sign of the loss is wrong.", "score-not-above-start", loss=negated),
    mistake(
        "A rare label is never predicted.",
        "score-not-above-majority",
        data={
            f"site-{i}": {"train": one_in_nine(40, i), "test": one_in_nine(36, 9 + i)}
            for i in range(2)
        },
    ),
    mistake(
        "The trained part does not change any prediction.",
        "score-constant",
        plan='share(named("body.bias"))',
        train={"lr": 1e-6},
    ),
    mistake(
        "There are six examples in all.", "few-test-examples", data=clients(1, train=4, test=2)
    ),
    mistake("The common test set is tiny.", "few-test-examples", test=rows(10, 9)),
    mistake(
        "One client has five test examples.",
        "few-client-test-examples",
        data=with_client("site-1", test=rows(5, 8)),
    ),
    mistake(
        "There are no test examples.",
        "no-test-examples",
        data={name: splits["train"] for name, splits in clients().items()},
    ),
    mistake(
        "A client is tested on its training examples.",
        "tested-on-training",
        data=with_client("site-1", train=rows(40, 5), test=rows(40, 5)),
    ),
    mistake(
        "Two clients have the same file.",
        "same-examples",
        data=with_client("site-1", train=rows(40, 0)),
    ),
    mistake(
        "A label occurs at one client only.",
        "label-at-one-client",
        data=with_client("site-1", train=rows(40, 1, labels=3)),
        model=net(labels=3),
    ),
    mistake(
        "All examples have one label.",
        "one-label",
        data={f"site-{i}": {"train": only(1, 40, i), "test": only(1, 40, 9 + i)} for i in range(2)},
    ),
    mistake(
        "A label of the tests is never trained.",
        "label-not-trained",
        model=net(labels=3),
        test=rows(60, 9, labels=3),
    ),
    in_file(
        "A partition leaves clients without examples.",
        "client-without-examples",
        "data.num_clients=5",
        "data.max_examples=4",
        "data.min_examples=0",
    ),
    mistake("A callback ends the run.", "ended-early", callbacks=[stop_at_once]),
    mistake(
        "All clients drop out.",
        "rounds-without-update",
        participation=fp.ClientsConfig(dropout_fraction=1.0),
    ),
    mistake(
        "Every answer of a client is late.",
        "client-never-aggregated",
        participation=fp.ClientsConfig(late_fraction=1.0),
    ),
    mistake(
        "A client's examples are no numbers.",
        "update-not-finite",
        data=with_client("site-1", train=no_numbers(40)),
    ),
    mistake(
        "Some clients with a personal score never train.",
        "client-never-drawn",
        plan='chain(share(), keep(named("top*")))',
        data=clients(6),
        participation=fp.ClientsConfig(fraction=0.2),
    ),
)


def good(what: str, **how: Any) -> tuple[str, Callable[[Path], Run]]:
    return what, lambda _: played(**how)


def good_file(what: str, *changes: str) -> tuple[str, Callable[[Path], Run]]:
    return what, lambda folder: from_file(folder, *changes)


KEEP_TOP = 'chain(share(), keep(named("top*")))'
METHOD = fp.methods
GOOD = dict(
    (
        good("FedAvg"),
        good(
            "a common test set alone",
            test=rows(60, 9),
            data={name: s["train"] for name, s in clients().items()},
        ),
        good("both kinds of tests", test=rows(60, 9)),
        good("FedProx", plan=METHOD.fedprox()),
        good("SCAFFOLD", plan=METHOD.scaffold(), train={"optimizer": "sgd", "lr": 0.3}),
        good("FedAvgM", plan=METHOD.fedavgm()),
        good("FedAdam", plan=METHOD.fedadam(lr=0.1)),
        good("a personal top", plan=KEEP_TOP),
        good(
            "a phase that begins",
            plan=Method(fp.parse(FROZEN), phase_rule=PlannedPhases({"frozen": 1})),
        ),
        good(
            "three labels",
            data=clients(labels=3),
            model=net(labels=3),
            train={"lr": 0.1, "rounds": 4},
        ),
        good("sampled clients", data=clients(4), participation=fp.ClientsConfig(fraction=0.5)),
        good(
            "some dropouts",
            data=clients(4),
            participation=fp.ClientsConfig(dropout_fraction=0.2),
        ),
        good("the median of the clients", defence=fp.DefenceConfig(rule="median")),
        good(
            "compressed updates",
            plan=Method(fp.share(), compression=parse_codec("pipe(delta(), bf16())")),
        ),
        good(
            "secure aggregation",
            aggregation=fp.AggregationConfig(kind="secure", threshold=2, min_contributors=2),
        ),
        good(
            "client-level privacy",
            data=clients(6),
            test=rows(80, 9),
            train={"optimizer": "sgd", "lr": 0.5},
            privacy=fp.PrivacyConfig(unit="client", epsilon=1e6, noise_multiplier=0.01),
        ),
        good_file("a study file"),
        good_file("FedPer of a study file", "method.name=fedper"),
        good_file("FedFrozen of a study file", "method.name=fedfrozen", "method.settings.warmup=1"),
        good_file("LoRA of a study file", "method.name=fedit", "train.lr=0.05"),
    )
)
