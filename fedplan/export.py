# SPDX-License-Identifier: Apache-2.0
"""Export: the model of a run as a folder that loads and predicts without fedplan's rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from fedplan.config import ConfigError
from fedplan.examples import Images
from fedplan.fit import Examples
from fedplan.loading import quiet
from fedplan.models.dual import Dual
from fedplan.models.folder import Picture, save
from fedplan.state import put
from fedplan.studies import Trial, read_run
from fedplan.tables import is_hub_id
from fedplan.tasks import Task


def export_run(run: Path, out: Path, client: str = "") -> str:
    """Write one client's model, or the world's, and say how it is loaded."""
    study, _, _ = read_run(run)
    trial = Trial(study, run)
    federation = trial.federation
    if client and client not in federation.sites:
        raise ConfigError(f"there is no client {client!r}; there are {', '.join(federation.sites)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty: name another folder")
    values = federation.personal_values(client) if client else federation.world_values()
    put(federation.model, values, federation.setup.trainable)
    with quiet():
        return _written(federation.model.eval(), trial.shares.task, trial.shares.test, out)


def _written(model: nn.Module, task: Task, rows: Examples | None, out: Path) -> str:
    if isinstance(model, Dual):
        save(model, out, picture=_picture(task, rows))
        return f"fedplan.models.folder.predict({str(out)!r}, [picture, ...])"
    whole = cast("Any", model)
    whole = whole.merge_and_unload() if _is_peft(model) else whole
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


def _is_peft(model: nn.Module) -> bool:
    return type(model).__module__.startswith("peft.")


def _tokenizer(source: str) -> Any:
    import transformers

    return cast("Any", transformers.AutoTokenizer).from_pretrained(
        source, local_files_only=not is_hub_id(source), trust_remote_code=False
    )
