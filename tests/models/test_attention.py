# SPDX-License-Identifier: Apache-2.0
"""Laws of listening: it hears what the model says of itself, keeps none, and leaves no trace."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from attention import fresh, look, stir, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from torch import Tensor, nn

import fedplan
from fedplan.errors import FedplanError
from fedplan.models.attention import (
    align_mask,
    attention_distance,
    attention_shift,
    capture_attention,
    token_mask,
)
from fedplan.models.description import block_modules, describe
from fedplan.models.params import Block, Kind
from fedplan.models.values import get_values

every = pytest.mark.parametrize("name", zoo.ARCHITECTURES)


def heard(model: nn.Module, batch: dict[str, Tensor]) -> dict[Block, Tensor]:
    """The first run of each block."""
    maps: dict[Block, Tensor] = {}
    capture_attention(model, batch, maps.setdefault)
    return maps


@every
def test_what_is_heard_is_what_the_model_returns(name: str) -> None:
    judge = zoo.build(name)
    for module in judge.modules():
        # Falcon cannot be asked for eager attention, and without it forgets the causal mask.
        getattr(module, "config", SimpleNamespace())._attn_implementation = "eager"
    truth = {b: seen for (b, cross), seen in look(name, judge).maps.items() if not cross}
    found = heard(fresh(name), zoo.feed(name))
    assert truth and found.keys() == block_modules(fresh(name)).keys()
    for block, seen in truth.items():
        torch.testing.assert_close(found[block], seen, rtol=0, atol=1e-6)


@every
def test_adapters_are_heard_through(name: str) -> None:
    plain, found = (
        heard(zoo.build(name), zoo.feed(name)),
        heard(zoo.with_lora(name), zoo.feed(name)),
    )
    assert list(found) == list(plain)
    for block, seen in plain.items():
        torch.testing.assert_close(found[block], seen, rtol=0, atol=1e-6)


@every
def test_probabilities_are_probabilities(name: str) -> None:
    for seen in heard(fresh(name), zoo.feed(name)).values():
        assert seen.dim() == 4 and (seen >= 0).all()
        torch.testing.assert_close(seen.sum(-1), torch.ones(seen.shape[:-1]))


@every
def test_listening_leaves_no_trace(name: str) -> None:
    model = fresh(name).train()
    next(iter(block_modules(model).values())).eval()
    before = trace(model)
    heard(model, zoo.feed(name))
    assert trace(model) == before


@pytest.mark.parametrize("name", ["bert", "t5", "clip", "falcon", "torch"])
def test_an_error_leaves_no_trace(name: str) -> None:
    model = fresh(name).train()
    before = trace(model)

    def refuse(block: Block, seen: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture_attention(model, zoo.feed(name), refuse)
    with pytest.raises(IndexError):
        capture_attention(
            model, {**zoo.feed(name), "input_ids": torch.full((2, 8), 999)}, lambda *_: None
        )
    assert trace(model) == before


def test_a_model_can_be_held_by_another() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = fresh("bert"), nn.Linear(2, 2)

        def forward(self, **inputs: Any) -> Any:
            return self.outer(self.inner(**inputs).logits)

    fedplan.register_layer_map("Holder", head="outer")
    model, batch = Holder(), zoo.feed("bert")
    plain = heard(fresh("bert"), batch)
    before = trace(model)
    assert "sdpa" in before["kernels"]
    for block, seen in plain.items():
        assert torch.equal(heard(model, batch)[block], seen)
    assert trace(model) == before


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "deberta-v2", "falcon", "torch"])
def test_no_map_but_the_last_is_kept(name: str) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def see(block: Block, seen: Tensor) -> None:
        # Some hold the last block's until the next is done.
        assert all(each() is None for each in alive[:-1])
        alive.append(weakref.ref(seen))

    capture_attention(fresh(name), zoo.feed(name), see)
    assert len(alive) == len(block_modules(fresh(name)))


def test_a_block_that_runs_twice_is_heard_twice() -> None:
    runs: list[Block] = []
    capture_attention(fresh("albert"), zoo.feed("albert"), lambda block, _: runs.append(block))
    assert runs == [Block("encoder", 0)] * 2


def test_the_model_is_not_given_labels() -> None:
    labels = torch.tensor([99, 99])
    assert heard(fresh("bert"), {**zoo.feed("bert"), "labels": labels})


def test_padded_rows_of_torchs_own_encoder_are_heard() -> None:
    class Masked(zoo.Torch):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            return self.head(self.encoder(hidden, src_key_padding_mask=attention_mask == 0))

    fedplan.register_layer_map("Masked", like="Torch")
    model = Masked()
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    for seen in heard(model, zoo.feed("torch") | {"attention_mask": mask}).values():
        assert seen.shape == (2, 4, 8, 8) and (seen[1, :, :, 5:] == 0).all()


def test_places_are_those_of_the_stack() -> None:
    mask, other = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1]])
    assert token_mask({"pixel_values": torch.ones(1, 3, 4, 4)}) is None
    assert token_mask({"attention_mask": mask}, "vision") is None
    both = {"attention_mask": mask, "decoder_input_ids": other, "decoder_attention_mask": other}
    assert token_mask(both, "encoder").tolist() == [[True, True, False]]
    assert token_mask(both, "decoder").tolist() == [[False, True]]
    assert token_mask({"attention_mask": mask}, "decoder").tolist() == [[True, True, False]]
    with pytest.raises(FedplanError, match=r"\[examples, tokens\]"):
        token_mask({"attention_mask": mask[None, None]})
    with pytest.raises(FedplanError, match="3 positions, but the attention map 2"):
        align_mask(mask, 2)


def maps(seed: int, rows: int, tokens: int, sharp: float) -> Tensor:
    noise = torch.randn(rows, 2, tokens, tokens, generator=torch.Generator().manual_seed(seed))
    return (noise * sharp).softmax(-1)


@settings(max_examples=often(200))
@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.sampled_from([0.0, 1.0, 100.0]))
def test_the_distance_is_the_mean_total_variation(
    data: st.DataObject, rows: int, tokens: int, sharp: float
) -> None:
    one, other = (maps(data.draw(st.integers(0, 99)), rows, tokens, sharp) for _ in range(2))
    real = data.draw(st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens))
    inside = torch.tensor(real).reshape(rows, tokens)
    slow = [
        sum(abs(one[r, h, i, j].item() - other[r, h, i, j].item()) for j in range(tokens)) / 2
        for r in range(rows)
        for h in range(2)
        for i in range(tokens)
        if inside[r, i]
    ]
    found = attention_distance(one, other, inside)
    assert found == pytest.approx(sum(slow) / len(slow) if slow else 0.0, abs=1e-6)
    assert 0 <= found <= 1 and found == attention_distance(other, one, inside)
    assert attention_distance(one, one) == 0


def test_maps_that_share_nothing_are_one_apart() -> None:
    one = torch.eye(4).expand(2, 3, 4, 4)
    assert attention_distance(one, one.roll(1, -1)) == 1


@pytest.mark.parametrize("name", ["bert", "gpt2", "albert", "bart", "swin"])
def test_attention_moves_from_the_block_whose_query_moved(name: str) -> None:
    model, params = fresh(name), describe(fresh(name))
    top = list(block_modules(model))[-1]
    query = [
        p for p in params if p.kind is Kind.QUERY and p.block_id == top and "cross" not in p.tags
    ]
    start, before = get_values(model, params), trace(model)
    stir(model, tuple(query))
    stirred = get_values(model, params)
    model.load_state_dict(fresh(name).state_dict())
    shifts = attention_shift(model, params, (start, stirred), zoo.feed(name))
    assert {block for block, shift in shifts.items() if shift > 0} == {top}
    assert all(0 <= shift <= 1 for shift in shifts.values())
    assert set(attention_shift(model, params, (stirred, stirred), zoo.feed(name)).values()) == {0}
    assert trace(model) == before
