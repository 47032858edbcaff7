# SPDX-License-Identifier: Apache-2.0
"""How one trains: each option changes what it says, and no bit of anything else."""

from __future__ import annotations

from dataclasses import replace
from threading import current_thread
from typing import Any

import pytest
import torch
import zoo
from clients import Few, loss
from fits import job_of, mean_of_rows, same, still, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from often import first, often
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedplan.data.examples import (
    NO_LABEL,
    Examples,
    epoch_steps,
    prefetch,
    split_step,
    token_lengths,
)
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.language import share
from fedplan.methods.method import Method
from fedplan.models.description import describe
from fedplan.models.params import Kind
from fedplan.models.values import get_values
from fedplan.parts import bias, body, mlp, norm, query, router
from fedplan.training import (
    FitResult,
    Job,
    TrainArguments,
    adamw,
    alternate,
    check_lr_by_part,
    control_variates,
    make_client_optimizer,
    plain_fit,
    sgd,
    trainable,
)
from fedplan.training.fit import use_gradient_checkpointing

ARCHITECTURES = ("bert", "gpt2", "vit")


def trained(
    name: str,
    train_arguments: TrainArguments,
    rows: Examples | None = None,
    plan: str = "share()",
    **said: Any,
) -> tuple[dict[str, Tensor], FitResult]:
    """What a fit makes of a tiny model."""
    model = said.pop("build", zoo.build)(name)
    job = replace(job_of(model, train_arguments, rows or Few(name, 0, 7), plan), **said)
    done = plain_fit(job)
    return get_values(model, job.roles), done


class Double:
    """Rows in float64."""

    def __init__(self, rows: Examples) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        found = self.rows.batch(indices)
        return {k: v.double() if v.is_floating_point() else v for k, v in found.items()}


# Accumulation


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("rows", "batch", "parts"), [(8, 2, 2), (7, 2, 3), (7, 3, 2), (5, 2, 9)])
def test_accumulated_batches_are_one_large_batch(
    name: str, rows: int, batch: int, parts: int
) -> None:
    """In float64 to the last bits, the last incomplete step too: it is weighed by its rows."""
    held = Double(Few(name, 0, rows))
    small = TrainArguments(
        sgd(),
        lr=0.1,
        batch_size=batch,
        gradient_accumulation_steps=parts,
        epochs=2,
        max_grad_norm=0.5,
    )
    large = replace(small, batch_size=batch * parts, gradient_accumulation_steps=1)
    (one, done), (other, whole) = (
        trained(name, train_arguments, held, loss=mean_of_rows, build=still)
        for train_arguments in (small, large)
    )
    assert done.steps == whole.steps and done.loss == pytest.approx(whole.loss, rel=1e-9)
    for key, value in one.items():
        assert torch.allclose(value, other[key], rtol=1e-9, atol=1e-11), key


class Tagger(nn.Module):
    """A model small enough to see through: an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@pytest.mark.parametrize("tags", [False, True])
def test_a_mean_over_tokens_is_weighed_by_tokens(tags: bool) -> None:
    """Weighed by rows, a step in parts would be the mean of means: another one."""
    rows, model = texts(9, tags=tags), Tagger().double()

    def tagged(batch: dict[str, Tensor]) -> Tensor:
        found, labels = model(batch["input_ids"]), batch["labels"]
        if labels.dim() == 1:
            inside = batch["attention_mask"][..., None].double()
            found = (found * inside).sum(1) / inside.sum(1)
        return cross_entropy(found.flatten(0, -2), labels.flatten(), ignore_index=NO_LABEL)

    everything = torch.arange(9)
    whole = torch.autograd.grad(tagged(rows.batch(everything)), list(model.parameters()))
    for size in (1, 2, 4, 9):
        parts = split_step(rows, everything, size)
        total = torch.stack([tagged(batch) * share for batch, share, _ in parts if share]).sum()
        found = torch.autograd.grad(total, list(model.parameters()))
        for one, other in zip(found, whole, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_a_number_of_steps_is_of_steps_and_not_of_batches() -> None:
    done = trained("bert", TrainArguments(steps=3, batch_size=2, gradient_accumulation_steps=2))[1]
    assert done.steps == 3
    assert (
        trained("bert", TrainArguments(batch_size=2, gradient_accumulation_steps=2, epochs=3))[
            1
        ].steps
        == 6
    )


# Checkpointing


COMMON = ("bert", "gpt2", "vit", "llama", "t5")
REST = [name for name in zoo.ARCHITECTURES if name not in COMMON]
UNABLE = {"albert", "dual", "torch"}


@pytest.mark.parametrize("name", first(len(COMMON), [*COMMON, *REST]))
def test_checkpointing_changes_no_bit(name: str) -> None:
    train_arguments = TrainArguments(lr=1e-2, batch_size=3)
    plainly, done = trained(name, train_arguments)
    if name in UNABLE:
        with pytest.raises(FedplanError, match="checkpointing"):
            trained(name, replace(train_arguments, gradient_checkpointing=True))
        return
    remembered, other = trained(name, replace(train_arguments, gradient_checkpointing=True))
    assert same(plainly, remembered) and done == other


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_checkpointing_changes_no_bit_of_adapters(name: str) -> None:
    """The inputs of the blocks need no gradient there, and their adapters do."""
    plan, train_arguments = "chain(freeze(), share(adapter))", TrainArguments(lr=1e-2, batch_size=3)
    one, done = trained(name, train_arguments, plan=plan, build=zoo.with_lora)
    train_arguments = replace(train_arguments, gradient_checkpointing=True)
    other, _ = trained(name, train_arguments, plan=plan, build=zoo.with_lora)
    start = get_values(zoo.with_lora(name), describe(zoo.with_lora(name)))
    assert same(one, other) and not same(one, start) and done.steps == 3


def test_checkpointing_is_on_in_the_fit_and_then_as_before() -> None:
    model, seen = zoo.build("bert"), list[bool]()

    def looked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(bool(getattr(model, "is_gradient_checkpointing", False)))
        return loss(model, batch)

    job = replace(
        job_of(model, TrainArguments(gradient_checkpointing=True), Few("bert", 0)), loss=looked
    )
    plain_fit(job)
    assert seen == [True] and not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable()
    plain_fit(job)
    assert model.is_gradient_checkpointing

    def broken(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise KeyError("rows")

    model.gradient_checkpointing_disable()
    with pytest.raises(KeyError):
        plain_fit(replace(job, loss=broken))
    assert not model.is_gradient_checkpointing


def test_a_model_without_checkpoints_is_refused_by_name() -> None:
    with (
        pytest.raises(FedplanError, match="Tagger does not support checkpointing"),
        use_gradient_checkpointing(Tagger(), True),
    ):
        pass


# Precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", ["share()", "chain(share(), freeze(query))"])
def test_values_stay_as_they_are_and_passes_are_in_what_is_said(precision: str, plan: str) -> None:
    seen = set[torch.dtype]()

    def looked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = zoo.loss(model(**batch))
        seen.add(
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else found.dtype
        )
        return (found - 1).square().float()

    train_arguments = TrainArguments(sgd(), lr=1e-2, batch_size=2, precision=precision)
    found, done = trained("gpt2", train_arguments, plan=plan, loss=looked)
    exact, _ = trained("gpt2", replace(train_arguments, precision="float32"), plan=plan)
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float16} and done.steps == 4
    start = get_values(zoo.build("gpt2"), describe(zoo.build("gpt2")))
    apart = sum(float((found[k] - exact[k]).square().sum()) for k in found)
    moved = sum(float((found[k] - start[k]).square().sum()) for k in found)
    assert 0 < apart < 0.05 * moved and all(v.dtype is torch.float32 for v in found.values())


def test_tf32_is_on_in_the_fit_alone() -> None:
    products: Any = torch.backends.cuda.matmul
    seen = set[bool]()

    def looked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.add(products.allow_tf32)
        return zoo.loss(model(**batch))

    base = TrainArguments(sgd(), lr=1e-2, batch_size=2)
    exact, _ = trained("gpt2", base, loss=looked)
    found, _ = trained("gpt2", replace(base, precision="tf32"), loss=looked)
    assert seen == {False, True} and not products.allow_tf32
    assert same(found, exact), "TF32 is of CUDA alone"


def test_a_step_that_float16_spoils_is_left_out_and_not_counted() -> None:
    """Its gradients are too large for the scaler's first scale and its second, and fit its third."""

    def large(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return zoo.loss(model(**batch)) * 2.0**8

    found, done = trained(
        "bert", TrainArguments(sgd(), lr=1e-6, batch_size=1, precision="fp16"), loss=large
    )
    assert done.steps == 5 and done.lr_sum == pytest.approx(1e-6 * 5)
    assert all(value.isfinite().all() for value in found.values())


def test_float16_values_are_not_scaled() -> None:
    model = zoo.build("bert").half()
    with pytest.raises(FedplanError, match="is in float16, and precision fp16"):
        plain_fit(job_of(model, TrainArguments(sgd(), precision="fp16"), Few("bert", 0)))


# Parameter groups


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("plan", ["share()", "chain(share(), freeze(query))"])
def test_norms_and_biases_do_not_decay_where_that_is_said(name: str, plan: str) -> None:
    """Without gradients a step is the decay alone: what it leaves is what was spared."""
    model = zoo.build(name)
    train_arguments = TrainArguments(adamw(weight_decay=0.5), lr=0.1, decay_norm_and_bias=False)
    job = job_of(model, train_arguments, Few(name, 0), plan)
    with trainable(model, job.roles) as trainable_params:
        running = train_arguments.make_optimizer(trainable_params)
        assert {id(p) for g in running.param_groups for p in g["params"]} == {
            id(p) for p in trainable_params.parameters()
        }
        for leaf in trainable_params.parameters():
            leaf.grad = torch.zeros_like(leaf)
        running.step()
    after = get_values(model, job.roles)
    for param, role in job.roles.items():
        spared = param.kind is Kind.NORM or "bias" in param.tags or not role.is_trained
        meant = job.start[param.key] * (1.0 if spared else 0.95)
        assert torch.allclose(after[param.key], meant, rtol=1e-6), param.key


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("plan", ["share()", "chain(share(), freeze(query))"])
def test_a_part_trains_at_its_own_rate(name: str, plan: str) -> None:
    """With gradients of one, a step of SGD moves each value by its learning rate."""
    model, rates = zoo.build(name), ((norm & body, 0.5), (mlp & ~norm, 0.0625))
    train_arguments = TrainArguments(sgd(), lr=0.25, lr_by_part=rates)
    job = job_of(model, train_arguments, Few(name, 0), plan)
    check_lr_by_part(rates, tuple(job.roles))
    with trainable(model, job.roles) as trainable_params:
        running = train_arguments.make_optimizer(trainable_params)
        for leaf in trainable_params.parameters():
            leaf.grad = torch.ones_like(leaf)
        running.step()
    after = get_values(model, job.roles)
    for param, role in job.roles.items():
        rate = next((rate for part, rate in rates if part.holds(param)), 0.25)
        meant = job.start[param.key] - (rate if role.is_trained else 0)
        assert torch.equal(after[param.key], meant), param.key


def test_rates_that_no_param_or_several_parts_have_are_refused() -> None:
    for name, rates, text in (
        ("bert", ((router, 1.0),), "the model has no params in router"),
        ("bert", ((query, 1.0), (bias, 2.0)), "query.bias is in query and in bias: give it one"),
        ("gpt2", ((query, 1.0),), "is one tensor with rows inside and outside of query"),
    ):
        with pytest.raises(FedplanError, match=text):
            check_lr_by_part(rates, describe(zoo.build(name)))
    params, rated = describe(zoo.build("bert")), TrainArguments(lr_by_part=((query, 1.0),))
    with pytest.raises(FedplanError, match="this method has another"):
        Agreement("own", params, Method(share(), loop=lambda job: FitResult(0.0, 0)), rated)
    with pytest.raises(FedplanError, match="SCAFFOLD needs one learning rate"):
        control_variates(plain_fit)(job_of(zoo.build("bert"), rated, Few("bert", 2)))


def test_groups_without_decay_change_no_bit() -> None:
    train_arguments = TrainArguments(adamw(), lr=1e-2, batch_size=3)
    assert same(
        trained("bert", train_arguments)[0],
        trained("bert", replace(train_arguments, decay_norm_and_bias=False))[0],
    )
    with pytest.raises(FedplanError, match="has no weight decay: leave decay_norm_and_bias out"):
        trained("bert", TrainArguments(make_client_optimizer("rprop"), decay_norm_and_bias=False))


# Batches


@settings(max_examples=often(400), deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_every_row_is_drawn_once_an_epoch(
    count: int, batch: int, parts: int, seed: int, by_length: bool
) -> None:
    lengths = torch.arange(count) * 7 % 13 if by_length else None
    draw = torch.Generator().manual_seed(seed)
    found = list(epoch_steps(count, batch * parts, draw, lengths))
    assert torch.cat(found).sort().values.tolist() == list(range(count))
    assert len(found) == TrainArguments(
        batch_size=batch, gradient_accumulation_steps=parts
    ).step_count(count)
    assert sum(len(each) != batch * parts for each in found) <= 1


@pytest.mark.parametrize("by_length", [False, True])
def test_orders_follow_from_the_seed_and_are_fresh_each_epoch(by_length: bool) -> None:
    rows, train_arguments = (
        texts(24),
        TrainArguments(batch_size=4, epochs=2, group_by_length=by_length),
    )
    one, two, other = (
        [e.tolist() for e in train_arguments.draw_steps(rows, seed)] for seed in (1, 1, 2)
    )
    assert one == two != other and one[:6] != one[6:] and len(one) == 12
    for rows_of in (one[:6], one[6:]):
        assert sorted(row for step in rows_of for row in step) == list(range(24))


def test_texts_of_similar_length_stand_together_and_less_is_filled_up() -> None:
    rows = texts(64)
    lengths = token_lengths(rows)

    def filled(train_arguments: TrainArguments) -> int:
        steps = train_arguments.draw_steps(rows, 3)
        return sum(int(rows.batch(i)["attention_mask"].eq(0).sum()) for i in steps)

    by_chance, together = (
        filled(TrainArguments(batch_size=4, group_by_length=way)) for way in (False, True)
    )
    assert lengths.tolist() == rows.ids.starts.diff().tolist()
    assert together < 0.2 * by_chance


def test_rows_without_lengths_cannot_be_put_together_by_them() -> None:
    with pytest.raises(FedplanError, match="no attention_mask"):
        trained("vit", TrainArguments(group_by_length=True))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_no_bit(workers: int) -> None:
    rows = Few("bert", 0, 7)
    seen, ours = set[str](), rows.batch

    def noted(indices: Tensor) -> dict[str, Tensor]:
        seen.add(current_thread().name.partition("_")[0])
        return ours(indices)

    train_arguments = TrainArguments(lr=1e-2, batch_size=2, gradient_accumulation_steps=2, epochs=3)
    alone, done = trained("bert", train_arguments, rows)
    rows.batch = noted  # pyright: ignore[reportAttributeAccessIssue]
    ahead_, other = trained("bert", replace(train_arguments, num_workers=workers), rows)
    assert same(alone, ahead_) and done == other and seen == {"fedplan-batches"}


def test_what_is_made_ahead_keeps_its_order_and_its_errors() -> None:
    made = list[int]()

    def make(number: int) -> int:
        made.append(number)
        if number == 50:
            raise KeyError(number)
        return number

    assert list(prefetch(make, range(40), 4)) == list(range(40))
    going = prefetch(make, range(100), 2)
    assert next(going) == 0 and max(made[40:]) <= 5  # no more than it was asked to
    with pytest.raises(KeyError):
        list(going)


# Compiled


def test_a_compiled_fit_is_that_of_the_model_and_leaves_the_model_alone() -> None:
    """By the backend that runs the same kernels: the same bits."""
    train_arguments = TrainArguments(lr=1e-2, batch_size=3)
    model = zoo.build("bert")
    kind, forward = type(model), model.forward
    job = job_of(model, replace(train_arguments, torch_compile="eager"), Few("bert", 0, 7))
    plain_fit(job)
    assert type(model) is kind and model.forward == forward
    assert same(trained("bert", train_arguments)[0], get_values(model, job.roles))
    with pytest.raises(FedplanError, match="no backend 'fast'"):
        trained("bert", TrainArguments(torch_compile="fast"))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_compiler_of_torch_is_near() -> None:
    """It rounds elsewhere: no bit is promised, and dropout is drawn in another order."""
    train_arguments, rows = TrainArguments(sgd(), lr=1e-2, batch_size=3), Double(Few("bert", 0, 7))
    one = trained("bert", train_arguments, rows, build=still)[0]
    other = trained("bert", replace(train_arguments, torch_compile="inductor"), rows, build=still)[
        0
    ]
    for key, value in one.items():
        assert torch.allclose(value, other[key], rtol=1e-6, atol=1e-8), key


# Wraps


def test_alternating_takes_its_own_epochs_whatever_the_pace() -> None:
    """Once a number of steps of the pace won over the epochs that the method says."""
    held = list[TrainArguments]()

    def fit(job: Job) -> FitResult:
        held.append(job.train_arguments)
        return FitResult(0.0, 1)

    job = job_of(zoo.build("bert"), TrainArguments(steps=9), Few("bert", 0))
    alternate(2)(fit)(job)
    assert [(p.epochs, p.steps) for p in held] == [(2, 0), (1, 9)]
