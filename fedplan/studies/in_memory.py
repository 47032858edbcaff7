# SPDX-License-Identifier: Apache-2.0
"""In-memory inputs: models, data and methods given as Python objects instead of files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fedplan.data.custom_task import CustomTask
from fedplan.data.examples import Examples
from fedplan.data.metrics import metric_named
from fedplan.data.tasks import Task, adapt_task
from fedplan.language.canonical import canonical_text
from fedplan.methods.method import Method
from fedplan.studies.federated_data import NO_TEST, FederatedData
from fedplan.studies.schema import ConfigError, Study, study_from_dict

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "fedplan")
"""Packages whose classes are identified by name alone; other classes also by their code."""


@dataclass(frozen=True)
class InMemoryInputs:
    """A method, a model, and each client's data as Python objects; the model is not modified.

    `clients`: training data by client name.
    `task`: prepares the data, and computes loss and metrics.
    `test`: data of the common test set, or None.
    `client_tests`: test data by client name, for personal models; names must be in `clients`. The
    caller must keep training and test data apart. Raises ConfigError if `clients` is empty or not a
    mapping.
    """

    method: Method
    model: nn.Module
    clients: Mapping[str, Any]
    task: Task
    test: Any = None
    client_tests: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Raise ConfigError for arguments that are not mappings, no clients, or unknown names."""
        for argument, data in (("clients", self.clients), ("client_tests", self.client_tests)):
            if not isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"{argument} is a {type(data).__name__}: give a dict from client names to data"
                )
        if not self.clients:
            raise ConfigError("clients is empty: give the data of at least one client, by its name")
        names = set(map(str, self.clients))
        if unknown := [name for name in map(str, self.client_tests) if name not in names]:
            raise ConfigError(f"client_tests has data of {unknown[0]!r}, which is not in clients")

    def configure_for(self, study: Study) -> InMemoryInputs:
        """Return a copy whose task follows the study.

        Under example-level DP each record becomes one example, and metrics named in
        `evaluate.metrics` are added. Raises ConfigError if a custom task would need named metrics.
        """
        privacy, metrics = study.privacy, study.evaluate.metrics
        if not isinstance(self.task, CustomTask):
            one_example_per_record = privacy is not None and privacy.unit == "example"
            task = adapt_task(
                self.task,
                one_example_per_row=one_example_per_record,
                extra_metrics=map(metric_named, metrics),
            )
            return replace(self, task=task)
        if metrics:
            raise ConfigError(
                f"evaluate.metrics is {metrics}: compute them in your own `metrics` function"
            )
        return self

    @property
    def federated_data(self) -> FederatedData:
        """Training and test data, prepared by the task."""
        train, client_tests = (
            {str(name): self.task.prepare(rows) for name, rows in source.items()}
            for source in (self.clients, self.client_tests)
        )
        common_test: Examples | None = (
            self.task.prepare(self.test) if self.test is not None else None
        )
        return FederatedData(
            train,
            client_tests,
            common_test,
            self.task,
            () if common_test is not None else (NO_TEST,),
        )

    def make_study(self, **sections: Any) -> Study:
        """Return the study that describes these inputs; `sections` are further sections and fields.

        Model class, task and method are written by their code, so that a changed one gives another
        digest. Model values and data are covered by the run's own digests.
        """
        task = self.task
        # The tokenizer's path and additional metrics do not change the training.
        binding_task = replace(task, source="", extra_metrics=())
        task_text = (
            binding_task.text
            if isinstance(binding_task, CustomTask)
            else canonical_text(binding_task)
        )
        clients = {"names": list(map(str, self.clients)), **sections.pop("clients", {})}
        return study_from_dict(
            {
                "model": {"from_python": _describe_model_class(self.model)},
                "task": {"kind": task.kind, "from_python": task_text},
                "data": {"from_python": True},
                "method": {"from_python": list(self.method.lines)},
                "clients": clients,
                **sections,
            }
        )


def _describe_model_class(model: nn.Module) -> str:
    """Return the class name of a model, with a digest of the code of classes outside LIBRARIES."""
    classes = {type(module) for module in model.modules()}
    custom = [cls for cls in classes if cls.__module__.partition(".")[0] not in LIBRARIES]
    digest = hashlib.sha256("\n".join(sorted(map(canonical_text, custom))).encode()).hexdigest()[
        :16
    ]
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return f"{name} #{digest}" if custom else name
