# SPDX-License-Identifier: Apache-2.0
"""Export: the model of a run as a folder that loads and predicts without fedplan's rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from fedplan.adapters import merged
from fedplan.agreement import Setup
from fedplan.archive import committed
from fedplan.config import ConfigError, Study
from fedplan.desk import last_of, own_values
from fedplan.examples import centre_of
from fedplan.hub import bare, is_hub_id
from fedplan.identity import read_identity
from fedplan.journal import Journal, home_of
from fedplan.loading import quiet
from fedplan.models.dual import Dual
from fedplan.models.folder import Picture, save
from fedplan.outgoing import AGREEMENT, read_agreement
from fedplan.rounds import World
from fedplan.server import personal_values, world_values
from fedplan.state import put
from fedplan.studies import Stage, noted_task, setup_in, stage_without_rows, study_in
from fedplan.tasks import Task
from fedplan.turn import Turn


def export_run(folder: Path, out: Path, client: str = "", key: Path | None = None) -> str:
    """Write a model, and say how it is loaded: the world's, or one client's own.

    The folder is a run's, or that of a site's experiment: then the model is the site's own, and
    `key` opens what it keeps.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty: name another folder")
    if (folder / AGREEMENT).exists():
        model, task = _of_site(folder, key)
    else:
        model, task = _of_run(folder, client)
    with quiet():
        return _written(model.eval(), task, out)


def _of_run(folder: Path, client: str) -> tuple[nn.Module, Task]:
    study, identity = study_in(folder), read_identity(folder)
    setup = replace(setup_in(folder), start=identity.start, run=identity.id)
    labels, clients = noted_task(folder)
    if client and not study.data.path:
        raise ConfigError(f"{client}'s own model is at the site: export its folder there")
    if client and client not in clients:
        raise ConfigError(f"there is no client {client!r}; there are {', '.join(clients)}")
    stage = _staged(study, setup, labels)
    world, home = _held(setup, folder, client)
    values = world_values(setup, world, stage.start)
    if client:
        turn = Turn(world.round, client, world.phase, study.clients.traits.get(client, {}))
        values = personal_values(setup, world, stage.start, turn, home)
    put(stage.model, values, setup.trainable)
    return stage.model, stage.shares.task


def _held(setup: Setup, folder: Path, client: str) -> tuple[World, dict[str, Tensor]]:
    """The world that was last committed, and what a client kept when it was, not a turn later."""
    while True:
        world, place = committed(folder)[0], home_of(folder, client)
        if not client:
            return world, {}
        journal, following = Journal(place, reading=True), setup.request(world.round + 1, client)
        if client in world.heard and not journal.last(following):
            raise ConfigError(f"{client}'s home is lost: put a copy of {place} back")
        home, _ = journal.home(following)
        # A run that goes on may have closed a round meanwhile.
        if committed(folder)[0].round == world.round:
            return world, home


def _of_site(folder: Path, key: Path | None) -> tuple[nn.Module, Task]:
    folder = last_of(folder)
    study, agreed = study_in(folder), read_agreement(folder)
    setup = replace(setup_in(folder), start=str(agreed.get("model")))
    stage = _staged(study, setup, noted_task(folder)[0])
    put(stage.model, own_values(setup, folder, key), setup.trainable)
    return stage.model, stage.shares.task


def _staged(study: Study, setup: Setup, labels: list[str]) -> Stage:
    """The model that a run started from, without its rows."""
    stage = stage_without_rows(study, labels)
    if stage.setup.params != setup.params:
        raise ConfigError("the model that the study names is not the one that the run started from")
    if stage.digest != setup.start:
        raise ConfigError(
            f"the run started from the model {setup.start}, and what the study names is now "
            f"{stage.digest}: give it the weights that it began with"
        )
    return stage


def _written(model: nn.Module, task: Task, out: Path) -> str:
    if isinstance(model, Dual):
        save(model, out, picture=_picture(task))
        return f"fedplan.models.folder.predict({str(out)!r}, [picture, ...])"
    whole = cast("Any", merged(model))
    whole.save_pretrained(out)
    if task.source and task.kind != "image-classification":
        _tokenizer(task.source).save_pretrained(out)
    return f"transformers.{task.model_class}.from_pretrained({str(out)!r})"


def _picture(task: Task) -> Picture:
    mean, std = centre_of(task.source)
    return Picture(task.image_size, _colours(mean), _colours(std))


def _colours(side: Tensor) -> tuple[float, ...]:
    return tuple(float(colour) for colour in side.flatten())


def _tokenizer(source: str) -> Any:
    import transformers

    return cast("Any", transformers.AutoTokenizer).from_pretrained(
        bare(source), local_files_only=not is_hub_id(source), trust_remote_code=False
    )
