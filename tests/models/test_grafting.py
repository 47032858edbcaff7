# SPDX-License-Identifier: Apache-2.0
"""Laws of grafting: by its name an adapter is peft's own, and it is written and read whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import zoo
from attention import stir
from test_adapters import CHECKED, PLACES, SETTINGS, adapted, answer, config_of, grafted, host_of
from torch import Tensor, nn

from fedplan.errors import UnknownAdapter
from fedplan.models.adapters import FAMILIES, families_in
from fedplan.models.description import describe
from fedplan.models.grafting import (
    ALIASES,
    CONFIG,
    WEIGHTS,
    configured,
    family_named,
    graft,
    load_adapter,
    save_adapter,
)
from fedplan.models.values import take

pytestmark = pytest.mark.filterwarnings("ignore")

CAUSAL = "AutoModelForCausalLM"
LOST = {"P_TUNING"}
"""What peft saves as what it gives, without what it is made of."""


def bare_host(kind: str) -> nn.Module:
    """The host of `adapted`, without an adapter."""
    model = zoo.build(host_of(kind))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(10 if tensor.dim() == 2 else 1)
    return model.eval()


def said(config: Any) -> dict[str, Any]:
    """A configuration without what peft notes in it as it is put on a model."""
    noted = {"auto_mapping", "base_model_name_or_path", "peft_version"}
    return {name: value for name, value in config.to_dict().items() if name not in noted}


@pytest.mark.parametrize("kind", CHECKED)
def test_by_its_name_an_adapter_is_pefts_own(kind: str) -> None:
    wanted = config_of(kind, host_of(kind))
    settings = {k: v for k, v in SETTINGS.get(kind, {}).items()}
    for name in ("target_modules", "r"):
        if name in wanted.to_dict() and name not in settings and kind != "ADALORA":
            settings[name] = getattr(wanted, name)
    if kind == "ADALORA":
        settings["target_modules"] = wanted.target_modules
    settings = {k: sorted(v) if isinstance(v, set) else v for k, v in settings.items()}
    made = configured(kind.lower(), settings, CAUSAL if wanted.task_type else "")
    assert said(made) == said(wanted)


@pytest.mark.parametrize("kind", CHECKED)
def test_a_saved_adapter_gives_the_same_model_here_and_in_peft(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    stir(model, grafted(describe(model)))
    now = answer(host_of(kind), model)
    save_adapter(model, tmp_path / "saved")
    torch.manual_seed(7)
    theirs = peft.PeftModel.from_pretrained(bare_host(kind), str(tmp_path / "saved"))
    assert torch.equal(answer(host_of(kind), theirs), now)
    if kind in LOST:
        with pytest.raises(UnknownAdapter, match="without the encoder"):
            load_adapter(bare_host(kind), str(tmp_path / "saved"))
        return
    ours = load_adapter(bare_host(kind), str(tmp_path / "saved"))
    assert torch.equal(answer(host_of(kind), ours), now)
    same(take(ours, describe(ours)), take(model, describe(model)))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key
