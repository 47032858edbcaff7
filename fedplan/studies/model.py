# SPDX-License-Identifier: Apache-2.0
"""Models: the one that every site of a study starts from."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedplan import seeds
from fedplan.data.foresight import require_packing, require_sight
from fedplan.data.tasks import Task
from fedplan.errors import FedplanError
from fedplan.language.parser import parse_part
from fedplan.language.parts import mlp
from fedplan.methods.adapters import hosts_of
from fedplan.methods.method import Method
from fedplan.methods.products import ByResidual
from fedplan.models.adapters import scales_in
from fedplan.models.behaviour.proposal import learn
from fedplan.models.buffers import stilled
from fedplan.models.dual import load_dual
from fedplan.models.grafting import configured, family_named, graft, load_adapter
from fedplan.models.hub import fetched, is_hub_id, quiet
from fedplan.models.quantised import quantisation, steadied
from fedplan.studies.model_section import AdapterSection, ModelSection
from fedplan.studies.schema import Study
from fedplan.tensors.devices import forked

BESIDE = frozenset(
    (
        *("num_labels", "attn_implementation", "experts_implementation", "problem_type"),
        *("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"),
        *("is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_word_embeddings"),
    )
)
"""Settings that every configuration takes, though it does not list them."""


def starting_model(study: Study, task: Task, method: Method) -> nn.Module:
    """The model as the study says it; what is new in it is drawn from the study's seed."""
    with quiet(), forked(seed=seeds.seed(study.name, "model", study.seed)):
        model = _made(study, task)
        require_sight(model, task.kind)
        model = stilled(model) if study.model.still else model
        if said := study.model.anatomy or ({"like": study.model.like} if study.model.like else {}):
            learn(model, said)
        model = _with_adapter(study, task, model) if study.model.adapter else model
        return adapted(model, task, method)


def outlined_model(study: Study, task: Task, method: Method) -> nn.Module:
    """The same model on the meta device: every name and shape, no memory, and nothing fetched.

    Two towers, a saved adapter and a row that a study teaches take weights to be known.
    """
    said = study.model
    taught, saved = said.like or said.anatomy, said.adapter and said.adapter.path
    if task.kind == "image-text" or taught or saved:
        _require_here(study)
        return starting_model(study, task, method)
    with quiet(), torch.device("meta"):
        model = _bare(study, task)
        model = stilled(model) if said.still else model
        model = _with_adapter(study, task, model) if said.adapter else model
        return method.adapt(model) if method.adapt is not None else model


def _require_here(study: Study) -> None:
    said = study.model
    saved = said.adapter.path if said.adapter else ""
    for name in (said.path, said.vision, said.text, said.bridge, saved):
        if is_hub_id(name):
            raise FedplanError(f"{name!r} is not here: it takes its weights to know what it is")


def _bare(study: Study, task: Task) -> nn.Module:
    import transformers

    said = study.model
    with _told(f"model: {said.path or said.type!r} cannot be read for {task.kind}"):
        _require_settings(said, here=True)
        settings = {**said.settings, **task.settings}
        config = (
            fetched(transformers.AutoConfig, said.path, here=True, **settings)
            if said.path
            else transformers.AutoConfig.for_model(said.type, **settings)
        )
        return _loader(task).from_config(config).to(getattr(torch, said.dtype))


def adapted(model: nn.Module, task: Task, method: Method) -> nn.Module:
    """A model with what a method adds to it, if it can then do what is asked."""
    model = method.adapt(model) if method.adapt is not None else model
    if task.packing:  # what an adapter puts before a text may join the texts again
        require_packing(model)
    _require_scale(model, method)
    return model


def _require_scale(model: nn.Module, method: Method) -> None:
    """Refuse to fold products into weights at another scale than that of the model's LoRA."""
    rule, scales = method.product, scales_in(model)
    if isinstance(rule, ByResidual) and scales - {rule.scale}:
        found = ", ".join(map(str, sorted(scales)))
        raise FedplanError(
            f"{rule.text} folds at another scale than the model's LoRA has, which is {found}: say "
            f"lora_alpha = {rule.scale:g} * r in model.adapter"
        )


def _with_adapter(study: Study, task: Task, model: nn.Module) -> nn.Module:
    """The model with the adapter of the study: a method that brings its own adds none to it."""
    said = study.model.adapter
    assert said is not None
    if said.path:
        with _told(f"model.adapter.path: {said.path!r} cannot be loaded"):
            return load_adapter(model, said.path)
    if unheard := {"rank", "on"} & study.method.settings.keys():
        raise FedplanError(
            f"method.settings.{min(unheard)} is of an adapter that the method would add, and the "
            "study has its own, model.adapter: say it there"
        )
    with _told(f"model.adapter: no {said.type!r} can be put on this model"):
        return graft(model, configured(said.type, _placed(said, model), task.model_class))


def _placed(said: AdapterSection, model: nn.Module) -> dict[str, Any]:
    """The settings of an adapter with the names of the layers that it is put on."""
    if not said.target:
        return said.settings
    layers = hosts_of(model, parse_part(said.target))
    found = {**said.settings, "target_modules": layers}
    if family_named(said.type)[0] == "ia3":
        # IA3 scales what enters such a layer, and what leaves any other.
        inner = set(hosts_of(model, mlp)) if "mlp" in said.target else set[str]()
        found.setdefault("feedforward_modules", sorted(inner & set(layers)))
    return found


def _made(study: Study, task: Task) -> nn.Module:
    said = study.model
    if task.kind == "image-text":
        with _told("model: the towers cannot be loaded"):
            return load_dual(
                said.path,
                vision=said.vision,
                text=said.text,
                bridge=said.bridge,
                names=task.labels,
                template=task.template,
                tokenizer=study.task.tokenizer,
            )
    return _pretrained(study, task) if said.path else _from_scratch(study, task)


def _pretrained(study: Study, task: Task) -> nn.Module:
    said = study.model
    if not is_hub_id(said.path) and not Path(said.path).is_dir():
        raise FedplanError(
            f"model.path: {said.path!r} is not there: give a folder of weights, or hub:org/name"
        )
    with _told(f"model.path: {said.path!r} cannot be loaded for {task.kind}"):
        dtype = getattr(torch, said.dtype)
        _require_settings(said)
        return steadied(
            fetched(
                _loader(task),
                said.path,
                dtype=dtype,
                **_packing(said.quantised, dtype),
                **task.settings,
                **said.settings,
            )
        )


def _packing(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """How the weights are packed as they load: in host memory, wherever they are trained."""
    if not kind:
        return {}
    return {"quantization_config": quantisation(kind, dtype), "device_map": {"": "cpu"}}


def _from_scratch(study: Study, task: Task) -> nn.Module:
    import transformers

    said = study.model
    _require_type(said.type)
    with _told(f"model.type: no {said.type!r} can be made for {task.kind} with these settings"):
        _require_settings(said)
        config = transformers.AutoConfig.for_model(said.type, **said.settings, **task.settings)
        return _loader(task).from_config(config).to(getattr(torch, said.dtype))


def _require_type(name: str) -> None:
    """Refuse a type of which transformers has no configuration, with the nearest that it has."""
    import transformers

    known = list(transformers.CONFIG_MAPPING.keys())
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "there are vit, bert, gpt2 and many more"
        raise FedplanError(f"model.type: transformers knows no model {name!r}: {hint}")


def _require_settings(said: ModelSection, *, here: bool = False) -> None:
    """Refuse settings that the model's own configuration does not have.

    A study comes from others: what is none of a model's would be a word to transformers itself.
    """
    if not said.settings:
        return
    import transformers

    config = (
        fetched(transformers.AutoConfig, said.path, here=here)
        if said.path
        else transformers.AutoConfig.for_model(said.type)
    )
    known = {*config.to_dict(), *signature(type(config)).parameters, *config.attribute_map}
    if strange := said.settings.keys() - known - BESIDE:
        raise FedplanError(f"model.settings: a {config.model_type} has no {min(strange)!r}")


@contextmanager
def _told(what: str) -> Generator[None]:
    """Tell whatever transformers meets in a user's files and settings as one message.

    Its code raises what it happens to raise there: a KeyError, a plain Exception of the Rust side.
    """
    try:
        yield
    except FedplanError:
        raise
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise FedplanError(f"{what}: {words[0][:300]}") from error


def _loader(task: Task) -> Any:
    import transformers

    return getattr(transformers, task.model_class)
