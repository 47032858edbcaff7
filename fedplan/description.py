# SPDX-License-Identifier: Apache-2.0
"""Describe: every parameter of a model as a param, or an error that says how to teach it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from fedplan.adapters import (
    ROWED,
    TAGS,
    WRAPPED,
    Graft,
    graft_of,
    is_dormant,
    without_wrappers,
)
from fedplan.anatomy import Anatomy, Path, ends, occurs, path
from fedplan.architectures import KNOWN
from fedplan.errors import UnknownArchitecture
from fedplan.params import Block, Kind, Param, Params, Rows

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""What may hold a model's blocks."""


def describe(model: nn.Module) -> Params:
    """List every parameter of a model, in the model's order, rows of fused tensors one by one.

    Works on the meta device too. Tied tensors appear once, under their first owner's kind. Copies
    that nobody runs (an adapter of peft that is not active, what a saved module replaced) are none.

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
        if root in KNOWN and KNOWN[root].blocks and not self.lists:
            where = ", ".join(KNOWN[root].blocks.values())
            lists = [name for name, module in self.modules.items() if isinstance(module, LISTS)]
            raise UnknownArchitecture(
                f"the row of {root!r} says that its blocks are in {where!r}, and there is no list "
                f"of modules there; there are {', '.join(lists) or 'none'}: teach it blocks= anew"
            )

    def explain(self, names: list[str], tensor: Tensor) -> Iterator[Param]:
        """The params that one tensor holds: one, or one per kind where it is fused.

        The first name that somebody runs says what it is; nothing of it is a param if none does.
        """
        live = [name for name in names if not is_dormant(self.modules, name)]
        graft = graft_of(self.modules, live[0]) if live else None
        if graft and graft.kind is Kind.ADAPTER:
            yield from self._adapters(live, tensor, graft)
        elif graft:
            kind, tag = graft.kind, TAGS.get(graft.place, "")
            yield self._param(live[0], tensor, without_wrappers(live[0]), kind, tag=tag)
        elif live:
            yield from self._plain(live[0], tensor, without_wrappers(live[0]))

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
        if where[-1] == "bias" or where[-1].endswith("_bias"):
            tags.add("bias")
        tags |= {tag for p, tag in row.tags.items() if occurs(p, where)} if row else set()
        acts_on = {k for p, k in row.acts_on.items() if occurs(p, where)} if row else set[Kind]()
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
            tags=frozenset(tags),
            on=frozenset(acts_on),
        )

    def _find(self, name: str, where: Path, owner: nn.Module) -> Kind | Path:
        """The kind of a tensor, or the path of its fused layout: by type first, then by name."""
        row, _ = self._row(name)
        if self._outside_backbone(name):
            return Kind.HEAD
        if row is None:
            raise self._untaught(name)
        matching = [p for p in (*row.kinds, *row.fused) if occurs(p, where)]
        if any(row.kinds.get(p) is Kind.HEAD for p in matching):
            return Kind.HEAD
        if _is_norm(owner):
            return Kind.NORM
        if matching:
            longest = max(matching, key=len)
            return row.kinds.get(longest, longest)
        if isinstance(owner, nn.Embedding):
            return Kind.EMBED
        raise self._untaught(name)

    def _fused(self, found: Path, name: str, size: int) -> dict[Kind, Rows]:
        row, config = self._row(name)
        assert row is not None
        return row.fused[found](config, size)

    def _row(self, name: str) -> tuple[Anatomy | None, Any]:
        """The anatomy of the nearest module that has one, and that module's configuration."""
        for above in _ancestors(name):
            module = self.modules.get(above)
            config = getattr(module, "config", None)
            kind = type(module)
            exact = f"{kind.__module__}.{kind.__qualname__}"
            for key in (getattr(config, "model_type", None), exact, kind.__name__):
                if key in KNOWN and KNOWN[key].fits(kind):
                    return KNOWN[key], config
        return None, None

    def _stack(self, name: str, stack: str) -> str:
        """The stack of a name: as a model of several models says, or as it is used."""
        _, config = self._row(name)
        used = "decoder" if getattr(config, "is_decoder", False) is True else stack
        return self._tower(name) or (used if stack == "encoder" else stack)

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
            backbone = getattr(self.modules.get(above), "base_model_prefix", "")
            inside = f"{above}.{backbone}" if above else str(backbone)
            if backbone and inside in self.modules:
                return not name.startswith(f"{inside}.")
        return False

    def _owner(self, name: str) -> nn.Module:
        return self.modules[name.rpartition(".")[0]]

    def _out_dim(self, name: str, tensor: Tensor) -> int:
        """The dimension that counts outputs: Conv1D of GPT-2 stores its weight transposed."""
        return 1 if type(self._owner(name)).__name__ == "Conv1D" and tensor.dim() == 2 else 0

    def _untaught(self, name: str) -> UnknownArchitecture:
        root = self.modules[""]
        kind = getattr(getattr(root, "config", None), "model_type", type(root).__name__)
        lists = [
            f"{n} ({len(m)} of {type(m[0]).__name__})"
            for n, m in self.modules.items()
            if isinstance(m, nn.ModuleList) and len(m) > 0
        ]
        return UnknownArchitecture(
            f"no anatomy says what {name!r} of {type(root).__name__} is.\n"
            f"Lists of modules in it: {', '.join(lists[:6]) or 'none'}.\n"
            "Teach it, with paths as they stand in the parameter names:\n"
            f'  fedplan.teach("{kind}", blocks={{"encoder": "encoder.layer"}}, '
            'query="self.query", key=..., value=..., out=..., mlp=..., embed=..., head=...)'
        )


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
