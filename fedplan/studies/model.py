# SPDX-License-Identifier: Apache-2.0
"""Models: the one that every site of a study starts from."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedplan import seeds
from fedplan.data.foresight import require_sight
from fedplan.data.tasks import Task
from fedplan.errors import FedplanError
from fedplan.methods.method import Method
from fedplan.models.behaviour.proposal import learn
from fedplan.models.buffers import stilled
from fedplan.models.dual import load_dual
from fedplan.models.hub import bare, is_hub_id, quiet
from fedplan.studies.schema import Study


def starting_model(study: Study, task: Task, method: Method) -> nn.Module:
    """The model as the study says it; what is new in it is drawn from the study's seed."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.seed(study.name, "model", study.seed))
        model = _made(study, task)
        require_sight(model, task.kind, packed=task.packing)
        model = stilled(model) if study.model.still else model
        if said := study.model.anatomy or ({"like": study.model.like} if study.model.like else {}):
            learn(model, said)
        return method.adapt(model) if method.adapt is not None else model


def _made(study: Study, task: Task) -> nn.Module:
    said = study.model
    if task.kind == "image-text":
        with _told("model: the towers cannot be loaded"):
            return load_dual(
                said.path,
                vision=said.vision,
                text=said.text,
                bridge=said.bridge,
                names=task.labels,
                template=task.template,
                tokenizer=study.task.tokenizer,
            )
    return _pretrained(study, task) if said.path else _from_scratch(study, task)


def _pretrained(study: Study, task: Task) -> nn.Module:
    said = study.model
    if not is_hub_id(said.path) and not Path(said.path).is_dir():
        raise FedplanError(
            f"model.path: {said.path!r} is not there: give a folder of weights, or hub:org/name"
        )
    with _told(f"model.path: {said.path!r} cannot be loaded for {task.kind}"):
        return _loader(task).from_pretrained(
            bare(said.path),
            dtype=torch.float32,
            local_files_only=not is_hub_id(said.path),
            trust_remote_code=False,
            **task.settings,
            **said.settings,
        )


def _from_scratch(study: Study, task: Task) -> nn.Module:
    import transformers

    said = study.model
    with _told(f"model.type: no {said.type!r} can be made for {task.kind} with these settings"):
        config = transformers.AutoConfig.for_model(said.type, **said.settings, **task.settings)
        return _loader(task).from_config(config)


@contextmanager
def _told(what: str) -> Generator[None]:
    """Tell whatever transformers meets in a user's files and settings as one message.

    Its code raises what it happens to raise there: a KeyError, a plain Exception of the Rust side.
    """
    try:
        yield
    except FedplanError:
        raise
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise FedplanError(f"{what}: {words[0][:300]}") from error


def _loader(task: Task) -> Any:
    import transformers

    return getattr(transformers, task.model_class)
