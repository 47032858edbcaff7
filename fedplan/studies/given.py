# SPDX-License-Identifier: Apache-2.0
"""What a caller gives from Python in place of files, and the study that tells of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fedplan.data.examples import Examples
from fedplan.data.own import Own
from fedplan.data.tasks import Task
from fedplan.language.wording import text_of
from fedplan.methods.method import Method
from fedplan.studies.schema import ConfigError, Study, study_of
from fedplan.studies.shares import NO_TEST, Shares


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
        if not self.clients:
            raise ConfigError("clients is empty: give the rows of at least one, by its name")
        if strange := self.own.keys() - self.clients.keys():
            raise ConfigError(f"own has rows of {min(strange)!r}, who is none of the clients")

    @property
    def starting_model(self) -> nn.Module:
        """A copy of the model, with what the method adds to it."""
        model = copy.deepcopy(self.model)
        return self.method.adapt(model) if self.method.adapt is not None else model

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
        kind, task = type(self.model), self.task
        told = task.text if isinstance(task, Own) else text_of(task)
        clients = {"names": list(map(str, self.clients)), **said.pop("clients", {})}
        return study_of(
            {
                "model": {"given": f"{kind.__module__}.{kind.__qualname__}"},
                "task": {"kind": task.kind, "given": told},
                "data": {"given": True},
                "method": {"given": list(self.method.lines)},
                "clients": clients,
                **said,
            }
        )
