# SPDX-License-Identifier: Apache-2.0
"""Helpers for the modules of a model and their dotted paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod

from torch import Tensor, nn


def ancestors(name: str) -> Iterator[str]:
    """Yield a path and the paths of its parents, nearest first; the root is the empty path."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def index_in(holder: nn.Module, segment: str) -> int:
    """The index of the child named `segment` in a ModuleList, ModuleDict or Sequential."""
    if isinstance(holder, nn.ModuleDict):
        return list(holder.keys()).index(segment)
    names = [name for name, _ in holder.named_children()]
    return int(segment) if segment.isdigit() else names.index(segment)


def is_norm(module: nn.Module) -> bool:
    """Whether the class name of a module ends with Norm, Norm1d or Norm2d."""
    return type(module).__name__.endswith(("Norm", "Norm1d", "Norm2d"))


def input_embeddings(module: nn.Module) -> nn.Module | None:
    """The input embeddings of a Hugging Face model; None for other modules, or if undefined."""
    get_embeddings = getattr(module, "get_input_embeddings", None)
    with suppress(NotImplementedError, AttributeError):
        embeddings = get_embeddings() if callable(get_embeddings) else None
        return embeddings if isinstance(embeddings, nn.Module) else None
    return None


def may_be_norm(owner: nn.Module) -> bool:
    """Whether a module could be a norm: a class outside torch, no children, vectors only."""
    if type(owner).__module__.startswith("torch.") or any(True for _ in owner.children()):
        return False
    shapes = (tuple(tensor.shape) for tensor in owner.parameters(recurse=False))
    return all(prod(shape) == max(shape, default=0) for shape in shapes)


def find_backbones(
    modules: Mapping[str, nn.Module], embeddings: Mapping[str, nn.Module | None]
) -> dict[str, str]:
    """The path of the backbone of each Hugging Face model that has a backbone, by model path.

    `modules` are all modules by path; `embeddings` has the input embeddings of each module, or
    None. A backbone is the child named by `base_model_prefix`, unless the model has input
    embeddings outside that child.
    """
    backbones = dict[str, str]()
    for name, module in modules.items():
        prefix = str(getattr(module, "base_model_prefix", ""))
        path = f"{name}.{prefix}" if name else prefix
        if prefix and path in modules:
            table = embeddings[name]
            if table is None or any(table is each for each in modules[path].modules()):
                backbones[name] = path
    return backbones


def output_dim(owner: nn.Module, tensor: Tensor) -> int:
    """The dimension of the output features of a weight: 1 for GPT-2's transposed Conv1D, else 0."""
    return 1 if type(owner).__name__ == "Conv1D" and tensor.dim() == 2 else 0
