# SPDX-License-Identifier: Apache-2.0
"""A loop of your own: it trains what is marked and nothing else, and ours written by you is ours."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import zoo
from clients import Few, few, loss
from settings import PROMPTED, SETTINGS
from torch import Tensor, nn

from fedplan.audits.ledger import verify_ledger
from fedplan.data.custom_task import CustomTask
from fedplan.errors import FedplanError, PrivacyError
from fedplan.federation.agreement import Agreement, require_private_method
from fedplan.language.parser import parse
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.language.resolution import permitted_roles, resolve
from fedplan.methods import METHODS, Method, fedprox, method_by_name
from fedplan.models.description import describe
from fedplan.models.values import get_values, set_values
from fedplan.privacy.guarantee import Guarantee
from fedplan.runners.local import Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.testing import check_method
from fedplan.training import (
    ExamplesDataset,
    FitResult,
    Job,
    TrainableParams,
    TrainArguments,
    attach,
    control_variates,
    plain_fit,
    proximal,
    sgd,
)

PACE = TrainArguments(sgd(momentum=0.9), lr=0.05, batch_size=2, steps=3)
PLANS = (
    "share()",
    "chain(share(), freeze(query | key))",
    "chain(freeze(), share(value), keep(head))",
)


class Text:
    """Rows of a language model, of different lengths."""

    def __init__(self, seed: int = 0, count: int = 6) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(3, 60, (3 + i % 3,), generator=draw) for i in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        chosen = [self.rows[i] for i in indices.tolist()]
        ids, mask, labels = (
            nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=fill)
            for each, fill in (
                (chosen, 0),
                ([torch.ones_like(c) for c in chosen], 0),
                (chosen, -100),
            )
        )
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    said = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 64,
        "n_positions": 16,
        "tie_word_embeddings": False,
    }
    config = hf.GPT2Config(**said, bos_token_id=1, eos_token_id=2, loss_type="ForCausalLM")
    return hf.GPT2LMHeadModel(config)


def text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def job_of(model: nn.Module, plan: str = "share()", **more: Any) -> Job:
    params = describe(model)
    roles = resolve(parse(plan), params, Turn(round=1, client="a"))
    said: dict[str, Any] = {
        "examples": Text(),
        "loss": text_loss,
        "train_arguments": PACE,
        "seed": 2**60 + 3,
    }
    return Job(model=model, roles=roles, start=get_values(model, params), **{**said, **more})


def moved(job: Job) -> set[str]:
    now = get_values(job.model, list(job.roles))
    return {p.key for p in job.roles if not torch.equal(now[p.key], job.start[p.key])}


def trained(job: Job) -> set[str]:
    return {p.key for p, role in job.roles.items() if role.is_trained}


def trainer_of(**said: Any) -> Callable[..., hf.Trainer]:
    """What makes a Trainer, with arguments of its own."""
    usual: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.05,
    }

    def trainer(
        model: nn.Module, rows: ExamplesDataset, trainable_params: TrainableParams
    ) -> hf.Trainer:
        return hf.Trainer(model, hf.TrainingArguments(**{**usual, **said}), train_dataset=rows)

    return trainer


def by_hand(
    weigh: Callable[[nn.Module, dict[str, Tensor]], Tensor], steps: int = PACE.steps
) -> Callable[..., float]:
    """What `plain` does with PACE, written by somebody who knows nothing of jobs."""

    def loop(model: nn.Module, rows: ExamplesDataset, trainable_params: TrainableParams) -> float:
        optimizer = torch.optim.SGD(trainable_params.parameters(), lr=PACE.lr, momentum=0.9)
        order, losses = torch.Generator().manual_seed(torch.initial_seed()), list[float]()
        while len(losses) < steps:
            for indices in torch.randperm(len(rows), generator=order).split(2):
                if len(losses) < steps:
                    found = weigh(model, rows.batch(indices))
                    found.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(found.item())
        return sum(losses) / len(losses)

    return loop


@pytest.mark.parametrize("around", ["plain", "proximal", "controlled"])
@pytest.mark.parametrize("plan", PLANS)
def test_our_loop_written_by_somebody_else_has_its_bits(plan: str, around: str) -> None:
    wrap = {"plain": lambda fit: fit, "proximal": proximal(0.5), "controlled": control_variates}[
        around
    ]
    jobs = [job_of(gpt2(), plan) for _ in range(2)]
    fits = (plain_fit, attach(by_hand(text_loss)))
    ours, theirs = (wrap(fit)(job) for fit, job in zip(fits, jobs, strict=True))
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-12) and ours.steps == theirs.steps
    values = [get_values(job.model, list(job.roles)) for job in jobs]
    assert all(torch.equal(values[0][key], values[1][key]) for key in values[0])
    assert moved(jobs[1]) == trained(jobs[1])
    for key, value in ours.aux.items():
        assert torch.allclose(value, theirs.aux[key], rtol=1e-6, atol=1e-9), key


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_other_models_have_it_too(name: str) -> None:
    rows = Few(name, 0, 6)
    jobs = [job_of(zoo.build(name), PLANS[1], examples=rows, loss=loss) for _ in range(2)]
    plain_fit(jobs[0])
    attach(by_hand(loss))(jobs[1])
    values = [get_values(job.model, list(job.roles)) for job in jobs]
    assert all(torch.equal(values[0][key], values[1][key]) for key in values[0])


@pytest.mark.parametrize("plan", PLANS)
def test_a_trainer_moves_what_is_marked_and_nothing_else(plan: str) -> None:
    """Decay and momentum would move frozen rows of a fused tensor."""
    one, other = (job_of(gpt2(), plan) for _ in range(2))
    fit = attach(trainer_of(weight_decay=0.5))
    done, again = fit(one), fit(other)
    assert done.steps == 3 and done.loss == again.loss > 0 and moved(one) == trained(one)
    values = [get_values(job.model, list(job.roles)) for job in (one, other)]
    assert all(torch.equal(values[0][key], values[1][key]) for key in values[0])
    assert not one.model.training and all(p.requires_grad for p in one.model.parameters())


def test_a_trainers_seed_is_the_jobs() -> None:
    jobs = [job_of(gpt2(), seed=seed) for seed in (1, 1, 2)]
    before = torch.random.get_rng_state()
    losses = [attach(trainer_of())(job).loss for job in jobs]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_trainer_has_the_class_and_the_groups_of_its_arguments() -> None:
    """By plain SGD with decay, a step of a Trainer is a step that anybody can write."""
    said = {"optim": "sgd", "max_steps": 1, "weight_decay": 0.5, "lr_scheduler_type": "constant"}
    job = job_of(gpt2().eval(), PLANS[1], examples=Text(count=2))
    for module in job.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin = gpt2()
    # A Trainer divides the sum over targets by the labels that are there, the first of a row too.
    twin.eval()(**job.examples.batch(torch.arange(2)), num_items_in_batch=7).loss.backward()
    attach(trainer_of(**said, max_grad_norm=0.0))(job)
    gradients = {name: weight.grad for name, weight in twin.named_parameters()}
    for p, role in job.roles.items():
        gradient = p.view(gradients[p.name])
        decay = 0.5 * job.start[p.key] if _decays(p.name) else 0.0
        expected = job.start[p.key] - 0.05 * (gradient + decay) * role.is_trained
        found = get_values(job.model, [p])[p.key]
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6), p.key


def _decays(name: str) -> bool:
    return "bias" not in name and "ln_" not in name


def test_a_trainer_clips_rows_of_fused_tensors_too() -> None:
    said = {"optim": "sgd", "max_steps": 1, "lr_scheduler_type": "constant", "max_grad_norm": 1e-5}
    job = job_of(gpt2(), "chain(freeze(), share(query))")
    attach(trainer_of(**said))(job)
    now = get_values(job.model, list(job.roles))
    far = sum(float((now[p.key] - job.start[p.key]).square().sum()) for p in job.roles) ** 0.5
    assert far == pytest.approx(0.05 * 1e-5, rel=1e-2)


def test_fedprox_pulls_a_trainer() -> None:
    def far(strength: float) -> float:
        job = job_of(gpt2())
        said = {"optim": "sgd", "max_steps": 12, "max_grad_norm": 0.0, "learning_rate": 0.1}
        proximal(strength)(attach(trainer_of(**said)))(job)
        now = get_values(job.model, list(job.roles))
        return sum(float((now[k] - job.start[k]).square().sum()) for k in now) ** 0.5

    assert far(5.0) < 0.6 * far(0.0)


def test_scaffold_goes_by_the_rates_that_a_trainer_took() -> None:
    """With plain steps a control is the mean gradient, weighed by the rates of the schedule."""
    job = job_of(gpt2(), examples=Text(count=2))
    said = {"optim": "sgd", "max_steps": 1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    found = [
        control_variates(attach(trainer_of(**said, learning_rate=rate)))(
            replace(job, model=gpt2())
        ).aux
        for rate in (0.25, 0.5)
    ]
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-3, atol=1e-5), key


def test_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    said = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "eval_strategy": "no"}
    job = job_of(gpt2())
    arguments = hf.TrainingArguments(**said, max_steps=2, per_device_train_batch_size=2)
    fit = attach(lambda model, rows, _: hf.Trainer(model, arguments, train_dataset=rows))
    fit(job)
    fit(job)
    assert os.listdir(tmp_path) == [] and capsys.readouterr().out == ""
    assert arguments.save_strategy == "steps" and arguments.max_grad_norm == 1.0


def test_mixed_precision_leaves_the_model_as_it_was() -> None:
    job = job_of(gpt2())
    forward = job.model.forward
    attach(trainer_of(bf16=True, use_cpu=True))(job)
    assert job.model.forward == forward


TRIED = [name for name in METHODS if name not in {*PROMPTED, "diloco"}]
"""Methods that go with an own loop; DiLoCo refuses it."""
LATER = ("fedavg", "fedfrozen", "fedrep", "fedadam")
FUSED, WHOLE = ("gpt-neox", "phi3"), ("bert", "vit", "llama")


def with_a_loop(name: str) -> Method:
    return replace(method_by_name(name, SETTINGS.get(name)), loop=attach(by_hand(loss, steps=1)))


@pytest.mark.parametrize("name", TRIED)
def test_every_method_goes_with_a_loop_of_ones_own(name: str, tmp_path: Path) -> None:
    """The ledger proves what rested; a client's own is its own. Fused rows and whole, in turn."""
    kinds = FUSED if TRIED.index(name) % 2 else WHOLE
    kind = "bert" if name == "bitfit" else kinds[TRIED.index(name) % len(kinds)]
    made, model, rows = with_a_loop(name), zoo.build(kind), few(kind)
    torch.manual_seed(0)
    model = made.adapt(model) if made.adapt is not None else model
    run_of(made, model, rows, loss, tmp_path)


def run_of(
    made: Method, model: nn.Module, rows: Mapping[str, Any], weigh: Any, folder: Path
) -> None:
    """Play two rounds, and check the ledger and the homes."""
    agreement = Agreement("loops", describe(model), made, PACE)
    whole = Federation(agreement, model, rows, weigh, folder, rounds=2)
    for _ in range(2):
        round_state = whole.run_round()
        assert not round_state.rejected
        whole.commit(round_state)
    assert not verify_ledger(agreement, read_json_lines(folder / "ledger.jsonl"))
    one, other = (whole.clients[client].journal.client_state()[0] for client in rows)
    turn = Turn(round=2, client=next(iter(rows)), phase=whole.global_state.phase)
    roles = permitted_roles(made.plan, agreement.params, turn)
    kept = {p.key for p, role in roles.items() if role is Role.KEEP}
    assert kept <= one.keys() & other.keys()
    # Beside a factor B near zero, what one step of SGD adds to A is less than its rounding.
    moved = {key for key in kept if "lora_A" not in key}
    assert not any(torch.equal(one[key], other[key]) for key in moved)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*FUSED, *WHOLE])
@pytest.mark.parametrize("name", TRIED)
def test_every_method_keeps_all_its_laws_with_a_loop_of_ones_own(name: str, kind: str) -> None:
    if name == "bitfit" and kind in ("llama", "phi3"):
        pytest.skip("they have no biases")
    check_method(with_a_loop(name), zoo.build(kind), few(kind), loss)


@pytest.mark.parametrize(
    "name", ["fedper", "scaffold", *(pytest.param(m, marks=pytest.mark.nightly) for m in LATER)]
)
def test_a_trainer_keeps_the_laws_of_a_round(name: str, tmp_path: Path) -> None:
    made = replace(method_by_name(name, SETTINGS.get(name)), loop=attach(trainer_of(max_steps=1)))
    run_of(made, gpt2(), {"a": Text(1), "b": Text(2)}, text_loss, tmp_path)


def _whole(model: nn.Module, rows: ExamplesDataset, trainable_params: TrainableParams) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    text_loss(model, rows.batch(torch.arange(2))).backward()
    optimizer.step()


def _twice(model: nn.Module, rows: ExamplesDataset, trainable_params: TrainableParams) -> None:
    weights = list(trainable_params.parameters())
    text_loss(model, rows.batch(torch.arange(2))).backward()
    for half in (weights[::2], weights[1::2]):
        torch.optim.SGD(half, lr=0.1).step()


def _asks(model: nn.Module, rows: ExamplesDataset, trainable_params: TrainableParams) -> None:
    text_loss(model, rows.batch(torch.arange(2))).backward()
    torch.optim.SGD(trainable_params.parameters(), lr=0.1).step(lambda: 0.0)


def _several(model: nn.Module, rows: ExamplesDataset, trainable_params: TrainableParams) -> None:
    weights = list(trainable_params.parameters())
    text_loss(model, rows.batch(torch.arange(2))).backward()
    groups = [{"params": weights[::2]}, {"params": weights[1::2], "lr": 0.2}]
    torch.optim.SGD(groups, lr=0.1).step()


def _replaces(model: Any, rows: ExamplesDataset, trainable_params: TrainableParams) -> None:
    model.transformer.wte = copy.deepcopy(model.transformer.wte)


def _casts(model: Any, rows: ExamplesDataset, trainable_params: TrainableParams) -> None:
    weight = model.transformer.h[0].attn.c_attn.weight
    weight.data = weight.data.bfloat16()


def _idles(model: nn.Module, rows: ExamplesDataset, trainable_params: TrainableParams) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("loop", "plan", "wrap", "words"),
    [
        (_whole, PLANS[1], None, "is trained in part, and the loop's optimizer holds all"),
        (_twice, PLANS[0], proximal(0.1), "the loop has two optimizers"),
        (_asks, PLANS[0], proximal(0.1), "calls a closure"),
        (_several, PLANS[0], control_variates, "SCAFFOLD needs one learning rate"),
        (_replaces, PLANS[0], None, "replaced transformer.wte.weight in the model"),
        (_casts, PLANS[1], None, "cast transformer.h.0.attn.c_attn.weight to torch.bfloat16"),
        (_idles, PLANS[0], None, r"the loop took no step with .* build its"),
        (lambda *_: "0.5", PLANS[0], None, "the loop returned a str: return the mean loss"),
        (lambda *_: torch.ones(3), PLANS[0], None, "returned a tensor of 3 values: return the"),
        (
            lambda model, rows, trainable_params: trainer_of()(gpt2(), rows, trainable_params),
            PLANS[0],
            None,
            "has another model",
        ),
        (trainer_of(optim="galore_adamw", optim_target_modules=["attn"]), PLANS[0], None, "galore"),
    ],
)
def test_what_would_break_the_plan_or_the_method_is_refused(
    loop: Any, plan: str, wrap: Any, words: str
) -> None:
    fit = attach(loop)
    with pytest.raises((FedplanError, ImportError), match=words):
        (wrap(fit) if wrap else fit)(job_of(gpt2(), plan))


@pytest.mark.parametrize("loop", [_twice, _asks, _several])
def test_what_no_method_changes_is_free(loop: Any) -> None:
    job = job_of(gpt2())
    done = attach(loop)(job)
    assert done.steps >= 1 and done.loss != done.loss


def test_of_nothing_to_train_nothing_is_asked() -> None:
    for job in (job_of(gpt2(), "freeze()"), job_of(gpt2(), examples=Text(count=0))):
        done = attach(by_hand(text_loss))(job)
        assert done.steps == 0 and done.loss != done.loss and not moved(job)


def test_a_loop_of_ones_own_hides_no_examples() -> None:
    guarantee = Guarantee("example", 900.0, 1e-5, 1.0, 1.0, 0.5, 2, 2)
    with pytest.raises(PrivacyError, match="no client hooks, no loop"):
        require_private_method(guarantee, Method(parse("share()"), loop=attach(by_hand(loss))))
    require_private_method(guarantee, Method(parse("share()")))
    require_private_method(
        Guarantee("client", 9.0, 1e-5, 1.0, 1.0, 0.5), Method(parse("share()"), loop=attach(_idles))
    )


def test_a_loop_is_part_of_what_is_agreed() -> None:
    made = [
        Method(parse("share()"), loop=loop) for loop in (plain_fit, attach(_idles), attach(_asks))
    ]
    assert len({each.lines for each in made}) == 3
    assert "loop plain" in made[0].lines
    assert any(line.startswith("loop attach(") and "_idles#" in line for line in made[1].lines)
    assert made[1].with_training_of(fedprox()).loop is made[1].loop
    assert fedprox().with_training_of(made[1]).loop is made[1].loop
    assert replace(made[1], client_hooks=(proximal(0.1),)).fit is not made[1].loop


def _adds(model: Any, rows: ExamplesDataset, trainable_params: TrainableParams) -> None:
    """All that Trainers leave: a head, a hook, another forward, no dropout, a changed config."""
    model.value_head = nn.Linear(16, 1)
    model.transformer.wte.register_forward_hook(lambda *_: None)
    model.transformer.forward = model.transformer.forward
    model.transformer.drop.p = 0.0
    model.config.pad_token_id, model.config.added = 3, True
    model.transformer.wte.register_buffer("more", torch.zeros(2))
    weights = [*trainable_params.parameters(), *model.value_head.parameters()]
    loss = text_loss(model, rows.batch(torch.arange(2)))
    (loss + model.value_head(torch.ones(16))).sum().backward()
    torch.optim.SGD(weights, lr=0.1).step()


def _state(model: Any) -> Any:
    """All of a model that a loop must leave as it is, without values."""
    modules = {
        name: {k: copy.copy(v) for k, v in vars(module).items() if k != "training"}
        for name, module in model.named_modules()
    }
    return modules, dict(vars(model.config))


def test_what_a_loop_adds_for_itself_is_gone_after_the_turn() -> None:
    job = job_of(gpt2(), PLANS[2])
    before = _state(job.model)
    done = attach(_adds)(job)
    assert done.steps == 1 and moved(job) == trained(job)
    after = _state(job.model)
    assert after[0].keys() == before[0].keys() and after[1] == before[1]
    for name, attributes in before[0].items():
        assert after[0][name].keys() == attributes.keys()
        for key, value in attributes.items():
            if not isinstance(value, Tensor) and key not in ("_parameters", "_buffers"):
                assert after[0][name][key] == value, (name, key)
            elif isinstance(value, dict):
                assert after[0][name][key].keys() == value.keys()


def _step(model: Any, rows: ExamplesDataset, trainable_params: TrainableParams) -> Any:
    """One step of SGD, which leaves its gradients."""
    loss = text_loss(model, rows.batch(torch.arange(2)))
    loss.backward()
    torch.optim.SGD(trainable_params.parameters(), lr=0.1).step()
    return loss


def _after(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A loop that trains one step, and then changes its model."""

    def loop(model: Any, rows: ExamplesDataset, trainable_params: TrainableParams) -> Any:
        loss = _step(model, rows, trainable_params)
        change(model)
        return loss

    return loop


def _set_weight(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _add_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.ones(64))


def _swap_class(model: Any) -> None:
    model.lm_head.__class__ = type("Other", (nn.Linear,), {"forward": lambda *_: None})


def _double(weight: Any) -> None:
    weight.grad.mul_(2)


def _hook_params(model: Any) -> None:
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient * 3)
        weight.register_post_accumulate_grad_hook(_double)


def _unset_gradients(model: Any) -> None:
    torch.set_grad_enabled(False)


def _raise(model: Any) -> None:
    model.transformer.wte.register_forward_hook(lambda *_: None)
    model.config.pad_token_id = 9
    model.half()
    _set_weight(model)
    raise ValueError("on purpose")


def _tied() -> nn.Module:
    model: Any = gpt2()
    model.lm_head.weight = model.transformer.wte.weight
    return model


CHANGES: tuple[tuple[Callable[..., Any], Callable[[], nn.Module], str], ...] = (
    (lambda model: None, gpt2, ""),
    (_add_bias, gpt2, ""),
    (_swap_class, gpt2, ""),
    (_hook_params, gpt2, ""),
    (_unset_gradients, gpt2, ""),
    (_raise, gpt2, "on purpose"),
    (lambda model: model.half(), gpt2, ""),
    (lambda model: setattr(model, "config", hf.BertConfig()), gpt2, ""),
    (lambda model: model.resize_token_embeddings(70), gpt2, "the loop replaced lm_head.weight"),
    (lambda model: model.resize_token_embeddings(70), _tied, "changed the shape|replaced"),
    (_set_weight, gpt2, "the loop replaced lm_head.weight"),
    (_set_weight, _tied, "the loop replaced lm_head.weight"),
    (lambda model: setattr(model.lm_head, "weight", model.transformer.wte.weight), gpt2, "replac"),
    (lambda model: delattr(model, "lm_head"), gpt2, "the loop replaced lm_head.weight"),
    (lambda model: model.transformer.h.pop(1), gpt2, "the loop replaced transformer.h.1"),
)


@pytest.mark.parametrize(("change", "build", "words"), CHANGES)
def test_the_next_turn_cannot_tell_what_a_loop_did_to_the_model(
    change: Any, build: Callable[[], nn.Module], words: str
) -> None:
    """Clients of one process train the same model: all but its values is as it was, or refused."""
    model, fresh = build(), build()
    job = job_of(model)
    if words:
        with pytest.raises((FedplanError, ValueError), match=words):
            attach(_after(change))(job)
    else:
        assert attach(_after(change))(job).steps == 1 and moved(job)
    assert torch.is_grad_enabled()
    names = dict(model.named_parameters(remove_duplicate=False))
    assert names.keys() == dict(fresh.named_parameters(remove_duplicate=False)).keys()
    set_values(model, job.start, list(job.roles))
    for each in (model, fresh):
        attach(by_hand(text_loss))(job_of(each))
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other) and one.dtype is other.dtype and one.grad is None


def test_an_adapter_that_a_loop_leaves_merged_is_refused() -> None:
    """Its product is in the weights already, and the next turn would add it again."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    model = peft.get_peft_model(gpt2(), lora)
    with pytest.raises(FedplanError, match="the loop left an adapter merged into base_model"):
        attach(_after(lambda model: model.merge_adapter()))(job_of(model))
    model = peft.get_peft_model(gpt2(), lora)
    done = attach(_after(lambda model: [model.merge_adapter(), model.unmerge_adapter()]))
    assert done(job_of(model)).steps == 1


def test_a_loops_own_random_numbers_are_the_turns() -> None:
    def loop(model: Any, rows: ExamplesDataset, trainable_params: TrainableParams) -> float:
        _step(model, rows, trainable_params)
        return random.random() + np.random.rand()

    random.seed(5)
    np.random.seed(5)
    losses = [attach(loop)(job_of(gpt2(), seed=seed)).loss for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    after = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    assert after == (random.random(), np.random.rand())


def test_a_head_that_a_trainer_adds_is_trained_and_clipped_and_gone() -> None:
    heads = list[nn.Linear]()

    class Valued(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs).loss + model.value_head(torch.full((16,), 100.0)).sum()

    def trainer(model: Any, rows: ExamplesDataset, _: TrainableParams) -> hf.Trainer:
        model.value_head = nn.Linear(16, 1)
        model.value_head.bias.requires_grad_(False)
        heads.append(copy.deepcopy(model.value_head))
        heads.append(model.value_head)
        model.requires_grad_(False)  # as peft does when a Trainer adds an adapter
        model.value_head.weight.requires_grad_(True)
        said: Any = {"optim": "sgd", "max_steps": 1, "learning_rate": 1.0, "max_grad_norm": 0.5}
        arguments = hf.TrainingArguments(**said, lr_scheduler_type="constant", use_cpu=True)
        return Valued(model, arguments, train_dataset=rows)

    job = job_of(gpt2(), PLANS[1])
    attach(trainer)(job)
    before, after = heads
    far = (after.weight - before.weight).norm().item()
    assert 0.45 < far <= 0.5 and torch.equal(after.bias, before.bias)
    assert "value_head" not in dict(job.model.named_modules()) and moved(job) == trained(job)


def test_a_trained_param_that_a_loop_casts_is_cast_back() -> None:
    def loop(model: Any, rows: ExamplesDataset, trainable_params: TrainableParams) -> None:
        for weight in trainable_params.parameters():
            weight.data = weight.data.bfloat16()
        _whole(model.bfloat16(), rows, trainable_params)

    job = job_of(gpt2())
    attach(loop)(job)
    assert {p.dtype for p in job.model.parameters()} == {torch.float32}
    # A step may be less than the rounding of bfloat16 beside a norm's ones.
    assert trained(job) >= moved(job) >= {key for key in trained(job) if "mlp" in key}


def test_a_loop_gets_the_rows_as_they_were_given() -> None:
    from datasets import Dataset

    entries = [{"prompt": "a", "chosen": "b" * i, "none": None} for i in range(3)]
    given: Any
    for given in (entries, Dataset.from_list(entries)):
        rows = ExamplesDataset(CustomTask().prepare(given))
        assert list(rows.raw_rows) == entries and rows.to_table().to_list() == entries
        rows.to_table().set_format("numpy")
        if isinstance(given, list):
            rows.raw_rows.pop()
            rows.raw_rows[0]["prompt"] = "z"
        # A loop's changes are its own: the next turn and the scores have the rows that were given.
        assert list(given) == list(rows.examples.raw_rows) == entries
    for wrong, words in (
        (Few("bert", 0, 3), "Few keeps prepared examples"),
        ([1, 2], "a row is a int"),
    ):
        with pytest.raises(FedplanError, match=words):
            ExamplesDataset(CustomTask().prepare(wrong)).to_table()


def test_rows_are_a_dataset_of_torch_and_of_hugging_face() -> None:
    rows = ExamplesDataset(Text())
    loader = torch.utils.data.DataLoader(rows, batch_size=3)
    for batch, indices in zip(loader, torch.arange(6).split(3), strict=True):
        for name, values in rows.batch(indices).items():
            assert torch.equal(batch[name], values)
    assert [len(row["input_ids"]) for row in rows.to_hf_dataset()] == [3, 4, 5, 3, 4, 5]


def words() -> Any:
    """A tokenizer of sixty words."""
    from tokenizers import Tokenizer, models

    known = {"<pad>": 0, "<end>": 2, **{f"w{i}": i for i in range(3, 60)}, "<unk>": 1}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.mark.nightly
def test_a_trainer_of_trl_follows_a_plan(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    tokenizer = words()
    said = SFTConfig(max_steps=2, per_device_train_batch_size=2, learning_rate=0.05, bf16=False)

    def trainer(model: nn.Module, rows: ExamplesDataset, trainable_params: TrainableParams) -> Any:
        return SFTTrainer(
            model, said, train_dataset=rows.to_hf_dataset(), processing_class=tokenizer
        )

    job = job_of(gpt2(), PLANS[1])
    done: FitResult = attach(trainer)(job)
    assert done.steps == 2 and moved(job) == trained(job)
