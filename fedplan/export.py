# SPDX-License-Identifier: Apache-2.0
"""Export: the model of a run as a folder that loads and predicts without fedplan's rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from fedplan.adapters import merged
from fedplan.config import ConfigError
from fedplan.desk import own_values
from fedplan.examples import Images
from fedplan.fit import Examples
from fedplan.loading import quiet
from fedplan.models.dual import Dual
from fedplan.models.folder import Picture, save
from fedplan.outgoing import AGREEMENT
from fedplan.server import Server
from fedplan.state import put
from fedplan.studies import Shares, Trial, read_run, stage_of, study_in
from fedplan.tables import is_hub_id
from fedplan.tasks import Task


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
        return _written(model.eval(), shares.task, shares.test, out)


def _of_run(folder: Path, client: str) -> tuple[nn.Module, Shares]:
    study, _, _ = read_run(folder)
    if not study.data.path:
        if client:
            raise ConfigError(f"{client}'s own model is at the site: export its folder there")
        stage, names = stage_of(study), study.clients.names
        roster = {name: dict[str, str]() for name in names}
        server = Server(stage.setup, stage.start, folder, rounds=1, roster=roster)
        put(stage.model, server.world_values(), stage.setup.trainable)
        return stage.model, stage.shares
    trial = Trial(study, folder)
    federation = trial.federation
    if client and client not in federation.sites:
        raise ConfigError(f"there is no client {client!r}; there are {', '.join(federation.sites)}")
    values = federation.personal_values(client) if client else federation.world_values()
    put(federation.model, values, federation.setup.trainable)
    return federation.model, trial.shares


def _of_site(folder: Path, key: Path | None) -> tuple[nn.Module, Shares]:
    study = study_in(folder)
    stage = stage_of(study)
    put(stage.model, own_values(stage.setup, folder, key), stage.setup.trainable)
    return stage.model, stage.shares


def _written(model: nn.Module, task: Task, rows: Examples | None, out: Path) -> str:
    if isinstance(model, Dual):
        save(model, out, picture=_picture(task, rows))
        return f"fedplan.models.folder.predict({str(out)!r}, [picture, ...])"
    whole = cast("Any", merged(model))
    whole.save_pretrained(out)
    if task.source and task.kind != "image-classification":
        _tokenizer(task.source).save_pretrained(out)
    return f"transformers.{task.model_class}.from_pretrained({str(out)!r})"


def _picture(task: Task, rows: Examples | None) -> Picture:
    if not isinstance(rows, Images):
        return Picture(task.image_size)
    return Picture(task.image_size, _colours(rows.mean), _colours(rows.std))


def _colours(side: Tensor) -> tuple[float, ...]:
    return tuple(float(colour) for colour in side.flatten())


def _tokenizer(source: str) -> Any:
    import transformers

    return cast("Any", transformers.AutoTokenizer).from_pretrained(
        source, local_files_only=not is_hub_id(source), trust_remote_code=False
    )
