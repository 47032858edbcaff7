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
from often import first
from safetensors.torch import load_file, save_file
from test_adapters import CHECKED, SETTINGS, adapted, answer, config_of, grafted, host_of
from torch import Tensor, nn

from fedplan.errors import UnknownAdapter
from fedplan.models.adapters import (
    ALIASES,
    CONFIG,
    FAMILIES,
    WEIGHTS,
    adapter_families,
    adapter_family,
    add_adapter,
    load_adapter,
    make_peft_config,
    save_adapter,
)
from fedplan.models.description import describe
from fedplan.models.values import get_values

pytestmark = pytest.mark.filterwarnings("ignore")

CAUSAL = "AutoModelForCausalLM"
LOST = {"P_TUNING"}
"""What peft saves as what it gives, without what it is made of."""
BY_DAY = ["LORA", "IA3", "VERA", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "VBLORA", "ADALORA"]
ORDERED = [*BY_DAY, *(kind for kind in CHECKED if kind not in BY_DAY)]


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
    settings = dict(SETTINGS.get(kind, {}))
    if wanted.to_dict().get("target_modules"):
        settings["target_modules"] = sorted(wanted.target_modules)
    if "r" in wanted.to_dict() and kind != "ADALORA":
        settings.setdefault("r", wanted.r)
    made = make_peft_config(kind.lower(), settings, CAUSAL if wanted.task_type else "")
    assert said(made) == said(wanted)


@pytest.mark.parametrize("kind", first(len(BY_DAY), ORDERED))
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
    same(get_values(ours, describe(ours)), get_values(model, describe(model)))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def test_every_family_and_every_further_name_has_a_configuration() -> None:
    for name in (*FAMILIES, *ALIASES):
        family, _ = adapter_family(name)
        given = {"num_virtual_tokens": 2} if family in ("prompt_tuning", "prefix_tuning") else {}
        needed = {**given, **SETTINGS.get(family.upper(), {})}
        assert make_peft_config(name, needed).peft_type.value.lower() == family
    assert make_peft_config("dora", {}).use_dora and not make_peft_config("lora", {}).use_dora


def test_the_task_of_an_adapter_is_that_of_its_model() -> None:
    assert make_peft_config("lora", {}, CAUSAL).task_type == "CAUSAL_LM"
    assert make_peft_config("lora", {}, "AutoModelForImageClassification").task_type is None


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("loar", {}, "no adapter 'loar': did you mean lora"),
        ("XLORA", {}, "no adapter 'XLORA'"),
        ("lora", {"rank": 8}, "lora has no setting 'rank': did you mean"),
        ("vera", {"lora_alpha": 8}, "vera has no setting 'lora_alpha'"),
        ("lora", {"task_type": "CAUSAL_LM"}, "no setting 'task_type'"),
        ("lora", {"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' changes the model"),
    ],
)
def test_what_peft_does_not_know_is_refused_by_name(
    name: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnknownAdapter, match=told):
        make_peft_config(name, settings)


def test_a_second_adapter_is_refused() -> None:
    model = adapted("LORA")
    assert adapter_families(model) == ["lora"] and not adapter_families(zoo.build("bert"))
    with pytest.raises(UnknownAdapter, match="already has an adapter, of peft's lora"):
        add_adapter(model, config_of("LORA", "bert"))


def test_what_is_no_whole_adapter_is_not_loaded(tmp_path: Path) -> None:
    save_adapter(adapted("LORA"), tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    names = sorted(weights)
    save_file({name: weights[name] for name in names[1:]}, tmp_path / WEIGHTS)
    with pytest.raises(UnknownAdapter, match=r"does not fit this model: see .*lora_A"):
        load_adapter(bare_host("LORA"), str(tmp_path))
    strange = {"base_model.model.bert.nothing.lora_A.weight": torch.ones(1)}
    save_file(weights | strange, tmp_path / WEIGHTS)
    with pytest.raises(UnknownAdapter, match=r"does not fit this model: see .*nothing"):
        load_adapter(bare_host("LORA"), str(tmp_path))
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"peft_type": "OSF"}))
    with pytest.raises(UnknownAdapter, match="peft's osf, which fedplan does not train"):
        load_adapter(bare_host("LORA"), str(tmp_path))


def test_what_was_pickled_is_never_read(tmp_path: Path) -> None:
    save_adapter(adapted("LORA"), tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(UnknownAdapter, match=f"no {WEIGHTS} in it"):
        load_adapter(bare_host("LORA"), str(tmp_path))


def test_an_adapter_is_not_written_alone_where_more_was_trained(tmp_path: Path) -> None:
    plain, saving = adapted("LORA"), adapted("LORA", modules_to_save=["classifier"])
    names = {True: [], False: []}
    for model, saved in ((plain, False), (saving, True)):
        names[saved] = [p.name for p in describe(model) if "classifier" in p.name]
    with pytest.raises(UnknownAdapter, match=r"classifier.* was trained too"):
        save_adapter(plain, tmp_path / "plain", names[False])
    save_adapter(saving, tmp_path / "saving", names[True])
    assert any("classifier" in name for name in load_file(tmp_path / "saving" / WEIGHTS))
    with pytest.raises(UnknownAdapter, match="has no adapter"):
        save_adapter(zoo.build("bert"), tmp_path / "none")
