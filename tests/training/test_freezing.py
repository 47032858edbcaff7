# SPDX-License-Identifier: Apache-2.0
"""Laws of marking: what is frozen does not move by a bit, and the rest does."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import zoo
from torch import Tensor, nn

from fedplan import Turn, chain, describe, freeze, parse, resolve, share
from fedplan.errors import FedplanError
from fedplan.language.parts import key, query
from fedplan.language.plan import Roles
from fedplan.models.params import Params
from fedplan.training.freezing import trainable

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.9, weight_decay=0.01),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2, weight_decay=0.1),
}
FROZEN = chain(share(), freeze(query | key))

# Parameters that these inputs leave out of the graph.
UNUSED = ("mask_token",)


def step(model: nn.Module, name: str, optimizer: torch.optim.Optimizer) -> None:
    zoo.loss(model(**zoo.feed(name))).backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module, params: Params) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters())
    return {p.key: p.view(tensors[p.name]).detach().clone() for p in params}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


def moved(model: nn.Module, params: Params, before: dict[str, Tensor]) -> set[str]:
    after = values(model, params)
    return {k for k in after if not torch.equal(bits(after[k]), bits(before[k]))}


def trained(roles: Roles) -> set[str]:
    return {p.key for p, role in roles.items() if role.is_trained}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_frozen_bits_stay_and_the_rest_moves(name: str, optimizer: str) -> None:
    model = zoo.build(name)
    params = describe(model)
    roles, before = resolve(FROZEN, params, Turn()), values(model, params)
    with trainable(model, roles) as trainable_params:
        running = OPTIMIZERS[optimizer](trainable_params.parameters())
        for _ in range(50):
            step(model, name, running)
        left = trained(roles) - moved(model, params, before)
    assert moved(model, params, before) <= trained(roles)
    assert {k for k in left if not any(word in k for word in UNUSED)} == set()


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_adapters_on_the_kernel_stay_and_those_on_the_value_move(name: str) -> None:
    if name == "torch":
        pytest.skip("peft makes new tensors of a packed attention each time it is asked for them")
    model = zoo.with_lora(name)
    with torch.no_grad():
        for n, tensor in model.named_parameters():
            if "lora_B" in n:
                tensor.normal_()
    params = describe(model)
    roles = resolve(
        parse("chain(freeze(), share(adapter), freeze(on(query | key)))"), params, Turn()
    )
    before = values(model, params)
    with trainable(model, roles) as trainable_params:
        running = OPTIMIZERS["adamw"](trainable_params.parameters())
        for _ in range(3):
            step(model, name, running)
    assert moved(model, params, before) == trained(roles)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", zoo.FUSED)
def test_marking_is_training_all_and_restoring_what_is_frozen(name: str, fused: bool) -> None:
    def adamw(ps: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, fused=fused)

    model, plain = zoo.build(name), zoo.build(name)
    params = describe(model)
    roles, before = resolve(FROZEN, params, Turn()), values(model, params)
    with trainable(model, roles) as trainable_params:
        running = adamw(trainable_params.parameters())
        for _ in range(5):
            step(model, name, running)
    running, tensors = adamw(plain.parameters()), dict(plain.named_parameters())
    for _ in range(5):
        step(plain, name, running)
        with torch.no_grad():
            for p, role in roles.items():
                if not role.is_trained:
                    p.view(tensors[p.name]).copy_(before[p.key])
    for n, tensor in model.named_parameters():
        assert torch.allclose(tensor, tensors[n], rtol=1e-5, atol=1e-7), n


@pytest.mark.parametrize("name", [*zoo.FUSED, "bert"])
def test_the_optimizer_remembers_only_what_is_trained(name: str) -> None:
    model = zoo.build(name)
    roles = resolve(FROZEN, describe(model), Turn())
    with trainable(model, roles) as trainable_params:
        running = OPTIMIZERS["adamw"](trainable_params.parameters())
        step(model, name, running)
    remembered = sum(
        t.numel() for state in running.state.values() for t in state.values() if t.dim() > 0
    )
    seen = sum(p.numel for p, role in roles.items() if role.is_trained)
    never = sum(p.numel for p in roles if any(word in p.name for word in UNUSED))
    assert remembered == 2 * (seen - never)


@pytest.mark.parametrize("name", [*zoo.FUSED, "bert"])
def test_accumulated_and_scaled_gradients_in_mixed_precision(name: str) -> None:
    model = zoo.build(name)
    params = describe(model)
    roles, before = resolve(FROZEN, params, Turn()), values(model, params)
    scaler = torch.amp.GradScaler("cpu")
    with trainable(model, roles) as trainable_params:
        running = OPTIMIZERS["adamw"](trainable_params.parameters())
        for _ in range(4):
            for _ in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = zoo.loss(model(**zoo.feed(name))) / 3
                scaler.scale(loss).backward()
            scaler.unscale_(running)
            nn.utils.clip_grad_norm_(trainable_params.parameters(), 1.0)
            scaler.step(running)
            scaler.update()
            running.zero_grad()
        assert moved(model, params, before) == trained(roles)


def test_accumulated_row_gradients_are_the_sum() -> None:
    model, params = zoo.build("gpt-neox"), describe(zoo.build("gpt-neox"))
    with trainable(model, resolve(FROZEN, params, Turn())) as trainable_params:
        rows = {n: t for n, t in trainable_params.named_parameters() if n.endswith("[value]")}
        zoo.loss(model(**zoo.feed("gpt-neox"))).backward()
        once = {n: t.grad.clone() for n, t in rows.items()}
        zoo.loss(model(**zoo.feed("gpt-neox"))).backward()
        assert rows
        for n, t in rows.items():
            assert torch.equal(t.grad, 2 * once[n])


def test_nothing_below_the_first_trained_block_gets_a_gradient() -> None:
    model = zoo.build("bert")
    roles = resolve(parse("chain(freeze(), share(blocks(1) | head))"), describe(model), Turn())
    with trainable(model, roles):
        hidden = model.bert.encoder.layer[0](torch.randn(1, 3, 16))
        assert not (hidden if isinstance(hidden, Tensor) else hidden[0]).requires_grad


def test_release_gives_the_flags_back() -> None:
    model = zoo.build("gpt2")
    model.transformer.wte.weight.requires_grad_(False)
    before = {n: t.requires_grad for n, t in model.named_parameters()}
    with trainable(model, resolve(parse("share(value)"), describe(model), Turn())):
        assert {n: t.requires_grad for n, t in model.named_parameters()} != before
    assert {n: t.requires_grad for n, t in model.named_parameters()} == before
    zoo.loss(model(**zoo.feed("gpt2"))).backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad is not None


def test_an_optimizer_of_the_whole_model_is_refused() -> None:
    model = zoo.build("gpt2")
    with trainable(model, resolve(FROZEN, describe(model), Turn())):
        torch.optim.AdamW(model.parameters())
        with pytest.raises(FedplanError, match=r"trainable_params\.parameters\(\)"):
            zoo.loss(model(**zoo.feed("gpt2"))).backward()


def test_a_model_cast_after_it_was_marked_is_refused() -> None:
    model = zoo.build("gpt2")
    with trainable(model, resolve(FROZEN, describe(model), Turn())) as trainable_params:
        torch.optim.AdamW(trainable_params.parameters())
        model.double()
        with pytest.raises(FedplanError, match="moved or cast"):
            zoo.loss(model(**zoo.feed("gpt2"))).backward()
