# SPDX-License-Identifier: Apache-2.0
"""DP-SGD: each example's gradient is its own, clipped, and hidden in noise that public numbers scale."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from clients import Few
from duals import ASKED, pictures_of
from duals import build as build_dual
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from torch import Tensor, nn

from fedplan import privacy
from fedplan.data.examples import (
    Examples,
    Loss,
    MaskedTokens,
    RaggedArray,
    TokenSequences,
    block_seeds,
)
from fedplan.data.tasks.kinds import make_task
from fedplan.errors import PrivacyError
from fedplan.language.parser import parse
from fedplan.language.parts import query
from fedplan.language.plan import Roles
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.methods.adapters import add_lora
from fedplan.models.description import describe
from fedplan.models.prompts import add_prompts
from fedplan.models.values import get_values
from fedplan.privacy.dpsgd import fit, per_example
from fedplan.privacy.dpsgd import fit as private_fit
from fedplan.privacy.dpsgd import ghost_clipping as ghost
from fedplan.privacy.dpsgd.fit import DPSGDConfig, DPSGDStats, RoundedGaussian, dp_sgd, train_dp_sgd
from fedplan.privacy.dpsgd.per_example import (
    ClippedSum,
    Objective,
    add_clipped_one_by_one,
    require_independent_examples,
    require_private_training,
    squared_norm,
    trained_tensors,
)
from fedplan.training.client_hooks import proximal
from fedplan.training.fit import FitResult, Job, TrainArguments
from fedplan.training.freezing import trainable
from fedplan.training.optimizers import ClientOptimizer, LRSchedule, adamw, sgd

PARTS = {
    "all": "share()",
    "query and key frozen": "chain(share(), freeze(query | key))",
    "last block": "chain(freeze(), share(last(1)))",
    "kept head": "chain(freeze(), keep(head))",
    "adapters": "chain(freeze(), share(lora_a), keep(lora_b))",
}
# Tied to the embeddings, a head is no param of its own.
HEADLESS = {"gpt2", "falcon", "falcon-heads", "falcon-groups", "bloom", "mpt", "gemma", "t5"}
HEADLESS |= {"bart", "whisper"}
WHOLE = {"all", "query and key frozen"}
SLOW = {name: WHOLE for name in ("swin", "clip", "dual", "gemma", "t5", "bart", "whisper")}
SLOW |= {"siglip": WHOLE | {"kept head"}, "deberta-v2": {*PARTS} - {"kept head"}}
SLOW |= {"torch": {*PARTS} - {"kept head"}}
"""Where examples are taken one by one, because a trained tensor is used in a way of its own."""
CASES = [(n, p) for n in zoo.ARCHITECTURES for p in PARTS if p != "kept head" or n not in HEADLESS]
HUGE = 1e30
FINE = 2.0**-300
"""A grid step so fine that no gradient is rounded to it."""


def distance_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A mean over rows of what a model says of each by itself."""
    said: Any = model(**batch)
    if not isinstance(said, Tensor):
        towers = "image_embeds" in said
        said = (said.image_embeds * said.text_embeds).sum(1) if towers else said.logits
    fine = said if said.dtype == torch.float64 else said.float()
    return 3 * (fine - 0.3).square().mean()


def roles_of(model: nn.Module, plan: str) -> Roles:
    return resolve(parse(plan), describe(model), Turn())


def seen(model: nn.Module, plan: str, rows: Examples, loss: Loss = distance_loss) -> Objective:
    """A model as a fit sees it."""
    tensors = trained_tensors(model, roles_of(model, plan))
    model.requires_grad_(False)
    for each in tensors:
        each.tensor.requires_grad_(True)
    return Objective(model, tensors, rows, loss)


def by_backward(subject: Objective, plan: str, index: int) -> dict[str, Tensor]:
    """The gradient of one row, as the plain fit would get it."""
    with trainable(subject.model, roles_of(subject.model, plan)) as marked:
        leaves = dict(marked.named_parameters())
        subject.loss(subject.model, subject.examples.batch(torch.tensor([index]))).backward()
        found = {
            k: v.grad if v.grad is not None else torch.zeros_like(v) for k, v in leaves.items()
        }
        for leaf in leaves.values():
            leaf.grad = None
    return found


def views(subject: Objective, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for each in subject.tensors for k, v in each.views(totals[each.name]).items()}


def singly(subject: Objective, index: int) -> dict[str, Tensor]:
    total = ClippedSum(subject.tensors, HUGE, FINE)
    add_clipped_one_by_one(subject, torch.tensor([index]), total)
    return views(subject, total.sums)


def among_others(subject: Objective, count: int, index: int) -> dict[str, Tensor]:
    """The gradient of one row out of the factors of several."""
    totals = ClippedSum(subject.tensors, HUGE).totals
    for name, factors in ghost.gradient_factors(subject, torch.arange(count)).items():
        for factor in factors:
            factor.add_weighted_sum(totals[name], torch.eye(count).to(totals[name])[index])
    return views(subject, totals)


def length(values: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(v.double().square().sum()) for v in values.values()))


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest distance in any tensor, as a share of the whole gradient."""
    assert one.keys() == other.keys()
    far = max(float((one[k].double() - other[k].double()).norm()) for k in one)
    return far / max(length(one), 1e-12)


def stir(model: nn.Module) -> nn.Module:
    """No tensor of zeros: fresh adapters would hide each other's gradients."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.parameters():
            if not tensor.any():
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model


def sharpened(model: nn.Module) -> nn.Module:
    """Attention that is not flat, so that queries and keys count; in float64, so that it shows."""
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 2 and min(tensor.shape) > 1:
                tensor.mul_(max(1.0, 0.2 / float(tensor.std())))
    return model.double()


def fine(rows: Few) -> Few:
    rows.rows = {k: v.double() if v.is_floating_point() else v for k, v in rows.rows.items()}
    return rows


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def generated(seed: int) -> tuple[RoundedGaussian, Callable[[int], Tensor]]:
    """Sources that a test can repeat."""
    source = torch.Generator().manual_seed(seed)
    return (
        lambda shape, stddev, step: (
            torch.randn(shape, generator=source, dtype=torch.float64) * stddev
        ),
        lambda count: torch.rand(count, generator=source, dtype=torch.float64),
    )


def silent(shape: tuple[int, ...], stddev: float = 0.0, step: float = 0.0) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def everybody(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64)


def nobody(count: int) -> Tensor:
    return torch.full((count,), 0.999, dtype=torch.float64)


PRIVATELY = DPSGDConfig(
    max_grad_norm=0.5,
    noise_multiplier=1.0,
    expected_batch_size=4,
    sampling_rate=0.5,
    steps=3,
    ghost_clipping=True,
    microbatch_size=2,
)


def job_of(
    model: nn.Module,
    plan: str = "share()",
    rows: Examples | None = None,
    loss: Loss = distance_loss,
    train_arguments: TrainArguments | None = None,
    seed: int = 0,
) -> Job:
    roles = roles_of(model, plan)
    return Job(
        model=model,
        roles=roles,
        examples=Few("bert", 0, 6) if rows is None else rows,
        loss=loss,
        train_arguments=train_arguments or TrainArguments(sgd(), lr=1.0),
        seed=seed,
        start=get_values(model, roles),
    )


def run(
    job: Job, privately: DPSGDConfig = PRIVATELY, seed: int = 0, **sources: Any
) -> tuple[dict[str, Tensor], FitResult, DPSGDStats]:
    """What a fit changed, what it leaves, and what it did."""
    before = get_values(job.model, job.roles)
    noise, uniform = generated(seed)
    sources = {"noise": noise, "uniform": uniform, **sources}
    done, round_state = train_dp_sgd(job, privately, **sources)
    return (
        {k: v - before[k] for k, v in get_values(job.model, job.roles).items()},
        done,
        round_state,
    )


MODULES = [file.stem for file in (Path(privacy.__file__).parent / "dpsgd").glob("[!_]*.py")]


def zoo_model(name: str, part: str) -> nn.Module:
    model = stir(zoo.with_lora(name) if part == "adapters" else zoo.build(name))
    return without_dropout(model).train() if name == "torch" else model


def require_own_gradients(subject: Objective, part: str, slow: str, tolerance: float) -> None:
    single, together = (ClippedSum(subject.tensors, 1.0, FINE) for _ in range(2))
    add_clipped_one_by_one(subject, torch.arange(3), single)
    (add_clipped_one_by_one if slow else ghost.add_ghost_clipped)(
        subject, torch.arange(3), together
    )
    for index in range(3):
        expected = by_backward(subject, PARTS[part], index)
        assert length(expected) > 0
        assert apart(expected, singly(subject, index)) == 0
        assert float(single.norms[index]) == pytest.approx(length(expected), rel=1e-6)
        assert float(together.norms[index]) == pytest.approx(length(expected), rel=1e-5)
        assert slow or apart(expected, among_others(subject, 3, index)) < tolerance
    assert apart(views(subject, single.sums), views(subject, together.sums)) < 1e-5


@pytest.mark.parametrize(("name", "part"), CASES)
def test_each_gradient_is_that_of_its_row_alone(name: str, part: str) -> None:
    subject = seen(sharpened(zoo_model(name, part)), PARTS[part], fine(Few(name, 0, 3)))
    slow = ghost.why_not_ghost_clipping(subject)
    assert bool(slow) == (part in SLOW.get(name, ())), slow
    require_own_gradients(subject, part, slow, 1e-6)


def test_params_whose_gradients_share_memory_are_each_clipped_once() -> None:
    # Autograd returns the class token's gradient as a part of that of the positions, if in float64.
    test_each_gradient_is_that_of_its_row_alone("vit", "all")


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "part"), CASES)
def test_each_gradient_is_that_of_its_row_alone_in_float32(name: str, part: str) -> None:
    subject = seen(zoo_model(name, part), PARTS[part], Few(name, 0, 3))
    slow = ghost.why_not_ghost_clipping(subject)
    assert bool(slow) == (part in SLOW.get(name, ())), slow
    require_own_gradients(subject, part, slow, 1e-5)


@pytest.mark.parametrize("name", ["clip", "vit-bert"])
@pytest.mark.parametrize("deep", [False, True])
def test_each_gradient_of_prompts_is_that_of_its_row_alone(name: str, deep: bool) -> None:
    plan = "chain(freeze(), share(prompt & common), keep(prompt & own | fusion))"
    model = stir(add_prompts(build_dual(name), text=2, vision=2, deep=deep))
    subject = seen(model, plan, pictures_of("hospital")["hospital"], ASKED.loss)
    assert "outside of its own layer" in ghost.why_not_ghost_clipping(subject)
    for index in range(3):
        assert apart(by_backward(subject, plan, index), singly(subject, index)) == 0
    rows = pictures_of("hospital")["hospital"]
    changes, _, round_state = run(job_of(model, plan, rows, ASKED.loss))
    assert round_state.slow_reason and all(
        (change != 0).any() == roles.is_trained
        for change, roles in zip(changes.values(), roles_of(model, plan).values(), strict=True)
    )


def ragged(labels: Tensor | RaggedArray) -> TokenSequences:
    ids = RaggedArray.from_lists([[5, 6, 7, 8, 9], [10, 11], [12, 12, 12], [13]])
    return TokenSequences(ids, 0, labels)


@pytest.mark.parametrize("kind", ["text-classification", "token-classification", "causal-lm"])
def test_padding_changes_no_gradient(kind: str) -> None:
    torch.manual_seed(0)
    tags = RaggedArray.from_lists([[0, -100, 1, 1, 0], [-100, 1], [1, 0, 0], [1]])
    if kind == "text-classification":
        model, rows = zoo.build("bert"), ragged(torch.tensor([0, 1, 1, 0]))
    elif kind == "token-classification":
        model, rows = zoo.build("roberta"), ragged(tags)
    else:
        model, rows = (
            zoo.build("gpt2"),
            ragged(RaggedArray.from_lists([[5, 6, 7, 8, 9], [10, 11], [12, 12, 12], [13]])),
        )
    asked = make_task(kind, columns="x", label="y", labels=["a", "b"])
    subject = seen(model, "share()", rows, asked.loss)
    require_independent_examples(subject)
    assert ghost.why_not_ghost_clipping(subject) == ""
    for index in range(4):
        expected = by_backward(subject, "share()", index)
        assert apart(expected, among_others(subject, 4, index)) < 1e-5


def of_kind(kind: str) -> tuple[nn.Module, TokenSequences, Loss]:
    """A model, rows of different lengths and the loss of a task."""
    torch.manual_seed(0)
    ids, words = ragged(torch.zeros(4)).ids, ["a", "b"]
    if kind in ("t5", "bart"):
        targets = RaggedArray.from_lists([[9, 8], [7, 6, 5, 4], [3], [12, 13, 14]])
        model = zoo.build(kind)
        model.config.decoder_start_token_id = 2  # type: ignore[union-attr,assignment]
        asked = make_task("seq2seq-lm", columns=["x", "y"])
        return model, TokenSequences(ids, 0, targets, seq2seq=True), asked.loss
    if kind == "instruction":
        answers = RaggedArray.from_lists(
            [[-100, -100, 7, 8, 9], [-100, 11], [-100, 12, -100], [-100]]
        )
        return zoo.build("gpt2"), ragged(answers), make_task(kind, columns="x").loss
    if kind == "multi-label":
        labels = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
        made = make_task(kind, columns="x", label="y", labels=words, weights={"a": 3.0})
        return zoo.build("bert"), ragged(labels), made.loss
    if kind == "regression":
        model = hf.BertForSequenceClassification(hf.BertConfig(**zoo.TEXT, num_labels=1)).eval()
        numbers = torch.tensor([0.5, -100.0, 3.0, 2.0])
        return model, ragged(numbers), make_task(kind, columns="x", label="y").loss
    made = make_task(
        "text-classification", columns="x", label="y", labels=words, weights={"b": 3.0}
    )
    return zoo.build("bert"), ragged(torch.tensor([0, 1, 1, 0])), made.loss


@pytest.mark.parametrize("kind", ["multi-label", "regression", "instruction", "weights"])
def test_rows_of_every_kind_have_gradients_of_their_own(kind: str) -> None:
    model, rows, loss = of_kind(kind)
    subject = seen(model, "share()", rows, loss)
    require_independent_examples(subject)
    assert ghost.why_not_ghost_clipping(subject) == ""
    for index in range(4):
        expected = by_backward(subject, "share()", index)
        assert apart(expected, among_others(subject, 4, index)) < 1e-5


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("plan", ["share()", "chain(freeze(), share(last(1)))"])
def test_pairs_of_texts_have_gradients_of_their_own(kind: str, plan: str) -> None:
    """With all of it trained, one row at a time: such a model uses its embeddings three times."""
    model, rows, loss = of_kind(kind)
    subject = seen(model, plan, rows, loss)
    require_independent_examples(subject)
    assert (ghost.why_not_ghost_clipping(subject) == "") == (plan != "share()")
    for index in range(4):
        expected = by_backward(subject, plan, index)
        assert apart(expected, singly(subject, index)) < 1e-6
        if plan != "share()":
            assert apart(expected, among_others(subject, 4, index)) < 1e-5


@pytest.mark.parametrize("name", ["bert", "bert-mlm", "roberta"])
def test_the_row_of_the_filling_token_has_no_gradient(name: str) -> None:
    rows = Few(name, 0, 3)
    rows.rows["input_ids"][:, ::2] = 0
    subject = seen(zoo.build(name), "share()", rows)
    assert ghost.why_not_ghost_clipping(subject) == ""
    expected = by_backward(subject, "share()", 1)
    assert apart(expected, among_others(subject, 3, 1)) < 1e-5


def test_texts_are_run_by_length_and_it_does_not_show() -> None:
    asked = make_task("text-classification", columns="x", label="y", labels=["a", "b"])
    rows, found = ragged(torch.tensor([0, 1, 1, 0])), list[dict[str, Tensor]]()
    for size in (1, 2, 4):
        job = job_of(without_dropout(zoo.build("bert")), rows=rows, loss=asked.loss)
        privately = replace(
            PRIVATELY, max_grad_norm=0.1, noise_multiplier=0.1, microbatch_size=size
        )
        found.append(run(job, privately, uniform=everybody)[0])
    portions = fit._microbatches(rows, torch.tensor([0, 1, 3]), 2)
    assert [each.tolist() for each in portions] == [[3], [1], [0]]
    assert all(apart(found[0], each) < 1e-5 for each in found[1:])


def test_few_long_texts_run_at_a_time_and_many_short_ones() -> None:
    for length, expected in ((8, 64), (64, 64), (512, 8), (5000, 1)):
        rows = TokenSequences(RaggedArray.from_lists([[1] * length] * 100), 0, torch.zeros(100))
        sizes = {len(each) for each in fit._microbatches(rows, torch.arange(100), 64)}
        assert max(sizes) == expected
        assert not list(fit._microbatches(rows, torch.arange(0), 64))


def test_masked_tokens_are_hidden_row_by_row() -> None:
    found = RaggedArray.from_lists([[5, 6, 7, 8, 9], [10, 11], [12, 12, 12], [13]])
    rows = MaskedTokens(ragged(found), block_seeds(found), 3, torch.tensor([0, 1, 2]), 64)
    asked = make_task("masked-lm", columns="x")
    changes, _, round_state = run(job_of(zoo.build("bert-mlm"), rows=rows, loss=asked.loss))
    assert not round_state.slow_reason and round_state.steps == 3
    assert all((change != 0).all() for change in changes.values())


def test_dropout_is_drawn_for_each_example() -> None:
    config = hf.BertConfig(**zoo.TEXT, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(config).train()
    subject = seen(model, "share()", Few("bert", 0, 4))
    torch.manual_seed(7)
    factors = ghost.gradient_factors(subject, torch.arange(4))
    torch.manual_seed(7)
    said = model(**subject.examples.batch(torch.arange(4))).logits
    leaves = [each.tensor for each in subject.tensors]
    for index in range(4):
        totals = ClippedSum(subject.tensors, HUGE).totals
        for name, each in factors.items():
            for factor in each:
                factor.add_weighted_sum(totals[name], torch.eye(4).double()[index])
        loss = 3 * (said[index] - 0.3).square().mean()
        expected = torch.autograd.grad(loss, leaves, retain_graph=True)
        named = dict(zip(totals, expected, strict=True))
        assert apart(named, totals) < 1e-5


@settings(max_examples=often(60))
@given(
    st.sampled_from(["bert", "gpt2", "vit", "llama"]),
    st.sampled_from(["all", "query and key frozen", "last block"]),
    st.floats(1e-4, 1e4),
    st.floats(1e-3, 1e2),
    st.booleans(),
)
def test_no_example_adds_more_than_the_bound(
    name: str, part: str, bound: float, size: float, fast: bool
) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return distance_loss(model, batch) * size

    subject = seen(zoo.build(name), PARTS[part], Few(name, 1, 4), loss)
    add = ghost.add_ghost_clipped if fast else add_clipped_one_by_one
    whole, without = ClippedSum(subject.tensors, bound), ClippedSum(subject.tensors, bound)
    add(subject, torch.arange(4), whole)
    add(subject, torch.arange(3), without)
    more = {k: v.double() - without.sums[k] for k, v in whole.sums.items()}
    alone = ClippedSum(subject.tensors, bound)
    add(subject, torch.tensor([3]), alone)
    assert length(views(subject, alone.sums)) <= bound
    assert length(views(subject, more)) <= bound * (1 + 1e-5)
    true = length(singly(subject, 3))
    assert float(whole.norms[3]) == pytest.approx(true, rel=1e-5)
    assert length(views(subject, alone.sums)) == pytest.approx(
        min(true, bound), rel=1e-4, abs=1e-6 * bound
    )


@pytest.mark.parametrize("size", [1, 1023, 1024, 4_000_001])
def test_lengths_of_long_tensors_are_exact(size: int) -> None:
    values = torch.rand(size, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert float(squared_norm(values)) == pytest.approx(
        float(values.double().square().sum()), rel=5e-7
    )


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_the_divisor_is_public(name: str) -> None:
    rows, fewer = Few(name, 0, 6), Few(name, 0, 6)
    fewer.rows = {k: v[:5] for k, v in fewer.rows.items()}
    first_five = torch.tensor([0.0, 0.9, 0.1, 0.2, 0.9, 0.9], dtype=torch.float64)
    changes = [
        run(job_of(zoo.build(name), rows=held), noise=silent, uniform=lambda n: first_five[:n])[0]
        for held in (rows, fewer)
    ]
    assert all(torch.equal(changes[0][k], changes[1][k]) for k in changes[0])


def test_more_expected_examples_make_smaller_steps() -> None:
    once = replace(PRIVATELY, steps=1)
    found = [
        run(job_of(zoo.build("bert")), replace(once, expected_batch_size=size))[0]
        for size in (4, 8)
    ]
    for key, change in found[0].items():
        torch.testing.assert_close(change, 2 * found[1][key], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt-neox"])
def test_every_trained_coordinate_gets_noise_and_no_other_moves(name: str) -> None:
    plan = "chain(share(), freeze(query | key))"
    model = zoo.build(name)
    job = job_of(model, plan, Few(name, 0, 6), train_arguments=TrainArguments(sgd(), lr=1.0))
    privately = replace(
        PRIVATELY, max_grad_norm=2.0, noise_multiplier=3.0, expected_batch_size=12, steps=1
    )
    changes, _, _ = run(
        job, privately, noise=lambda shape, stddev, _: silent(shape) + stddev, uniform=nobody
    )
    for param, role in job.roles.items():
        wanted = -0.5 if role.is_trained else 0.0
        torch.testing.assert_close(
            changes[param.key], torch.full(param.shape, wanted), atol=1e-6, rtol=0
        )
        assert role.is_trained or not changes[param.key].any()


def test_the_noise_has_the_spread_that_is_paid_for() -> None:
    privately = DPSGDConfig(
        max_grad_norm=0.5, noise_multiplier=2.0, expected_batch_size=10, sampling_rate=0.1, steps=1
    )
    changes, _, _ = run(job_of(zoo.build("bert")), privately, uniform=nobody)
    drawn = torch.cat([change.flatten() for change in changes.values()])
    assert len(drawn) > 5000
    assert float(drawn.std()) == pytest.approx(0.1, rel=0.03)
    assert abs(float(drawn.mean())) < 0.005


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "modernbert", "torch"])
@pytest.mark.parametrize(
    "optimizer", [adamw(weight_decay=0.1), sgd(weight_decay=0.1, momentum=0.9)]
)
def test_what_is_not_trained_does_not_move_a_bit(name: str, optimizer: ClientOptimizer) -> None:
    model = zoo.build(name)
    job = job_of(
        model,
        "chain(freeze(), share(value & last(1)), keep(norm))",
        Few(name, 0, 6),
        train_arguments=TrainArguments(optimizer, lr=0.1),
    )
    before = {k: v.clone() for k, v in model.state_dict().items()}
    changes, _, _ = run(job)
    trained_names = {p.name for p, role in job.roles.items() if role.is_trained}
    for param, role in job.roles.items():
        assert bool(changes[param.key].any()) == role.is_trained
    for key, value in model.state_dict().items():
        assert key in trained_names or torch.equal(value, before[key])


def test_a_step_without_examples_is_a_step() -> None:
    changes, done, round_state = run(job_of(zoo.build("bert")), uniform=nobody)
    assert (done.steps, round_state.steps, round_state.examples) == (3, 3, 0)
    assert all((change != 0).all() for change in changes.values())


def test_a_client_without_rows_takes_its_steps() -> None:
    none = Few("bert", 0, 1)
    none.rows = {k: v[:0] for k, v in none.rows.items()}
    changes, done, round_state = run(job_of(zoo.build("bert"), rows=none))
    assert done.steps == 3 and round_state.examples == 0
    assert all((change != 0).all() for change in changes.values())


def test_who_trains_nothing_takes_no_step() -> None:
    _, done, round_state = run(job_of(zoo.build("bert"), "freeze()"))
    assert done.steps == 0 and round_state == DPSGDStats()


def test_tensors_that_the_loss_does_not_reach_get_noise_too() -> None:
    def only_text(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(**batch).text_embeds[:, 0].mean()

    changes, _, round_state = run(
        job_of(zoo.build("clip"), "share(last(1))", Few("clip", 0, 6), only_text)
    )
    moved = [change for change in changes.values() if change.any()]
    assert moved and all((change != 0).all() for change in moved)
    assert len(moved) == sum(
        r.is_trained for r in roles_of(zoo.build("clip"), "share(last(1))").values()
    )
    assert not round_state.slow_reason


def test_the_same_draws_give_the_same_model_whatever_torch_is_seeded_with() -> None:
    found = list[dict[str, Tensor]]()
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = zoo.build("bert")
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found.append(run(job_of(without_dropout(model), seed=seed))[0])
        assert torch.equal(state, torch.get_rng_state())
    other = run(job_of(zoo.build("bert")), seed=1)[0]
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])
    assert not any(torch.equal(found[0][k], other[k]) for k in other)


@pytest.mark.parametrize("plan", ["share()", "chain(share(), freeze(embed))"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_example_that_is_not_finite_counts_for_nothing(plan: str, value: float) -> None:
    spoiled, without = Few("vit", 0, 4), Few("vit", 0, 4)
    spoiled.rows["pixel_values"][2, 0, 0, 0] = value
    without.rows = {k: v[[0, 1, 3]] for k, v in without.rows.items()}
    for slow in (False, True):
        found = list[dict[str, Tensor]]()
        for rows in (spoiled, without):
            subject = seen(zoo.build("vit"), plan, rows)
            total = ClippedSum(subject.tensors, 0.5)
            (add_clipped_one_by_one if slow else ghost.add_ghost_clipped)(
                subject, torch.arange(len(rows)), total
            )
            assert total.non_finite == (len(rows) == 4)
            found.append(views(subject, total.sums))
        assert apart(found[1], found[0]) < 1e-5
    changes, _, round_state = run(job_of(zoo.build("vit"), plan, spoiled), uniform=everybody)
    assert round_state.non_finite == round_state.steps == 3 and not round_state.slow_reason
    assert all(change.isfinite().all() for change in changes.values())


def test_a_trial_that_shows_nothing_is_not_trusted() -> None:
    rows = Few("vit", 0, 4)
    rows.rows["pixel_values"][:2] = math.nan
    subject = seen(zoo.build("vit"), "share()", rows)
    assert ghost.why_not_ghost_clipping(subject) == "too few examples have a gradient to test it on"
    rows.rows["pixel_values"][0] = 1.0
    assert ghost.why_not_ghost_clipping(subject) == ""


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_both_ways_and_all_sizes_train_the_same_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    privately = replace(PRIVATELY, max_grad_norm=0.1, steps=2)
    train_arguments = TrainArguments(sgd(), lr=0.1)

    def trained_with(size: int) -> dict[str, Tensor]:
        job = job_of(
            without_dropout(zoo.build(name)), rows=Few(name, 0, 6), train_arguments=train_arguments
        )
        return run(job, replace(privately, microbatch_size=size))[0]

    found = [trained_with(size) for size in (1, 4, 16)]
    monkeypatch.setattr(private_fit, "why_not_ghost_clipping", lambda _: "because")
    found.append(trained_with(4))
    assert all(apart(found[0], each) < 1e-5 for each in found[1:])


def test_a_loss_that_compares_examples_is_refused() -> None:
    def contrastive(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(**batch, return_loss=True).loss

    for name in ("clip", "siglip"):
        with pytest.raises(PrivacyError, match="contrastive"):
            subject = seen(zoo.build(name), "share()", Few(name, 0, 4), contrastive)
            require_private_training(subject)


def test_losses_of_sums_and_of_unequal_rows_are_not_refused() -> None:
    def summed(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return distance_loss(model, batch) * len(batch["input_ids"])

    require_independent_examples(seen(zoo.build("bert"), "share()", Few("bert", 0, 4), summed))


def test_batch_norm_is_refused_by_name_unless_at_rest() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = zoo.build("vit")
            self.norm = nn.BatchNorm2d(3)

        def forward(self, pixel_values: Tensor) -> Any:
            return self.model(self.norm(pixel_values))

    model = Normed().train()
    tensors = [
        per_example.TrainedTensor(n, p)
        for n, p in model.named_parameters()
        if "head" in n or "classifier" in n
    ]
    subject = Objective(model, tuple(tensors), Few("vit", 0, 3), distance_loss)
    with pytest.raises(PrivacyError, match="norm of Normed is a BatchNorm2d"):
        require_independent_examples(subject)
    model.norm.eval()
    require_independent_examples(subject)


class TimeFirst(nn.Module):
    """A model whose layers see tokens first, and examples second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 6)
        self.dense = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.dense(self.embed(input_ids.T)).tanh().mean(0))


class Functional(nn.Module):
    """A model that uses a weight twice, once beside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 6)
        self.dense = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        found = self.dense(self.embed(input_ids)).tanh() @ self.dense.weight
        return self.head(found.mean(1))


@pytest.mark.parametrize("make", [TimeFirst, Functional])
def test_a_model_of_another_build_is_taken_one_by_one(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, rows = make(), Few("bert", 0, 4)
    tensors = tuple(per_example.TrainedTensor(n, p) for n, p in model.named_parameters())
    subject = Objective(model, tensors, rows, distance_loss)
    assert ghost.why_not_ghost_clipping(subject)
    expected = torch.autograd.grad(
        distance_loss(model, rows.batch(torch.tensor([1]))), [each.tensor for each in tensors]
    )
    assert apart(singly(subject, 1), dict(zip(singly(subject, 1), expected, strict=True))) == 0


def test_losses_that_ask_in_other_ways_are_taken_one_by_one() -> None:
    def twice(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return distance_loss(model, batch) + distance_loss(model, batch)

    def inner(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(**batch, labels=batch["input_ids"][:, 0] % 2).loss

    for loss, why in ((twice, "2 times"), (inner, "")):
        _, _, round_state = run(job_of(zoo.build("bert"), loss=loss))
        assert round_state.slow_reason and why in round_state.slow_reason


def test_a_layer_with_chance_inside_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf.ViTConfig(**zoo.VISION, hidden_dropout_prob=0.5)
    torch.manual_seed(0)
    model = hf.ViTForImageClassification(config)
    _, _, round_state = run(job_of(model, rows=Few("vit", 0, 6)), uniform=everybody)
    assert "gives another output when it runs again" in round_state.slow_reason
    assert round_state.examples == 18


class Mindful(nn.Module):
    """Scales a text by the longest that it has seen, or by chance of its own; a short one resets.

    As rotary embeddings of the type dynamic and Reformer do; no buffer changes.
    """

    def __init__(self, by_chance: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 2)
        self.longest, self.by_chance = 0, by_chance

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        length = input_ids.shape[1]
        self.longest = 0 if length <= 4 else max(self.longest, length)
        if self.by_chance:
            torch.seed()
        scale = torch.rand(()) if self.by_chance else max(self.longest, 4)
        return (self.embed(input_ids) * scale).mean()


@pytest.mark.parametrize("by_chance", [False, True])
def test_a_model_whose_gradients_cannot_be_repeated_is_refused(by_chance: bool) -> None:
    ids = RaggedArray.from_lists([[1] * size for size in (9, 9, 9, 8, 2)])
    rows = TokenSequences(ids, 0, torch.zeros(5))

    def mean_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(**batch)

    model = Mindful(by_chance)
    tensors = (per_example.TrainedTensor("embed.weight", model.embed.weight),)
    with pytest.raises(PrivacyError, match="remembers other examples, or is not deterministic"):
        per_example.require_private_training(Objective(model, tensors, rows, mean_loss))


def test_trials_leave_no_trace() -> None:
    model = add_lora(zoo.build("bert"), rank=2, on=query).train()
    subject = seen(model, "chain(freeze(), share(adapter))", Few("bert", 0, 4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = sum(len(m._forward_hooks) for m in model.modules())
    assert ghost.why_not_ghost_clipping(subject) == ""
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert hooks == sum(len(m._forward_hooks) for m in model.modules())
    assert "forward" not in vars(model) and model.training


def test_a_fit_says_its_steps_and_not_its_loss() -> None:
    noise, uniform = generated(0)
    fit = dp_sgd(PRIVATELY, noise=noise, uniform=uniform)
    done = fit(job_of(zoo.build("bert")))
    assert math.isnan(done.loss) and done.steps == 3 and not done.aux and not done.memory


def test_wraps_change_the_noisy_gradient() -> None:
    fit = proximal(0.5)(dp_sgd(replace(PRIVATELY, steps=1), noise=silent, uniform=nobody))
    model = zoo.build("bert")
    job = job_of(model)
    moved = {k: v + 1.0 for k, v in job.start.items()}
    before = get_values(model, job.roles)
    fit(replace(job, start=moved))
    for key, value in get_values(model, job.roles).items():
        torch.testing.assert_close(value, before[key] + 0.5)


def test_bf16_keeps_the_bound() -> None:
    for slow in (False, True):
        subject = replace(
            seen(zoo.build("bert"), "share()", Few("bert", 0, 4)), dtype=torch.bfloat16
        )
        total = ClippedSum(subject.tensors, 0.01)
        (add_clipped_one_by_one if slow else ghost.add_ghost_clipped)(
            subject, torch.tensor([1]), total
        )
        assert 0.009 < length(views(subject, total.sums)) <= 0.01
    changes, _, round_state = run(
        job_of(zoo.build("bert"), train_arguments=TrainArguments(precision="bf16"))
    )
    assert not round_state.slow_reason and all(
        change.isfinite().all() for change in changes.values()
    )


REFUSED: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "precision": "tf32",
    "torch_compile": "eager",
    "group_by_length": True,
    "num_workers": 1,
    "cache_activations": True,
}
"""Fields of TrainArguments with a value that DP-SGD refuses."""
TAKEN = {
    "optimizer",
    "lr",
    "lr_by_part",
    "lr_scheduler",
    "max_grad_norm",
    "decay_norm_and_bias",
    "precision",
    "gradient_checkpointing",
}
"""Fields of TrainArguments that DP-SGD uses; of precision bf16."""


def test_every_field_of_a_train_config_is_used_or_refused_by_name() -> None:
    """Or it says how many examples and steps, which are those of the guarantee."""
    own = {"epochs", "steps", "batch_size"}
    assert REFUSED.keys() | TAKEN | own == {f.name for f in fields(TrainArguments)}
    for name, value in [*REFUSED.items(), ("precision", "fp16")]:
        train_arguments = replace(TrainArguments(sgd()), **{name: value})
        with pytest.raises(PrivacyError, match=rf"train\.{name} cannot be used with"):
            run(job_of(zoo.build("bert"), train_arguments=train_arguments))


def test_its_steps_are_at_the_rates_of_the_schedule() -> None:
    """A step at a rate of zero moves nothing, and one at half the rate half as far."""
    moved = list[dict[str, Tensor]]()
    for number in (1, 2):
        schedule = LRSchedule("linear", rounds=2)
        job = replace(
            job_of(
                zoo.build("bert"), train_arguments=TrainArguments(sgd(), 1.0, lr_scheduler=schedule)
            ),
            round=number,
        )
        moved.append(run(job, replace(PRIVATELY, steps=1))[0])
    for key, change in moved[0].items():
        torch.testing.assert_close(change, moved[1][key] * 2, rtol=1e-3, atol=1e-6)
    warm = TrainArguments(sgd(), lr_scheduler=LRSchedule("linear", 1, rounds=2))
    still = run(job_of(zoo.build("bert"), train_arguments=warm), replace(PRIVATELY, steps=1))[0]
    assert not any(change.any() for change in still.values())


def test_checkpointing_changes_no_private_bit_that_matters() -> None:
    """Rows are then taken one by one, so that their sum may round elsewhere."""
    model, found = without_dropout(zoo.build("bert")), list[Any]()
    for on in (False, True):
        found.append(
            run(
                job_of(
                    deepcopy(model),
                    train_arguments=TrainArguments(sgd(), 1.0, gradient_checkpointing=on),
                )
            )
        )
    assert not found[0][2].slow_reason and "checkpointing" in found[1][2].slow_reason
    for key, change in found[0][0].items():
        torch.testing.assert_close(change, found[1][0][key], rtol=1e-3, atol=1e-5)


def test_noise_that_is_spread_over_places_is_refused() -> None:
    for source in (
        {"noise": lambda *_: silent((1,))},
        {"noise": lambda shape, *_: silent(shape).float()},
        {"uniform": lambda count: silent((1,))},
    ):
        with pytest.raises(PrivacyError, match="a random source returned"):
            run(job_of(zoo.build("bert")), **source)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_grad_norm", each) for each in (0.0, -1.0, math.nan, math.inf)),
        *(("noise_multiplier", each) for each in (-1.0, math.nan, math.inf)),
        *(("sampling_rate", each) for each in (0.0, 1.1, math.nan)),
        *(
            (name, each)
            for name in ("expected_batch_size", "steps", "microbatch_size")
            for each in (0, 1.5)
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(PrivacyError, match=f"{field} is"):
        replace(PRIVATELY, **{field: value})


@pytest.mark.parametrize("name", MODULES)
def test_no_chance_but_what_is_given(name: str) -> None:
    tree = ast.parse((Path(privacy.__file__).parent / "dpsgd" / f"{name}.py").read_text())
    words = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    words |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert not words & {"rand", "randn", "randint", "normal_", "uniform_", "bernoulli", "randperm"}
