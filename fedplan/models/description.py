# SPDX-License-Identifier: Apache-2.0
"""The function `describe`: every parameter of a model as a Param, by its layer map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedplan.errors import UnknownArchitecture
from fedplan.models.adapters import (
    BASE_LAYER,
    PER_OUTPUT_TAGS,
    find_adapter_tensor,
    is_inactive,
    strip_peft_segments,
)
from fedplan.models.architectures import LAYER_MAPS  # where the known maps are registered
from fedplan.models.layer_maps import (
    LayerMap,
    Path,
    find_layer_map,
    path_contains,
    path_ends_with,
    split_path,
)
from fedplan.models.params import PLACE_WORDS, Block, Kind, Param, Params, Rows


def ancestors(name: str) -> Iterator[str]:
    """Yield a path and the paths of its parents, nearest first; the root is the empty path."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


_KIND_WORDS = frozenset(map(str, Kind)) - {"adapter", "unknown"}
LAYER_MAP_WORDS = _KIND_WORDS | {"kernel", "cross", "common", "own"}
"""The words of the plan language that depend on a layer map."""

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""The module classes that may contain a model's blocks."""


def describe(model: nn.Module) -> Params:
    """All params of a model, in the model's order; a fused tensor gives one param per kind.

    Works on the meta device too. A tied tensor appears once; an embedding tied to the head is
    EMBED. Tensors that the forward pass ignores (inactive adapters of peft, modules replaced by
    modules_to_save) are left out. Without a layer map only norms (by class), input embeddings,
    adapters and a head beside a backbone have a kind; all other kinds are UNKNOWN. Raises
    UnknownArchitecture if a layer map under the model's class name finds no blocks, or if a fused
    tensor is packed (quantized), and UnknownAdapter for an unsupported adapter.

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
    """The module of each block of a model, in order; empty without a layer map."""
    structure = _Structure(dict(model.named_modules()))
    return {
        Block(position.stack, position.offset + i): module
        for name, position in structure.lists.items()
        for i, module in enumerate(structure.modules[name].children())
    }


class _ListPosition(NamedTuple):
    """The position of a list of blocks: its stack, and the number of blocks before it there."""

    stack: str
    offset: int


class _Coverage(NamedTuple):
    """The layer map of a tensor's nearest parent with one; any Hugging Face model in between."""

    layer_map: LayerMap | None = None
    config: Any = None
    submodel: Path | None = None


class _Structure:
    """Finds the blocks, backbones and params of a model, given all modules by path.

    `lists`: the lists of blocks by path. `beside`: lists outside a stack with a module per block.
    `backbones`: by path of a Hugging Face model, the path of its backbone. `name` is always a name
    as in `named_parameters`, and `path` its segments without those that peft adds.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self.lists: dict[str, _ListPosition] = {}
        self.beside: dict[str, _ListPosition] = {}
        self.depths: dict[str, int] = {}
        module_lists = {n: m for n, m in modules.items() if isinstance(m, LISTS)}
        for name, module in module_lists.items():
            layer_map, path = self._coverage(name).layer_map, split_path(name)
            for stack, beside in layer_map.beside.items() if layer_map else ():
                if path_ends_with(split_path(beside), path):
                    self.beside[name] = _ListPosition(stack, 0)
            for stack, blocks in layer_map.blocks.items() if layer_map else ():
                if any(path_ends_with(split_path(each), path) for each in blocks.split()):
                    stack = self._stack(name, stack)
                    self.lists[name] = _ListPosition(stack, self.depths.get(stack, 0))
                    self.depths[stack] = self.depths.get(stack, 0) + len(module)
        root = type(modules[""]).__name__
        layer_map = find_layer_map(modules[""]) if root in LAYER_MAPS else None
        if layer_map and layer_map.blocks and not self.lists:
            raise UnknownArchitecture(
                f"the layer map of {root!r} has its blocks in "
                f"{', '.join(layer_map.blocks.values())!r}, but there is no list of modules there; "
                f"lists: {', '.join(module_lists) or 'none'}. Register it again with the right "
                "blocks="
            )
        self.tables: set[nn.Module] = set()
        self.backbones: dict[str, str] = {}
        for name, module in modules.items():
            table: object = None
            get_embeddings = getattr(module, "get_input_embeddings", None)
            with suppress(NotImplementedError, AttributeError):
                table = get_embeddings() if callable(get_embeddings) else None
            if isinstance(table, nn.Embedding):
                self.tables.add(table)
            prefix = str(getattr(module, "base_model_prefix", ""))
            path = f"{name}.{prefix}" if name else prefix
            # Not a backbone if the model has its input embeddings elsewhere.
            if prefix and path in modules:
                inside = not isinstance(table, nn.Module) or any(
                    table is each for each in modules[path].modules()
                )
                self.backbones |= {name: path} if inside else {}

    def params_in(self, names: list[str], tensor: Tensor) -> Iterator[Param]:
        """Yield the params of a tensor with all `names`: one, or one per kind of a fused tensor.

        The kind is that of the first name that the forward pass uses; a name in a head counts only
        if all are. Yields nothing if the forward pass uses no name.
        """
        active = [name for name in names if not is_inactive(self.modules, name)]
        if not active:
            return
        if len(active) > 1:
            active.sort(key=self._is_head)
        name = active[0]
        if adapter := find_adapter_tensor(self.modules, name):
            if adapter.kind is Kind.ADAPTER:
                yield from self._adapter_params(active, tensor, adapter.tags)
            else:
                yield self._param(name, tensor, adapter.kind, tags=adapter.tags)
            return
        owner = self._owner(name)
        kind_or_path = self._kind_or_fused(name, strip_peft_segments(name), owner)
        if isinstance(kind_or_path, Kind):
            yield self._param(name, tensor, kind_or_path)
            return
        is_transposed = type(owner).__name__ == "Conv1D" and tensor.dim() == 2  # GPT-2
        dim = 1 if is_transposed else 0
        if getattr(owner, "out_features", tensor.shape[dim]) != tensor.shape[dim]:
            raise UnknownArchitecture(
                f"{name!r} holds several kinds and is packed ({tuple(tensor.shape)} of "
                f"{tensor.dtype}), so its rows are unknown: load the model without quantization"
            )
        for kind, rows in self._fused_rows(kind_or_path, name, tensor.shape[dim]).items():
            yield self._param(name, tensor, kind, replace(rows, dim=dim))

    def _is_head(self, name: str) -> bool:
        """Whether a name of a tied tensor belongs to a head, or is a second path to one module."""
        owner = self.modules.get(name.rpartition(".")[0])
        path = strip_peft_segments(name)
        return owner is None or self._kind_or_fused(name, path, owner) is Kind.HEAD

    def _adapter_params(
        self, names: list[str], tensor: Tensor, tags: frozenset[str]
    ) -> Iterator[Param]:
        """Yield the params of an adapter's tensor, which has a name for each host layer.

        One param acts on the kinds of all hosts, without block if these are in several blocks. But
        a tensor with a row per output of one fused host (LoRA's B) gives a param per kind.
        """
        param = self._param(names[0], tensor, Kind.ADAPTER, tags=tags)
        hosts = {name: self._host_kind(name) for name in names}
        host = hosts[names[0]]
        if len(names) == 1 and isinstance(host, tuple) and tags & PER_OUTPUT_TAGS:
            for kind, rows in self._fused_rows(host, names[0], tensor.shape[0]).items():
                shape = rows.shape(tuple(tensor.shape))
                yield replace(param, on=frozenset({kind}), rows=rows, shape=shape)
            return
        on = {
            kind
            for name, host in hosts.items()
            for kind in (self._fused_rows(host, name, 0) if isinstance(host, tuple) else (host,))
        }
        block = param.block if len({self._block(name) for name in names}) == 1 else None
        yield replace(param, on=frozenset(kind for kind in on if kind), block=block)

    def _host_kind(self, name: str) -> Kind | Path | None:
        """The kind of an adapter's host layer, or its key in `fused`; None without a host."""
        adapter = find_adapter_tensor(self.modules, name)
        inner = adapter.inner if adapter else ""
        if not adapter or inner not in self.modules:
            return None
        while f"{inner}.{BASE_LAYER}" in self.modules:
            inner = f"{inner}.{BASE_LAYER}"
        leaf = str(getattr(self.modules[adapter.layer], "parameter_name", "weight"))
        path = (*strip_peft_segments(adapter.layer), leaf)
        return self._kind_or_fused(name, path, self.modules[inner])

    def _param(
        self,
        name: str,
        tensor: Tensor,
        kind: Kind,
        rows: Rows | None = None,
        tags: frozenset[str] = frozenset(),
    ) -> Param:
        layer_map, _, submodel = self._coverage(name)
        stack, block = self._block(name)
        path, acts_on = strip_peft_segments(name), set[Kind]()
        recurrent = path[-1].startswith("bias_") and isinstance(self._owner(name), nn.RNNBase)
        if path[-1] == "bias" or path[-1].endswith("_bias") or recurrent:
            tags |= {"bias"}
        is_mapped = is_placed = False
        if layer_map:
            tags |= {tag for p, tag in layer_map.tags.items() if path_contains(p, path)}
            acts_on = {k for p, k in layer_map.acts_on.items() if path_contains(p, path)}
            is_mapped = _covers(layer_map, submodel) or bool(_matching(layer_map, submodel, path))
            is_placed = bool(layer_map.blocks and is_mapped)
        is_placed = is_placed or block is not None
        shape = tuple(tensor.shape)
        return Param(
            name=name,
            kind=kind,
            shape=rows.shape(shape) if rows else shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            block=block,
            stack=stack,
            depth=self.depths.get(stack, 0),
            rows=rows,
            tags=tags,
            on=frozenset(acts_on),
            uncertain=self._uncertain_words(name, kind, is_placed=is_placed, is_mapped=is_mapped),
        )

    def _uncertain_words(
        self, name: str, kind: Kind, *, is_placed: bool, is_mapped: bool
    ) -> frozenset[str]:
        """The words that may or may not apply to a param, by what is known of its place and map."""
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
        shapes = (tuple(tensor.shape) for tensor in owner.parameters(recurse=False))
        is_leaf = not type(owner).__module__.startswith("torch.") and not [*owner.children()]
        is_linear = isinstance(owner, nn.Linear)  # whose packed weight has one column
        if not is_leaf or is_linear or any(prod(each) != max(each, default=0) for each in shapes):
            words -= {"norm"}  # norms are modules of their own, with vectors only
        parents = [self.modules.get(path) for path in ancestors(name)]
        in_hugging_face_model = any(getattr(each, "base_model_prefix", "") for each in parents)
        in_list = any(isinstance(each, LISTS) for each in parents)
        # Within a backbone only a pooler may be head: linear layers or attention outside all lists.
        inside = [*owner.modules()]
        has_linear = any(isinstance(each, nn.Linear) for each in inside)
        may_be_pooler = has_linear and not in_list and not any(isinstance(e, LISTS) for e in inside)
        return words - {"head"} if in_hugging_face_model and not may_be_pooler else words

    def _kind_or_fused(self, name: str, path: Path, owner: nn.Module) -> Kind | Path:
        """The kind of the tensor `name`; for a fused tensor the key in the layer map's `fused`."""
        layer_map, _, submodel = self._coverage(name)
        if self._outside_backbone(name):
            return Kind.HEAD
        matching = _matching(layer_map, submodel, path) if layer_map else []
        if layer_map and any(layer_map.kinds.get(p) is Kind.HEAD for p in matching):
            return Kind.HEAD
        if type(owner).__name__.endswith(("Norm", "Norm1d", "Norm2d")):
            return Kind.NORM
        if layer_map and matching:
            longest = max(matching, key=len)
            return layer_map.kinds.get(longest, longest)
        is_mapped = layer_map is not None and _covers(layer_map, submodel)
        is_table = isinstance(owner, nn.Embedding) if is_mapped else owner in self.tables
        return Kind.EMBED if is_table else Kind.UNKNOWN

    def _fused_rows(self, path: Path, name: str, row_count: int) -> dict[Kind, Rows]:
        """The rows of each kind in a fused tensor; `path` is the key in the layer map's `fused`."""
        layer_map, config, _ = self._coverage(name)
        assert layer_map is not None
        return layer_map.fused[path](config, row_count)

    def _coverage(self, name: str) -> _Coverage:
        submodel: Path | None = None
        for path in ancestors(name):
            module = self.modules.get(path)
            config = getattr(module, "config", None)
            if layer_map := find_layer_map(module):
                return _Coverage(layer_map, config, submodel)
            if isinstance(getattr(config, "model_type", None), str):
                submodel = split_path(path)
        return _Coverage()

    def _stack(self, name: str, stack: str) -> str:
        """The stack of `name`: of its tower if it is in one, else `stack`, by the config."""
        for path in ancestors(name):
            layer_map = self._coverage(path).layer_map
            child = name[len(path) + 1 if path else 0 :].split(".")[0]
            if layer_map and layer_map.towers.get(child):
                return layer_map.towers[child]
        is_decoder = getattr(self._coverage(name).config, "is_decoder", False) is True
        return "decoder" if is_decoder and stack == "encoder" else stack

    def _block(self, name: str) -> tuple[str, int | None]:
        """Return (stack, block index) of `name`; the index is None outside all blocks."""
        segments = name.split(".")
        for i, segment in enumerate(segments):
            path = ".".join(segments[:i])
            position = self.lists.get(path) or self.beside.get(path)
            if position:
                holder = self.modules[path]
                by_number = segment.isdigit() and not isinstance(holder, nn.ModuleDict)
                names = [name for name, _ in holder.named_children()]
                index = int(segment) if by_number else names.index(segment)
                return position.stack, position.offset + index
        layer_map = self._coverage(name).layer_map
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

    def _owner(self, name: str) -> nn.Module:
        return self.modules[name.rpartition(".")[0]]


def _matching(layer_map: LayerMap, submodel: Path | None, path: Path) -> list[Path]:
    """The paths in a layer map's `kinds` and `fused` that match a tensor, or its submodel."""
    subject = path if submodel is None else submodel
    return [p for p in (*layer_map.kinds, *layer_map.fused) if path_contains(p, subject)]


def _covers(layer_map: LayerMap, submodel: Path | None) -> bool:
    """Whether a layer map describes all tensors, matching or not: one of a whole model."""
    is_whole = bool(layer_map.blocks or layer_map.towers or layer_map.fused)
    return submodel is None and is_whole
