# SPDX-License-Identifier: Apache-2.0
"""Proposals: a layer map for an architecture without one, from the names of its modules.

Known layer maps are tried first. Every proposal comes with checks of the model's behaviour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from rich.table import Table
from torch import Tensor, nn

from fedplan.errors import FedplanError, UnknownArchitecture
from fedplan.models.behaviour.dummy_inputs import small_model
from fedplan.models.behaviour.validate import (
    EXPECTED_BEHAVIOUR,
    ParamCheck,
    check_params,
    require_valid_layer_map,
)
from fedplan.models.catalog import load_model_config
from fedplan.models.description import describe
from fedplan.models.layer_maps import LAYER_MAPS, make_layer_map, temporary_layer_map
from fedplan.models.layouts import LAYOUTS, LayerMap
from fedplan.models.params import Kind

Settings = dict[str, Any]
"""A layer map as in a study: the arguments of `make_layer_map`, with layouts by name."""

NAME_PATTERNS: dict[str, str] = {
    "query": r"q|query|q_proj|q_lin|to_q|wq|query_proj|q_attn|q_bias",
    "key": r"k|key|k_proj|k_lin|to_k|wk|key_proj",
    "value": r"v|value|v_proj|v_lin|to_v|wv|value_proj|v_bias",
    "fused": r"qkv|Wqkv|qkv_proj|query_key_value|c_attn|in_proj",
    "out": r"o|out|output|o_proj|out_proj|out_lin|wo|proj|dense|c_proj|to_out|projection",
    "position": r".*(relative|rel_pos|position_bias).*",
    "router": r"gate|router",
    "expert": r"experts?",
    "scale": r".*(layer_?scale|lambda|gamma).*",
    "head": r".*(pooler|classifier|head|score).*",
}
"""Patterns of module names by kind; "fused" for query, key and value in one."""
ATTENTION = re.compile(r".*(attn|attention)(?!.*(norm|mlp)).*", re.IGNORECASE)
"""Names of attention modules."""
LAYOUT_NEEDS = {"thirds": "", "per_head": "num_attention_heads", "grouped": "num_key_value_heads"}
"""The fused layouts to try, and the config attributes that each needs."""
CROSS = re.compile(r".*(cross|encoder_?attn|encdec|multihead_attn).*", re.IGNORECASE)
"""Names of cross-attention modules."""
NORM_PATTERNS = {"query": re.compile(r"q_?(layer)?_?norm"), "key": re.compile(r"k_?(layer)?_?norm")}
"""Names of norms that act on query or key alone."""


@dataclass(frozen=True)
class Proposal:
    """A proposed layer map for the model type `name`: its settings, and the checks of params."""

    name: str
    settings: Settings = field(default_factory=dict[str, Any])
    checks: tuple[ParamCheck, ...] = ()

    @property
    def faults(self) -> tuple[ParamCheck, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.fault)

    @property
    def toml(self) -> str:
        """The layer map as a section of a study file."""
        if self.settings.keys() == {"like"}:
            return f"[model]\nlayer_map_like = {json.dumps(self.settings['like'])}"
        return "[model.layer_map]\n" + "\n".join(
            f"{k} = {_toml(v)}" for k, v in self.settings.items()
        )

    @property
    def python(self) -> str:
        """The layer map as a call of `fedplan.register_layer_map`."""
        arguments = [
            f"{k}={_python(v) if k == 'fused' else repr(v)}" for k, v in self.settings.items()
        ]
        return f"fedplan.register_layer_map({', '.join([repr(self.name), *arguments])})"


def layer_map_from_study(settings: Mapping[str, Any]) -> LayerMap:
    """The layer map of a study: `settings` are model.layer_map, or {"like": model.layer_map_like}.

    Raises FedplanError for an unknown `like`, layout or setting.
    """
    arguments = dict(settings)
    if arguments.get("like", "llama") not in LAYER_MAPS:
        raise FedplanError(
            f"there is no layer map {arguments['like']!r}; there are {', '.join(LAYER_MAPS)}"
        )
    fused = dict(arguments.pop("fused", {}))
    if unknown := set(fused.values()) - set(LAYOUTS):
        raise FedplanError(f"there is no layout {min(unknown)!r}; there are {', '.join(LAYOUTS)}")
    try:
        layouts = {path: LAYOUTS[name] for path, name in fused.items()}
        return make_layer_map(fused=layouts, **arguments)
    except (ValueError, TypeError, AttributeError) as error:
        raise FedplanError(f"model.layer_map is no layer map: {error}") from error


def register_study_layer_map(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Register the layer map of a study for a model's type, after checking it by behaviour.

    Raises FedplanError if the type has another layer map, and UnknownArchitecture if the model does
    not behave accordingly.
    """
    name, layer_map = model_type_name(model), layer_map_from_study(settings)
    if LAYER_MAPS.get(name, layer_map) != layer_map:
        raise FedplanError(
            f"{name!r} already has another layer map than this study: leave out "
            "model.layer_map_like and model.layer_map"
        )
    label = f"the layer map {settings.get('like', '') or 'of model.layer_map'!r}"
    with temporary_layer_map(name, layer_map):
        require_valid_layer_map(model, label=label)
    LAYER_MAPS[name] = layer_map


def model_type_name(model: nn.Module) -> str:
    """The name of a model's layer map: its `config.model_type`, or else its class name."""
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def propose_layer_map(model: nn.Module, batch: Mapping[str, Tensor] | None = None) -> Proposal:
    """Propose a layer map for a model, with checks of its behaviour on a batch (default: random).

    Its own map if it has one; else the first known map without faults; else the guess from its
    module names with the fewest faults. Raises UnknownArchitecture if it has no list of blocks.
    """
    name = model_type_name(model)
    if name in LAYER_MAPS:
        return Proposal(name, {"like": name}, check_params(model, batch))
    for like in _candidate_maps(name, model):
        proposal = _check_proposal(name, {"like": like}, model, batch)
        if not proposal.faults:
            return proposal
    guesses = [_check_proposal(name, guess, model, batch) for guess in _guess_settings(model)]
    return min(guesses, key=lambda guess: len(guess.faults))


def _check_proposal(
    name: str, settings: Settings, model: nn.Module, batch: Mapping[str, Tensor] | None
) -> Proposal:
    """A proposal with these settings, and the checks of the model with it."""
    with temporary_layer_map(name, layer_map_from_study(settings)):
        return Proposal(name, settings, check_params(model, batch))


def _candidate_maps(name: str, model: nn.Module) -> Iterator[str]:
    """Yield the names of known layer maps that cover a model; equal maps once."""
    tried: list[LayerMap] = []
    for like, layer_map in list(LAYER_MAPS.items()):
        if layer_map.blocks and layer_map not in tried:
            tried.append(layer_map)
            with temporary_layer_map(name, layer_map):
                if _is_covered(model):
                    yield like


def _is_covered(model: nn.Module) -> bool:
    """Whether all kinds are known, and each block has query, key, value and out."""
    try:
        params = describe(model)
    except UnknownArchitecture:  # its blocks are elsewhere
        return False
    blocks: dict[object, set[Kind]] = {}
    for p in params:
        if p.block_id:
            blocks.setdefault(p.block_id, set()).add(p.kind)
    attention = {Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.OUT}
    all_known = all(p.kind is not Kind.UNKNOWN for p in params)
    return all_known and bool(blocks) and all(kinds >= attention for kinds in blocks.values())


def _guess_settings(model: nn.Module) -> Iterator[Settings]:
    """Yield layer maps by the names of a model's modules: one for each possible fused layout."""
    lists = _block_lists(model)
    settings: Settings = {"blocks": _block_paths(model, lists)}
    paths_by_kind: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        kind, path = _guess_kind(name, lists, model)
        if kind and path not in paths_by_kind.setdefault(kind, []):
            paths_by_kind[kind].append(path)
    fused, cross = paths_by_kind.pop("fused", []), _cross_attention_names(model, lists)
    acts_on = {path: kind for kind in NORM_PATTERNS for path in paths_by_kind.pop(f"on {kind}", [])}
    settings |= {kind: " ".join(paths) for kind, paths in paths_by_kind.items()}
    settings |= {"cross": " ".join(cross)} if cross else {}
    settings |= {"acts_on": acts_on} if acts_on else {}
    config = getattr(model, "config", None)
    for layout, needs in LAYOUT_NEEDS.items() if fused else ():
        if all(each in dir(config) for each in needs.split()):
            yield settings | {"fused": dict.fromkeys(fused, layout)}
    if not fused:
        yield settings


def _block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of blocks by path: the innermost lists whose modules contain attention.

    Raises UnknownArchitecture if there are none.
    """
    lists = {
        name: module
        for name, module in _modules(model).items()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and any(map(ATTENTION.match, _modules(module[0])))
    }
    if not lists:
        raise UnknownArchitecture(
            f"{type(model).__name__} has no list of blocks with attention: register a layer map"
        )
    return {n: m for n, m in lists.items() if not any(o.startswith(f"{n}.") for o in lists)}


def _modules(module: nn.Module) -> dict[str, nn.Module]:
    return dict(cast("Any", module).named_modules())


def _block_paths(model: nn.Module, lists: Mapping[str, nn.ModuleList]) -> dict[str, str]:
    """The setting `blocks`: the path patterns of the lists, by stack."""
    stacks: dict[str, list[str]] = {}
    for name in lists:
        path = ".".join(re.sub(r"\.\d+\.", ".*.", name).split(".")[-3:])
        paths = stacks.setdefault(_guess_stack(name, model), [])
        if path not in paths:
            paths.append(path)
    return {stack: " ".join(paths) for stack, paths in stacks.items()}


def _guess_stack(name: str, model: nn.Module) -> str:
    """The stack of a list of blocks, by its path, the model's input and its model type."""
    words = {"decoder": "decoder", "encoder": "encoder", "vision": "vision", "visual": "vision"}
    for word, stack in (words | {"text": "text"}).items():
        if word in name:
            return stack
    if getattr(model, "main_input_name", "") == "pixel_values":
        return "vision"
    return "decoder" if _is_causal(model) else "encoder"


def _is_causal(model: nn.Module) -> bool:
    """Whether transformers has a causal language model of the model's type, and no masked one."""
    from transformers.models.auto import modeling_auto as auto

    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return [model_type_name(model) in each for each in mappings] == [True, False]


def _guess_kind(name: str, lists: Mapping[str, nn.ModuleList], model: nn.Module) -> tuple[str, str]:
    """The guessed kind of a param and the path for the layer map; empty strings for none.

    Besides kinds there are "fused", and "on query" and "on key" for norms.
    """
    block_list = next((each for each in lists if name.startswith(f"{each}.")), None)
    owner = model.get_submodule(name.rpartition(".")[0])
    if block_list is None:
        return _guess_outside_blocks(name, owner)
    path = name[len(block_list) + 1 :].split(".")[1:]
    path = path[:-1] if path[-1] in ("weight", "bias") else path
    pattern = ".".join("*" if step.isdecimal() else step for step in path)
    if "norm" in type(owner).__name__.lower():
        on = [kind for kind, norm in NORM_PATTERNS.items() if norm.fullmatch(path[-1])]
        return (f"on {on[0]}", pattern) if on else ("", "")
    return _guess_in_block(path, pattern)


def _cross_attention_names(model: nn.Module, lists: Mapping[str, nn.ModuleList]) -> list[str]:
    """The names of cross-attention modules in the blocks."""
    paths = (name for each in lists.values() for name in _modules(each[0]))
    steps = (step for path in paths for step in path.split(".") if CROSS.fullmatch(step))
    return [step for step in dict.fromkeys(steps) if "norm" not in step.lower()]


def _guess_outside_blocks(name: str, owner: nn.Module) -> tuple[str, str]:
    """The kind and path of a param outside blocks: position, head or embed; or empty strings."""
    path = name.split(".")
    module = ".".join(path[:-1] if path[-1] in ("weight", "bias") else path)
    if any(re.fullmatch(NAME_PATTERNS["position"], step) for step in path):
        return "position", module
    if "norm" in type(owner).__name__.lower() or isinstance(owner, nn.Embedding):
        return "", ""
    heads = [step for step in path if re.fullmatch(NAME_PATTERNS["head"], step)]
    return ("head", heads[0]) if heads else ("embed", module)


def _guess_in_block(path: list[str], pattern: str) -> tuple[str, str]:
    """The kind and path pattern of a param in a block, by its path there; or empty strings."""
    last = path[-1]
    if any(re.fullmatch(NAME_PATTERNS["expert"], step) for step in path):
        return "expert", ".".join(path[: path.index("experts") + 1] if "experts" in path else path)
    for kind in ("position", "scale"):
        if re.fullmatch(NAME_PATTERNS[kind], pattern):
            return kind, pattern
    attention = any(ATTENTION.match(step) for step in path[:-1])
    for kind in ("query", "key", "value", "fused", "out") if attention else ():
        if re.fullmatch(NAME_PATTERNS[kind], last):
            return kind, pattern
    if not attention and re.fullmatch(NAME_PATTERNS["router"], last) and len(path) > 1:
        return "router", pattern
    return ("", "") if attention else ("mlp", pattern)


def _toml(value: Any) -> str:
    """A string or a dict of strings as a TOML value."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(str(k))} = {json.dumps(v)}" for k, v in value.items())  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value)


def _python(layouts: Mapping[str, str]) -> str:
    pairs = (f"{path!r}: fedplan.models.layouts.{name}" for path, name in layouts.items())
    return f"{{{', '.join(pairs)}}}"


def small_model_like(name: str) -> nn.Module:
    """A small random model of a model type, or of the type of a folder, hub id or short name.

    Raises UnknownModel for an unknown name, FedplanError if no small model can run.
    """
    import transformers

    if name in transformers.CONFIG_MAPPING:
        return small_model(transformers.AutoConfig.for_model(name))
    return small_model(load_model_config(name)[0])


def proposal_report(proposal: Proposal) -> Iterator[Any]:
    """Yield the text and table of a proposal for a person: layer map, checks and usage."""
    is_known = proposal.settings.get("like") == proposal.name
    yield f"{proposal.name}: {_origin(proposal)}\n" + ("" if is_known else f"\n{proposal.toml}\n")
    yield _check_table(proposal)
    if is_known:
        yield "\nA study needs no settings for it."
    elif proposal.faults:
        yield "\nThe model does not behave by this layer map, so it cannot be used: correct it."
    else:
        yield (
            "\nAll checked params behave by this layer map. It is checked again before a study "
            f"uses it.\nIn a study, use the lines above; in Python:\n  {proposal.python}"
        )


def _origin(proposal: Proposal) -> str:
    if proposal.settings.get("like") == proposal.name:
        return "has a layer map"
    return "like a known layer map" if "like" in proposal.settings else "from module names"


def _check_table(proposal: Proposal) -> Table:
    """A table with the number of params of each kind, and their behaviour or first faults."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("part", "params", "verdict"):
        table.add_column(name)
    for kind in Kind:
        checks = [c for c in proposal.checks if c.param.kind is kind]
        faults = [f"{c.param.key} {c.fault}" for c in checks if c.fault]
        shown = faults[:2] + ([f"and {len(faults) - 2} more"] if len(faults) > 2 else [])
        if checks:
            table.add_row(str(kind), str(len(checks)), "; ".join(shown) or EXPECTED_BEHAVIOUR[kind])
    return table
