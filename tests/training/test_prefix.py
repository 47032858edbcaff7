# SPDX-License-Identifier: Apache-2.0
"""Frozen outputs are kept: no bit follows from how many, and nothing stale is ever used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from clients import Few, few
from duals import ASKED, build, pictures_of
from fits import job_of, mean_of_rows, same, still, texts
from often import first
from torch import Tensor, nn

from fedplan.data.examples import Examples
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.language.parser import parse
from fedplan.language.plan import Role
from fedplan.methods.adapters import pfeddc, promptfl
from fedplan.methods.method import Method
from fedplan.methods.published import safl
from fedplan.models.description import describe
from fedplan.models.params import Params
from fedplan.models.prompts import add_prompts
from fedplan.models.values import get_values
from fedplan.runners.local import Federation
from fedplan.studies.schema import study_from_dict
from fedplan.training import (
    ActivationCache,
    FitResult,
    Job,
    TrainArguments,
    alternate,
    plain_fit,
    sgd,
)

PACE = TrainArguments(sgd(), lr=0.01, batch_size=3, epochs=2, cache_activations=True)
HEAD = "chain(freeze(), share(head))"
LAST = "chain(freeze(), share(last(1)))"
FEDPER = "chain(freeze(), share(last(1)), keep(head))"
LORA = "chain(freeze(), share(adapter & last(1)))"
PROMPTS = "chain(freeze(), share(prompt & common))"
CASES = [
    ("bert", HEAD),
    ("gpt2", LORA),
    ("clip", PROMPTS),
    ("vit", FEDPER),
    ("bert", LORA),
    ("gpt2", LAST),
    ("vit", HEAD),
    ("bert", FEDPER),
    ("vit", LORA),
    ("clip", LAST),
    ("llama", LORA),
    ("deberta-v2", LAST),
    ("modernbert", HEAD),
]
ROOMS = (0, 700, 2**20)
"""Bytes: of nothing, of a row or some, of all."""


def quiet(model: nn.Module) -> nn.Module:
    """A model without dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def made(name: str, plan: str) -> nn.Module:
    torch.manual_seed(0)
    if plan == PROMPTS:
        return add_prompts(build(name), text=2, vision=0, levels=("common",))
    return quiet(zoo.with_lora(name)) if plan == LORA else still(name).float()


def job(
    name: str, plan: str, train_arguments: TrainArguments = PACE, rows: Examples | None = None
) -> Job:
    model = made(name, plan)
    if plan == PROMPTS:
        told = job_of(model, train_arguments, pictures_of("someone")["someone"], plan)
        return replace(told, loss=ASKED.loss)
    return replace(job_of(model, train_arguments, rows or Few(name, 0, 7), plan), loss=mean_of_rows)


def features(room: int) -> ActivationCache:
    kept = ActivationCache()
    kept.room = room
    return kept


def twice(told: Job) -> tuple[dict[str, Tensor], list[FitResult]]:
    """What two turns make of a model: the second finds what the first has kept."""
    done = [plain_fit(told), plain_fit(replace(told, seed=told.seed + 1))]
    return get_values(told.model, told.roles), done


@pytest.mark.parametrize("case", first(4, CASES))
def test_no_bit_follows_from_how_much_is_kept(case: tuple[str, str]) -> None:
    name, plan = case
    plain_values = twice(job(name, plan, replace(PACE, cache_activations=False)))[0]
    one, done = twice(job(name, plan))  # without any room between two turns
    for room in ROOMS:
        kept = features(room)
        other, again = twice(replace(job(name, plan), activation_cache=kept))
        assert same(one, other) and done == again, room
        assert kept.used <= room
        assert all(result.cut is not None for result in kept.cuts.values())
    assert kept.misses == len(job(name, plan).examples) and kept.hits > kept.misses
    assert all(torch.allclose(one[k], plain_values[k], rtol=1e-3, atol=1e-4) for k in one)


def prompting(name: str, vision: int, at: int, train_arguments: TrainArguments = PACE) -> Job:
    """A turn of prompts of two levels and what fuses them."""
    method = pfeddc(text=2, vision=vision, width=8, vision_at=at)
    assert method.adapt is not None
    torch.manual_seed(0)
    model = method.adapt(build(name))
    told = job_of(model, train_arguments, pictures_of("someone")["someone"], method.plan.text)
    return replace(told, loss=ASKED.loss)


@pytest.mark.parametrize("name", ["clip", "dinov2-bert"])
@pytest.mark.parametrize("vision", [0, 2])
def test_a_picture_runs_once_below_its_prompts(name: str, vision: int) -> None:
    """The whole tower where texts alone are prompted, else the blocks below the prompted one."""
    one, done = twice(prompting(name, vision, 1))
    kept = features(2**20)
    other, again = twice(replace(prompting(name, vision, 1), activation_cache=kept))
    assert same(one, other) and done == again
    assert kept.misses == 4 and kept.hits > kept.misses
    far = twice(prompting(name, vision, 1, replace(PACE, cache_activations=False)))[0]
    assert all(torch.allclose(one[k], far[k], rtol=1e-3, atol=1e-4) for k in one)


def test_there_may_be_more_classes_than_rows_in_a_batch() -> None:
    """What stands still in the text tower has a row for each class, or one for all of them."""
    train_arguments = replace(PACE, batch_size=2)
    kept = features(2**20)
    one = twice(replace(prompting("dinov2-bert", 2, 1, train_arguments), activation_cache=kept))
    other = twice(prompting("dinov2-bert", 2, 1, train_arguments))
    assert kept.hits and same(one[0], other[0]) and one[1] == other[1]


def test_prompts_in_front_of_the_first_block_leave_nothing_to_keep() -> None:
    kept = features(2**20)
    twice(replace(prompting("clip", 2, 0), activation_cache=kept))
    assert [result.cut for result in kept.cuts.values()] == [None] and not kept.misses


@pytest.mark.parametrize(
    "change", ["gradient_accumulation_steps", "precision", "gradient_checkpointing", "num_workers"]
)
def test_it_goes_together_with_what_else_a_pace_says(change: str) -> None:
    said: dict[str, Any] = dict(
        gradient_accumulation_steps=2,
        precision="bf16",
        gradient_checkpointing=True,
        num_workers=2,
    )
    train_arguments = replace(PACE, **{change: said[change]})
    plan = "chain(freeze(), share(head), share(last(1)))"
    one = twice(replace(job("vit", plan, train_arguments), activation_cache=features(0)))
    kept = features(2**20)
    other = twice(replace(job("vit", plan, train_arguments), activation_cache=kept))
    assert kept.hits and same(one[0], other[0]) and one[1] == other[1]
    if change != "precision":
        far = twice(job("vit", plan, replace(train_arguments, cache_activations=False)))[0]
        assert all(torch.allclose(far[k], one[0][k], atol=1e-3) for k in far)


def labelled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


@pytest.mark.parametrize("plan", [HEAD, LAST])
def test_texts_of_other_lengths_are_filled_up(plan: str) -> None:
    """A row runs at its own length, and its batch is near to what it is without that."""
    train_arguments = TrainArguments(sgd(), lr=0.1, batch_size=3, epochs=2, cache_activations=True)
    found = [
        twice(replace(job("bert", plan, each, texts(9)), loss=labelled, activation_cache=kept))[0]
        for each, kept in (
            (train_arguments, features(0)),
            (train_arguments, features(2**20)),
            (replace(train_arguments, cache_activations=False), None),
        )
    ]
    assert same(found[0], found[1])
    assert all(torch.allclose(found[0][key], found[2][key], atol=1e-5) for key in found[0])


def test_other_values_below_make_it_anew() -> None:
    """A block below the cut that another round has trained: nothing kept is of use then."""
    kept, told = features(2**20), job("vit", LAST)
    told = replace(told, activation_cache=kept)
    plain_fit(told)
    rows = kept.misses
    with torch.no_grad():
        told.model.get_parameter("vit.layers.0.mlp.fc1.weight").mul_(1.1)
    state = get_values(told.model, told.roles)
    one = twice(told)[0]
    assert kept.misses == 2 * rows

    fresh = job("vit", LAST)
    fresh.model.load_state_dict(told.model.state_dict() | state)
    assert same(one, twice(fresh)[0])


def test_values_above_the_cut_leave_it() -> None:
    kept, told = features(2**20), job("vit", "chain(freeze(), share(blocks(1)))")
    told = replace(told, activation_cache=kept)
    plain_fit(told)
    rows = kept.misses
    with torch.no_grad():
        told.model.get_parameter("classifier.weight").mul_(1.1)
    plain_fit(told)
    assert kept.misses == rows


def test_where_something_is_drawn_in_the_frozen_part_it_is_left_alone() -> None:
    """With dropout below the cut all is as it would be without `reuse`, to the bit."""
    for name, change in (("bert", "dropout"), ("vit", "rows")):
        found = list[dict[str, Tensor]]()
        for reuse in (True, False):
            told = job(
                name, HEAD, replace(PACE, cache_activations=reuse), Shaken(name, change == "rows")
            )
            if change == "dropout":
                told.model.get_submodule("bert.encoder.layer.0.output.dropout").p = 0.1
            kept = features(2**20)
            found.append(twice(replace(told, activation_cache=kept))[0])
            assert (
                not kept.misses and [result.cut for result in kept.cuts.values()] == [None] * reuse
            )
        assert same(*found) or change == "rows"


class Shaken(Few):
    """Rows that are another each time, as by augmentation."""

    def __init__(self, name: str, on: bool) -> None:
        super().__init__(name, 0, 7)
        self.on = on

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        found = super().batch(indices)
        shaken = {k: v + torch.rand(()) if v.is_floating_point() else v for k, v in found.items()}
        return shaken if self.on else found


def test_a_full_turn_and_one_of_the_embeddings_keep_nothing() -> None:
    for plan in ("share()", "chain(freeze(), share(bias))"):
        kept = features(2**20)
        one = twice(replace(job("bert", plan), activation_cache=kept))[0]
        assert not kept.misses and same(
            one, twice(job("bert", plan, replace(PACE, cache_activations=False)))[0]
        )


def test_the_model_is_left_as_it_was() -> None:
    told = job("vit", HEAD)
    plain_fit(told)
    for module in told.model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks and not module._forward_hooks  # pyright: ignore


def test_two_clients_do_not_share_a_row() -> None:
    kept, found = features(2**20), list[dict[str, Tensor]]()
    for seed in (1, 2):
        for shelf in (kept, None):
            told = replace(job("vit", HEAD), examples=Few("vit", seed, 7), activation_cache=shelf)
            plain_fit(told)
            found.append(get_values(told.model, told.roles))
    assert same(found[0], found[1]) and same(found[2], found[3])


def test_a_loss_that_compares_rows_is_refused_where_it_would_be_another() -> None:
    """A model that looks at all rows at once below the cut: one by one is something else."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            found = self.below(x)
            return self.above(found - found.mean(0)) + 1

    class Rows:
        def __len__(self) -> int:
            return 6

        def batch(self, indices: Tensor) -> dict[str, Tensor]:
            return {"x": torch.arange(24.0).reshape(6, 4)[indices]}

    torch.manual_seed(0)
    told = job_of(Centred(), PACE, Rows())
    roles = {p: Role.SHARE if p.name.startswith("above") else Role.FREEZE for p in told.roles}
    with pytest.raises(
        FedplanError, match=r"examples one by one through frozen layers, and the loss of Centred"
    ):
        plain_fit(replace(told, roles=roles, loss=lambda m, b: m(**b).square().mean()))


def test_it_is_agreed_on_and_its_room_is_not() -> None:
    said: dict[str, Any] = {
        "model": {"type": "vit"},
        "task": {"kind": "masked-lm"},
        "data": {"path": "rows.parquet"},
        "method": {"plan": "share()"},
    }
    plainly, on, small = (
        study_from_dict(said | {"train": each})
        for each in (
            {},
            {"cache_activations": True},
            {"cache_activations": True, "activation_cache_mb": 1},
        )
    )
    assert plainly.digest != on.digest == small.digest
    assert (
        on.train.train_arguments == small.train.train_arguments
        and on.train.train_arguments.cache_activations
    )
    assert plainly.train.activation_cache is None and small.train.activation_cache is not None
    assert small.train.activation_cache.room == 2**20
    with pytest.raises(
        FedplanError, match="cache_activations cannot be combined with torch_compile"
    ):
        TrainArguments(cache_activations=True, torch_compile="eager")


METHODS: dict[str, tuple[Method, str]] = {
    "safl": (safl(k=1, probe="last"), "vit"),
    "fedrep on the last block": (
        Method(parse(FEDPER), client_hooks=(alternate(1),)),
        "vit",
    ),
    "promptfl": (promptfl(text=2), "clip"),
}


@pytest.mark.parametrize("name", METHODS)
def test_rounds_of_a_federation_have_the_same_bits(name: str, tmp_path: Path) -> None:
    method, architecture = METHODS[name]
    worlds = list[dict[str, Tensor]]()
    for number, kept in enumerate((features(0), features(2**22))):
        torch.manual_seed(0)
        prompted = method.adapt is not None
        model = build("clip") if prompted else still(architecture).float()
        model = method.adapt(model) if method.adapt is not None else model
        rows = pictures_of("a", "bcd") if prompted else few(architecture)
        params: Params = describe(model)
        agreement = Agreement("law", params, method, PACE)
        loss = ASKED.loss if prompted else mean_of_rows
        made = Federation(
            agreement, model, rows, loss, tmp_path / str(number), rounds=3, activation_cache=kept
        )
        for _ in range(3):
            made.commit(made.run_round())
        worlds.append(made.global_values())
        assert kept.misses
    assert kept.hits > kept.misses and same(*worlds)
