# SPDX-License-Identifier: Apache-2.0
"""DualEncoder: an image classifier made of a CLIP-like model and one text per class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.models.architectures import BRIDGE, DUALS, EMBEDDINGS, RESIZED, TOWERS
from fedplan.models.catalog import load_pretrained

TEMPLATE = "a picture of a {}"
"""Default template for the text of a class."""


class ModelError(FedplanError):
    """A model cannot be built, changed or loaded with the given settings."""

    code = "model"


@final
class DualEncoder(nn.Module):
    """Classifies images by their similarity to one text per class: `model(pixel_values)` -> logits.

    Built by `make_dual_encoder` or `load_dual_encoder`. `backbone` is a CLIPModel or a
    VisionTextDualEncoderModel. `ids` and `mask` (classes x tokens) are the tokenized texts,
    `template` the sentence around a class name, `lead` its number of tokens before the name,
    without the first special token. `prompts`, `fusion` and `prompt_config` are None until
    `add_prompts`. Raises ModelError if the backbone is of another type, or a text is too long.
    """

    ids: Tensor
    mask: Tensor
    prompts: nn.Module | None
    fusion: nn.Module | None

    def __init__(
        self,
        backbone: nn.Module,
        ids: Tensor,
        mask: Tensor,
        *,
        names: Sequence[str],
        template: str = TEMPLATE,
        lead: int = 0,
    ) -> None:
        super().__init__()
        self.config: Any = cast("Any", backbone).config
        if self.config.model_type not in DUALS:
            raise ModelError(
                f"{type(backbone).__name__} is no supported dual encoder; "
                f"use one of {', '.join(DUALS.values())}"
            )
        self.backbone = backbone
        self.names, self.template, self.lead = tuple(names), template, lead
        self.prompt_config: object = None
        self.register_module("prompts", None)
        self.register_module("fusion", None)
        self.set_texts(ids, mask)
        if self.config.vision_config.model_type in RESIZED:
            embeddings = self.embeddings("vision")
            embeddings.register_forward_pre_hook(_interpolate_positions, with_kwargs=True)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """The logits (images x classes) of a batch of images."""
        output = self.backbone(
            input_ids=self.ids, attention_mask=self.mask, pixel_values=pixel_values
        )
        return output.logits_per_image

    def train(self, mode: bool = True) -> DualEncoder:
        """Set the training mode; a backbone with prompts is frozen and stays in eval mode."""
        super().train(mode)
        self.backbone.train(mode and self.prompts is None)
        return self

    def set_texts(self, ids: Tensor, mask: Tensor) -> None:
        """Replace the token ids and attention mask of the class texts (classes x tokens).

        Raises ModelError if the texts are longer than the text tower allows.
        """
        max_length = int(self.config.text_config.max_position_embeddings)
        if ids.shape[1] > max_length:
            raise ModelError(
                f"the longest text of a class has {ids.shape[1]} tokens, prompts included, and the "
                f"text tower takes {max_length}: shorten the template, the names or the prompts"
            )
        device = next(self.backbone.parameters()).device
        self.register_buffer("ids", ids.to(device), persistent=False)
        self.register_buffer("mask", mask.to(device), persistent=False)

    def tower(self, stack: str) -> nn.Module:
        """The tower of a stack, "text" or "vision"."""
        return self.backbone.get_submodule(TOWERS[stack])

    def embeddings(self, stack: str) -> nn.Module:
        """The embeddings module of a tower, "text" or "vision"; ModelError if it has none."""
        tower = self.tower(stack)
        if EMBEDDINGS not in dict(tower.named_children()):
            raise ModelError(f"{type(tower).__name__} has no module {EMBEDDINGS!r} to prompt")
        return tower.get_submodule(EMBEDDINGS)


def make_dual_encoder(
    backbone: nn.Module, tokenizer: Any, names: Sequence[str], template: str = TEMPLATE
) -> DualEncoder:
    """A DualEncoder for classes `names`; a class's text is the template with `{}` replaced.

    `_` in a name becomes a space. Raises ModelError for an unsuitable template or names, or if a
    tokenized text does not start with one special token and the words of the template.
    """
    if template.count("{}") != 1:
        raise ModelError(f"the template {template!r} must have {{}} once, for the class name")
    if not names or len(set(names)) < len(names) or not all(name.strip("_ ") for name in names):
        raise ModelError(f"the classes {list(names)} must be one or more different names")
    texts = [template.replace("{}", name.replace("_", " ")) for name in names]
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    lead_ids: list[int] = []
    if words := template.partition("{}")[0].rstrip():
        lead_ids = tokenizer([words], add_special_tokens=False)["input_ids"][0]
    lead = len(lead_ids)
    if not (mask[:, 0].all() and (ids[:, 1 : 1 + lead] == torch.tensor(lead_ids)).all()):
        raise ModelError(
            f"the texts of template {template!r} must be one special token, then the words before "
            "{}, then the name, padded on the right: put a space before {}, or use another "
            "tokenizer"
        )
    return DualEncoder(backbone, ids, mask, names=names, template=template, lead=lead)


def load_dual_encoder(
    path: str = "",
    *,
    names: Sequence[str],
    template: str = TEMPLATE,
    vision: str = "",
    text: str = "",
    bridge: str = "",
    tokenizer: str = "",
) -> DualEncoder:
    """Load a DualEncoder for classes `names` from a CLIP (`path`), or from two single models.

    `path`, or else `vision` and `text`, are folders or hub ids. `bridge` is a safetensors file with
    the projections of two single models, and further trained weights; without a bridge the
    projections are random. `tokenizer` defaults to that of `path` or `text`. Raises ModelError if
    both or neither source is given, or a part cannot be loaded or does not fit.
    """
    import transformers

    if bool(path) == bool(vision and text):
        raise ModelError("give the path of a CLIP, or both a vision and a text model")
    backbone = _load_model(path) if path else _join_towers(vision, text, bridge)
    source = tokenizer or path or text
    try:
        loaded_tokenizer = load_pretrained(transformers.AutoTokenizer, source)
    except (OSError, ValueError) as error:
        raise ModelError(f"there is no tokenizer in {source!r}") from error
    return make_dual_encoder(backbone, loaded_tokenizer, names, template)


def _load_model(path: str) -> nn.Module:
    import transformers

    try:
        return load_pretrained(transformers.AutoModel, path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"there is no model in {path!r}: {str(error).splitlines()[0]}") from error


def _join_towers(vision: str, text: str, bridge: str) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
    from transformers import VisionTextDualEncoderConfig, VisionTextDualEncoderModel

    vision_model, text_model = cast("Any", _load_model(vision)), cast("Any", _load_model(text))
    try:
        tensors = load_file(bridge) if bridge else dict[str, Tensor]()
        width = {"projection_dim": len(tensors[BRIDGE])} if BRIDGE in tensors else {}
        make_config = cast("Any", VisionTextDualEncoderConfig.from_vision_text_configs)
        config = make_config(vision_model.config, text_model.config, **width)
        make_model = cast("Any", VisionTextDualEncoderModel)
        model = make_model(config, vision_model, text_model).float().eval()
        keys = model.load_state_dict(tensors, strict=False)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{bridge!r} does not fit these towers: {error}") from error
    if keys.unexpected_keys:
        name = keys.unexpected_keys[0]
        raise ModelError(f"{bridge!r} has {name!r}, which the towers do not have")
    return model


def _interpolate_positions(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of embeddings: return (args, kwargs) that interpolate positions."""
    return args, {**kwargs, "interpolate_pos_encoding": True}
