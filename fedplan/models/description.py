# SPDX-License-Identifier: Apache-2.0
"""The function `describe`: every parameter of a model as a Param, by its layer map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from fedplan.errors import UnknownArchitecture
from fedplan.models.adapter_tensors import (
    BASE_LAYER,
    PER_OUTPUT_TAGS,
    TAGS,
    AdapterTensor,
    find_adapter_tensor,
    is_inactive,
    strip_peft_segments,
)
from fedplan.models.layer_maps import LAYER_MAPS, find_layer_map
from fedplan.models.layouts import LayerMap, Path, path_contains, path_ends_with, split_path
from fedplan.models.module_tree import (
    ancestors,
    find_backbones,
    index_in,
    input_embeddings,
    is_norm,
    may_be_norm,
    output_dim,
)
from fedplan.models.params import PLACE_WORDS, Block, Kind, Param, Params, Rows

_KIND_WORDS = frozenset(map(str, Kind)) - {"adapter", "unknown"}
LAYER_MAP_WORDS = _KIND_WORDS | {"kernel", "cross", "common", "own"}
"""The words of the plan language that depend on a layer map."""

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""The module classes that may contain a model's blocks."""


def describe(model: nn.Module) -> Params:
    """All params of a model, in the model's order; a fused tensor gives one param per kind.

    Works on the meta device too. Tied tensors appear once; an embedding tied to the head is embed.
    Tensors that are not used in the forward pass (inactive adapters of peft, modules replaced by
    modules_to_save) are left out. Without a layer map only norms (by class), biases and a head
    beside a backbone are known; all other kinds are UNKNOWN. Raises UnknownArchitecture if the
    layer map does not match the model's blocks, or a fused tensor is packed, and UnknownAdapter for
    an unsupported adapter.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9))
    >>> [p.key for p in describe(model) if p.kind == "query"][0]
    'encoder.layer.0.attention.self.query.weight'
    """
    structure = _Structure(dict(model.named_modules()))
    names: dict[Tensor, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(tensor, []).append(name)
    return tuple(
        replace(param, name=all_names[0], tied=tuple(all_names[1:]))
        for tensor, all_names in names.items()
        for param in structure.params_in(all_names, tensor)
    )


def block_modules(model: nn.Module) -> dict[Block, nn.Module]:
    """The module of each block, in order."""
    structure = _Structure(dict(model.named_modules()))
    return {
        Block(position.stack, position.offset + i): module
        for name, position in structure.lists.items()
        for i, module in enumerate(structure.modules[name].children())
    }


@dataclass(frozen=True)
class _ListPosition:
    """The position of a list of blocks: its stack, and the number of blocks before it there."""

    stack: str
    offset: int


class _Structure:
    """A model's modules by path, with its lists of blocks and its backbones.

    `lists`: the lists of blocks by path. `beside`: lists outside a stack with a module per block.
    `depths`: the number of blocks by stack. `tables`: the input embeddings. `backbones`: by path of
    a Hugging Face model, the path of its backbone.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self.lists: dict[str, _ListPosition] = {}
        self.beside: dict[str, _ListPosition] = {}
        self.depths: dict[str, int] = {}
        for name, module in modules.items():
            if isinstance(module, LISTS):
                self._add_list(name, len(module))
        self._require_blocks()
        embeddings = {name: input_embeddings(module) for name, module in modules.items()}
        self.tables = {e for e in embeddings.values() if isinstance(e, nn.Embedding)}
        self.backbones = find_backbones(modules, embeddings)

    def _add_list(self, name: str, size: int) -> None:
        """Record a list of `size` modules if the layer map has blocks there: see the fields."""
        layer_map, _ = self._layer_map(name)
        for stack, path in layer_map.beside.items() if layer_map else ():
            if path_ends_with(split_path(path), split_path(name)):
                self.beside[name] = _ListPosition(stack, 0)
        for stack, paths in layer_map.blocks.items() if layer_map else ():
            if any(path_ends_with(split_path(path), split_path(name)) for path in paths.split()):
                stack = self._stack(name, stack)
                self.lists[name] = _ListPosition(stack, self.depths.get(stack, 0))
                self.depths[stack] = self.depths.get(stack, 0) + size

    def _require_blocks(self) -> None:
        """Raise UnknownArchitecture if a map registered for the root's class matches no blocks."""
        root = type(self.modules[""]).__name__
        layer_map = find_layer_map(self.modules[""]) if root in LAYER_MAPS else None
        if layer_map and layer_map.blocks and not self.lists:
            paths = ", ".join(layer_map.blocks.values())
            lists = [name for name, module in self.modules.items() if isinstance(module, LISTS)]
            raise UnknownArchitecture(
                f"the layer map of {root!r} has its blocks in {paths!r}, but there is no list of "
                f"modules there; lists: {', '.join(lists) or 'none'}. Register it again with the "
                "right blocks="
            )

    def params_in(self, names: list[str], tensor: Tensor) -> Iterator[Param]:
        """Yield the params of one tensor with these names: one, or one per kind if it is fused.

        Its first active name decides the kind, names of a head last; none if no name is active.
        """
        active = [name for name in names if not is_inactive(self.modules, name)]
        if len(active) > 1:
            active.sort(key=self._is_head)
        adapter = find_adapter_tensor(self.modules, active[0]) if active else None
        if adapter and adapter.kind is Kind.ADAPTER:
            yield from self._adapter_params(active, tensor, adapter)
        elif adapter:
            kind, tag = adapter.kind, TAGS.get(adapter.place, "")
            yield self._param(active[0], tensor, strip_peft_segments(active[0]), kind, tag=tag)
        elif active:
            yield from self._model_params(active[0], tensor, strip_peft_segments(active[0]))

    def _is_head(self, name: str) -> bool:
        """Whether a name of a tied tensor belongs to a head, or is a second path to one module."""
        owner = self.modules.get(name.rpartition(".")[0])
        return (
            owner is None
            or self._kind_or_fused(name, strip_peft_segments(name), owner) is Kind.HEAD
        )

    def _model_params(self, name: str, tensor: Tensor, path: Path) -> Iterator[Param]:
        """Yield the params of a tensor of the model itself: one, or one per kind if it is fused.

        Raises UnknownArchitecture if a fused tensor is packed, so that its rows are unknown.
        """
        kind_or_path = self._kind_or_fused(name, path, self._owner(name))
        if isinstance(kind_or_path, Kind):
            yield self._param(name, tensor, path, kind_or_path)
            return
        dim = output_dim(self._owner(name), tensor)
        if getattr(self._owner(name), "out_features", tensor.shape[dim]) != tensor.shape[dim]:
            raise UnknownArchitecture(
                f"{name!r} holds several kinds and is packed ({tuple(tensor.shape)} of "
                f"{tensor.dtype}), so its rows are unknown: load the model without quantization"
            )
        for kind, rows in self._fused_rows(kind_or_path, name, tensor.shape[dim]).items():
            yield self._param(name, tensor, path, kind, replace(rows, dim=dim))

    def _adapter_params(
        self, names: list[str], tensor: Tensor, adapter: AdapterTensor
    ) -> Iterator[Param]:
        """Yield the params of an adapter's tensor: one that acts on the kinds of its host layers.

        For a fused host, tensors with a row per output, such as LoRA's B, give a param per kind.
        """
        name, tag = names[0], TAGS.get(adapter.place, "")
        param = self._param(name, tensor, strip_peft_segments(name), Kind.ADAPTER, tag=tag)
        host = self._host_kind(name)
        layout = self._fused_rows(host, name, tensor.numel()) if isinstance(host, tuple) else {}
        if len(names) > 1 or not layout or tag not in PER_OUTPUT_TAGS:
            yield self._with_host_kinds(param, names)
            return
        for kind, rows in self._fused_rows(cast("Path", host), name, tensor.shape[0]).items():
            shape = rows.shape(tuple(tensor.shape))
            yield replace(param, on=frozenset({kind}), rows=rows, shape=shape)

    def _with_host_kinds(self, param: Param, names: list[str]) -> Param:
        """The param with the kinds of all its host layers; no block if they are in several."""
        hosts = {name: self._host_kind(name) for name in names}
        on = {
            kind
            for name, host in hosts.items()
            for kind in (self._fused_rows(host, name, 0) if isinstance(host, tuple) else (host,))
        }
        positions = {self._block(name, self._layer_map(name)[0]) for name in names}
        block = param.block if len(positions) == 1 else None
        return replace(param, on=frozenset(kind for kind in on if kind), block=block)

    def _host_kind(self, name: str) -> Kind | Path | None:
        """The kind, or fused path, of the layer that an adapter's tensor changes.

        None for an adapter of the whole model.
        """
        adapter = find_adapter_tensor(self.modules, name)
        inner = adapter.inner if adapter else ""
        if not adapter or inner not in self.modules:
            return None
        while f"{inner}.{BASE_LAYER}" in self.modules:
            inner = f"{inner}.{BASE_LAYER}"
        leaf = str(getattr(self.modules[adapter.layer], "parameter_name", "weight"))
        return self._kind_or_fused(
            name, (*strip_peft_segments(adapter.layer), leaf), self.modules[inner]
        )

    def _param(
        self,
        name: str,
        tensor: Tensor,
        path: Path,
        kind: Kind,
        rows: Rows | None = None,
        tag: str = "",
    ) -> Param:
        """The param of a tensor, or of `rows` of it; `path` is its name without peft's segments."""
        layer_map, _ = self._layer_map(name)
        stack, block = self._block(name, layer_map)
        tags, leaf = {tag} if tag else set[str](), path[-1]
        recurrent = leaf.startswith("bias_") and isinstance(self._owner(name), nn.RNNBase)
        if leaf == "bias" or leaf.endswith("_bias") or recurrent:
            tags.add("bias")
        acts_on = set[Kind]()
        if layer_map:
            tags |= {tag for p, tag in layer_map.tags.items() if path_contains(p, path)}
            acts_on = {k for p, k in layer_map.acts_on.items() if path_contains(p, path)}
        shape = tuple(tensor.shape)
        is_mapped = self._is_mapped(name, path)
        is_placed = block is not None or bool(layer_map and layer_map.blocks and is_mapped)
        return Param(
            name=name,
            kind=kind,
            shape=rows.shape(shape) if rows else shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            block=block,
            stack=stack,
            depth=self.depths.get(stack, 0),
            rows=rows,
            tags=frozenset(tags),
            on=frozenset(acts_on),
            perhaps=self._perhaps(name, kind, is_placed=is_placed, is_mapped=is_mapped),
        )

    def _perhaps(
        self, name: str, kind: Kind, *, is_placed: bool, is_mapped: bool
    ) -> frozenset[str]:
        """The words that may apply to a param: none if its kind and its block are known.

        `is_placed`: its block is known, or known to be none. `is_mapped`: a layer map covers it.
        """
        if kind is Kind.PROMPT or self._outside_backbone(name):
            return frozenset()
        places = frozenset[str]() if is_placed else PLACE_WORDS
        if kind is not Kind.UNKNOWN:
            kernel = {"kernel"} if kind in (Kind.NORM, Kind.ADAPTER) else set[str]()
            return frozenset() if is_mapped else places | kernel
        owner = self._owner(name)
        if isinstance(owner, nn.Embedding):
            return places | {"embed", "position", "kernel", "prompt"}
        words = LAYER_MAP_WORDS | places
        words -= set() if may_be_norm(owner) else {"norm"}
        in_list = any(isinstance(self.modules.get(each), LISTS) for each in ancestors(name))
        # Within a backbone only a linear layer outside all lists may be head: a pooler.
        may_be_pooler = isinstance(owner, nn.Linear) and not in_list
        no_head = self._in_hugging_face_model(name) and not may_be_pooler
        return words - {"head"} if no_head else words

    def _kind_or_fused(self, name: str, path: Path, owner: nn.Module) -> Kind | Path:
        """The kind of a tensor, or the path of its fused layout; by class first, then by path.

        `path` is its name without peft's segments, `owner` the module that it belongs to.
        """
        layer_map, _ = self._layer_map(name)
        if self._outside_backbone(name):
            return Kind.HEAD
        if layer_map is None:
            return self._kind_by_class(owner)
        submodel = self._unmapped_submodel(name)
        path_to_match = path if submodel is None else submodel
        matching = [
            p for p in (*layer_map.kinds, *layer_map.fused) if path_contains(p, path_to_match)
        ]
        if any(layer_map.kinds.get(p) is Kind.HEAD for p in matching):
            return Kind.HEAD
        if is_norm(owner):
            return Kind.NORM
        if matching:
            longest = max(matching, key=len)
            return layer_map.kinds.get(longest, longest)
        if not self._is_mapped(name, path):
            return self._kind_by_class(owner)
        return Kind.EMBED if isinstance(owner, nn.Embedding) else Kind.UNKNOWN

    def _kind_by_class(self, owner: nn.Module) -> Kind:
        """The kind of the tensors of a module without layer map: NORM, EMBED or UNKNOWN."""
        if is_norm(owner):
            return Kind.NORM
        return Kind.EMBED if owner in self.tables else Kind.UNKNOWN

    def _fused_rows(self, path: Path, name: str, size: int) -> dict[Kind, Rows]:
        """The rows of each kind in a fused tensor of `size` rows; `path` is its layer map's key."""
        layer_map, config = self._layer_map(name)
        assert layer_map is not None
        return layer_map.fused[path](config, size)

    def _layer_map(self, name: str) -> tuple[LayerMap | None, Any]:
        """The layer map of the nearest module above `name` that has one, and its config."""
        for path in ancestors(name):
            module = self.modules.get(path)
            if layer_map := find_layer_map(module):
                return layer_map, getattr(module, "config", None)
        return None, None

    def _stack(self, name: str, stack: str) -> str:
        """The stack of a tensor: its tower, "decoder" for an encoder used as one, or `stack`."""
        _, config = self._layer_map(name)
        role = "decoder" if getattr(config, "is_decoder", False) is True else stack
        return self._tower(name) or (role if stack == "encoder" else stack)

    def _unmapped_submodel(self, name: str) -> Path | None:
        """The path of the outermost submodel without layer map, inside a mapped model, or None."""
        submodel: Path | None = None
        for path in ancestors(name):
            module = self.modules.get(path)
            if find_layer_map(module):
                return submodel
            model_type = getattr(getattr(module, "config", None), "model_type", None)
            submodel = split_path(path) if isinstance(model_type, str) else submodel
        return None

    def _is_mapped(self, name: str, path: Path) -> bool:
        """Whether a layer map covers the submodel that contains a tensor, or its path."""
        layer_map, _ = self._layer_map(name)
        if layer_map is None:
            return False
        submodel = self._unmapped_submodel(name)
        if submodel is None and (layer_map.blocks or layer_map.towers or layer_map.fused):
            return True
        path_to_match = path if submodel is None else submodel
        return any(path_contains(p, path_to_match) for p in (*layer_map.kinds, *layer_map.fused))

    def _tower(self, name: str) -> str:
        """The stack that a model of several towers assigns to the one with this name, or ""."""
        for path in ancestors(name):
            layer_map, _ = self._layer_map(path)
            towers = layer_map.towers if layer_map else dict[str, str]()
            child = name[len(path) + 1 if path else 0 :].split(".")[0]
            if child in towers:
                return towers[child]
        return ""

    def _block(self, name: str, layer_map: LayerMap | None) -> tuple[str, int | None]:
        """The stack and block index of a tensor; the index is None outside all blocks."""
        segments = name.split(".")
        for i, segment in enumerate(segments):
            path = ".".join(segments[:i])
            position = self.lists.get(path) or self.beside.get(path)
            if position:
                return position.stack, position.offset + index_in(self.modules[path], segment)
        if layer_map is None or self._outside_backbone(name):
            return "", None
        blocks = layer_map.blocks
        stacks = [stack for stack in blocks if len(blocks) == 1 or stack in segments]
        return self._stack(name, stacks[0] if stacks else ""), None

    def _outside_backbone(self, name: str) -> bool:
        """Whether a tensor belongs to a Hugging Face model with a backbone, but not to that."""
        for path in ancestors(name):
            if backbone := self.backbones.get(path):
                return not name.startswith(f"{backbone}.")
        return False

    def _in_hugging_face_model(self, name: str) -> bool:
        """Whether a tensor belongs to a Hugging Face model."""
        parents = (self.modules.get(path) for path in ancestors(name))
        return any(getattr(module, "base_model_prefix", "") for module in parents)

    def _owner(self, name: str) -> nn.Module:
        return self.modules[name.rpartition(".")[0]]
