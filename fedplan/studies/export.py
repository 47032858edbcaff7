# SPDX-License-Identifier: Apache-2.0
"""Export a model of a run as a Hugging Face folder, and check an exported folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from fedplan.data.custom_task import CustomTask
from fedplan.data.tasks.definition import Task
from fedplan.federation.agreement import Agreement
from fedplan.federation.endpoint import only_run_folder, read_personal_model
from fedplan.federation.global_state import GlobalState, global_values, personal_values
from fedplan.federation.ledger.egress import AGREEMENT, read_agreement
from fedplan.language.predicates import Turn
from fedplan.models.adapters import (
    CONFIG,
    adapter_families,
    load_adapter,
    merge_and_dequantize,
    save_adapter,
)
from fedplan.models.catalog import (
    is_hub_id,
    load_pretrained,
    manifest_json,
    no_progress_bars,
    strip_hub_prefix,
)
from fedplan.models.dual_encoder import DualEncoder
from fedplan.models.folder import SETTINGS, load_folder, save_folder
from fedplan.models.values import is_quantized, set_values
from fedplan.privacy.statement import PRIVACY_FILE
from fedplan.storage.files import write_folder
from fedplan.studies.experiment import Experiment, build_experiment, privacy_statement
from fedplan.studies.federated_data import FederatedData
from fedplan.studies.model_card import (
    CARD_FILE,
    TOLERANCE,
    GoldenExample,
    ModelCard,
    compute_logits,
    make_golden_example,
    private_names,
    read_golden_example,
    tokenize_text,
)
from fedplan.studies.record import read_data_record
from fedplan.studies.run import (
    MANIFEST,
    RunReader,
    read_consistently,
    read_earlier_expenses,
    read_run,
    read_run_agreement,
    read_run_study,
    read_task_file,
    sweep_expenses,
)
from fedplan.studies.run_scores import (
    client_score,
    is_personal,
    personal_params,
    run_scores,
    score_rules,
)
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.sections import DataSection
from fedplan.studies.stored_model import (
    MODEL_FOLDER,
    PROCESSOR_FILE,
    STORED_FILE,
    ModelValues,
    image_preprocessing,
    load_stored_model,
    write_processor,
)
from fedplan.tensors.named import Tensors

HIDDEN_COLUMNS = ("examples", "clients")
"""Metrics that are no scores; the number of test examples is not revealed."""
VALUES_EXPORT = "model.safetensors"
"""File of an exported model whose code is unknown: all values by name."""


@dataclass(frozen=True)
class _ExportedModel:
    """A model filled with the values of a run."""

    model: nn.Module
    task: Task
    card: ModelCard

    @property
    def loader(self) -> str:
        """The name of the transformers class that loads the model."""
        if not isinstance(self.task, CustomTask):
            return self.task.model_class
        adapted = adapter_families(self.model)
        return type(cast("Any", self.model).get_base_model() if adapted else self.model).__name__


def export_run(
    folder: Path | str,
    output: Path | str,
    client: str = "",
    key: Path | None = None,
    *,
    adapter: bool = False,
    best: bool = False,
    global_model: bool = False,
) -> str:
    """Write a model of a run into a new or empty folder, and return the code that loads the model.

    `folder`: a run's folder, or at a client's site the folder of the site's only run; a site
    exports its personal model, and `key` is the key file that decrypts the site's state.
    `client`: export this client's personal model. `global_model`: export the global model; this is
    the default, but must be said if clients have params of their own, which the global model lacks.
    `adapter`: write only the peft adapter; by default adapters are merged into the full model.
    `best`: export the global model of the best round, stored by `evaluate.keep_best`. Also writes
    the tokenizer or image processor, a model card, a golden example for `check_export`, and what
    the model has cost in privacy, which a run that starts from the folder adds to its own. Killed
    at any moment, `output` is whole or not there. Raises ConfigError if `output` is not empty, or
    the arguments or the run do not allow the export.
    """
    folder, output = Path(folder), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is not empty: name another folder")
    if output.resolve() == Path.cwd().resolve():
        raise ConfigError(f"{output} is the working folder, which is replaced: name a new folder")
    is_site = (folder / AGREEMENT).exists()
    if best and (client or is_site):
        raise ConfigError(
            "--best is for the global model: leave out --client, and run it in a run's folder"
        )
    if key and not is_site:
        raise ConfigError(f"--key decrypts a site's state, and {folder} is a run: leave it out")
    if client and not is_site and not is_personal(read_run(folder).agreement):
        raise ConfigError(
            f"the plan of {folder} keeps nothing at clients, so {client} has the shared model: "
            "leave out --client"
        )
    if client and global_model:
        raise ConfigError("--client and --global exclude each other: give one of them")
    if not is_site and not (client or best or global_model):
        _require_shared_plan(folder, output)
    exported = _model_of_site(folder, key) if is_site else _model_of_run(folder, client, best=best)
    exported.model.eval()
    with no_progress_bars():
        write = _write_adapter if adapter else _write_model
        with write_folder(output) as unfinished:
            loading_code = write(exported, unfinished, output)
            # safetensors writes files for their owner alone: they get the mode of the others.
            mode = (unfinished / CARD_FILE).stat().st_mode
            for file in unfinished.glob("*.safetensors"):
                file.chmod(mode)
    return loading_code


def _require_shared_plan(folder: Path, output: Path) -> None:
    """Raise ConfigError if clients have params of their own: then there is no model for all."""
    run = read_run(folder)
    if not is_personal(run.agreement):
        return
    kinds = ", ".join(dict.fromkeys(p.label for p in personal_params(run.agreement)))
    scores, commands = run_scores(run), ""
    client = f"--client {next(iter(run.clients), 'NAME')}"
    for option, score in ((client, scores.find("personal")), ("--global", scores.find("global"))):
        note = f"  # {score.text}" if score else ""
        commands += f"\n  fedplan export {folder} {output} {option}{note}"
    raise ConfigError(
        f"each client of {folder} has its own {kinds}: export one client's model, or the global "
        f"model without them{commands}"
    )


def load_run_model(folder: Path, client: str = "") -> nn.Module:
    """Return the global model of a run, or the personal model of `client`, with its adapters.

    Raises ConfigError if the run or its initial model cannot be read, or its class is unknown.
    """
    model = _model_of_run(folder, client, best=False).model
    if isinstance(model, ModelValues):
        name = read_run_study(folder).model.from_python.partition(" ")[0]
        raise ConfigError(
            f"the model of {folder} is of the class {name}, whose code is not in the folder: make "
            "one, and call model.load_state_dict(run.global_values()) or "
            "model.load_state_dict(run.personal_values(client))"
        )
    return model.eval()


def load_run_values(folder: Path, client: str = "") -> dict[str, Tensor]:
    """Return the state dict of the model of `load_run_model`, of any class; raises as that."""
    return dict(_model_of_run(folder, client, best=False).model.state_dict())


def check_export(folder: Path | str, model: nn.Module | None = None) -> float:
    """Run the golden example of an exported folder, and return the largest deviation of a logit.

    The golden example is a synthetic input with the model's logits at the export. `model`: the base
    model that an exported adapter is put on; by default the base model named in the adapter's
    configuration, from local files. Raises ConfigError if the deviation exceeds TOLERANCE times the
    largest logit (or 1, if all logits are smaller), if the folder's tokenizer or image processor
    gives other inputs, or if files are missing.
    """
    folder = Path(folder)
    try:
        example = read_golden_example(folder)
        with no_progress_bars():
            _require_same_inputs(folder, example)
            logits = compute_logits(_load_exported(folder, example, model), example.inputs)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder} cannot be checked: {error}") from error
    expected = example.logits
    if logits.shape != expected.shape:
        raise ConfigError(
            f"{folder}: the logits have shape {tuple(logits.shape)}, but had "
            f"{tuple(expected.shape)} at the export"
        )
    deviation = float((logits - expected).abs().max())
    if not deviation <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ConfigError(
            f"{folder} differs by {deviation:.2g} from the model's logits at the export: these "
            "are other weights, or another base model; export it again"
        )
    return deviation


def _load_exported(folder: Path, example: GoldenExample, base: nn.Module | None) -> nn.Module:
    """Load the model in an exported folder: a dual encoder, a transformers model, or an adapter."""
    import transformers

    if (folder / SETTINGS).exists():
        return load_folder(folder)
    loader = getattr(transformers, example.loader)
    if not (folder / CONFIG).exists():
        return load_pretrained(loader, str(folder), local_files_only=True)
    if base is None:
        name = str(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"] or "")
        labels = {"id2label": dict(enumerate(example.labels))} if example.labels else {}
        base = cast("nn.Module", load_pretrained(loader, name, local_files_only=True, **labels))
    return load_adapter(base, str(folder))


def _require_same_inputs(folder: Path, example: GoldenExample) -> None:
    """Raise ConfigError if the tokenizer or image processor gives other inputs than the run."""
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
    for name in [each for each in example.inputs if each in prepared]:
        before, now = example.inputs[name].double(), prepared[name].double()
        if not torch.allclose(before, now, atol=1e-6):
            raise ConfigError(
                f"{folder} prepares another {name} for its golden example: export it again"
            )


def _model_of_run(folder: Path, client: str, *, best: bool) -> _ExportedModel:
    """Return the global model of a run, or the personal model of `client` if given."""

    def read(run: RunReader) -> tuple[RunReader, GlobalState, Tensors]:
        state = run.best_state if best else run.global_state
        return run, state, run.client_state(client)[0] if client else {}

    run, global_state, client_state = read_consistently(folder, read)
    study = run.study
    if study.data.from_python:
        experiment = _load_experiment(run)
    else:
        experiment = _rebuild_experiment(study, run.agreement, run.labels)
    initial = experiment.initial_values
    values = global_values(run.agreement, global_state, initial)
    if client:
        turn = Turn(run.round, client, global_state.phase, study.clients.traits.get(client, {}))
        values = personal_values(run.agreement, global_state, initial, turn, client_state)
    earlier = read_earlier_expenses(folder)
    statement = privacy_statement(study, run.folder, earlier=(*earlier, *sweep_expenses(folder)))
    names = run.clients or list(study.clients.names)
    public, number = statement is None, global_state.round
    row = next((row for row in run.metrics if public and row["round"] == number), {})
    scores = list(score_rules(run).of_row(row).scores)
    if not client:
        scores.sort(key=lambda score: score.kind != "global")  # this model's first
    elif public and (own := client_score(run, client)):
        scores = [replace(own, kind="this client"), *scores]
    prefix = f"clients.{client}." if client else "global."
    own_row = {n.removeprefix(prefix): v for n, v in row.items() if n.startswith(prefix)}
    told = public and not study.aggregation.config.active
    trained: dict[str, Any] = read_data_record(run.folder).get("train", {}) if told else {}
    card = ModelCard(
        study,
        run.agreement,
        number,
        len(names),
        personal=bool(client),
        statement=statement,
        earlier=earlier,
        scores={name: value for name, value in own_row.items() if name not in HIDDEN_COLUMNS},
        score_texts=tuple(replace(score, client="").text for score in scores),
        train_examples=sum(int(each["examples"]) for each in trained.values()),
        private_names=private_names(study, names),
    )
    return _fill_model(experiment, values, card)


def _fill_model(experiment: Experiment, values: Tensors, card: ModelCard) -> _ExportedModel:
    params = [p for p in experiment.agreement.trainable if p.key in values]
    initial = experiment.initial_values
    changed = tuple(p.name for p in params if not torch.equal(values[p.key], initial[p.key]))
    set_values(experiment.model, values, params)
    return _ExportedModel(experiment.model, experiment.data.task, replace(card, changed=changed))


def _model_of_site(folder: Path, key: Path | None) -> _ExportedModel:
    """Return the personal model at a client's site; `key`: key file of the encrypted state."""
    folder = only_run_folder(folder)
    study, terms = read_run_study(folder), read_agreement(folder)
    agreement = replace(read_run_agreement(folder), start=str(terms.get("model")))
    labels, clients = read_task_file(folder)
    experiment = _rebuild_experiment(study, agreement, labels)
    names = list(study.clients.names) or clients
    account, run = Path(str(terms.get("account", ""))), str(terms.get("prefix", ""))
    earlier = read_earlier_expenses(folder)
    statement = privacy_statement(study, account, run=run, earlier=earlier)
    card = ModelCard(
        study,
        agreement,
        0,
        len(names),
        personal=True,
        statement=statement,
        earlier=earlier,
        private_names=private_names(study, names),
    )
    return _fill_model(experiment, read_personal_model(agreement, folder, key), card)


def _rebuild_experiment(study: Study, agreement: Agreement, labels: list[str]) -> Experiment:
    """Build the initial model of a run again, without data; ConfigError if it is another now."""
    task = study.task.model_copy(update={"labels": labels})
    experiment = build_experiment(study.model_copy(update={"data": DataSection(), "task": task}))
    if experiment.agreement.params != agreement.params:
        raise ConfigError("the study's model has other params than the run started from")
    experiment.require_start(agreement.start)
    return experiment


def _load_experiment(run: RunReader) -> Experiment:
    """Load the stored initial model of a run from Python; ConfigError if there is none."""
    folder, agreement = run.folder, run.agreement
    if faults := [*run.model_faults().values()]:
        raise ConfigError(f"{folder}: {faults[0]}: restore it from a backup")
    if not (folder / MODEL_FOLDER / STORED_FILE).is_file():
        raise ConfigError(
            f"{folder} has no initial model, since it is temporary, of an older version or of "
            "RunOptions(store_model=False): give RunOptions a folder, or continue it with "
            "fedplan.simulate(..., options=RunOptions(folder=..., resume=True)), with the same "
            "objects, which stores the model"
        )
    model, task = load_stored_model(folder / MODEL_FOLDER)
    experiment = Experiment(FederatedData({}, {}, None, task), model, agreement)
    if experiment.model_digest != agreement.start:
        raise ConfigError(
            f"the run started from the model {agreement.start}, but {folder / MODEL_FOLDER} is "
            f"{experiment.model_digest}: restore it from a backup"
        )
    return experiment


def _write_model(exported: _ExportedModel, output: Path, final: Path) -> str:
    """Write the whole model, with merged adapters and dequantized; return the loading code."""
    model, task = exported.model, exported.task
    if isinstance(model, ModelValues):
        return _write_values(exported, output, final)
    if isinstance(model, DualEncoder):
        save_folder(model, output, preprocessing=image_preprocessing(task, model))
        loading_code = "from fedplan.models.folder import predict\n\npredict({}, [image, ...])"
        _write_card(exported, output, loading_code)
        return f"fedplan.models.folder.predict({str(final)!r}, [image, ...])"
    quantized, merged = is_quantized(model), merge_and_dequantize(model)
    cast("Any", merged).save_pretrained(output)
    write_processor(task, output)
    code = f"transformers.{exported.loader}.from_pretrained({{}})"
    card_code = f"import transformers\n\nmodel = {code}{_processor_code(task)}"
    _write_card(replace(exported, model=merged), output, card_code)
    note = "  # dequantized: the base was quantized in the run" if quantized else ""
    return code.format(repr(str(final))) + note


def _write_values(exported: _ExportedModel, output: Path, final: Path) -> str:
    """Write all values of a model whose code is unknown, and its manifest; return the code."""
    # Clones, since tied params share their memory, which safetensors refuses.
    values = {name: value.clone() for name, value in exported.model.state_dict().items()}
    save_file(values, output / VALUES_EXPORT)
    manifest = manifest_json(exported.card.agreement.params)
    (output / MANIFEST).write_text(manifest, encoding="utf-8")
    name = exported.card.study.model.from_python.partition(" ")[0]
    code = f"model.load_state_dict(load_file({{!r}}))  # of the class {name}"
    card_code = f"from safetensors.torch import load_file\n\n{code.format(VALUES_EXPORT)}"
    card = replace(exported.card, library="pytorch")
    _write_card(replace(exported, card=card), output, card_code)
    return code.format(str(final / VALUES_EXPORT))


def _write_adapter(exported: _ExportedModel, output: Path, final: Path) -> str:
    """Write only the peft adapter; return the code that puts it on a base model."""
    if isinstance(exported.model, ModelValues):
        raise ConfigError(
            "--adapter is for models of transformers: leave it out to export all values"
        )
    save_adapter(exported.model, output, exported.card.changed)
    write_processor(exported.task, output)
    path = exported.card.study.model.path
    base = repr(strip_hub_prefix(path)) if is_hub_id(path) else "base"
    card_code = (
        "import peft\nimport transformers\n\n"
        f"base = transformers.{exported.loader}.from_pretrained({base})\n"
        f"model = peft.PeftModel.from_pretrained(base, {{}}){_processor_code(exported.task)}"
    )
    _write_card(replace(exported, card=replace(exported.card, adapter=True)), output, card_code)
    return f"peft.PeftModel.from_pretrained(model, {str(final)!r})"


IMAGE_HEADS = ("image-classification", "image-multi-label")
"""Tasks on images with a classification head."""


def _processor_code(task: Task) -> str:
    if task.kind in IMAGE_HEADS:
        return "\nprocessor = transformers.AutoImageProcessor.from_pretrained({})"
    return "\ntokenizer = transformers.AutoTokenizer.from_pretrained({})" if task.source else ""


def _write_card(exported: _ExportedModel, output: Path, loading_code: str) -> None:
    """Write card, privacy file and golden example; `{}` in `loading_code` is the folder "."."""
    example = None
    if not isinstance(exported.task, CustomTask):  # whose inputs are unknown
        example = make_golden_example(exported.model, exported.task)
    if example is not None:
        example.write(output)
    loading_code = loading_code.replace("{}", '"."')
    text = exported.card.text(loading_code, has_golden_example=example is not None)
    (output / CARD_FILE).write_text(text, encoding="utf-8")
    privacy = json.dumps(exported.card.privacy_json(), indent=1)
    (output / PRIVACY_FILE).write_text(privacy + "\n", encoding="utf-8")
