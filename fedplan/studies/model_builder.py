# SPDX-License-Identifier: Apache-2.0
"""Build the initial model of a study: load or create it, and add its adapters."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fedplan import seeds
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.language import require_attention_mask, require_packing_support
from fedplan.errors import FedplanError, PrivacyError
from fedplan.language.parser import parse_part
from fedplan.language.parts import mlp
from fedplan.methods.adapters import hosts_of
from fedplan.methods.lora import MeansAndResidual
from fedplan.methods.method import Method
from fedplan.models.adapters import (
    adapter_family,
    add_adapter,
    load_adapter,
    lora_scales,
    make_peft_config,
)
from fedplan.models.catalog import (
    is_hub_id,
    load_pretrained,
    no_load_report,
    no_progress_bars,
    strip_hub_prefix,
)
from fedplan.models.dual_encoder import load_dual_encoder
from fedplan.models.proposal import register_study_layer_map
from fedplan.models.values import freeze_batch_norms, pin_packed_layout, quantization_config
from fedplan.privacy.statement import HISTORY, PRIVACY_FILE, Expense, expenses_from_json
from fedplan.studies.schema import Study
from fedplan.studies.sections import ModelSection
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
    """Load or create a study's model; add the layer map, the adapter and the method's layers.

    New weights are drawn from the study's seed. May download from the Hub. Raises FedplanError if
    the model cannot be built, or not for the task.
    """
    section = study.model
    with no_progress_bars(), fork_rng_state(seed=seeds.seed(study.name, "model", study.seed)):
        model = _load_model(study, task)
        require_attention_mask(model, task.kind)
        model = freeze_batch_norms(model) if section.freeze_batch_norm else model
        like = {"like": section.layer_map_like} if section.layer_map_like else {}
        if layer_map := section.layer_map or like:
            register_study_layer_map(model, layer_map)
        model = _add_study_adapter(study, task, model) if section.adapter else model
        return add_method_adapter(model, task, method)


def build_meta_model(study: Study, task: Task, method: Method) -> nn.Module:
    """Build the model of a study on the meta device, with the layers that the method adds.

    Downloads nothing; a model of which the weights are needed is built on the CPU. Raises
    FedplanError if these are on the Hub, or if the model cannot be built for the task.
    """
    section, adapter = study.model, study.model.adapter
    saved_adapter = adapter.path if adapter else ""
    if task.kind == "image-text" or section.layer_map_like or section.layer_map or saved_adapter:
        for name in (section.path, section.vision, section.text, section.bridge, saved_adapter):
            if is_hub_id(name):
                raise FedplanError(
                    f"{name!r} is on the Hub, but its weights are needed to know its layers: "
                    "download it, and give its folder"
                )
        return build_model(study, task, method)
    with no_progress_bars(), torch.device("meta"):
        of = f"{section.path or section.type!r} cannot be used for {task.kind}"
        with _explain_errors(f"model: {of}"):
            settings = {**section.config, **task.settings}
            model = _new_model(section, task, settings, local_only=True)
        model = freeze_batch_norms(model) if section.freeze_batch_norm else model
        model = _add_study_adapter(study, task, model) if section.adapter else model
        return method.adapt(model) if method.adapt is not None else model


def initial_expenses(
    study: Study, model: nn.Module | None = None, *, download: bool = False
) -> tuple[Expense, ...]:
    """Return what the initial model of a study has cost in privacy, by the PRIVACY_FILE beside it.

    Looks where model and adapter are from, also an in-memory `model`. `download`: whether the file
    may be fetched. Raises a PrivacyError if a file of an export was changed.
    """
    section = study.model
    adapter = section.adapter.path if section.adapter else ""
    names = [section.path, section.vision, section.text, adapter]
    if section.from_python:
        names.append(str(getattr(getattr(model, "config", None), "_name_or_path", "")))
    expenses = list[Expense]()
    for name in filter(None, names):
        file = Path(name) / PRIVACY_FILE
        if is_hub_id(name) or (section.from_python and not Path(name).is_dir()):
            file = _hub_file(name, download=download and is_hub_id(name))
        if file is None or not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PrivacyError(f"{file} cannot be read: {error}") from error
        if isinstance(content, dict) and HISTORY in content:  # else the file is of other origin
            expenses += expenses_from_json(cast("dict[str, Any]", content)[HISTORY], str(file))
    return tuple(expenses)


def _hub_file(name: str, *, download: bool) -> Path | None:
    """Return PRIVACY_FILE of a Hub repository in the local cache; None if there is none."""
    from transformers.utils import hub

    look_up = cast("Any", hub).cached_file
    try:
        file = look_up(strip_hub_prefix(name), PRIVACY_FILE, local_files_only=not download)
    except OSError:  # no such file or repository, or no connection
        return None
    return Path(file) if file else None


def add_method_adapter(model: nn.Module, task: Task, method: Method) -> nn.Module:
    """Add the layers of a method, such as LoRA or prompts, to a model; return the adapted model.

    The given model is changed in place, and may be wrapped. Raises FedplanError if examples that
    the task packs into one sequence would see each other, or if the method aggregates LoRA products
    at another scale than the model's.
    """
    model = method.adapt(model) if method.adapt is not None else model
    if task.packing:  # an adapter's prefix may connect packed examples
        require_packing_support(model)
    rule, scales = method.lora_aggregation, lora_scales(model)
    if isinstance(rule, MeansAndResidual) and scales - {rule.scale}:
        listed = ", ".join(map(str, sorted(scales)))
        raise FedplanError(
            f"{rule.text} folds LoRA products at another scale than the model's LoRA ({listed}): "
            f"set lora_alpha = {rule.scale:g} * r in model.adapter"
        )
    return model


def _add_study_adapter(study: Study, task: Task, model: nn.Module) -> nn.Module:
    """Return the model wrapped with the adapter of `study.model.adapter`: a new or a saved one."""
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
        settings = section.settings
        if section.target:
            layers = hosts_of(model, parse_part(section.target))
            settings["target_modules"] = layers
            if adapter_family(section.type)[0] == "ia3":
                # IA3 scales the input of feed-forward layers, and the output of others.
                mlp_layers = set(hosts_of(model, mlp)) if "mlp" in section.target else set[str]()
                settings.setdefault("feedforward_modules", sorted(mlp_layers & set(layers)))
        return add_adapter(model, make_peft_config(section.type, settings, task.model_class))


def _load_model(study: Study, task: Task) -> nn.Module:
    """Load the study's dual encoder or pretrained model, or create a model with new weights."""
    import transformers

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
    if section.path:
        return _load_pretrained_model(section, task, getattr(torch, section.dtype))
    types = list(transformers.CONFIG_MAPPING.keys())
    if section.type not in types:
        close = get_close_matches(section.type, types, n=1)
        hint = f"did you mean {close[0]}?" if close else "there are vit, bert, gpt2 and many more"
        raise FedplanError(f"model.type: transformers knows no model {section.type!r}: {hint}")
    with _explain_errors(
        f"model.type: {section.type!r} cannot be created for {task.kind} with these settings"
    ):
        return _new_model(section, task, dict(**section.config, **task.settings))


def _load_pretrained_model(section: ModelSection, task: Task, dtype: torch.dtype) -> nn.Module:
    """Load the weights of `model.path` as `dtype`, quantized if the section says so."""
    if not is_hub_id(section.path) and not Path(section.path).is_dir():
        raise FedplanError(
            f"model.path: {section.path!r} does not exist: give a model folder, or hub:org/name"
        )
    with _explain_errors(f"model.path: {section.path!r} cannot be loaded for {task.kind}"):
        _require_model_settings(section)
        quantized = dict[str, Any]()
        if section.quantization:
            config = quantization_config(section.quantization, dtype)
            quantized = {"quantization_config": config, "device_map": {"": "cpu"}}
        settings: dict[str, Any] = {"dtype": dtype, **quantized, **task.settings, **section.config}
        if not new_head_note(section, task):
            return pin_packed_layout(load_pretrained(_model_class(task), section.path, **settings))
        # transformers draws new values for every param of another shape: only the head may differ.
        with no_load_report():  # `new_head_note` says it
            model, loading = load_pretrained(
                _model_class(task),
                section.path,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **settings,
            )
        for name, stored, shape in sorted(loading["mismatched_keys"]):
            if tuple(stored)[1:] != tuple(shape)[1:] or shape[0] != model.config.num_labels:
                raise FedplanError(
                    f"model.path: {name} has shape {tuple(stored)} in {section.path!r}, and "
                    f"{tuple(shape)} by model.config: change model.config"
                )
        return pin_packed_layout(model)


def new_head_note(section: ModelSection, task: Task) -> str:
    """Return a note if the head of `model.path` has another size than the task needs; else ""."""
    import transformers

    needed = len(task.settings.get("id2label", ())) or task.settings.get("num_labels", 0)
    if not section.path or not needed:
        return ""
    with _explain_errors(f"model.path: {section.path!r} cannot be loaded for {task.kind}"):
        config = load_pretrained(transformers.AutoConfig, section.path)
    head = task.model_class.removeprefix("AutoModel")
    has_head = any(name.endswith(head) for name in config.architectures or ())
    if not has_head or config.num_labels == needed:
        return ""
    return (
        f"The model in {section.path} has a head of {config.num_labels} outputs, and the task "
        f"needs {needed}: the head is made anew, and starts untrained."
    )


def _require_model_settings(section: ModelSection, *, local_only: bool = False) -> None:
    """Raise FedplanError if `model.config` has a setting that the model's configuration lacks."""
    # Others would be arguments of transformers itself, which a study from the network must not set.
    if not section.config:
        return
    config = _load_config(section, local_only=local_only)
    accepted = {*config.to_dict(), *signature(type(config)).parameters, *config.attribute_map}
    if unknown := section.config.keys() - accepted - COMMON_SETTINGS:
        raise FedplanError(f"model.config: {config.model_type} has no setting {min(unknown)!r}")


@contextmanager
def _explain_errors(context: str) -> Generator[None]:
    """Re-raise an Exception of the body as FedplanError: `context` and the error's first line."""
    # transformers raises errors of any type for unusable files and settings.
    try:
        yield
    except FedplanError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FedplanError(f"{context}: {lines[0][:300]}") from error


def _load_config(section: ModelSection, *, local_only: bool, **settings: Any) -> Any:
    """Return the transformers configuration of `model.path` or `model.type`."""
    from transformers import AutoConfig

    if not section.path:
        return AutoConfig.for_model(section.type, **settings)
    return load_pretrained(AutoConfig, section.path, local_files_only=local_only, **settings)


def _new_model(
    section: ModelSection, task: Task, settings: dict[str, Any], *, local_only: bool = False
) -> nn.Module:
    """Create the model of a [model] section with these settings, new weights and no adapters."""
    _require_model_settings(section, local_only=local_only)
    config = _load_config(section, local_only=local_only, **settings)
    return _model_class(task).from_config(config).to(getattr(torch, section.dtype))


def _model_class(task: Task) -> Any:
    import transformers

    return getattr(transformers, task.model_class)
