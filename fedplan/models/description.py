# SPDX-License-Identifier: Apache-2.0
"""Describe: every parameter of a model as a param; what no anatomy explains is unknown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

from torch import Tensor, nn

from fedplan.errors import UnknownArchitecture
from fedplan.models.adapters import (
    ROWED,
    TAGS,
    WRAPPED,
    Graft,
    graft_of,
    is_dormant,
    without_wrappers,
)
from fedplan.models.layouts import Anatomy, Path, ends, occurs, path
from fedplan.models.params import PLACES, Block, Kind, Param, Params, Rows
from fedplan.models.teaching import KNOWN, known_row

ANATOMY = frozenset(map(str, Kind)) - {"adapter", "unknown"} | {"kernel", "cross", "common", "own"}
"""The words that an anatomy decides."""

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""What may hold a model's blocks."""


def describe(model: nn.Module) -> Params:
    """List every parameter of a model, in the model's order, rows of fused tensors one by one.

    Works on the meta device too. Tied tensors appear once; a table that is the head too is embed.
    Copies that nobody runs (peft's adapters that are not active, what a saved module replaced) are
    no params. Of a model without an anatomy it tells what is sure: norms by type, biases, a head
    beside a backbone.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9))
    >>> [p.key for p in describe(model) if p.kind == "query"][0]
    'encoder.layer.0.attention.self.query.weight'
    """
    body = _Body(dict(model.named_modules()))
    names: dict[Tensor, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(tensor, []).append(name)
    return tuple(
        replace(param, name=all_names[0], tied=tuple(all_names[1:]))
        for tensor, all_names in names.items()
        for param in body.explain(all_names, tensor)
    )


def blocks_of(model: nn.Module) -> dict[Block, nn.Module]:
    """The module of each block, in order: where to listen to one."""
    body = _Body(dict(model.named_modules()))
    return {
        Block(place.stack, place.offset + i): module
        for name, place in body.lists.items()
        for i, module in enumerate(body.modules[name].children())
    }


@dataclass(frozen=True)
class _Place:
    """One block list's share of its stack: the blocks before it, and the stack's name."""

    stack: str
    offset: int


class _Body:
    """A model's modules by path, with the blocks found among them."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self.lists: dict[str, _Place] = {}
        self.beside: dict[str, _Place] = {}
        self.depths: dict[str, int] = {}
        for name, module in modules.items():
            if isinstance(module, LISTS):
                self._count(name, len(module))
        self._require_blocks()
        entries = {name: _entry(module) for name, module in modules.items()}
        self.tables = {e for e in entries.values() if isinstance(e, nn.Embedding)}
        self.backbones = dict(self._backbones(entries))

    def _backbones(self, entries: dict[str, nn.Module | None]) -> Iterator[tuple[str, str]]:
        """Hugging Face models by path, each with the path of the backbone that its input enters."""
        for name, module in self.modules.items():
            backbone = str(getattr(module, "base_model_prefix", ""))
            inside = f"{name}.{backbone}" if name else backbone
            if backbone and inside in self.modules:
                entry = entries[name]
                if entry is None or any(entry is m for m in self.modules[inside].modules()):
                    yield name, inside

    def _count(self, name: str, size: int) -> None:
        row, _ = self._row(name)
        for stack, where in row.beside.items() if row else ():
            if ends(path(where), path(name)):
                self.beside[name] = _Place(stack, 0)
        for stack, where in row.blocks.items() if row else ():
            if any(ends(path(each), path(name)) for each in where.split()):
                stack = self._stack(name, stack)
                self.lists[name] = _Place(stack, self.depths.get(stack, 0))
                self.depths[stack] = self.depths.get(stack, 0) + size

    def _require_blocks(self) -> None:
        """A row that somebody taught for this class must find the blocks that it speaks of."""
        root = type(self.modules[""]).__name__
        row = known_row(self.modules[""]) if root in KNOWN else None
        if row and row.blocks and not self.lists:
            where = ", ".join(row.blocks.values())
            lists = [name for name, module in self.modules.items() if isinstance(module, LISTS)]
            raise UnknownArchitecture(
                f"the row of {root!r} says that its blocks are in {where!r}, and there is no list "
                f"of modules there; there are {', '.join(lists) or 'none'}: teach it blocks= anew"
            )

    def explain(self, names: list[str], tensor: Tensor) -> Iterator[Param]:
        """The params that one tensor holds: one, or one per kind where it is fused.

        The first name that somebody runs says what it is, but a head's only if it is nothing else;
        nothing of it is a param if nobody runs it.
        """
        live = [name for name in names if not is_dormant(self.modules, name)]
        if len(live) > 1:
            live.sort(key=self._is_head)
        graft = graft_of(self.modules, live[0]) if live else None
        if graft and graft.kind is Kind.ADAPTER:
            yield from self._adapters(live, tensor, graft)
        elif graft:
            kind, tag = graft.kind, TAGS.get(graft.place, "")
            yield self._param(live[0], tensor, without_wrappers(live[0]), kind, tag=tag)
        elif live:
            yield from self._plain(live[0], tensor, without_wrappers(live[0]))

    def _is_head(self, name: str) -> bool:
        """Whether a name of a tied tensor is a head's, or a second path to one module."""
        owner = self.modules.get(name.rpartition(".")[0])
        return owner is None or self._find(name, without_wrappers(name), owner) is Kind.HEAD

    def _plain(self, name: str, tensor: Tensor, where: Path) -> Iterator[Param]:
        found = self._find(name, where, self._owner(name))
        if isinstance(found, Kind):
            yield self._param(name, tensor, where, found)
            return
        dim = self._out_dim(name, tensor)
        if getattr(self._owner(name), "out_features", tensor.shape[dim]) != tensor.shape[dim]:
            raise UnknownArchitecture(
                f"{name!r} holds several kinds and is packed ({tuple(tensor.shape)} of "
                f"{tensor.dtype}), so that its rows cannot be told: load the model unpacked"
            )
        for kind, rows in self._fused(found, name, tensor.shape[dim]).items():
            yield self._param(name, tensor, where, kind, replace(rows, dim=dim))

    def _adapters(self, names: list[str], tensor: Tensor, graft: Graft) -> Iterator[Param]:
        """An adapter acts on its host's kind; of a fused host, LoRA's output side has rows too."""
        name, tag = names[0], TAGS.get(graft.place, "")
        param = self._param(name, tensor, without_wrappers(name), Kind.ADAPTER, tag=tag)
        found = self._host(name)
        layout = self._fused(found, name, tensor.numel()) if isinstance(found, tuple) else {}
        if len(names) > 1 or not layout or tag not in ROWED:
            yield self._acting(param, names)
            return
        for kind, rows in self._fused(cast("Path", found), name, tensor.shape[0]).items():
            shape = rows.shape(tuple(tensor.shape))
            yield replace(param, on=frozenset({kind}), rows=rows, shape=shape)

    def _acting(self, param: Param, names: list[str]) -> Param:
        """An adapter with all that it acts on; one that serves several blocks stands in none."""
        hosts = {name: self._host(name) for name in names}
        on = {
            kind
            for name, host in hosts.items()
            for kind in (self._fused(host, name, 0) if isinstance(host, tuple) else (host,))
        }
        places = {self._block(name, self._row(name)[0]) for name in names}
        block = param.block if len(places) == 1 else None
        return replace(param, on=frozenset(kind for kind in on if kind), block=block)

    def _host(self, name: str) -> Kind | Path | None:
        """The kind of what an adapter's layer changes; None where it serves the whole model."""
        graft = graft_of(self.modules, name)
        inner = graft.inner if graft else ""
        if not graft or inner not in self.modules:
            return None
        while f"{inner}.{WRAPPED}" in self.modules:
            inner = f"{inner}.{WRAPPED}"
        leaf = str(getattr(self.modules[graft.layer], "parameter_name", "weight"))
        return self._find(name, (*without_wrappers(graft.layer), leaf), self.modules[inner])

    def _param(
        self,
        name: str,
        tensor: Tensor,
        where: Path,
        kind: Kind,
        rows: Rows | None = None,
        tag: str = "",
    ) -> Param:
        row, _ = self._row(name)
        stack, block = self._block(name, row)
        tags = {tag} if tag else set[str]()
        if where[-1] == "bias" or where[-1].endswith("_bias") or self._recurrent_bias(name):
            tags.add("bias")
        tags |= {tag for p, tag in row.tags.items() if occurs(p, where)} if row else set()
        acts_on = {k for p, k in row.acts_on.items() if occurs(p, where)} if row else set[Kind]()
        shape = tuple(tensor.shape)
        told = self._told(name, where)
        placed = block is not None or bool(row and row.blocks and told)
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
            perhaps=self._perhaps(name, kind, placed=placed, told=told),
        )

    def _perhaps(self, name: str, kind: Kind, *, placed: bool, told: bool) -> frozenset[str]:
        """The words that nobody knows to be true or not, of a param whose row is not known."""
        if kind is Kind.PROMPT or self._outside_backbone(name):
            return frozenset()
        places = frozenset[str]() if placed else PLACES
        if kind is not Kind.UNKNOWN:
            acts = {"kernel"} if kind in (Kind.NORM, Kind.ADAPTER) else set[str]()
            return frozenset() if told else places | acts
        owner = self._owner(name)
        if isinstance(owner, nn.Embedding):
            return places | {"embed", "position", "kernel", "prompt"}
        words = ANATOMY | places
        words -= set() if _may_be_norm(owner) else {"norm"}
        listed = any(isinstance(self.modules.get(above), LISTS) for above in _ancestors(name))
        # Within a backbone only a linear layer beside the blocks may be head: a pooler.
        inside = self._inside_backbone(name) and (listed or not isinstance(owner, nn.Linear))
        return words - {"head"} if inside else words

    def _find(self, name: str, where: Path, owner: nn.Module) -> Kind | Path:
        """The kind of a tensor, or the path of its fused layout: by type first, then by name."""
        row, _ = self._row(name)
        if self._outside_backbone(name):
            return Kind.HEAD
        if row is None:
            return self._by_type(owner)
        foreign = self._foreign(name)
        said = where if foreign is None else foreign
        matching = [p for p in (*row.kinds, *row.fused) if occurs(p, said)]
        if any(row.kinds.get(p) is Kind.HEAD for p in matching):
            return Kind.HEAD
        if _is_norm(owner):
            return Kind.NORM
        if matching:
            longest = max(matching, key=len)
            return row.kinds.get(longest, longest)
        if not self._told(name, where):
            return self._by_type(owner)
        return Kind.EMBED if isinstance(owner, nn.Embedding) else Kind.UNKNOWN

    def _by_type(self, owner: nn.Module) -> Kind:
        """What is sure of a tensor without any anatomy."""
        if _is_norm(owner):
            return Kind.NORM
        return Kind.EMBED if owner in self.tables else Kind.UNKNOWN

    def _fused(self, found: Path, name: str, size: int) -> dict[Kind, Rows]:
        row, config = self._row(name)
        assert row is not None
        return row.fused[found](config, size)

    def _row(self, name: str) -> tuple[Anatomy | None, Any]:
        """The anatomy of the nearest module that has one, and that module's configuration."""
        for above in _ancestors(name):
            module = self.modules.get(above)
            if row := known_row(module):
                return row, getattr(module, "config", None)
        return None, None

    def _stack(self, name: str, stack: str) -> str:
        """The stack of a name: as a model of several models says, or as it is used."""
        _, config = self._row(name)
        used = "decoder" if getattr(config, "is_decoder", False) is True else stack
        return self._tower(name) or (used if stack == "encoder" else stack)

    def _foreign(self, name: str) -> Path | None:
        """The path of a model of an unknown type within a known one, if this stands in one."""
        found: Path | None = None
        for above in _ancestors(name):
            module = self.modules.get(above)
            if known_row(module):
                return found
            model_type = getattr(getattr(module, "config", None), "model_type", None)
            found = path(above) if isinstance(model_type, str) else found
        return None

    def _told(self, name: str, where: Path) -> bool:
        """Whether a row tells of the model that this stands in, or of this by its path."""
        row, _ = self._row(name)
        foreign = self._foreign(name)
        if row is None or (foreign is None and (row.blocks or row.towers or row.fused)):
            return row is not None
        said = where if foreign is None else foreign
        return any(occurs(p, said) for p in (*row.kinds, *row.fused))

    def _tower(self, name: str) -> str:
        """The stack that a model of several models gives to the one that holds this name."""
        for above in _ancestors(name):
            row, _ = self._row(above)
            towers = row.towers if row else dict[str, str]()
            below = name[len(above) + 1 if above else 0 :].split(".")[0]
            if below in towers:
                return towers[below]
        return ""

    def _block(self, name: str, row: Anatomy | None) -> tuple[str, int | None]:
        """The stack and block of a tensor; no block for what stands outside all of them."""
        segments = name.split(".")
        for i, segment in enumerate(segments):
            above = ".".join(segments[:i])
            place = self.lists.get(above) or self.beside.get(above)
            if place:
                return place.stack, place.offset + _position(self.modules[above], segment)
        if row is None or self._outside_backbone(name):
            return "", None
        named = [stack for stack in row.blocks if len(row.blocks) == 1 or stack in segments]
        return self._stack(name, named[0] if named else ""), None

    def _outside_backbone(self, name: str) -> bool:
        """Whether a Hugging Face model with a backbone holds this beside it: then it is head."""
        for above in _ancestors(name):
            if inside := self.backbones.get(above):
                return not name.startswith(f"{inside}.")
        return False

    def _inside_backbone(self, name: str) -> bool:
        """Whether a Hugging Face model holds this in its backbone, or is nothing but one."""
        above = (self.modules.get(each) for each in _ancestors(name))
        return any(getattr(module, "base_model_prefix", "") for module in above)

    def _recurrent_bias(self, name: str) -> bool:
        last = name.rpartition(".")[2]
        return last.startswith("bias_") and isinstance(self._owner(name), nn.RNNBase)

    def _owner(self, name: str) -> nn.Module:
        return self.modules[name.rpartition(".")[0]]

    def _out_dim(self, name: str, tensor: Tensor) -> int:
        """The dimension that counts outputs: Conv1D of GPT-2 stores its weight transposed."""
        return 1 if type(self._owner(name)).__name__ == "Conv1D" and tensor.dim() == 2 else 0


def _ancestors(name: str) -> Iterator[str]:
    """The path itself and each one above it, nearest first, down to the root's empty path."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _position(holder: nn.Module, segment: str) -> int:
    """Which of a list's modules a segment names; they may have names of their own."""
    if isinstance(holder, nn.ModuleDict):
        return list(holder.keys()).index(segment)
    names = [name for name, _ in holder.named_children()]
    return int(segment) if segment.isdigit() else names.index(segment)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("Norm", "Norm1d", "Norm2d"))


def _entry(module: nn.Module) -> nn.Module | None:
    """The module that a Hugging Face model says its input enters by, if it says one."""
    ask = getattr(module, "get_input_embeddings", None)
    try:
        found = ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None


def _may_be_norm(owner: nn.Module) -> bool:
    """Whether a module of somebody's own class holds nothing but vectors."""
    if type(owner).__module__.startswith("torch.") or any(True for _ in owner.children()):
        return False
    held = (tuple(tensor.shape) for tensor in owner.parameters(recurse=False))
    return all(prod(shape) == max(shape, default=0) for shape in held)
