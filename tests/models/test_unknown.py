# SPDX-License-Identifier: Apache-2.0
"""Laws of models without an anatomy: any module runs, and what is not known is never guessed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from unittest.mock import patch

import fifty
import pytest
import sentences
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from test_description import require_partition
from torch import Tensor, nn

import fedplan as fp
from fedplan.errors import PlanError, UnknownArchitecture
from fedplan.language import parts
from fedplan.language.resolution import check_plan, require_known_part
from fedplan.models import architectures
from fedplan.models.catalog import manifest_json, read_manifest
from fedplan.models.description import describe
from fedplan.models.params import Kind, Params


class Own(nn.Module):
    """A norm that nobody would know by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.body = nn.LSTM(4, 4, batch_first=True)
        self.answer = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.answer(self.body(self.table(input_ids))[0])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)
    )


STRANGE: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "recurrent": Recurrent,
    "one layer": lambda: nn.Linear(2, 2),
    "scalar": lambda: nn.ParameterList([nn.Parameter(torch.tensor(1.0))]),  # type: ignore[return-value]
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "around torch": lambda: nn.Sequential(zoo.Torch().encoder, nn.Linear(16, 2)),
    "own norm": lambda: nn.Sequential(nn.Linear(4, 4), Own()),
    "no weights": nn.ReLU,
}
SURE = [
    "share()",
    "chain(freeze(),share(bias))",
    "chain(share(),keep(named('*weight')))",
    "hold(~bias)",
]
ANATOMICAL = [
    *("query", "key", "value", "out", "position", "kernel", "mlp", "router", "expert", "scale"),
    *("embed", "head", "cross", "body", "encoder", "blocks(0)", "first(1)", "last(1)"),
    *("~query", "bias | mlp", "~(head & bias)", "on(query)", "everything & ~value"),
]


@pytest.mark.parametrize("name", STRANGE)
def test_any_module_is_described(name: str) -> None:
    model = STRANGE[name]()
    params = describe(model)
    require_partition(model, params)
    assert {p.name for p in params} == set(dict(model.named_parameters()))
    for p in params:
        assert p.words <= set(parts.WORDS)
        assert p.uncertain <= set(parts.WORDS)


@pytest.mark.parametrize("name", ["convolutions", "recurrent", "own norm"])
def test_a_plan_without_anatomy_runs_on_any_module(name: str) -> None:
    params = describe(STRANGE[name]())
    for plan in SURE:
        roles = fp.resolve(fp.parse(plan), params, fp.Turn())
        assert set(roles) == set(params)


@pytest.mark.parametrize("part", ANATOMICAL)
@pytest.mark.parametrize("name", ["convolutions", "recurrent"])
def test_a_plan_that_names_a_part_in_doubt_is_refused(name: str, part: str) -> None:
    params = describe(STRANGE[name]())
    for plan in (f"share({part})", f"chain(share(), keep({part}))", f"best(1, {part})"):
        with pytest.raises(PlanError) as caught:
            check_plan(fp.parse(plan), params)
        if isinstance(caught.value, UnknownArchitecture):
            for word in (
                "model.layer_map_like",
                "fedplan.register_layer_map",
                "fedplan propose",
                "named(",
            ):
                assert word in str(caught.value)
        else:
            assert "matches no parameter" in str(caught.value)


def test_the_message_names_the_part_and_a_param_that_may_be_of_it() -> None:
    with pytest.raises(UnknownArchitecture, match=r"no layer map, .* '0\.weight' belongs to query"):
        check_plan(fp.parse("freeze(query)"), describe(convolutions()))
    with pytest.raises(UnknownArchitecture, match="belongs to blocks"):
        check_plan(fp.parse("chain(share(bias), best(1, bias))"), describe(convolutions()))


def test_norms_are_told_by_type_unless_a_vector_may_be_one_too() -> None:
    plan = fp.parse("chain(share(), keep(norm))")
    roles = fp.resolve(plan, describe(convolutions()), fp.Turn())
    assert {p.name for p, role in roles.items() if role.name == "KEEP"} == {"1.weight", "1.bias"}
    with pytest.raises(UnknownArchitecture, match=r"'1\.gain' belongs to norm"):
        check_plan(plan, describe(nn.Sequential(nn.LayerNorm(4), Own())))


def test_the_biases_of_recurrent_layers_are_biases() -> None:
    found = {p.name for p in describe(Recurrent()) if "bias" in p.tags}
    assert found == {"answer.bias", "body.bias_ih_l0", "body.bias_hh_l0"}


def test_what_adapters_need_is_refused_before_they_are_added() -> None:
    with pytest.raises(UnknownArchitecture, match="belongs to query"):
        require_known_part(parts.query, describe(convolutions()))


def test_a_manifest_keeps_the_doubts(tmp_path: object) -> None:
    from pathlib import Path

    params = describe(convolutions())
    file = Path(str(tmp_path), "mine.json")
    file.write_text(manifest_json(params))
    assert read_manifest(file) == params


TYPES = {
    "bert": ("bert",),
    "t5": ("t5",),
    "gpt2": ("gpt2",),
    "deberta-v2": ("deberta-v2",),
    "falcon": ("falcon",),
    "swin": ("swin",),
    "bart": ("bart",),
    "torch": ("Torch", "TransformerEncoder"),
    "clip": ("clip", "clip_text_model", "clip_vision_model"),
    "siglip": ("siglip", "siglip_text_model", "siglip_vision_model"),
    "dual": ("vision-text-dual-encoder", "bert", "vit"),
}
FORGOTTEN = [
    (name, frozenset(k for i, k in enumerate(keys) if bits >> i & 1))
    for name, keys in TYPES.items()
    for bits in range(1, 2 ** len(keys))
]


@cache
def forgotten(name: str, keys: frozenset[str]) -> Params:
    """A model described without some of the rows that tell of it."""
    rows = {key: row for key, row in architectures.LAYER_MAPS.items() if key not in keys}
    with patch.dict(architectures.LAYER_MAPS, rows, clear=True):
        return describe(zoo.build(name))


@cache
def known(name: str) -> Params:
    return describe(zoo.build(name))


@settings(max_examples=often(400))
@given(st.sampled_from(FORGOTTEN), sentences.ANY_PART)
def test_what_is_said_without_a_row_stays_true_with_it(
    case: tuple[str, frozenset[str]], part: parts.Part
) -> None:
    told: dict[str, set[bool]] = {}
    for p in known(case[0]):
        for name in {p.name, p.key}:
            told.setdefault(name, set()).add(part.holds(p))
    heads = {p.name for p in known(case[0]) if p.kind is Kind.HEAD}
    for p in forgotten(*case):
        # By type alone a norm is a norm, also where the row counts it to the head.
        if not part.is_uncertain(p) and not (p.name in heads and p.kind is Kind.NORM):
            assert told[p.key] == {part.holds(p)}, (p, part.text)


@pytest.mark.parametrize("name", [*TYPES, "mpnet", "mixtral", "wav2vec2", "segformer", "detr"])
def test_the_plainest_methods_run_without_any_row(name: str) -> None:
    model = zoo.build(name) if name in zoo.ROWS else fifty.build(name)
    with patch.dict(architectures.LAYER_MAPS, clear=True):
        params = describe(model)
    require_partition(model, params)
    for plan in ("share()", "chain(freeze(), share(bias | norm))"):
        if "bias" in plan and not any("bias" in p.tags for p in params):
            continue
        fp.resolve(fp.parse(plan), params, fp.Turn())
