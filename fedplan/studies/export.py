# SPDX-License-Identifier: Apache-2.0
"""Export: the model of a run as a folder that loads and predicts without fedplan's rounds."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.tasks import Task
from fedplan.federation.agreement import Agreement
from fedplan.federation.egress import AGREEMENT, read_agreement
from fedplan.federation.endpoint import last_of, own_values
from fedplan.federation.world import World, personal_values, world_values
from fedplan.language.turn import Turn
from fedplan.models.dual import Dual
from fedplan.models.folder import SETTINGS, Preprocessing, load_folder, save_folder
from fedplan.models.grafting import CONFIG, load_adapter, save_adapter, whole
from fedplan.models.hub import bare, fetched, is_hub_id, quiet
from fedplan.models.images import centre_of
from fedplan.models.quantised import is_quantised
from fedplan.models.values import put
from fedplan.studies.card import CARD, Card, secrets_of
from fedplan.studies.folder import agreement_in, noted_task, study_in
from fedplan.studies.run import Run, looked_at
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.stage import (
    Stage,
    require_files,
    stage_without_rows,
    statement_of,
)
from fedplan.studies.vector import (
    TOLERANCE,
    Vector,
    logits_of,
    read_vector,
    tokens_of,
    vector_of,
)
from fedplan.tensors.named import Tensors

PROCESSOR = "preprocessor_config.json"
"""In the folder of a model of pictures, as Hugging Face has it: how a picture is made ready."""


@dataclass(frozen=True)
class _Held:
    """A model with the values of a run, the tensors that are not as they started, and its card."""

    model: nn.Module
    task: Task
    moved: tuple[str, ...]
    card: Card


def export_run(
    folder: Path | str,
    out: Path | str,
    client: str = "",
    key: Path | None = None,
    *,
    adapter: bool = False,
    best: bool = False,
) -> str:
    """Write a model, and say how it is loaded: the world's, or one client's own.

    The folder is a run's, or that of a site's experiment: then the model is the site's own, and
    `key` opens what it keeps. With `adapter` only the adapter is written, as peft loads it; else
    the whole model in floats, its adapter merged into it. With `best` it is the world of the round
    that scored best, where the study has it kept. Beside it stand what makes inputs ready, a card,
    and a test vector: `check_export` computes it again.
    """
    folder, out = Path(folder), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty: name another folder")
    of_site = (folder / AGREEMENT).exists()
    if best and (client or of_site):
        raise ConfigError("the best that is kept is the world's, and no client's own")
    held = _of_site(folder, key) if of_site else _of_run(folder, client, best=best)
    held.model.eval()
    with quiet():
        return _adapter_written(held, out) if adapter else _written(held, out)


def check_export(folder: Path | str, model: nn.Module | None = None) -> float:
    """Load an exported model, feed it its test vector, and say how far off it is at the most.

    An adapter is put on `model`, or on the base that it names. More than the tolerance raises, and
    so does an input that is made ready otherwise than in the run.
    """
    folder = Path(folder)
    try:
        vector = read_vector(folder)
        with quiet():
            _require_inputs(folder, vector)
            said = logits_of(_loaded(folder, vector, model), vector.inputs)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder} cannot be checked: {error}") from error
    if said.shape != vector.logits.shape:
        raise ConfigError(
            f"{folder} says {tuple(said.shape)}, and said {tuple(vector.logits.shape)}"
        )
    off = float((said - vector.logits).abs().max())
    if not off <= TOLERANCE * max(1.0, float(vector.logits.abs().max())):
        raise ConfigError(
            f"{folder} differs by {off:.2g} from what the model said when it was exported: these "
            "are other weights, or another base; export it again"
        )
    return off


def _loaded(folder: Path, vector: Vector, base: nn.Module | None) -> nn.Module:
    import transformers

    if (folder / SETTINGS).exists():
        return load_folder(folder)
    loader = getattr(transformers, vector.loader)
    if not (folder / CONFIG).exists():
        return fetched(loader, str(folder), here=True)
    if base is None:
        named = str(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"] or "")
        labels = {"id2label": dict(enumerate(vector.labels))} if vector.labels else {}
        base = cast("nn.Module", fetched(loader, named, here=True, **labels))
    return load_adapter(base, str(folder))


def _require_inputs(folder: Path, vector: Vector) -> None:
    """Refuse a folder that makes inputs ready otherwise than the run did."""
    import transformers

    made: Tensors = {}
    if vector.raw:
        tokenizer = fetched(transformers.AutoTokenizer, str(folder), here=True)
        length = vector.inputs["input_ids"].shape[1]
        made = tokens_of(tokenizer, vector.raw, length, vector.loader)
    elif vector.picture is not None and (folder / PROCESSOR).exists():
        processor = fetched(transformers.AutoImageProcessor, str(folder), here=True)
        made = processor(vector.picture.numpy(), return_tensors="pt")
    for name, value in vector.inputs.items():
        if name in made and not torch.allclose(value.double(), made[name].double(), atol=1e-6):
            raise ConfigError(f"{folder} makes another {name} of its test vector: export it again")


def _of_run(folder: Path, client: str, *, best: bool = False) -> _Held:
    run, world, home = looked_at(folder, lambda run: _held(run, client, best=best))
    require_files(run.study)
    stage = _staged(run.study, run.agreement, run.labels)
    values = world_values(run.agreement, world, stage.start)
    if client:
        turn = Turn(run.round, client, world.phase, run.study.clients.traits.get(client, {}))
        values = personal_values(run.agreement, world, stage.start, turn, home)
    return _filled(stage, values, _card(run, world.round, own=bool(client)))


def _card(run: Run, number: int, *, own: bool) -> Card:
    study, stated = run.study, statement_of(run.study, run.folder)
    clients = run.clients or list(study.clients.names)
    told = stated is None and not own
    row = next((row for row in run.metrics if told and row["round"] == number), {})
    return Card(
        study,
        run.agreement,
        number,
        len(clients),
        own=own,
        statement=stated,
        # How many rows the test has is told to nobody.
        scores={
            name.removeprefix(TESTED): value
            for name, value in row.items()
            if name.startswith(TESTED) and not name.endswith("examples")
        },
        secret=secrets_of(study, clients),
    )


TESTED = "world."
"""What the names of scores on the common test start with."""


def _filled(stage: Stage, values: Tensors, card: Card) -> _Held:
    held = [p for p in stage.agreement.trainable if p.key in values]
    moved = [p.name for p in held if not torch.equal(values[p.key], stage.start[p.key])]
    put(stage.model, values, held)
    return _Held(stage.model, stage.shares.task, tuple(moved), card)


def _held(run: Run, client: str, *, best: bool) -> tuple[Run, World, dict[str, Tensor]]:
    """The run with its world, and what a client kept of it, of one round."""
    return run, run.best if best else run.world, run.home(client)[0] if client else {}


def _of_site(folder: Path, key: Path | None) -> _Held:
    folder = last_of(folder)
    study, agreed = study_in(folder), read_agreement(folder)
    agreement = replace(agreement_in(folder), start=str(agreed.get("model")))
    labels, clients = noted_task(folder)
    stage = _staged(study, agreement, labels)
    names = list(study.clients.names) or clients
    account, run = Path(str(agreed.get("account", ""))), str(agreed.get("prefix", ""))
    stated = statement_of(study, account, run=run)
    secret = secrets_of(study, names)
    card = Card(study, agreement, 0, len(names), own=True, statement=stated, secret=secret)
    return _filled(stage, own_values(agreement, folder, key), card)


def _staged(study: Study, agreement: Agreement, labels: list[str]) -> Stage:
    """The model that a run started from, without its rows."""
    stage = stage_without_rows(study, labels)
    if stage.agreement.params != agreement.params:
        raise ConfigError("the model that the study names is not the one that the run started from")
    if stage.digest != agreement.start:
        raise ConfigError(
            f"the run started from the model {agreement.start}, and what the study names is now "
            f"{stage.digest}: give it the weights that it began with"
        )
    return stage


def _written(held: _Held, out: Path) -> str:
    model, task = held.model, held.task
    if isinstance(model, Dual):
        save_folder(model, out, picture=_picture(task))
        how = "from fedplan.models.folder import predict\n\npredict({}, [picture, ...])"
        _describe(model, task, held.card, out, how)
        return f"fedplan.models.folder.predict({str(out)!r}, [picture, ...])"
    packed, alone = is_quantised(model), whole(model)
    cast("Any", alone).save_pretrained(out)
    _write_processor(task, out)
    how = f"transformers.{task.model_class}.from_pretrained({{}})"
    _describe(alone, task, held.card, out, f"import transformers\n\nmodel = {how}{_fed(task)}")
    how = how.format(repr(str(out)))
    return f"{how}  # dequantised: the base was packed in the run" if packed else how


def _adapter_written(held: _Held, out: Path) -> str:
    save_adapter(held.model, out, held.moved)
    _write_processor(held.task, out)
    how = "peft.PeftModel.from_pretrained(model, {})"
    card, path = replace(held.card, adapter=True), held.card.study.model.path
    base = repr(bare(path)) if is_hub_id(path) else "base"
    load = f"base = transformers.{held.task.model_class}.from_pretrained({base})"
    load += f"\nmodel = {how.replace('model', 'base')}{_fed(held.task)}"
    _describe(held.model, held.task, card, out, f"import peft\nimport transformers\n\n{load}")
    return how.format(repr(str(out)))


def _fed(task: Task) -> str:
    """How that is loaded which makes inputs ready."""
    if task.kind == "image-classification":
        return "\nprocessor = transformers.AutoImageProcessor.from_pretrained({})"
    return "\ntokenizer = transformers.AutoTokenizer.from_pretrained({})" if task.source else ""


def _describe(model: nn.Module, task: Task, card: Card, out: Path, how: str) -> None:
    """Write the card of a model, and its test vector."""
    vector = vector_of(model, task)
    if vector is not None:
        vector.write(out)
    text = card.text(how.replace("{}", '"."'), vector=vector is not None)
    (out / CARD).write_text(text, encoding="utf-8")


def _write_processor(task: Task, out: Path) -> None:
    """Write what makes inputs ready: a tokenizer, or how a picture is resized and centred."""
    if task.kind != "image-classification":
        _write_tokenizer(task, out)
        return
    picture = _picture(task)
    said = {
        # By PIL, as in the run: torchvision resizes a little otherwise.
        "image_processor_type": "ViTImageProcessorPil",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": picture.size, "width": picture.size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": picture.mean,
        "image_std": picture.std,
    }
    (out / PROCESSOR).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def _write_tokenizer(task: Task, out: Path) -> None:
    if task.source:
        task.tokenizer.save_pretrained(out)


def _picture(task: Task) -> Preprocessing:
    mean, std = centre_of(task.source)
    return Preprocessing(task.image_size, _colours(mean), _colours(std))


def _colours(side: Tensor) -> tuple[float, ...]:
    return tuple(float(colour) for colour in side.flatten())
