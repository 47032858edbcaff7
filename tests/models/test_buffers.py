# SPDX-License-Identifier: Apache-2.0
"""Buffers stand still: a model whose training changes one is refused, or a resumed run is another.

For every model that is accepted, a run that is killed after each round has the model, buffers and
predictions of one that never was.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import zoo
from clients import Few, few
from clients import loss as zoo_loss
from torch import Tensor, nn

from fedplan import describe, parse
from fedplan.data.examples import Loss
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, TrainSetup
from fedplan.federation.endpoint import Endpoint, open_journal
from fedplan.federation.global_state import GlobalState
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.methods.method import Method
from fedplan.models.params import Kind, Param, Params
from fedplan.models.values import (
    copy_buffers,
    freeze_batch_norms,
    get_values,
    require_unchanged_buffers,
    set_values,
)
from fedplan.runners.local import Federation
from fedplan.tensors.named import digests
from fedplan.tensors.serialization import unpack_message
from fedplan.training.fit import TrainArguments

ROUNDS = 3
PACE = TrainArguments(lr=1e-2, batch_size=2, steps=2)
PLAN = "chain(share(), when(after(1), keep(head)))"


class Pictures:
    """A few pictures of a client."""

    def __init__(self, seed: int) -> None:
        self.x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(seed)) + seed

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"x": self.x[indices]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - 1).square().mean()


def cnn(norm: Callable[[], nn.Module]) -> nn.Module:
    """A small network of two convolutions with a norm between them."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), norm(), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(4, 2, 2))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(2, 1))


def params_of(model: nn.Module) -> Params:
    named = model.named_parameters()
    return tuple(
        Param(n, Kind.HEAD if n.startswith("2.") else Kind.MLP, tuple(t.shape)) for n, t in named
    )


class Remembers(nn.Module):
    """A module whose buffer each forward changes in some way."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("seen", torch.zeros(()), persistent=change != "unsaved")

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "grown":
            self.seen = torch.zeros(len(x))
        elif self.change == "added":
            self.register_buffer("more", torch.ones(1))
        elif self.change in ("saved", "unsaved") or (self.change == "training" and self.training):
            self.seen += 1
        return x


class Constants(nn.Module):
    """Buffers that nothing changes: one of them is no number, one is of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gap", torch.tensor([float("nan"), -0.0, 1.0]))
        self.register_buffer("ids", torch.arange(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ids.sum()


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm, cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "instance norm, tracked": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)),
    **{kind: lambda kind=kind: Remembers(kind)
       for kind in ("saved", "unsaved", "training", "grown", "added")},
}  # fmt: skip
ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "batch norm without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm2d(4),
    "constants": Constants,
    "batch norm, stilled": lambda: freeze_batch_norms(nn.BatchNorm2d(4)),
    "instance norm, stilled": lambda: freeze_batch_norms(
        nn.InstanceNorm2d(4, track_running_stats=True)
    ),
}


def federation(model: nn.Module, folder: Path) -> Federation:
    agreement = Agreement("buffers", params_of(model), Method(parse(PLAN)), PACE)
    rows = {"ann": Pictures(0), "berta": Pictures(1)}
    return Federation(agreement, model, rows, loss, folder, rounds=ROUNDS)


@pytest.mark.parametrize("norm", REFUSED)
def test_a_model_whose_training_changes_a_buffer_is_refused_by_name(
    norm: str, tmp_path: Path
) -> None:
    whole = federation(cnn(REFUSED[norm]), tmp_path)
    before = digests(copy_buffers(whole.model))
    with pytest.raises(FedplanError, match=r"0\.1.* is no param, and training .* GroupNorm"):
        whole.run_round()
    # A site's next turn must not start from the buffers of a turn that failed.
    assert digests(copy_buffers(whole.model)) == before
    assert whole.global_state.round == 0 and not (tmp_path / "ledger.jsonl").read_bytes()


def test_a_site_refuses_it_too_and_says_why(tmp_path: Path) -> None:
    model = cnn(REFUSED["batch norm"])
    agreement = Agreement("buffers", params_of(model), Method(parse(PLAN)), PACE)
    start = get_values(model, agreement.params)
    journal = open_journal(tmp_path)
    setup = TrainSetup(model, loss, start, digest_initial_model(model, agreement.params, start))
    site = Client("ann", Pictures(0), journal, setup)
    down = make_request(agreement, GlobalState.initial(agreement, start), "ann", {})
    found, said = unpack_message(
        Endpoint(agreement, site, tmp_path).answer("train", request_message(down))
    )
    assert not found and "failed" in said
    assert not journal.reply_for(down.name)


def left(whole: Federation, batch: dict[str, Tensor], loss: Loss) -> dict[str, object]:
    """The model's buffers, and what the federation's and each client's model predict."""
    found: dict[str, object] = {"buffers": digests(copy_buffers(whole.model))}
    models = {"world": whole.global_values()}
    for name, values in (models | {n: whole.personal_values(n) for n in whole.clients}).items():
        set_values(whole.model, values, whole.agreement.trainable)
        with torch.no_grad():
            found[name] = loss(whole.model, batch).item()
    return found


def killed_is_whole(make: Callable[[Path], Federation], folder: Path, batch: dict[str, Tensor],
                    loss: Loss) -> None:  # fmt: skip
    whole = make(folder / "whole")
    for _ in range(ROUNDS):
        whole.commit(whole.run_round())
    for _ in range(ROUNDS):
        killed = make(folder / "killed")
        killed.commit(killed.run_round())
    assert left(make(folder / "killed"), batch, loss) == left(whole, batch, loss)


@pytest.mark.parametrize("norm", ACCEPTED)
def test_what_is_accepted_is_the_same_killed_and_resumed(norm: str, tmp_path: Path) -> None:
    model, batch = cnn(ACCEPTED[norm]), Pictures(7).batch(torch.arange(6))
    killed_is_whole(lambda folder: federation(deepcopy(model), made(folder)), tmp_path, batch, loss)


def made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("bert", "gpt2", "clip") else pytest.mark.nightly)
        for n in zoo.ARCHITECTURES
    ],
)
def test_every_architecture_is_accepted_and_the_same_resumed(name: str, tmp_path: Path) -> None:
    def make(folder: Path) -> Federation:
        model = zoo.build(name)
        agreement = Agreement(
            "buffers", describe(model), Method(parse("chain(freeze(), best(1))")), PACE
        )
        return Federation(agreement, model, few(name), zoo_loss, made(folder), rounds=ROUNDS)

    batch = Few(name, 7).batch(torch.arange(2))
    killed_is_whole(make, tmp_path, batch, zoo_loss)


def test_stilled_norms_predict_in_training_as_they_do_after_it() -> None:
    model = cnn(REFUSED["batch norm"])
    for _ in range(3):
        model(Pictures(3).x)
    asked, x = [n for n, _ in model.named_parameters()], Pictures(1).x
    still = freeze_batch_norms(deepcopy(model)).train()
    assert still is not model and [n for n, _ in still.named_parameters()] == asked
    assert still.state_dict().keys() == model.state_dict().keys()
    still[0][3].eval()  # type: ignore[index]
    assert torch.equal(still(x), model.eval()(x))
    assert torch.equal(deepcopy(still).train()[0][1](x.expand(-1, 4, -1, -1)),  # type: ignore[index]
                       model[0][1](x.expand(-1, 4, -1, -1)))  # type: ignore[index]  # fmt: skip
    require_unchanged_buffers(still, copy_buffers(model))
