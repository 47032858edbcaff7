# SPDX-License-Identifier: Apache-2.0
"""Layer maps for architectures without one: proposed from module names, or given by a study.

Known layer maps are tried first. Every proposal comes with checks of the model's behaviour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rich.table import Table
from torch import Tensor, nn

from fedplan.errors import FedplanError, UnknownArchitecture
from fedplan.models.catalog import load_model_config
from fedplan.models.description import describe
from fedplan.models.layer_maps import (
    LAYER_MAPS,
    LAYOUTS,
    LayerMap,
    register_layer_map,
    restore_layer_maps,
)
from fedplan.models.params import Kind
from fedplan.models.trace import small_model
from fedplan.models.validate import (
    EXPECTED_BEHAVIOUR,
    ParamCheck,
    check_params,
    require_valid_layer_map,
)

Settings = dict[str, Any]
"""A layer map as in a study: the arguments of `register_layer_map`, with layouts by name."""

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
NORM_PATTERNS = {"query": r"q_?(layer)?_?norm", "key": r"k_?(layer)?_?norm"}
"""Names of norms that act on query or key alone."""
ATTENTION = re.compile(r".*(attn|attention)(?!.*(norm|mlp)).*", re.IGNORECASE)
CROSS = re.compile(r".*(cross|encoder_?attn|encdec|multihead_attn).*", re.IGNORECASE)
"""Names of cross-attention modules."""
LAYOUT_NEEDS = {"thirds": "", "per_head": "num_attention_heads", "grouped": "num_key_value_heads"}
"""The fused layouts to try, and the config attribute that each needs."""


@dataclass(frozen=True)
class Proposal:
    """A proposed layer map for the model type `name`, as returned by `propose_layer_map`.

    `settings`: the layer map as study settings. `checks`: the result for each checked param. The
    properties: `faults`, the failed checks; `toml` and `python`, the code that uses the map.
    """

    name: str
    settings: Settings = field(default_factory=dict[str, Any])
    checks: tuple[ParamCheck, ...] = ()

    @property
    def faults(self) -> tuple[ParamCheck, ...]:
        return tuple(check for check in self.checks if check.fault)

    @property
    def toml(self) -> str:
        """The layer map as a section of a study file."""
        if self.settings.keys() == {"like"}:
            return f"[model]\nlayer_map_like = {json.dumps(self.settings['like'])}"
        lines = ["[model.layer_map]"]
        for name, value in self.settings.items():
            text = json.dumps(value)
            if isinstance(value, dict):
                table = cast("dict[str, str]", value).items()
                pairs = (f"{json.dumps(k)} = {json.dumps(v)}" for k, v in table)
                text = f"{{ {', '.join(pairs)} }}"
            lines.append(f"{name} = {text}")
        return "\n".join(lines)

    @property
    def python(self) -> str:
        """The layer map as a call of `fedplan.register_layer_map`."""
        arguments = {name: repr(value) for name, value in self.settings.items()}
        if "fused" in self.settings:
            layouts = self.settings["fused"].items()
            pairs = (f"{path!r}: fedplan.models.layer_maps.{name}" for path, name in layouts)
            arguments["fused"] = f"{{{', '.join(pairs)}}}"
        texts = [repr(self.name), *(f"{name}={text}" for name, text in arguments.items())]
        return f"fedplan.register_layer_map({', '.join(texts)})"


def layer_map_from_study(settings: Mapping[str, Any]) -> LayerMap:
    """The layer map of a study: `settings` are model.layer_map, or {"like": model.layer_map_like}.

    Registers nothing. Raises FedplanError for an unknown `like`, layout or setting.
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
        with restore_layer_maps():
            layouts = {path: LAYOUTS[name] for path, name in fused.items()}
            return register_layer_map("", fused=layouts, **arguments)
    except (ValueError, TypeError, AttributeError) as error:
        raise FedplanError(f"model.layer_map is no layer map: {error}") from error


def register_study_layer_map(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Check the layer map of a study by the behaviour of a model, then register the map.

    Raises FedplanError for invalid settings, or if the model type has another layer map, and
    UnknownArchitecture if the checks find faults.
    """
    name, layer_map = model_type_name(model), layer_map_from_study(settings)
    if LAYER_MAPS.get(name, layer_map) != layer_map:
        raise FedplanError(
            f"{name!r} already has another layer map than this study: leave out "
            "model.layer_map_like and model.layer_map"
        )
    with restore_layer_maps():
        LAYER_MAPS[name] = layer_map
        label = f"the layer map {settings.get('like', '') or 'of model.layer_map'!r}"
        require_valid_layer_map(model, label=label)
    LAYER_MAPS[name] = layer_map


def model_type_name(model: nn.Module) -> str:
    """The name of a model's layer map: its `config.model_type`, or else its class name."""
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def propose_layer_map(model: nn.Module, batch: Mapping[str, Tensor] | None = None) -> Proposal:
    """Propose a layer map for a model, with checks of the model's behaviour on a batch.

    Proposes the registered map of the model's type; else the first registered map without faults;
    else the guess from module names with the fewest faults. `batch` is by default `dummy_inputs`.
    Registers nothing. Raises UnknownArchitecture if a guess is needed and the model has no list of
    blocks, and FedplanError if there are no dummy inputs for the model.
    """
    name = model_type_name(model)
    if name in LAYER_MAPS:
        return Proposal(name, {"like": name}, check_params(model, batch))
    with restore_layer_maps():

        def check(settings: Settings) -> Proposal:
            LAYER_MAPS[name] = layer_map_from_study(settings)
            return Proposal(name, settings, check_params(model, batch))

        tried: list[LayerMap] = []
        for like, layer_map in list(LAYER_MAPS.items()):
            if not layer_map.blocks or layer_map in tried:
                continue
            tried.append(layer_map)
            LAYER_MAPS[name] = replace(layer_map, library="")
            if _is_described(model) and not (proposal := check({"like": like})).faults:
                return proposal
        return min(map(check, _guess_settings(model)), key=lambda guess: len(guess.faults))


def _is_described(model: nn.Module) -> bool:
    """Whether the registered layer map fits the model, by a coarse check without forward passes."""
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
    modules: dict[str, Any] = dict(cast("Any", model).named_modules())
    lists: dict[str, list[str]] = {
        name: [*dict(cast("Any", module)[0].named_modules())]
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    lists = {name: inside for name, inside in lists.items() if any(map(ATTENTION.match, inside))}
    if not lists:
        raise UnknownArchitecture(
            f"{type(model).__name__} has no list of blocks with attention: register a layer map"
        )
    lists = {n: m for n, m in lists.items() if not any(o.startswith(f"{n}.") for o in lists)}
    blocks: dict[str, dict[str, None]] = {}
    for name in lists:
        path = ".".join(re.sub(r"\.\d+\.", ".*.", name).split(".")[-3:])
        blocks.setdefault(_guess_stack(name, model), {})[path] = None
    paths_by_kind: dict[str, dict[str, None]] = {}
    for name, _ in model.named_parameters():
        kind, path = _guess_kind(name, [*lists], model.get_submodule(name.rpartition(".")[0]))
        if kind:
            paths_by_kind.setdefault(kind, {})[path] = None
    fused = paths_by_kind.pop("fused", {})
    acts_on = {path: kind for kind in NORM_PATTERNS for path in paths_by_kind.pop(f"on {kind}", {})}
    steps = (step for inside in lists.values() for path in inside for step in path.split("."))
    cross = [s for s in dict.fromkeys(steps) if CROSS.fullmatch(s) and "norm" not in s.lower()]
    settings: Settings = {"blocks": {stack: " ".join(paths) for stack, paths in blocks.items()}}
    settings |= {kind: " ".join(paths) for kind, paths in paths_by_kind.items()}
    settings |= {"cross": " ".join(cross)} if cross else {}
    settings |= {"acts_on": acts_on} if acts_on else {}
    if not fused:
        yield settings
        return
    for layout, needed in LAYOUT_NEEDS.items():
        if not needed or needed in dir(getattr(model, "config", None)):
            yield settings | {"fused": dict.fromkeys(fused, layout)}


def _guess_stack(name: str, model: nn.Module) -> str:
    """The stack of a list of blocks: by its path, the model's input, or its type's models."""
    from transformers.models.auto import modeling_auto as auto

    for word in ("decoder", "encoder", "vision", "visual", "text"):
        if word in name:
            return word.replace("visual", "vision")
    if getattr(model, "main_input_name", "") == "pixel_values":
        return "vision"
    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    is_causal = [model_type_name(model) in each for each in mappings] == [True, False]
    return "decoder" if is_causal else "encoder"


def _guess_kind(name: str, block_lists: list[str], owner: nn.Module) -> tuple[str, str]:
    """Return (kind, also "fused" or "on KIND"; path) of a parameter; "" if it needs no entry."""
    is_norm, path = "norm" in type(owner).__name__.lower(), name.split(".")
    block_list = next((each for each in block_lists if name.startswith(f"{each}.")), None)
    if block_list is not None:
        path = name[len(block_list) + 1 :].split(".")[1:]
    steps = path[:-1] if path[-1] in ("weight", "bias") else path
    if block_list is None:
        if any(re.fullmatch(NAME_PATTERNS["position"], step) for step in path):
            return "position", ".".join(steps)
        if is_norm or isinstance(owner, nn.Embedding):
            return "", ""
        heads = [step for step in path if re.fullmatch(NAME_PATTERNS["head"], step)]
        return ("head", heads[0]) if heads else ("embed", ".".join(steps))
    pattern, last = ".".join("*" if step.isdecimal() else step for step in steps), steps[-1]
    if is_norm:
        on = [kind for kind, norm in NORM_PATTERNS.items() if re.fullmatch(norm, last)]
        return (f"on {on[0]}", pattern) if on else ("", "")
    if any(re.fullmatch(NAME_PATTERNS["expert"], step) for step in steps):
        end = steps.index("experts") + 1 if "experts" in steps else None
        return "expert", ".".join(steps[:end])
    in_attention = any(ATTENTION.match(step) for step in steps[:-1])
    subjects = {"position": pattern, "scale": pattern}
    if in_attention:
        subjects |= {kind: last for kind in ("query", "key", "value", "fused", "out")}
    elif len(steps) > 1:
        subjects["router"] = last
    for kind, subject in subjects.items():
        if re.fullmatch(NAME_PATTERNS[kind], subject):
            return kind, pattern
    return ("", "") if in_attention else ("mlp", pattern)


def small_model_like(name: str) -> nn.Module:
    """A small random model of the type of a name; UnknownModel, FedplanError if it cannot run."""
    import transformers

    if name in transformers.CONFIG_MAPPING:
        return small_model(transformers.AutoConfig.for_model(name))
    return small_model(load_model_config(name)[0])


def proposal_report(proposal: Proposal) -> Iterator[Any]:
    """Yield a proposal for a person, as strings and a rich Table: layer map, checks and usage."""
    is_known = proposal.settings.get("like") == proposal.name
    origin = "like a known layer map" if "like" in proposal.settings else "from module names"
    text = "has a layer map\n" if is_known else f"{origin}\n\n{proposal.toml}\n"
    yield f"{proposal.name}: {text}"
    table = Table("part", "params", "verdict", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for kind in Kind:
        checks = [c for c in proposal.checks if c.param.kind is kind]
        faults = [f"{c.param.key} {c.fault}" for c in checks if c.fault]
        shown = faults[:2] + ([f"and {len(faults) - 2} more"] if len(faults) > 2 else [])
        if checks:
            table.add_row(str(kind), str(len(checks)), "; ".join(shown) or EXPECTED_BEHAVIOUR[kind])
    yield table
    if is_known:
        yield "\nA study needs no settings for it."
    elif proposal.faults:
        yield "\nThe model does not behave by this layer map, so it cannot be used: correct it."
    else:
        yield (
            "\nAll checked params behave by this layer map. It is checked again before a study "
            f"uses it.\nIn a study, use the lines above; in Python:\n  {proposal.python}"
        )
