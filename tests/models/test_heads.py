# SPDX-License-Identifier: Apache-2.0
"""Laws of heads: a head comes after the blocks and gives the answer, in every class of the zoo."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from typing import Any

import fifty
import pytest
import torch
import transformers as hf
import zoo
from torch import Tensor, nn

from fedplan.models.description import block_modules, describe
from fedplan.models.params import Kind

SETTINGS: dict[str, dict[str, Any]] = {
    "BeitForMaskedImageModeling": {"use_mask_token": True},
    "BeitForSemanticSegmentation": {
        "num_hidden_layers": 4,
        "stage_names": ["stem", "stage1", "stage2", "stage3", "stage4"],
        "out_indices": [1, 2, 3, 4],
    },
    "DeiTForMaskedImageModeling": {"encoder_stride": 4},
    "Wav2Vec2ForXVector": {
        "tdnn_dim": (8, 8, 8, 8, 8),
        "tdnn_kernel": (1, 1, 1, 1, 1),
        "tdnn_dilation": (1, 1, 1, 1, 1),
    },
    "SwinForMaskedImageModeling": {"encoder_stride": 4},
    "T5ForSequenceClassification": {"decoder_start_token_id": 0},
    "ViTForMaskedImageModeling": {"encoder_stride": 4},
}
LEFT_OUT = {"DetrForSegmentation"}
"""Needs a network of four stages below it, which no tiny one has."""
HOMES = zoo.ROWS | fifty.MODELS
AFTER = {Kind.HEAD, Kind.NORM, Kind.SCALE}
"""What may stand behind the last block."""


@functools.cache
def classes() -> dict[str, tuple[str, type[hf.PreTrainedModel]]]:
    """Every class that transformers has for a configuration of the zoo, with the zoo's name."""
    found = dict[str, tuple[str, type[hf.PreTrainedModel]]]()
    for name, (make, _) in HOMES.items():
        model = make()
        if isinstance(model, hf.PreTrainedModel):
            for each in vars(sys.modules[type(model).__module__]).values():
                if _is_model_of(each, type(model.config)):
                    found.setdefault(each.__name__, (name, each))
    return found


def _is_model_of(each: Any, config: type) -> bool:
    if not inspect.isclass(each) or not issubclass(each, hf.PreTrainedModel):
        return False
    public = getattr(hf, each.__name__, None) is each
    runs = each.forward.__name__ == "forward"
    return public and runs and each.config_class is config and each.__name__ not in LEFT_OUT


def built(name: str) -> tuple[nn.Module, zoo.Inputs]:
    """A tiny model of one class, without zeros that would hide an influence, and a batch for it."""
    home, wanted = classes()[name]
    torch.manual_seed(0)
    config = copy.deepcopy(HOMES[home][0]().config)
    config.update(SETTINGS.get(name, {}))
    if getattr(config.get_text_config(), "pad_token_id", 0) is None:
        config.pad_token_id = 0
    model = wanted(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if not tensor.any():
                tensor.normal_(0, 0.1)
    return model, batch_of(name, home)


def batch_of(name: str, home: str) -> zoo.Inputs:
    """A batch of what a class takes, taken from the zoo's."""
    batch, wanted = HOMES[home][1](), inspect.signature(classes()[name][1].forward).parameters
    batch = {k: v for k, v in batch.items() if k in wanted} or zoo.tokens()
    if "MultipleChoice" in name:
        batch = {k: v[:, None].repeat(1, 2, 1) for k, v in batch.items()}
    if "SequenceClassification" in name and batch.pop("decoder_input_ids", None) is not None:
        batch["input_ids"][:, -1] = HOMES[home][0]().config.eos_token_id
    if name == "BlipForQuestionAnswering":
        batch["decoder_input_ids"] = zoo.tokens()["input_ids"]
    if "MaskedImage" in name:
        patches = 64 if home == "swin" else 16
        batch["bool_masked_pos"] = torch.arange(2 * patches).reshape(2, patches) % 3 == 0
    return batch


def influences(model: nn.Module, batch: zoo.Inputs) -> tuple[set[str], set[str]]:
    """The names of what some block's output depends on, and of what the answer depends on."""
    given = list[Tensor]()
    hooks = [
        block.register_forward_hook(lambda _, __, out: given.append(_first(out)))
        for block in block_modules(model).values()
    ]
    out = model(**batch)
    answer = zoo.loss({k: v for k, v in out.items() if not _is_number(v)})
    for hook in hooks:
        hook.remove()
    inner = torch.stack([each.double().square().sum() for each in given]).sum()
    return _reached(model, inner), _reached(model, answer)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else _first(out[0])


def _reached(model: nn.Module, goal: Tensor) -> set[str]:
    model.zero_grad()
    goal.backward(retain_graph=True)
    return {n for n, t in model.named_parameters() if t.grad is not None and t.grad.any()}


@pytest.mark.parametrize("name", sorted(classes()))
def test_a_head_stands_behind_the_blocks_and_nothing_else_does(name: str) -> None:
    model, batch = built(name)
    params = describe(model)
    assert sum(p.numel for p in params) == sum(t.numel() for t in model.parameters())
    inner, outer = influences(model, batch)
    for p in params:
        if p.kind is Kind.HEAD:
            assert p.name not in inner and p.block is None, p.name
        elif p.name in outer - inner:
            assert p.kind in AFTER or p.block_id, p.name


def test_a_table_that_is_tied_to_the_head_is_embed_whoever_names_it_first() -> None:
    """XLM-RoBERTa holds its head before its backbone, RoBERTa behind it."""
    for name in ("XLMRobertaForMaskedLM", "RobertaForMaskedLM", "CamembertForCausalLM"):
        model, _ = built(name)
        params = describe(model)
        (table,) = [p for p in params if any("word_embeddings" in n for n in (p.name, *p.tied))]
        assert table.kind is Kind.EMBED and table.tied
        assert table.name in dict(model.named_parameters())
        heads = {p.name for p in params if p.kind is Kind.HEAD}
        assert {"lm_head.dense.weight", "lm_head.layer_norm.weight"} <= heads
