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
    """A method, a model and each client's data as Python objects, instead of a study's files.

    `make_study` returns the study of these inputs; `build_experiment` then uses a copy of the
    model. The constructor raises ConfigError if `clients` is empty, if `clients` or `client_tests`
    is not a mapping, or if `client_tests` has a name that `clients` lacks.
    `clients`: training data by client name, in a form that `task` can prepare.
    `task`: prepares the data, and computes loss and metrics.
    `test`: data of the common test set, or None.
    `client_tests`: test data by client name, to evaluate personal models. The caller must keep
    training and test data disjoint.
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
        """Return a copy with the task changed as the study asks; a CustomTask stays as given.

        The metrics of `evaluate.metrics` are added to the task. Under example-level DP, the task
        makes exactly one example of each data row. Raises ConfigError if `evaluate.metrics` is set
        with a CustomTask.
        """
        privacy, metrics = study.privacy, study.evaluate.metrics
        if not isinstance(self.task, CustomTask):
            one_example_per_record = privacy is not None and privacy.unit == "example"
            extra = map(metric_named, metrics)
            task = adapt_task(
                self.task, one_example_per_row=one_example_per_record, extra_metrics=extra
            )
            return replace(self, task=task)
        if metrics:
            raise ConfigError(
                f"evaluate.metrics is {metrics}: compute them in your own `metrics` function"
            )
        return self

    @property
    def federated_data(self) -> FederatedData:
        """Training and test data; the task prepares all data anew at each access, which is slow."""
        train, client_tests = (
            {str(name): self.task.prepare(rows) for name, rows in source.items()}
            for source in (self.clients, self.client_tests)
        )
        test: Examples | None = self.task.prepare(self.test) if self.test is not None else None
        notes = () if test is not None else (NO_TEST,)
        return FederatedData(train, client_tests, test, self.task, notes)

    def make_study(self, **sections: Any) -> Study:
        """Return the study that describes these inputs.

        `sections`: further sections as dicts, and fields such as `name` and `seed`. The study has
        digests of the code of model class, task and method, so that changed code gives another
        study digest; model values and data are not in the study. Raises ConfigError if a section is
        invalid.
        """
        task = self.task
        # The tokenizer's path and additional metrics do not change the training.
        binding = replace(task, source="", extra_metrics=())
        text = binding.text if isinstance(binding, CustomTask) else canonical_text(binding)
        # Classes of LIBRARIES are identified by name, others by their code, too.
        modules = {type(module) for module in self.model.modules()}
        custom = [cls for cls in modules if cls.__module__.partition(".")[0] not in LIBRARIES]
        code = "\n".join(sorted(map(canonical_text, custom))).encode()
        digest = f" #{hashlib.sha256(code).hexdigest()[:16]}" if custom else ""
        model = f"{type(self.model).__module__}.{type(self.model).__qualname__}{digest}"
        clients = {"names": list(map(str, self.clients)), **sections.pop("clients", {})}
        return study_from_dict(
            {
                "model": {"from_python": model},
                "task": {"kind": task.kind, "from_python": text},
                "data": {"from_python": True},
                "method": {"from_python": list(self.method.lines)},
                "clients": clients,
                **sections,
            }
        )
