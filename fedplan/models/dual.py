# SPDX-License-Identifier: Apache-2.0
"""Dual: a classifier of pictures made of a two-tower model and the texts of its classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.models.architectures import BRIDGE, DUALS, EMBEDDINGS, RESIZED, TOWERS
from fedplan.models.hub import fetched

TEMPLATE = "a picture of a {}"
"""The text of a class, unless a task says another."""


class ModelError(FedplanError):
    """A model that cannot be built, changed or read as asked."""

    code = "model"


@final
class Dual(nn.Module):
    """Pictures against the texts of the classes: build one with `dual_of` or `load_dual`.

    `ids` and `mask` hold one text per class. `lead` is how many tokens the template has before the
    class name, the first special token not counted. `prompts`, `fusion` and `settings` are empty
    until `add_prompts` fills them.
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
                f"{type(backbone).__name__} is no model of two towers that fedplan can prompt; "
                f"there are {', '.join(DUALS.values())}"
            )
        self.backbone = backbone
        self.names, self.template, self.lead = tuple(names), template, lead
        self.settings: object = None
        self.register_module("prompts", None)
        self.register_module("fusion", None)
        self.write(ids, mask)
        if self.config.vision_config.model_type in RESIZED:
            entry = self.embeddings("vision")
            entry.register_forward_pre_hook(_at_any_size, with_kwargs=True)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """The logits of each picture over the classes, as the backbone itself computes them."""
        output = self.backbone(
            input_ids=self.ids, attention_mask=self.mask, pixel_values=pixel_values
        )
        return output.logits_per_image

    def train(self, mode: bool = True) -> Dual:
        """As ever, but a backbone with prompts is frozen, and stays as it is when it predicts."""
        super().train(mode)
        self.backbone.train(mode and self.prompts is None)
        return self

    def write(self, ids: Tensor, mask: Tensor) -> None:
        """Take these tokens as the texts of the classes."""
        most = int(self.config.text_config.max_position_embeddings)
        if ids.shape[1] > most:
            raise ModelError(
                f"the longest text of a class has {ids.shape[1]} tokens, prompts included, and the "
                f"text tower takes {most}: shorten the template, the names or the prompts"
            )
        device = next(self.backbone.parameters()).device
        self.register_buffer("ids", ids.to(device), persistent=False)
        self.register_buffer("mask", mask.to(device), persistent=False)

    def tower(self, stack: str) -> nn.Module:
        """The tower of a stack: text or vision."""
        return self.backbone.get_submodule(TOWERS[stack])

    def embeddings(self, stack: str) -> nn.Module:
        """The module of a tower that makes its first block's input."""
        tower = self.tower(stack)
        if EMBEDDINGS not in dict(tower.named_children()):
            raise ModelError(f"{type(tower).__name__} has no module {EMBEDDINGS!r} to prompt")
        return tower.get_submodule(EMBEDDINGS)


def dual_of(
    backbone: nn.Module, tokenizer: Any, names: Sequence[str], template: str = TEMPLATE
) -> Dual:
    """A classifier of pictures into these classes; `_` in a name is read as a space."""
    if template.count("{}") != 1:
        raise ModelError(f"the template {template!r} must hold {{}} once, for the class name")
    if not names or len(set(names)) < len(names) or not all(name.strip("_ ") for name in names):
        raise ModelError(f"the classes {list(names)} must be one or more different names")
    texts = [template.replace("{}", name.replace("_", " ")) for name in names]
    found = tokenizer(texts, padding=True, return_tensors="pt")
    ids, mask = found["input_ids"], found["attention_mask"]
    words = template.partition("{}")[0].rstrip()
    before: list[int] = []
    if words:
        before = tokenizer([words], add_special_tokens=False)["input_ids"][0]
    lead = len(before)
    if not (mask[:, 0].all() and (ids[:, 1 : 1 + lead] == torch.tensor(before)).all()):
        raise ModelError(
            f"the texts of template {template!r} must be one special token, then the words before "
            "{}, then the name, filled up on the right: set a space before {}, or take another "
            "tokenizer"
        )
    return Dual(backbone, ids, mask, names=names, template=template, lead=lead)


def load_dual(
    path: str = "",
    *,
    names: Sequence[str],
    template: str = TEMPLATE,
    vision: str = "",
    text: str = "",
    bridge: str = "",
    tokenizer: str = "",
) -> Dual:
    """A classifier of pictures from a CLIP by folder or hub id, or from two towers.

    `vision` and `text` are folders or hub ids of single models; `bridge` is a safetensors file with
    what joins them: the two projections, the scale, and any weight trained with these. Without it
    the projections are untrained. The tokenizer is that of the path or of `text`.
    """
    if bool(path) == bool(vision and text):
        raise ModelError("give the path of a CLIP, or both a vision and a text model")
    backbone = _read(path) if path else _joined(vision, text, bridge)
    import transformers

    words = tokenizer or path or text
    try:
        reader = fetched(transformers.AutoTokenizer, words)
    except (OSError, ValueError) as error:
        raise ModelError(f"there is no tokenizer in {words!r}") from error
    return dual_of(backbone, reader, names, template)


def _read(path: str) -> nn.Module:
    import transformers

    try:
        model = fetched(transformers.AutoModel, path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"there is no model in {path!r}: {str(error).splitlines()[0]}") from error
    return model


def _joined(vision: str, text: str, bridge: str) -> nn.Module:
    """Two towers as one model, joined by a bridge."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
    from transformers import VisionTextDualEncoderConfig, VisionTextDualEncoderModel

    eye, ear = cast("Any", _read(vision)), cast("Any", _read(text))
    try:
        held = load_file(bridge) if bridge else dict[str, Tensor]()
        width = {"projection_dim": len(held[BRIDGE])} if BRIDGE in held else {}
        make = cast("Any", VisionTextDualEncoderConfig.from_vision_text_configs)
        config = make(eye.config, ear.config, **width)
        model = cast("Any", VisionTextDualEncoderModel)(config, eye, ear).float().eval()
        answer = model.load_state_dict(held, strict=False)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{bridge!r} is no bridge between these towers: {error}") from error
    if answer.unexpected_keys:
        name = answer.unexpected_keys[0]
        raise ModelError(f"{bridge!r} holds {name!r}, which the towers do not have")
    return model


def _at_any_size(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Ask the embeddings to interpolate; at the size that they were trained for they do not."""
    return args, {**kwargs, "interpolate_pos_encoding": True}
