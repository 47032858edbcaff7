# SPDX-License-Identifier: Apache-2.0
"""In-memory inputs: models, data and methods given as Python objects instead of files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from fedplan.data.custom_task import CustomTask
from fedplan.data.examples import Examples
from fedplan.data.metrics import metric_named
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import adapt_task
from fedplan.language.canonical import canonical_text
from fedplan.methods.method import Method
from fedplan.studies.federated_data import NO_TEST, FederatedData
from fedplan.studies.schema import Study, study_from_dict
from fedplan.studies.section import ConfigError, Section

KINDS = ("train", "validation", "test")
"""Kinds of a client's data."""
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "fedplan")
"""Packages whose classes are identified by name alone; other classes also by their code."""


@dataclass(frozen=True)
class InMemoryInputs:
    """A method, a model and each client's data as Python objects, instead of a study's files.

    `make_study` returns the study of these inputs; `build_experiment` then uses a copy of the
    model. The constructor raises ConfigError if `clients` is empty or no mapping.
    `clients`: by client name the training data, in a form that `task` can prepare, or a mapping of
    "train", "validation" and "test" data; test data evaluates the client's personal model, and by
    validation data the best round is chosen. The caller must keep the data disjoint.
    `task`: prepares the data, and computes loss and metrics.
    `test`, `validation`: data of the common test and validation sets, or None.
    """

    method: Method
    model: nn.Module
    clients: Mapping[str, Any]
    task: Task
    test: Any = None
    validation: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.clients, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"clients is a {type(self.clients).__name__}: give a dict from client names to data"
            )
        for kind, common in (("test", self.test), ("validation", self.validation)):
            if isinstance(common, Mapping):
                raise ConfigError(
                    f"{kind} is a mapping: give one dataset, and a client's own as clients={{name: "
                    f'{{"train": ..., "{kind}": ...}}}}'
                )
        if not self.clients:
            raise ConfigError("clients is empty: give the data of at least one client, by its name")
        for name, data in self.clients.items():
            if isinstance(data, Mapping) and not {"train"} <= data.keys() <= set(KINDS):
                keys = ", ".join(map(str, cast("Mapping[str, Any]", data)))
                raise ConfigError(
                    f"clients[{name!r}] is a mapping with {keys}: give a dataset, or a mapping "
                    "of 'train', 'validation' and 'test' datasets"
                )

    def configure_for(self, study: Study) -> InMemoryInputs:
        """Return a copy with the task changed as the study asks; a CustomTask stays as given.

        The metrics of `evaluate.metrics` are added; under example-level DP each row makes exactly
        one example. Raises ConfigError if `evaluate.metrics` is set with a CustomTask.
        """
        privacy, metrics = study.privacy, study.evaluate.metrics
        if not isinstance(self.task, CustomTask):
            one_each = privacy is not None and privacy.unit == "example"
            extra = map(metric_named, metrics)
            task = adapt_task(self.task, one_example_per_row=one_each, extra_metrics=extra)
            return replace(self, task=task)
        if metrics:
            raise ConfigError(
                f"evaluate.metrics is {metrics}: compute them in your own `metrics` function"
            )
        return self

    @property
    def federated_data(self) -> FederatedData:
        """Training and test data; the task prepares all data anew at each access, which is slow."""
        by_kind: dict[str, dict[str, Examples]] = {kind: {} for kind in KINDS}
        for name, data in self.clients.items():
            parts = cast("Any", data) if isinstance(data, Mapping) else {"train": data}
            for kind, part in cast("Mapping[str, Any]", parts).items():
                by_kind[kind][str(name)] = self.task.prepare(part)
        test, validation = (
            self.task.prepare(data) if data is not None else None
            for data in (self.test, self.validation)
        )
        return FederatedData(
            by_kind["train"],
            by_kind["test"],
            test,
            self.task,
            () if test is not None else (NO_TEST,),
            client_validations=by_kind["validation"],
            common_validation=validation,
        )

    def make_study(self, *, sections: Mapping[str, Section | None], **fields: Any) -> Study:
        """Return the study of these inputs, with further `sections`, and `fields` such as `seed`.

        It has digests of the code of model class, task and method, but not of model values or data.
        Raises ConfigError if a section is invalid.
        """
        values = dict[str, dict[str, Any]](clients={})
        for name, section in sections.items():
            if section is not None and not isinstance(section, Section):  # pyright: ignore[reportUnnecessaryIsInstance]
                config = f"fp.{name.capitalize()}Config(...)"
                argument = "participation" if name == "clients" else name
                raise ConfigError(f"{argument} is {section!r}: give {config}")
            if section is not None:
                values[name] = section.model_dump()
        if values["clients"].get("names"):
            raise ConfigError("participation has names: the clients are those with data")
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
        return study_from_dict(
            {
                "model": {"from_python": model},
                "task": {"kind": task.kind, "from_python": text},
                "data": {"from_python": True},
                "method": {"from_python": list(self.method.lines)},
                **fields,
                **values,
                "clients": {**values["clients"], "names": list(map(str, self.clients))},
            }
        )
