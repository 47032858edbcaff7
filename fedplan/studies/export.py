# SPDX-License-Identifier: Apache-2.0
"""Export a model of a run as a Hugging Face folder, and check an exported folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.tasks import Task
from fedplan.federation.agreement import Agreement
from fedplan.federation.egress_log import AGREEMENT, read_agreement
from fedplan.federation.endpoint import only_run_folder, read_personal_model
from fedplan.federation.global_state import GlobalState, global_values, personal_values
from fedplan.language.turn import Turn
from fedplan.models.dual_encoder import DualEncoder
from fedplan.models.folder import SETTINGS, Preprocessing, load_folder, save_folder
from fedplan.models.hub import is_hub_id, load_pretrained, no_progress_bars, strip_hub_prefix
from fedplan.models.images import image_mean_std
from fedplan.models.peft_adapters import CONFIG, load_adapter, merge_and_dequantize, save_adapter
from fedplan.models.quantized import is_quantized
from fedplan.models.values import set_values
from fedplan.studies.experiment import (
    Experiment,
    build_experiment_without_data,
    privacy_statement,
    require_study_from_files,
)
from fedplan.studies.golden_example import (
    TOLERANCE,
    GoldenExample,
    compute_logits,
    make_golden_example,
    read_golden_example,
    tokenize_text,
)
from fedplan.studies.model_card import CARD_FILE, ModelCard, private_names
from fedplan.studies.run import Run, read_consistently
from fedplan.studies.run_folder import read_run_agreement, read_run_study, read_task_file
from fedplan.studies.schema import ConfigError, Study
from fedplan.tensors.named import Tensors

PROCESSOR_FILE = "preprocessor_config.json"
"""File of a Hugging Face image processor."""


@dataclass(frozen=True)
class _ExportedModel:
    """A model with the values of a run, its task, changed tensors by name, and its card."""

    model: nn.Module
    task: Task
    changed: tuple[str, ...]
    card: ModelCard


def export_run(
    folder: Path | str,
    output: Path | str,
    client: str = "",
    key: Path | None = None,
    *,
    adapter: bool = False,
    best: bool = False,
) -> str:
    """Write a model into a new or empty folder, and return the code that loads it.

    `folder`: a run's folder, or at a site the folder of its experiment; then the site's personal
    model is exported, and `key` is the key file of its state.
    `client`: export this client's personal model instead of the global one.
    `adapter`: write only the peft adapter; else adapters are merged into the full model.
    `best`: export the best round, if the study has `evaluate.keep_best`. Beside the weights are
    written the tokenizer or image processor, a model card, and a golden example for `check_export`.
    Raises ConfigError if the model cannot be exported.
    """
    folder, output = Path(folder), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is not empty: name another folder")
    is_site = (folder / AGREEMENT).exists()
    if best and (client or is_site):
        raise ConfigError(
            "--best is for the global model: leave out --client, and run it in a run's folder"
        )
    exported = _model_of_site(folder, key) if is_site else _model_of_run(folder, client, best=best)
    exported.model.eval()
    with no_progress_bars():
        return _write_adapter(exported, output) if adapter else _write_model(exported, output)


def check_export(folder: Path | str, model: nn.Module | None = None) -> float:
    """Load an exported model, run its golden example, and return the largest deviation of a logit.

    An adapter is put on `model`, or else on the base model that it names. Raises ConfigError if the
    deviation exceeds the tolerance, or if the folder prepares inputs differently from the run.
    """
    folder = Path(folder)
    try:
        example = read_golden_example(folder)
        with no_progress_bars():
            _require_same_inputs(folder, example)
            logits = compute_logits(_load_exported(folder, example, model), example.inputs)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder} cannot be checked: {error}") from error
    if logits.shape != example.logits.shape:
        raise ConfigError(
            f"{folder}: the logits have shape {tuple(logits.shape)}, but had "
            f"{tuple(example.logits.shape)} at the export"
        )
    deviation = float((logits - example.logits).abs().max())
    if not deviation <= TOLERANCE * max(1.0, float(example.logits.abs().max())):
        raise ConfigError(
            f"{folder} differs by {deviation:.2g} from the model's logits at the export: these "
            "are other weights, or another base model; export it again"
        )
    return deviation


def _load_exported(folder: Path, example: GoldenExample, base: nn.Module | None) -> nn.Module:
    """Load the model of an exported folder; an adapter is put on `base` or on its named base."""
    import transformers

    if (folder / SETTINGS).exists():
        return load_folder(folder)
    loader = getattr(transformers, example.loader)
    if not (folder / CONFIG).exists():
        return load_pretrained(loader, str(folder), local_files_only=True)
    if base is None:
        base_name = str(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"] or "")
        labels = {"id2label": dict(enumerate(example.labels))} if example.labels else {}
        base = cast(
            "nn.Module", load_pretrained(loader, base_name, local_files_only=True, **labels)
        )
    return load_adapter(base, str(folder))


def _require_same_inputs(folder: Path, example: GoldenExample) -> None:
    """Raise ConfigError if the folder's tokenizer or processor gives other inputs than the run."""
    import transformers

    prepared: Tensors = {}
    if example.text:
        tokenizer = load_pretrained(transformers.AutoTokenizer, str(folder), local_files_only=True)
        length = example.inputs["input_ids"].shape[1]
        prepared = tokenize_text(tokenizer, example.text, length, example.loader)
    elif example.image is not None and (folder / PROCESSOR_FILE).exists():
        processor = load_pretrained(
            transformers.AutoImageProcessor, str(folder), local_files_only=True
        )
        prepared = processor(example.image.numpy(), return_tensors="pt")
    for name, value in example.inputs.items():
        if name in prepared and not torch.allclose(
            value.double(), prepared[name].double(), atol=1e-6
        ):
            raise ConfigError(
                f"{folder} prepares another {name} for its golden example: export it again"
            )


def _model_of_run(folder: Path, client: str, *, best: bool = False) -> _ExportedModel:
    """Return the global model of a run, or a client's personal model, with its card."""
    run, global_state, client_state = read_consistently(
        folder, lambda run: _read_states(run, client, best=best)
    )
    require_study_from_files(run.study)
    experiment = _rebuild_experiment(run.study, run.agreement, run.labels)
    values = global_values(run.agreement, global_state, experiment.initial_values)
    if client:
        turn = Turn(run.round, client, global_state.phase, run.study.clients.traits.get(client, {}))
        values = personal_values(
            run.agreement, global_state, experiment.initial_values, turn, client_state
        )
    return _fill_model(
        experiment, values, _make_card(run, global_state.round, personal=bool(client))
    )


def _make_card(run: Run, round_number: int, *, personal: bool) -> ModelCard:
    """Return the card of a model after a round; `personal` marks a client's model.

    Metrics are shown only for the global model, and not under differential privacy.
    """
    study, statement = run.study, privacy_statement(run.study, run.folder)
    clients = run.clients or list(study.clients.names)
    show_metrics = statement is None and not personal
    row = next((row for row in run.metrics if show_metrics and row["round"] == round_number), {})
    return ModelCard(
        study,
        run.agreement,
        round_number,
        len(clients),
        personal=personal,
        statement=statement,
        # The number of test examples is not revealed.
        scores={
            name.removeprefix(METRIC_PREFIX): value
            for name, value in row.items()
            if name.startswith(METRIC_PREFIX) and not name.endswith("examples")
        },
        private_names=private_names(study, clients),
    )


METRIC_PREFIX = "global."
"""Prefix of metrics on the common test set."""


def _fill_model(experiment: Experiment, values: Tensors, card: ModelCard) -> _ExportedModel:
    """Load values into an experiment's model, and note the params that differ from the start."""
    params = [p for p in experiment.agreement.trainable if p.key in values]
    changed = [
        p.name for p in params if not torch.equal(values[p.key], experiment.initial_values[p.key])
    ]
    set_values(experiment.model, values, params)
    return _ExportedModel(experiment.model, experiment.data.task, tuple(changed), card)


def _read_states(
    run: Run, client: str, *, best: bool
) -> tuple[Run, GlobalState, dict[str, Tensor]]:
    """Return the run, its global state (last or best), and a client's stored tensors."""
    return (
        run,
        run.best_state if best else run.global_state,
        run.client_state(client)[0] if client else {},
    )


def _model_of_site(folder: Path, key: Path | None) -> _ExportedModel:
    """Return the personal model of a site, with its card."""
    folder = only_run_folder(folder)
    study, terms = read_run_study(folder), read_agreement(folder)
    agreement = replace(read_run_agreement(folder), start=str(terms.get("model")))
    labels, clients = read_task_file(folder)
    experiment = _rebuild_experiment(study, agreement, labels)
    names = list(study.clients.names) or clients
    account, run = Path(str(terms.get("account", ""))), str(terms.get("prefix", ""))
    statement = privacy_statement(study, account, run=run)
    private = private_names(study, names)
    card = ModelCard(
        study, agreement, 0, len(names), personal=True, statement=statement, private_names=private
    )
    return _fill_model(experiment, read_personal_model(agreement, folder, key), card)


def _rebuild_experiment(study: Study, agreement: Agreement, labels: list[str]) -> Experiment:
    """Build the initial model of a run, without data.

    Raises ConfigError if the study's model is no longer the one that the run started from.
    """
    experiment = build_experiment_without_data(study, labels)
    if experiment.agreement.params != agreement.params:
        raise ConfigError("the study's model has other params than the run started from")
    if experiment.model_digest != agreement.start:
        raise ConfigError(
            f"the run started from the model {agreement.start}, but the study's model is now "
            f"{experiment.model_digest}: restore the initial weights"
        )
    return experiment


def _write_model(exported: _ExportedModel, output: Path) -> str:
    """Write the full model with its processor, card and golden example; return the loading code."""
    model, task = exported.model, exported.task
    if isinstance(model, DualEncoder):
        save_folder(model, output, preprocessing=_image_preprocessing(task))
        loading_code = "from fedplan.models.folder import predict\n\npredict({}, [image, ...])"
        _write_card(model, task, exported.card, output, loading_code)
        return f"fedplan.models.folder.predict({str(output)!r}, [image, ...])"
    quantized, merged = is_quantized(model), merge_and_dequantize(model)
    cast("Any", merged).save_pretrained(output)
    _write_processor(task, output)
    loading_code = f"transformers.{task.model_class}.from_pretrained({{}})"
    _write_card(
        merged,
        task,
        exported.card,
        output,
        f"import transformers\n\nmodel = {loading_code}{_processor_code(task)}",
    )
    loading_code = loading_code.format(repr(str(output)))
    return (
        f"{loading_code}  # dequantized: the base was quantized in the run"
        if quantized
        else loading_code
    )


def _write_adapter(exported: _ExportedModel, output: Path) -> str:
    """Write the peft adapter with processor, card and golden example; return the loading code."""
    save_adapter(exported.model, output, exported.changed)
    _write_processor(exported.task, output)
    loading_code = "peft.PeftModel.from_pretrained(model, {})"
    card, path = replace(exported.card, adapter=True), exported.card.study.model.path
    base = repr(strip_hub_prefix(path)) if is_hub_id(path) else "base"
    card_code = f"base = transformers.{exported.task.model_class}.from_pretrained({base})"
    card_code += (
        f"\nmodel = {loading_code.replace('model', 'base')}{_processor_code(exported.task)}"
    )
    _write_card(
        exported.model,
        exported.task,
        card,
        output,
        f"import peft\nimport transformers\n\n{card_code}",
    )
    return loading_code.format(repr(str(output)))


def _processor_code(task: Task) -> str:
    """Return the code that loads the image processor or tokenizer, or an empty text."""
    if task.kind == "image-classification":
        return "\nprocessor = transformers.AutoImageProcessor.from_pretrained({})"
    return "\ntokenizer = transformers.AutoTokenizer.from_pretrained({})" if task.source else ""


def _write_card(
    model: nn.Module, task: Task, card: ModelCard, output: Path, loading_code: str
) -> None:
    """Write the model card and, if the model has one, the golden example."""
    example = make_golden_example(model, task)
    if example is not None:
        example.write(output)
    text = card.text(loading_code.replace("{}", '"."'), has_golden_example=example is not None)
    (output / CARD_FILE).write_text(text, encoding="utf-8")


def _write_processor(task: Task, output: Path) -> None:
    """Write the image processor's configuration, or the tokenizer if there is one."""
    if task.kind != "image-classification":
        if task.source:
            task.tokenizer.save_pretrained(output)
        return
    image = _image_preprocessing(task)
    config = {
        # PIL, as in the run: torchvision resizes slightly differently.
        "image_processor_type": "ViTImageProcessorPil",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": image.size, "width": image.size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": image.mean,
        "image_std": image.std,
    }
    (output / PROCESSOR_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _image_preprocessing(task: Task) -> Preprocessing:
    """Return the size, mean and standard deviation of a task's images."""
    mean, std = image_mean_std(task.source)
    return Preprocessing(task.image_size, _channel_values(mean), _channel_values(std))


def _channel_values(tensor: Tensor) -> tuple[float, ...]:
    return tuple(float(value) for value in tensor.flatten())
