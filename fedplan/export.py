# SPDX-License-Identifier: Apache-2.0
"""Export: the model of a run as a folder that loads and predicts without fedplan's rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from fedplan.adapters import merged
from fedplan.config import ConfigError
from fedplan.desk import last_of, own_values
from fedplan.examples import centre_of
from fedplan.hub import bare, is_hub_id
from fedplan.journal import Journal, home_of
from fedplan.loading import quiet
from fedplan.models.dual import Dual
from fedplan.models.folder import Picture, save
from fedplan.outgoing import AGREEMENT
from fedplan.resolution import permitted
from fedplan.rounds import World
from fedplan.server import read_world
from fedplan.shares import Shares
from fedplan.state import put
from fedplan.studies import stage_of, study_in
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
        model, shares = _of_site(folder, key)
    else:
        model, shares = _of_run(folder, client)
    with quiet():
        return _written(model.eval(), shares.task, out)


def _of_run(folder: Path, client: str) -> tuple[nn.Module, Shares]:
    study = study_in(folder)
    if client and not study.data.path:
        raise ConfigError(f"{client}'s own model is at the site: export its folder there")
    stage, found = stage_of(study), read_world(folder)
    if client and client not in stage.shares.train:
        there = ", ".join(stage.shares.train)
        raise ConfigError(f"there is no client {client!r}; there are {there}")
    world = found[0] if found else World.start(stage.setup, stage.start)
    values = {p.key: world.values.get(p.key, stage.start[p.key]) for p in stage.setup.trainable}
    if client:
        home, _ = Journal(home_of(folder, client), reading=True).home()
        turn = Turn(world.round, client, world.phase, study.clients.traits.get(client, {}))
        roles = permitted(stage.setup.method.plan, stage.setup.params, turn)
        own = {p.key for p in stage.setup.trainable if roles[p].own}
        values |= {k: v for k, v in home.items() if k in own}
    put(stage.model, values, stage.setup.trainable)
    return stage.model, stage.shares


def _of_site(folder: Path, key: Path | None) -> tuple[nn.Module, Shares]:
    folder = last_of(folder)
    study = study_in(folder)
    stage = stage_of(study)
    put(stage.model, own_values(stage.setup, folder, key), stage.setup.trainable)
    return stage.model, stage.shares


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
