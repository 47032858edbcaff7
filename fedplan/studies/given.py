# SPDX-License-Identifier: Apache-2.0
"""What a caller gives from Python in place of files, and the study that tells of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fedplan.data.examples import Examples
from fedplan.data.metrics import metric_named
from fedplan.data.own import Own
from fedplan.data.tasks import Task, refitted
from fedplan.language.wording import text_of
from fedplan.methods.method import Method
from fedplan.studies.schema import ConfigError, Study, study_of
from fedplan.studies.shares import NO_TEST, Shares

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "fedplan")
"""Whose modules are told by their names: their versions are another matter."""


@dataclass(frozen=True)
class Given:
    """A method, a model, and each client's rows, as objects; the caller's model is not touched.

    `clients` are the rows to train on, by name; `own` those to test each client's own model on, and
    `test` those of the common test. That no row is both trained and tested on is the caller's care.
    """

    method: Method
    model: nn.Module
    clients: Mapping[str, Any]
    task: Task
    test: Any = None
    own: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for what, said in (("clients", self.clients), ("own", self.own)):
            if not isinstance(said, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"{what} are a {type(said).__name__}: give rows by their names")
        if not self.clients:
            raise ConfigError("clients is empty: give the rows of at least one, by its name")
        names = set(map(str, self.clients))
        if strange := [name for name in map(str, self.own) if name not in names]:
            raise ConfigError(f"own has rows of {strange[0]!r}, who is none of the clients")

    def under(self, study: Study) -> Given:
        """The same, as the study asks for it: one row an example, and metrics by their names."""
        hidden, names = study.privacy, study.evaluate.metrics
        if not isinstance(self.task, Own):
            single = hidden is not None and hidden.unit == "example"
            task = refitted(self.task, single=single, extra=map(metric_named, names))
            return replace(self, task=task)
        if names:
            raise ConfigError(f"evaluate.metrics is {names}: measure them in `metrics`, a function")
        return self

    @property
    def shares(self) -> Shares:
        """The rows as a study has them."""
        train, own = (
            {str(name): self.task.prepare(rows) for name, rows in each.items()}
            for each in (self.clients, self.own)
        )
        test: Examples | None = self.task.prepare(self.test) if self.test is not None else None
        return Shares(train, own, test, self.task, () if test is not None else (NO_TEST,))

    def study(self, **said: Any) -> Study:
        """The study that tells of all this: what is an object stands in it by its content.

        The model's values and the rows are told by the run's own digests.
        """
        task = self.task
        # Where a tokenizer lies and what else is measured changes no turn.
        aside = replace(task, source="", extra=())
        told = aside.text if isinstance(aside, Own) else text_of(aside)
        clients = {"names": list(map(str, self.clients)), **said.pop("clients", {})}
        return study_of(
            {
                "model": {"given": _told_model(self.model)},
                "task": {"kind": task.kind, "given": told},
                "data": {"given": True},
                "method": {"given": list(self.method.lines)},
                "clients": clients,
                **said,
            }
        )


def _told_model(model: nn.Module) -> str:
    """The class of a model, with a digest of those that no library wrote, it and its parts."""
    kinds = {type(module) for module in model.modules()}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in LIBRARIES]
    mark = hashlib.sha256("\n".join(sorted(map(text_of, own))).encode()).hexdigest()[:16]
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return f"{name} #{mark}" if own else name
