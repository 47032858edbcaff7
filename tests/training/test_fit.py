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

from fedplan.data.examples import NO_LABEL, Examples
from fedplan.errors import FedplanError
from fedplan.models.description import describe
from fedplan.models.params import Kind
from fedplan.models.values import take
from fedplan.training import Done, Job, Pace, adamw, alternate, mark, optimiser_named, plain, sgd
from fedplan.training.batches import ahead, epoch, lengths_of, weighed
from fedplan.training.passes import checkpointed

ARCHITECTURES = ("bert", "gpt2", "vit")


def trained(
    name: str, pace: Pace, rows: Examples | None = None, plan: str = "share()", **said: Any
) -> tuple[dict[str, Tensor], Done]:
    """What a fit makes of a tiny model."""
    model = said.pop("build", zoo.build)(name)
    job = replace(job_of(model, pace, rows or Few(name, 0, 7), plan), **said)
    done = plain(job)
    return take(model, job.roles), done


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
    small = Pace(sgd(), rate=0.1, batch=batch, accumulate=parts, epochs=2, clip=0.5)
    large = replace(small, batch=batch * parts, accumulate=1)
    (one, done), (other, whole) = (
        trained(name, pace, held, loss=mean_of_rows, build=still) for pace in (small, large)
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
        parts = weighed(rows, everything, size)
        total = torch.stack([tagged(batch) * share for batch, share, _ in parts if share]).sum()
        found = torch.autograd.grad(total, list(model.parameters()))
        for one, other in zip(found, whole, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_a_number_of_steps_is_of_steps_and_not_of_batches() -> None:
    done = trained("bert", Pace(steps=3, batch=2, accumulate=2))[1]
    assert done.steps == 3
    assert trained("bert", Pace(batch=2, accumulate=2, epochs=3))[1].steps == 6


# Checkpointing


COMMON = ("bert", "gpt2", "vit", "llama", "t5")
REST = [name for name in zoo.ARCHITECTURES if name not in COMMON]
UNABLE = {"albert", "dual", "torch"}


@pytest.mark.parametrize("name", first(len(COMMON), [*COMMON, *REST]))
def test_checkpointing_changes_no_bit(name: str) -> None:
    pace = Pace(rate=1e-2, batch=3)
    plainly, done = trained(name, pace)
    if name in UNABLE:
        with pytest.raises(FedplanError, match="checkpointing"):
            trained(name, replace(pace, checkpointing=True))
        return
    remembered, other = trained(name, replace(pace, checkpointing=True))
    assert same(plainly, remembered) and done == other


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_checkpointing_changes_no_bit_of_adapters(name: str) -> None:
    """The inputs of the blocks need no gradient there, and their adapters do."""
    plan, pace = "chain(freeze(), share(adapter))", Pace(rate=1e-2, batch=3)
    one, done = trained(name, pace, plan=plan, build=zoo.with_lora)
    pace = replace(pace, checkpointing=True)
    other, _ = trained(name, pace, plan=plan, build=zoo.with_lora)
    start = take(zoo.with_lora(name), describe(zoo.with_lora(name)))
    assert same(one, other) and not same(one, start) and done.steps == 3


def test_checkpointing_is_on_in_the_fit_and_then_as_before() -> None:
    model, seen = zoo.build("bert"), list[bool]()

    def looked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(bool(getattr(model, "is_gradient_checkpointing", False)))
        return loss(model, batch)

    job = replace(job_of(model, Pace(checkpointing=True), Few("bert", 0)), loss=looked)
    plain(job)
    assert seen == [True] and not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable()
    plain(job)
    assert model.is_gradient_checkpointing

    def broken(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise KeyError("rows")

    model.gradient_checkpointing_disable()
    with pytest.raises(KeyError):
        plain(replace(job, loss=broken))
    assert not model.is_gradient_checkpointing


def test_a_model_without_checkpoints_is_refused_by_name() -> None:
    with (
        pytest.raises(FedplanError, match="Tagger does not support checkpointing"),
        checkpointed(Tagger(), True),
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

    pace = Pace(sgd(), rate=1e-2, batch=2, precision=precision)
    found, done = trained("gpt2", pace, plan=plan, loss=looked)
    exact, _ = trained("gpt2", replace(pace, precision="float32"), plan=plan)
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float16} and done.steps == 4
    start = take(zoo.build("gpt2"), describe(zoo.build("gpt2")))
    apart = sum(float((found[k] - exact[k]).square().sum()) for k in found)
    moved = sum(float((found[k] - start[k]).square().sum()) for k in found)
    assert 0 < apart < 0.05 * moved and all(v.dtype is torch.float32 for v in found.values())


def test_a_step_that_float16_spoils_is_left_out_and_not_counted() -> None:
    """Its gradients are too large for the scaler's first scale and its second, and fit its third."""

    def large(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return zoo.loss(model(**batch)) * 2.0**8

    found, done = trained("bert", Pace(sgd(), rate=1e-6, batch=1, precision="fp16"), loss=large)
    assert done.steps == 5 and done.distance == pytest.approx(1e-6 * 5)
    assert all(value.isfinite().all() for value in found.values())


def test_float16_values_are_not_scaled() -> None:
    model = zoo.build("bert").half()
    with pytest.raises(FedplanError, match="is in float16, and precision fp16"):
        plain(job_of(model, Pace(sgd(), precision="fp16"), Few("bert", 0)))


# Parameter groups


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("plan", ["share()", "chain(share(), freeze(query))"])
def test_norms_and_biases_do_not_decay_where_that_is_said(name: str, plan: str) -> None:
    """Without gradients a step is the decay alone: what it leaves is what was spared."""
    model = zoo.build(name)
    pace = Pace(adamw(decay=0.5), rate=0.1, decay_all=False)
    job = job_of(model, pace, Few(name, 0), plan)
    with mark(model, job.roles) as marked:
        running = pace.start(marked)
        assert {id(p) for g in running.param_groups for p in g["params"]} == {
            id(p) for p in marked.parameters()
        }
        for leaf in marked.parameters():
            leaf.grad = torch.zeros_like(leaf)
        running.step()
    after = take(model, job.roles)
    for param, role in job.roles.items():
        spared = param.kind is Kind.NORM or "bias" in param.tags or not role.trained
        meant = job.start[param.key] * (1.0 if spared else 0.95)
        assert torch.allclose(after[param.key], meant, rtol=1e-6), param.key


def test_groups_without_decay_change_no_bit() -> None:
    pace = Pace(adamw(), rate=1e-2, batch=3)
    assert same(trained("bert", pace)[0], trained("bert", replace(pace, decay_all=False))[0])
    with pytest.raises(FedplanError, match="has no decay: leave decay_all out"):
        trained("bert", Pace(optimiser_named("rprop"), decay_all=False))


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
    found = list(epoch(count, batch * parts, draw, lengths))
    assert torch.cat(found).sort().values.tolist() == list(range(count))
    assert len(found) == Pace(batch=batch, accumulate=parts).steps_of(count)
    assert sum(len(each) != batch * parts for each in found) <= 1


@pytest.mark.parametrize("by_length", [False, True])
def test_orders_follow_from_the_seed_and_are_fresh_each_epoch(by_length: bool) -> None:
    rows, pace = texts(24), Pace(batch=4, epochs=2, by_length=by_length)
    one, two, other = ([e.tolist() for e in pace.draw(rows, seed)] for seed in (1, 1, 2))
    assert one == two != other and one[:6] != one[6:] and len(one) == 12
    for rows_of in (one[:6], one[6:]):
        assert sorted(row for step in rows_of for row in step) == list(range(24))


def test_texts_of_similar_length_stand_together_and_less_is_filled_up() -> None:
    rows = texts(64)
    lengths = lengths_of(rows)

    def filled(pace: Pace) -> int:
        steps = pace.draw(rows, 3)
        return sum(int(rows.batch(i)["attention_mask"].eq(0).sum()) for i in steps)

    by_chance, together = (filled(Pace(batch=4, by_length=way)) for way in (False, True))
    assert lengths.tolist() == rows.ids.starts.diff().tolist()
    assert together < 0.2 * by_chance


def test_rows_without_lengths_cannot_be_put_together_by_them() -> None:
    with pytest.raises(FedplanError, match="no attention_mask"):
        trained("vit", Pace(by_length=True))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_no_bit(workers: int) -> None:
    rows = Few("bert", 0, 7)
    seen, ours = set[str](), rows.batch

    def noted(indices: Tensor) -> dict[str, Tensor]:
        seen.add(current_thread().name.partition("_")[0])
        return ours(indices)

    pace = Pace(rate=1e-2, batch=2, accumulate=2, epochs=3)
    alone, done = trained("bert", pace, rows)
    rows.batch = noted  # pyright: ignore[reportAttributeAccessIssue]
    ahead_, other = trained("bert", replace(pace, workers=workers), rows)
    assert same(alone, ahead_) and done == other and seen == {"fedplan-batches"}


def test_what_is_made_ahead_keeps_its_order_and_its_errors() -> None:
    made = list[int]()

    def make(number: int) -> int:
        made.append(number)
        if number == 50:
            raise KeyError(number)
        return number

    assert list(ahead(make, range(40), 4)) == list(range(40))
    going = ahead(make, range(100), 2)
    assert next(going) == 0 and max(made[40:]) <= 5  # no more than it was asked to
    with pytest.raises(KeyError):
        list(going)


# Compiled


def test_a_compiled_fit_is_that_of_the_model_and_leaves_the_model_alone() -> None:
    """By the backend that runs the same kernels: the same bits."""
    pace = Pace(rate=1e-2, batch=3)
    model = zoo.build("bert")
    kind, forward = type(model), model.forward
    job = job_of(model, replace(pace, compile="eager"), Few("bert", 0, 7))
    plain(job)
    assert type(model) is kind and model.forward == forward
    assert same(trained("bert", pace)[0], take(model, job.roles))
    with pytest.raises(FedplanError, match="no backend 'fast'"):
        trained("bert", Pace(compile="fast"))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_compiler_of_torch_is_near() -> None:
    """It rounds elsewhere: no bit is promised, and dropout is drawn in another order."""
    pace, rows = Pace(sgd(), rate=1e-2, batch=3), Double(Few("bert", 0, 7))
    one = trained("bert", pace, rows, build=still)[0]
    other = trained("bert", replace(pace, compile="inductor"), rows, build=still)[0]
    for key, value in one.items():
        assert torch.allclose(value, other[key], rtol=1e-6, atol=1e-8), key


# Wraps


def test_alternating_takes_its_own_epochs_whatever_the_pace() -> None:
    """Once a number of steps of the pace won over the epochs that the method says."""
    held = list[Pace]()

    def fit(job: Job) -> Done:
        held.append(job.pace)
        return Done(0.0, 1)

    job = job_of(zoo.build("bert"), Pace(steps=9), Few("bert", 0))
    alternate(2)(fit)(job)
    assert [(p.epochs, p.steps) for p in held] == [(2, 0), (1, 9)]
