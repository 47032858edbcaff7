# SPDX-License-Identifier: Apache-2.0
"""Export a model of a run, or all its adapters, and check an exported folder."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from fedplan.data.custom_task import CustomTask
from fedplan.data.tasks.definition import Task
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.egress import AGREEMENT
from fedplan.models.adapters import (
    CONFIG,
    WEIGHTS,
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
from fedplan.models.params import Kind
from fedplan.models.values import is_quantized
from fedplan.privacy.statement import PRIVACY_FILE
from fedplan.storage.files import file_size_and_digest, safe_folder_name, write_folder
from fedplan.studies.model_card import (
    CARD_FILE,
    TOLERANCE,
    GoldenExample,
    compute_logits,
    make_golden_example,
    read_golden_example,
    tokenize_text,
)
from fedplan.studies.run import (
    MANIFEST,
    RunReader,
    read_consistently,
    read_run,
    read_run_study,
)
from fedplan.studies.run_models import (
    ExportedModel,
    read_run_model,
    read_run_models,
    read_site_model,
)
from fedplan.studies.run_scores import (
    is_personal,
    personal_params,
    run_scores,
)
from fedplan.studies.schema import ConfigError
from fedplan.studies.stored_model import (
    PROCESSOR_FILE,
    ModelValues,
    image_preprocessing,
    write_processor,
)
from fedplan.tensors.named import Tensors

VALUES_EXPORT = "model.safetensors"
"""File of an exported model whose code is unknown: all values by name."""
ADAPTERS_FILE, SHARED_ADAPTER = "manifest.json", "shared"
"""In an export of all adapters: the list of them, and the name of the global model's."""


def export_run(
    folder: Path | str,
    output: Path | str,
    client: str = "",
    key: Path | None = None,
    *,
    adapter: bool = False,
    best: bool = False,
    global_model: bool = False,
    all_clients: bool = False,
) -> str:
    """Write a model of a run into a new or empty folder, and return the code that loads the model.

    `folder`: a run's folder, or at a client's site the folder of the site's only run; a site
    exports its personal model, and `key` is the key file that decrypts the site's state.
    `client`: export this client's personal model. `global_model`: export the global model; this is
    the default, but must be said if clients have params of their own, which the global model lacks.
    `adapter`: write only the peft adapter; by default adapters are merged into the full model.
    `all_clients`, with `adapter`: write the global model's adapter into the folder `shared`, each
    client's into `clients`, and `manifest.json`: the base model, and name, path, client, rank,
    dtype and digests of each adapter. Not where the study hides its clients, nor at a site.
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
    if all_clients:
        alone = not (client or best or global_model)
        _require_all_adapters(folder, is_site=is_site, adapter=adapter, alone=alone)
    if (client or all_clients) and not is_site and not is_personal(read_run(folder).agreement):
        raise ConfigError(
            f"the plan of {folder} keeps nothing at clients, so {client or 'each'} has the shared "
            f"model: leave out {'--client' if client else '--all-clients'}"
        )
    if client and global_model:
        raise ConfigError("--client and --global exclude each other: give one of them")
    if all_clients:
        return read_consistently(folder, lambda run: _export_adapters(run, output))
    if not is_site and not (client or best or global_model):
        _require_shared_plan(folder, output)
    exported = (
        read_site_model(folder, key) if is_site else read_run_model(folder, client, best=best)
    )
    with no_progress_bars(), write_folder(output) as unfinished:
        return _write(exported, unfinished, output, adapter=adapter)


def _write(exported: ExportedModel, output: Path, final: Path, *, adapter: bool) -> str:
    """Write a model, or its adapter, into an empty folder, and return the loading code.

    `final`: the name that the folder gets later.
    """
    exported.model.eval()
    loading_code = (_write_adapter if adapter else _write_model)(exported, output, final)
    # safetensors writes files for their owner alone: they get the mode of the others.
    mode = (output / CARD_FILE).stat().st_mode
    for file in output.glob("*.safetensors"):
        file.chmod(mode)
    return loading_code


def _require_all_adapters(folder: Path, *, is_site: bool, adapter: bool, alone: bool) -> None:
    """Raise ConfigError unless the adapters of all clients can be exported from a folder.

    `alone`: no option chooses a single model.
    """
    if not alone:
        raise ConfigError("--all-clients excludes --client, --global and --best: leave them out")
    if not adapter:
        raise ConfigError(
            "--all-clients writes adapters alone: add --adapters; or export one client's whole "
            "model by --client NAME"
        )
    study = None if is_site else read_run(folder).study
    if study is None or not study.has_central_data:
        raise ConfigError(
            f"{folder}: each client's adapter is at its site, which alone can export it: run "
            "`fedplan export` there, without --all-clients"
        )
    if study.hides_clients:
        hidden = "[privacy]" if study.privacy is not None else "secure aggregation"
        raise ConfigError(
            f"{hidden} of {folder} hides clients, and a folder with the adapter of each would "
            "reveal them: export one client's by --client NAME, for that client alone"
        )


def _export_adapters(run: RunReader, output: Path) -> str:
    """Write the adapters of a run's global model and of all clients; return code that loads one.

    The folder has a folder per adapter, and ADAPTERS_FILE, by which an engine can load them.
    """
    if SHARED_ADAPTER in run.clients:
        raise ConfigError(
            f"a client of {run.folder} is called {SHARED_ADAPTER!r}, as the adapter of all: export "
            "each client's adapter by --client NAME"
        )
    adapters, base, loading_code = list[dict[str, Any]](), dict[str, Any](), ""
    with no_progress_bars(), write_folder(output) as unfinished:
        for client, exported in read_run_models(run, ["", *run.clients], best=False):
            path = Path("clients", safe_folder_name(client)) if client else Path(SHARED_ADAPTER)
            folder = unfinished / path
            folder.mkdir(parents=True)
            code = _write(exported, folder, output / path, adapter=True)
            loading_code = loading_code or code
            described = _describe_adapter(folder)
            base = base or {
                "model": described["base"],
                "dtype": _base_dtype(exported.card.agreement),
                "loader": exported.loader,
            }
            where = {"name": client or SHARED_ADAPTER, "client": client or None, "path": str(path)}
            adapters.append({**where, **{k: v for k, v in described.items() if k != "base"}})
        content = {
            "study": run.study.digest,
            "run": run.identity.id,
            "round": run.round,
            "start": run.identity.start,
            "base": base,
            "max_rank": max(each["rank"] or 0 for each in adapters),
            "adapters": adapters,
        }
        text = json.dumps(content, indent=1) + "\n"
        (unfinished / ADAPTERS_FILE).write_text(text, encoding="utf-8")
    return loading_code


def _describe_adapter(folder: Path) -> dict[str, Any]:
    """Return rank, dtype, digests and more of a written adapter, with its `base` model's name."""
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    weights = load_file(folder / WEIGHTS)
    ranks: list[int] = [config.get("r") or 0, *(config.get("rank_pattern") or {}).values()]
    dtypes = {str(value.dtype).removeprefix("torch.") for value in weights.values()}
    return {
        "base": config["base_model_name_or_path"],
        "type": config["peft_type"],
        "rank": max(ranks) or None,
        "target_modules": config.get("target_modules"),
        "modules_to_save": config.get("modules_to_save"),
        "dtype": ", ".join(sorted(dtypes)),
        "sha256": {name: file_size_and_digest(folder / name)[1] for name in (CONFIG, WEIGHTS)},
    }


def _base_dtype(agreement: Agreement) -> str:
    """Return the dtype of most values of a model, adapters apart."""
    values = Counter[str]()
    for p in agreement.params:
        values[p.dtype] += p.numel * (p.kind is not Kind.ADAPTER)
    return values.most_common(1)[0][0]


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
    model = read_run_model(folder, client, best=False).model
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
    return dict(read_run_model(folder, client, best=False).model.state_dict())


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


def _write_model(exported: ExportedModel, output: Path, final: Path) -> str:
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


def _write_values(exported: ExportedModel, output: Path, final: Path) -> str:
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


def _write_adapter(exported: ExportedModel, output: Path, final: Path) -> str:
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


def _write_card(exported: ExportedModel, output: Path, loading_code: str) -> None:
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
