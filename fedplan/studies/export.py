# SPDX-License-Identifier: Apache-2.0
"""Export: the model of a run as a folder that loads and predicts without fedplan's rounds."""

from __future__ import annotations

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
from fedplan.models.folder import Preprocessing, save_folder
from fedplan.models.grafting import save_adapter, whole
from fedplan.models.hub import quiet
from fedplan.models.images import centre_of
from fedplan.models.quantised import is_quantised
from fedplan.models.values import put
from fedplan.studies.folder import agreement_in, noted_task, study_in
from fedplan.studies.run import Run, looked_at
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.stage import Stage, require_files, stage_without_rows
from fedplan.tensors.named import Tensors


@dataclass(frozen=True)
class _Held:
    """A model with the values of a run, and the tensors that are not as they started."""

    model: nn.Module
    task: Task
    moved: tuple[str, ...]


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
    that scored best, where the study has it kept.
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
        return _adapter_written(held, out) if adapter else _written(held.model, held.task, out)


def _of_run(folder: Path, client: str, *, best: bool = False) -> _Held:
    run, world, home = looked_at(folder, lambda run: _held(run, client, best=best))
    require_files(run.study)
    stage = _staged(run.study, run.agreement, run.labels)
    values = world_values(run.agreement, world, stage.start)
    if client:
        turn = Turn(run.round, client, world.phase, run.study.clients.traits.get(client, {}))
        values = personal_values(run.agreement, world, stage.start, turn, home)
    return _filled(stage, values)


def _filled(stage: Stage, values: Tensors) -> _Held:
    held = [p for p in stage.agreement.trainable if p.key in values]
    moved = [p.name for p in held if not torch.equal(values[p.key], stage.start[p.key])]
    put(stage.model, values, held)
    return _Held(stage.model, stage.shares.task, tuple(moved))


def _held(run: Run, client: str, *, best: bool) -> tuple[Run, World, dict[str, Tensor]]:
    """The run with its world, and what a client kept of it, of one round."""
    return run, run.best if best else run.world, run.home(client)[0] if client else {}


def _of_site(folder: Path, key: Path | None) -> _Held:
    folder = last_of(folder)
    study, agreed = study_in(folder), read_agreement(folder)
    agreement = replace(agreement_in(folder), start=str(agreed.get("model")))
    stage = _staged(study, agreement, noted_task(folder)[0])
    return _filled(stage, own_values(agreement, folder, key))


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


def _written(model: nn.Module, task: Task, out: Path) -> str:
    if isinstance(model, Dual):
        save_folder(model, out, picture=_picture(task))
        return f"fedplan.models.folder.predict({str(out)!r}, [picture, ...])"
    packed = is_quantised(model)
    cast("Any", whole(model)).save_pretrained(out)
    _write_tokenizer(task, out)
    how = f"transformers.{task.model_class}.from_pretrained({str(out)!r})"
    return f"{how}  # dequantised: the base was packed in the run" if packed else how


def _adapter_written(held: _Held, out: Path) -> str:
    save_adapter(held.model, out, held.moved)
    _write_tokenizer(held.task, out)
    return f"peft.PeftModel.from_pretrained(model, {str(out)!r})"


def _write_tokenizer(task: Task, out: Path) -> None:
    if task.source and task.kind != "image-classification":
        task.tokenizer.save_pretrained(out)


def _picture(task: Task) -> Preprocessing:
    mean, std = centre_of(task.source)
    return Preprocessing(task.image_size, _colours(mean), _colours(std))


def _colours(side: Tensor) -> tuple[float, ...]:
    return tuple(float(colour) for colour in side.flatten())
