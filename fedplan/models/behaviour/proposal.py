# SPDX-License-Identifier: Apache-2.0
"""Proposals: a row for an architecture that has none, from the names of its modules.

A row that is known is tried first. What is proposed is no more than a guess until its behaviour is
judged; what fails is said.
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
from fedplan.models.behaviour.judging import BEHAVES, Verdict, require_true, verdicts
from fedplan.models.behaviour.stimulus import small_model
from fedplan.models.catalog import configuration
from fedplan.models.description import describe
from fedplan.models.layouts import LAYOUTS, Anatomy
from fedplan.models.params import Kind
from fedplan.models.teaching import KNOWN, row_said, trying

Said = dict[str, Any]
"""A row as a study says it: the words of `teach`, with layouts by name."""

NAMES: dict[str, str] = {
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
ATTENTION = re.compile(r".*(attn|attention)(?!.*(norm|mlp)).*", re.IGNORECASE)
NEEDS = {"thirds": "", "per_head": "num_attention_heads", "grouped": "num_key_value_heads"}
"""The layouts that are tried, and what the configuration must say for each."""
CROSS = re.compile(r".*(cross|encoder_?attn|encdec|multihead_attn).*", re.IGNORECASE)
ON = {"query": re.compile(r"q_?(layer)?_?norm"), "key": re.compile(r"k_?(layer)?_?norm")}


@dataclass(frozen=True)
class Proposal:
    """A row for a model type, and what its behaviour says of it."""

    name: str
    said: Said = field(default_factory=dict[str, Any])
    judged: tuple[Verdict, ...] = ()

    @property
    def faults(self) -> tuple[Verdict, ...]:
        """What does not behave as the row says."""
        return tuple(verdict for verdict in self.judged if verdict.fault)

    @property
    def toml(self) -> str:
        """The row as a study says it."""
        if self.said.keys() == {"like"}:
            return f"[model]\nlike = {json.dumps(self.said['like'])}"
        return "[model.anatomy]\n" + "\n".join(f"{k} = {_toml(v)}" for k, v in self.said.items())

    @property
    def python(self) -> str:
        """The row as Python teaches it."""
        words = [f"{k}={_python(v) if k == 'fused' else repr(v)}" for k, v in self.said.items()]
        return f"fedplan.teach({', '.join([repr(self.name), *words])})"


def taught_by(said: Mapping[str, Any]) -> Anatomy:
    """The row that a study says: `like` alone, or an anatomy in the words of `teach`."""
    words = dict(said)
    if words.get("like", "llama") not in KNOWN:
        raise FedplanError(f"there is no row {words['like']!r}; there are {', '.join(KNOWN)}")
    fused = dict(words.pop("fused", {}))
    if strange := set(fused.values()) - set(LAYOUTS):
        raise FedplanError(f"there is no layout {min(strange)!r}; there are {', '.join(LAYOUTS)}")
    try:
        return row_said(fused={path: LAYOUTS[name] for path, name in fused.items()}, **words)
    except (ValueError, TypeError, AttributeError) as error:
        raise FedplanError(f"model.anatomy is not a row: {error}") from error


def learn(model: nn.Module, said: Mapping[str, Any]) -> None:
    """Know a model's type by the row that a study says, if it behaves by that row."""
    name, row = type_of(model), taught_by(said)
    if KNOWN.get(name, row) != row:
        raise FedplanError(
            f"{name!r} is known, by another row than this study says: leave out model.like and "
            "model.anatomy"
        )
    with trying(name, row):
        require_true(model, row=f"the row {said.get('like', '') or 'of model.anatomy'!r}")
    KNOWN[name] = row


def type_of(model: nn.Module) -> str:
    """The name that a model's row goes by."""
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def propose(model: nn.Module, batch: Mapping[str, Tensor] | None = None) -> Proposal:
    """The first row that a model behaves by, of those that are known; else one from its names."""
    name = type_of(model)
    if name in KNOWN:
        return Proposal(name, {"like": name}, verdicts(model, batch))
    for like in _fitting(name, model):
        proposal = judged(name, {"like": like}, model, batch)
        if not proposal.faults:
            return proposal
    guesses = [judged(name, said, model, batch) for said in _from_names(model)]
    return min(guesses, key=lambda guess: len(guess.faults))


def judged(
    name: str, said: Said, model: nn.Module, batch: Mapping[str, Tensor] | None = None
) -> Proposal:
    """A row, tried on a model."""
    with trying(name, taught_by(said)):
        return Proposal(name, said, verdicts(model, batch))


def _fitting(name: str, model: nn.Module) -> Iterator[str]:
    """Known rows that explain every param, and give each block its attention; each row once."""
    tried: list[Anatomy] = []
    for like, row in list(KNOWN.items()):
        if row.blocks and row not in tried:
            tried.append(row)
            with trying(name, row):
                if _explains(model):
                    yield like


def _explains(model: nn.Module) -> bool:
    try:
        params = describe(model)
    except UnknownArchitecture:  # its blocks are not where the row says
        return False
    blocks: dict[object, set[Kind]] = {}
    for p in params:
        if p.at:
            blocks.setdefault(p.at, set()).add(p.kind)
    whole = {Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.OUT}
    known = all(p.kind is not Kind.UNKNOWN for p in params)
    return known and bool(blocks) and all(kinds >= whole for kinds in blocks.values())


def _from_names(model: nn.Module) -> Iterator[Said]:
    """Rows by the names of a model's modules: one for each layout that could be meant."""
    lists = _lists(model)
    said: Said = {"blocks": _blocks(model, lists)}
    found: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        kind, where = _guess(name, lists, model)
        if kind and where not in found.setdefault(kind, []):
            found[kind].append(where)
    fused, cross = found.pop("fused", []), _crossed(model, lists)
    acts = {where: kind for kind in ON for where in found.pop(f"on {kind}", [])}
    said |= {kind: " ".join(paths) for kind, paths in found.items()}
    said |= {"cross": " ".join(cross)} if cross else {}
    said |= {"acts_on": acts} if acts else {}
    config = getattr(model, "config", None)
    for layout, needs in NEEDS.items() if fused else ():
        if all(each in dir(config) for each in needs.split()):
            yield said | {"fused": dict.fromkeys(fused, layout)}
    if not fused:
        yield said


def _lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of blocks: the innermost in which modules have attention of their own."""
    found = {
        name: module
        for name, module in _modules(model).items()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and any(map(ATTENTION.match, _modules(module[0])))
    }
    if not found:
        raise UnknownArchitecture(
            f"{type(model).__name__} has no list of blocks with attention in it: teach its row"
        )
    return {n: m for n, m in found.items() if not any(o.startswith(f"{n}.") for o in found)}


def _modules(module: nn.Module) -> dict[str, nn.Module]:
    return dict(cast("Any", module).named_modules())


def _blocks(model: nn.Module, lists: Mapping[str, nn.ModuleList]) -> dict[str, str]:
    stacks: dict[str, list[str]] = {}
    for name in lists:
        where = ".".join(re.sub(r"\.\d+\.", ".*.", name).split(".")[-3:])
        paths = stacks.setdefault(_stack(name, model), [])
        if where not in paths:
            paths.append(where)
    return {stack: " ".join(paths) for stack, paths in stacks.items()}


def _stack(name: str, model: nn.Module) -> str:
    words = {"decoder": "decoder", "encoder": "encoder", "vision": "vision", "visual": "vision"}
    for word, stack in (words | {"text": "text"}).items():
        if word in name:
            return stack
    if getattr(model, "main_input_name", "") == "pixel_values":
        return "vision"
    return "decoder" if _causal(model) else "encoder"


def _causal(model: nn.Module) -> bool:
    from transformers.models.auto import modeling_auto as auto

    kinds = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return [type_of(model) in each for each in kinds] == [True, False]


def _guess(name: str, lists: Mapping[str, nn.ModuleList], model: nn.Module) -> tuple[str, str]:
    """What a param is by its name, and the path that says so."""
    above = next((each for each in lists if name.startswith(f"{each}.")), None)
    owner = model.get_submodule(name.rpartition(".")[0])
    if above is None:
        return _outside(name, owner)
    path = name[len(above) + 1 :].split(".")[1:]
    path = path[:-1] if path[-1] in ("weight", "bias") else path
    said = ".".join("*" if step.isdecimal() else step for step in path)
    if "norm" in type(owner).__name__.lower():
        on = [kind for kind, spelt in ON.items() if spelt.fullmatch(path[-1])]
        return (f"on {on[0]}", said) if on else ("", "")
    return _inside(path, said)


def _crossed(model: nn.Module, lists: Mapping[str, nn.ModuleList]) -> list[str]:
    """The names of modules of cross-attention within the blocks."""
    below = (name for each in lists.values() for name in _modules(each[0]))
    found = (step for name in below for step in name.split(".") if CROSS.fullmatch(step))
    return [step for step in dict.fromkeys(found) if "norm" not in step.lower()]


def _outside(name: str, owner: nn.Module) -> tuple[str, str]:
    path = name.split(".")
    top = ".".join(path[:-1] if path[-1] in ("weight", "bias") else path)
    if any(re.fullmatch(NAMES["position"], step) for step in path):
        return "position", top
    if "norm" in type(owner).__name__.lower() or isinstance(owner, nn.Embedding):
        return "", ""
    heads = [step for step in path if re.fullmatch(NAMES["head"], step)]
    return ("head", heads[0]) if heads else ("embed", top)


def _inside(path: list[str], said: str) -> tuple[str, str]:
    last = path[-1]
    if any(re.fullmatch(NAMES["expert"], step) for step in path):
        return "expert", ".".join(path[: path.index("experts") + 1] if "experts" in path else path)
    for kind in ("position", "scale"):
        if re.fullmatch(NAMES[kind], said):
            return kind, said
    attention = any(ATTENTION.match(step) for step in path[:-1])
    for kind in ("query", "key", "value", "fused", "out") if attention else ():
        if re.fullmatch(NAMES[kind], last):
            return kind, said
    if not attention and re.fullmatch(NAMES["router"], last) and len(path) > 1:
        return "router", said
    return ("", "") if attention else ("mlp", said)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(str(k))} = {json.dumps(v)}" for k, v in value.items())  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value)


def _python(layouts: Mapping[str, str]) -> str:
    pairs = (f"{path!r}: fedplan.models.layouts.{name}" for path, name in layouts.items())
    return f"{{{', '.join(pairs)}}}"


def small_copy(name: str) -> nn.Module:
    """A small model of a type, or of the type that a folder, hub id or short name is of."""
    import transformers

    if name in transformers.CONFIG_MAPPING:
        return small_model(transformers.AutoConfig.for_model(name))
    return small_model(configuration(name)[0])


def report(proposal: Proposal) -> Iterator[Any]:
    """A proposal for a person: the row, the verdict on each of its parts, and how to use it."""
    own = proposal.said.get("like") == proposal.name
    yield f"{proposal.name}: {_origin(proposal)}\n" + ("" if own else f"\n{proposal.toml}\n")
    yield _verdicts(proposal)
    if own:
        yield "\nA study has nothing to say of it."
    elif proposal.faults:
        yield "\nIt does not behave by this row, so it cannot be used as it is: mend the row above."
    else:
        yield (
            "\nEvery param that was judged behaves by this row. It is judged again before a study "
            f"uses it.\nIn a study, say what stands above; in Python:\n  {proposal.python}"
        )


def _origin(proposal: Proposal) -> str:
    if proposal.said.get("like") == proposal.name:
        return "known already, by a row of its own"
    return "like a row that is known" if "like" in proposal.said else "a row from module names"


def _verdicts(proposal: Proposal) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("part", "params", "verdict"):
        table.add_column(name)
    for kind in Kind:
        held = [v for v in proposal.judged if v.param.kind is kind]
        faults = [f"{v.param.key} {v.fault}" for v in held if v.fault]
        said = faults[:2] + ([f"and {len(faults) - 2} more"] if len(faults) > 2 else [])
        if held:
            table.add_row(str(kind), str(len(held)), "; ".join(said) or BEHAVES[kind])
    return table
