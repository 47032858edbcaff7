# SPDX-License-Identifier: Apache-2.0
"""Build the initial model of a study: load or create it, and add its adapters."""

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
from fedplan.data.causality import require_attention_mask, require_packing_support
from fedplan.data.tasks import Task
from fedplan.errors import FedplanError
from fedplan.language.parser import parse_part
from fedplan.language.parts import mlp
from fedplan.methods.adapters import hosts_of
from fedplan.methods.lora_products import MeansAndResidual
from fedplan.methods.method import Method
from fedplan.models.adapter_tensors import lora_scales
from fedplan.models.behaviour.proposal import register_study_layer_map
from fedplan.models.buffers import freeze_batch_norms
from fedplan.models.dual_encoder import load_dual_encoder
from fedplan.models.hub import is_hub_id, load_pretrained, no_progress_bars
from fedplan.models.peft_adapters import adapter_family, add_adapter, load_adapter, make_peft_config
from fedplan.models.quantized import pin_packed_layout, quantization_config
from fedplan.studies.model_section import AdapterSection, ModelSection
from fedplan.studies.schema import Study
from fedplan.tensors.devices import fork_rng_state

COMMON_SETTINGS = frozenset(
    (
        *("num_labels", "attn_implementation", "experts_implementation", "problem_type"),
        *("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"),
        *("is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_word_embeddings"),
    )
)
"""Settings that every transformers configuration accepts, even if it does not list them."""


def build_model(study: Study, task: Task, method: Method) -> nn.Module:
    """Load or create the study's model, and add its layer map, adapter and the method's layers.

    New weights are drawn from the study's seed. Raises FedplanError if the model cannot be built or
    cannot do the task.
    """
    with no_progress_bars(), fork_rng_state(seed=seeds.seed(study.name, "model", study.seed)):
        model = _load_model(study, task)
        require_attention_mask(model, task.kind)
        model = freeze_batch_norms(model) if study.model.freeze_batch_norm else model
        if layer_map := study.model.layer_map or (
            {"like": study.model.layer_map_like} if study.model.layer_map_like else {}
        ):
            register_study_layer_map(model, layer_map)
        model = _add_study_adapter(study, task, model) if study.model.adapter else model
        return add_method_adapter(model, task, method)


def build_meta_model(study: Study, task: Task, method: Method) -> nn.Module:
    """Build the study's model on the meta device: all names and shapes, without weights.

    Fetches nothing. A dual encoder, a saved adapter or a study's own layer map needs the real
    weights; these must be local files, else raises FedplanError.
    """
    section = study.model
    has_layer_map, saved_adapter = (
        section.layer_map_like or section.layer_map,
        section.adapter and section.adapter.path,
    )
    if task.kind == "image-text" or has_layer_map or saved_adapter:
        _require_local_files(study)
        return build_model(study, task, method)
    with no_progress_bars(), torch.device("meta"):
        model = _build_bare_model(study, task)
        model = freeze_batch_norms(model) if section.freeze_batch_norm else model
        model = _add_study_adapter(study, task, model) if section.adapter else model
        return method.adapt(model) if method.adapt is not None else model


def _require_local_files(study: Study) -> None:
    """Raise FedplanError if a model or adapter of the study is on the Hub."""
    section = study.model
    adapter_path = section.adapter.path if section.adapter else ""
    for name in (section.path, section.vision, section.text, section.bridge, adapter_path):
        if is_hub_id(name):
            raise FedplanError(
                f"{name!r} is on the Hub, but its weights are needed to know its layers: download "
                "it, and give its folder"
            )


def _build_bare_model(study: Study, task: Task) -> nn.Module:
    """Create the model from its configuration alone, without weights and adapters."""
    import transformers

    section = study.model
    with _explain_errors(f"model: {section.path or section.type!r} cannot be used for {task.kind}"):
        _require_model_settings(section, local_only=True)
        settings = {**section.config, **task.settings}
        config = (
            load_pretrained(
                transformers.AutoConfig, section.path, local_files_only=True, **settings
            )
            if section.path
            else transformers.AutoConfig.for_model(section.type, **settings)
        )
        return _model_class(task).from_config(config).to(getattr(torch, section.dtype))


def add_method_adapter(model: nn.Module, task: Task, method: Method) -> nn.Module:
    """Return the model with the layers that a method adds, such as LoRA or prompts.

    Raises if packed examples would see each other, or if the method needs another LoRA scale.
    """
    model = method.adapt(model) if method.adapt is not None else model
    if task.packing:  # an adapter's prefix may connect packed examples
        require_packing_support(model)
    _require_same_lora_scale(model, method)
    return model


def _require_same_lora_scale(model: nn.Module, method: Method) -> None:
    """Raise FedplanError if the method folds LoRA products at another scale than the model."""
    rule, scales = method.lora_aggregation, lora_scales(model)
    if isinstance(rule, MeansAndResidual) and scales - {rule.scale}:
        listed = ", ".join(map(str, sorted(scales)))
        raise FedplanError(
            f"{rule.text} folds LoRA products at another scale than the model's LoRA ({listed}): "
            f"set lora_alpha = {rule.scale:g} * r in model.adapter"
        )


def _add_study_adapter(study: Study, task: Task, model: nn.Module) -> nn.Module:
    """Return the model with the adapter of `model.adapter`: a new or a saved one."""
    section = study.model.adapter
    assert section is not None
    if section.path:
        with _explain_errors(f"model.adapter.path: {section.path!r} cannot be loaded"):
            return load_adapter(model, section.path)
    if misplaced := {"rank", "on"} & study.method.settings.keys():
        raise FedplanError(
            f"method.settings.{min(misplaced)} configures an adapter that the method would add, "
            "but the study has its own: set it in model.adapter"
        )
    with _explain_errors(f"model.adapter: {section.type!r} cannot be added to this model"):
        return add_adapter(
            model,
            make_peft_config(section.type, _adapter_settings(section, model), task.model_class),
        )


def _adapter_settings(section: AdapterSection, model: nn.Module) -> dict[str, Any]:
    """Return the peft settings of an adapter, with `target_modules` of its target part."""
    if not section.target:
        return section.settings
    layers = hosts_of(model, parse_part(section.target))
    settings = {**section.settings, "target_modules": layers}
    if adapter_family(section.type)[0] == "ia3":
        # IA3 scales the input of feed-forward layers, and the output of others.
        mlp_layers = set(hosts_of(model, mlp)) if "mlp" in section.target else set[str]()
        settings.setdefault("feedforward_modules", sorted(mlp_layers & set(layers)))
    return settings


def _load_model(study: Study, task: Task) -> nn.Module:
    """Load the study's dual encoder or pretrained model, or create a new model."""
    section = study.model
    if task.kind == "image-text":
        with _explain_errors("model: the image and text encoders cannot be loaded"):
            return load_dual_encoder(
                section.path,
                vision=section.vision,
                text=section.text,
                bridge=section.bridge,
                names=task.labels,
                template=task.template,
                tokenizer=study.task.tokenizer,
            )
    return _load_pretrained_model(study, task) if section.path else _create_model(study, task)


def _load_pretrained_model(study: Study, task: Task) -> nn.Module:
    """Load the weights of `model.path`, quantized if the study says so."""
    section = study.model
    if not is_hub_id(section.path) and not Path(section.path).is_dir():
        raise FedplanError(
            f"model.path: {section.path!r} does not exist: give a model folder, or hub:org/name"
        )
    with _explain_errors(f"model.path: {section.path!r} cannot be loaded for {task.kind}"):
        dtype = getattr(torch, section.dtype)
        _require_model_settings(section)
        return pin_packed_layout(
            load_pretrained(
                _model_class(task),
                section.path,
                dtype=dtype,
                **_quantization_arguments(section.quantization, dtype),
                **task.settings,
                **section.config,
            )
        )


def _quantization_arguments(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return `from_pretrained` arguments to load quantized weights to the CPU; {} for ""."""
    if not kind:
        return {}
    return {"quantization_config": quantization_config(kind, dtype), "device_map": {"": "cpu"}}


def _create_model(study: Study, task: Task) -> nn.Module:
    """Create a model of `model.type` with new weights."""
    import transformers

    section = study.model
    _require_known_type(section.type)
    with _explain_errors(
        f"model.type: {section.type!r} cannot be created for {task.kind} with these settings"
    ):
        _require_model_settings(section)
        config = transformers.AutoConfig.for_model(section.type, **section.config, **task.settings)
        return _model_class(task).from_config(config).to(getattr(torch, section.dtype))


def _require_known_type(name: str) -> None:
    """Raise FedplanError unless transformers has this model type; suggest the closest one."""
    import transformers

    types = list(transformers.CONFIG_MAPPING.keys())
    if name not in types:
        close = get_close_matches(name, types, n=1)
        hint = f"did you mean {close[0]}?" if close else "there are vit, bert, gpt2 and many more"
        raise FedplanError(f"model.type: transformers knows no model {name!r}: {hint}")


def _require_model_settings(section: ModelSection, *, local_only: bool = False) -> None:
    """Raise FedplanError for settings that are not in the model's configuration.

    Others would be arguments of transformers itself, which a study from the network must not set.
    `local_only`: read the configuration from local files only.
    """
    if not section.config:
        return
    import transformers

    config = (
        load_pretrained(transformers.AutoConfig, section.path, local_files_only=local_only)
        if section.path
        else transformers.AutoConfig.for_model(section.type)
    )
    accepted = {*config.to_dict(), *signature(type(config)).parameters, *config.attribute_map}
    if unknown := section.config.keys() - accepted - COMMON_SETTINGS:
        raise FedplanError(f"model.config: {config.model_type} has no setting {min(unknown)!r}")


@contextmanager
def _explain_errors(context: str) -> Generator[None]:
    """Re-raise any error of the body as FedplanError: the context and the error's first line."""
    # transformers raises errors of any type for unusable files and settings.
    try:
        yield
    except FedplanError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FedplanError(f"{context}: {lines[0][:300]}") from error


def _model_class(task: Task) -> Any:
    """Return the transformers class that loads the task's model."""
    import transformers

    return getattr(transformers, task.model_class)
