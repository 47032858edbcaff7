# SPDX-License-Identifier: Apache-2.0
"""The study file: its schema, reading and overriding fields, and digests of a study."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from fedplan.data.custom_task import CUSTOM_KIND
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.federation.client import Client
from fedplan.models.hub import is_hub_id
from fedplan.naming import UnknownName, unknown_name_message
from fedplan.privacy.dpsgd.fit import require_train_config
from fedplan.storage.names import validate_study_name
from fedplan.studies.field_types import DeviceName, Positive, as_value_error
from fedplan.studies.model_section import ModelSection
from fedplan.studies.referenced_code import metric_code_fingerprints, turn_code_fingerprints
from fedplan.studies.sections import (
    AggregationSection,
    ClientsSection,
    DataSection,
    DefenceSection,
    EarlyStoppingSection,
    EvaluateSection,
    MethodSection,
    PrivacySection,
    Section,
    TaskSection,
    TimeoutsSection,
)
from fedplan.studies.synonyms import unknown_field_message
from fedplan.studies.toml_values import (
    flatten_fields,
    parse_toml,
    parse_toml_value,
    unserializable_reason,
)
from fedplan.studies.train_section import TrainSection
from fedplan.tensors.devices import AUTO

PATH_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"path": ..., "vision": ..., "text": ..., "bridge": ..., "adapter": {"path": ...}},
    "task": {"tokenizer": ...},
    "data": {"path": ..., "test_path": ...},
}
"""Fields with paths; they are not part of a study's digest, since files have their own digests."""
NON_BINDING_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("evaluate", "timeouts", "early_stopping"), True),
    **dict.fromkeys(("threads", "device", "deterministic"), True),
    "train": {"rounds", "activation_cache_mb"},
}
"""Fields that do not affect training: evaluation, timeouts, early stopping and hardware."""


class ConfigError(FedplanError):
    """An invalid study, or a folder that does not fit it; the message names the field."""

    code = "settings"


class Study(Section):
    """One study: model, task, data, method, training, privacy and seed."""

    name: Annotated[str, AfterValidator(validate_study_name)] = "study"
    """Name of the study; folders of its runs and of its state at sites have this name."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random choices: partition, participants, batches and new weights."""
    continue_from: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")] = ""
    """Id of an earlier run: each client starts from the parameters that it kept there."""
    threads: Positive = 1
    """Number of CPU threads of torch in each process."""
    device: DeviceName = AUTO
    """Device: "auto", "cpu", "cuda", "cuda:1", "mps" or "xpu"; "auto" is the best available."""
    deterministic: bool = Client.deterministic
    """Allow only deterministic operations of torch."""
    model: ModelSection
    """The initial model."""
    task: TaskSection
    """The task of the model."""
    data: DataSection = DataSection()
    """The dataset, its tests, and its partition among clients."""
    method: MethodSection
    """The method: which part of the model is trained, shared and kept."""
    train: TrainSection = TrainSection()
    """Training arguments of the clients."""
    clients: ClientsSection = ClientsSection()
    """Participation of clients."""
    evaluate: EvaluateSection = EvaluateSection()
    """Evaluation of the models."""
    timeouts: TimeoutsSection = TimeoutsSection()
    """Timeouts of a server with real sites."""
    early_stopping: EarlyStoppingSection | None = None
    """Early stopping; default: off."""
    privacy: PrivacySection | None = None
    """Differential privacy; default: off."""
    defence: DefenceSection = DefenceSection()
    """Robust aggregation."""
    aggregation: AggregationSection = AggregationSection()
    """Plain or secure aggregation."""

    @property
    def digest(self) -> str:
        """The first 32 hex digits of SHA-256 over all fields that affect training.

        Includes the code of plug-ins, and excludes paths and NON_BINDING_FIELDS.
        """
        fields = self.model_dump(mode="json", exclude=PATH_FIELDS | NON_BINDING_FIELDS)
        text = json.dumps(fields, sort_keys=True) + "".join(turn_code_fingerprints(self))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def client_level_dp(self) -> bool:
        """Whether the study has client-level differential privacy."""
        return self.privacy is not None and self.privacy.unit == "client"

    @property
    def full_digest(self) -> str:
        """SHA-256 over every field and the code of all plug-ins; a site approves this digest."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        text += "".join([*turn_code_fingerprints(self), *metric_code_fingerprints(self)])
        return hashlib.sha256(text.encode()).hexdigest()

    @model_validator(mode="after")
    def _validate_privacy(self) -> Study:
        """Check that [privacy] fits [clients], [data] and [train]; raise ValueError if not."""
        privacy = self.privacy
        if self.client_level_dp and (self.clients.dropout_fraction or self.clients.late_fraction):
            raise ValueError(
                "client-level privacy draws its own participants: leave out "
                "clients.dropout_fraction and clients.late_fraction"
            )
        if self.client_level_dp and self.clients.min_updates > 1:
            raise ValueError(
                f"clients.min_updates is {self.clients.min_updates}: with client-level privacy, "
                "a round that fails for lack of answers would reveal who was absent; leave it out"
            )
        if self.client_level_dp and self.data.partition == "column" and not self.clients.names:
            raise ValueError(
                'with client-level privacy and data.partition = "column", list all possible '
                "clients in clients.names: names read from the data would reveal who is in it"
            )
        if (
            privacy
            and privacy.unit == "example"
            and not (self.train.steps and privacy.examples_per_site)
        ):
            raise ValueError(
                "example-level privacy needs train.steps and privacy.examples_per_site, as "
                "public numbers"
            )
        if (
            privacy
            and privacy.unit == "example"
            and privacy.examples_per_site < self.train.batch_size
        ):
            raise ValueError(
                "privacy.examples_per_site is below train.batch_size: a batch cannot be "
                "larger than the data"
            )
        if privacy and privacy.unit == "example":
            with as_value_error():
                require_train_config(self.train.train_config)
        return self

    @model_validator(mode="after")
    def _validate_continue_from(self) -> Study:
        if self.privacy and self.continue_from:
            raise ValueError(
                "continue_from: params kept in an earlier run reveal examples, which this study's "
                "privacy guarantee does not cover: leave it out"
            )
        return self

    @property
    def has_central_data(self) -> bool:
        """Whether the data of all clients is available here, instead of at sites."""
        return bool(self.data.path) or self.data.from_python

    @model_validator(mode="after")
    def _validate_in_memory(self) -> Study:
        """Check that either all or none of model, task, method and data came from Python."""
        parts = {
            "model": self.model.from_python,
            "task": self.task.from_python,
            "method": self.method.from_python,
        }
        if mismatched := [
            name for name, value in parts.items() if bool(value) != self.data.from_python
        ]:
            raise ValueError(
                f"{mismatched[0]}.from_python is set by fedplan.simulate only: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _validate_evaluation(self) -> Study:
        """Check that clients may reveal the metrics of [evaluate]; raise ValueError if not."""
        section = self.evaluate
        if self.privacy and (section.on_clients or section.keep_best == "personal"):
            raise ValueError(
                'evaluate.on_clients and evaluate.keep_best = "personal" reveal metrics of '
                "clients, which the privacy guarantee does not cover: leave them out, or "
                "use a common test set"
            )
        if section.on_clients and self.aggregation.config.active:
            raise ValueError(
                "evaluate.on_clients reveals each client's metrics, which secure aggregation "
                "hides: leave it out, or use a common test set"
            )
        if section.on_clients and not (self.data.holdout_fraction or self.data.from_python):
            raise ValueError(
                "evaluate.on_clients needs held-out examples of the clients: raise "
                "data.holdout_fraction"
            )
        return self

    @model_validator(mode="after")
    def _validate_early_stopping(self) -> Study:
        if self.privacy and self.early_stopping:
            with as_value_error():
                self.early_stopping.callback.require_public()
        return self

    @model_validator(mode="after")
    def _validate_sites(self) -> Study:
        """Check that clients have data, and that sites know all labels; raise ValueError if not."""
        if not self.data.path and not self.clients.names:
            raise ValueError("set data.path, or clients.names of sites with their own data")
        if self.data.path and self.clients.names and self.data.partition != "column":
            raise ValueError(
                "clients.names lists sites with their own data: leave out data.path, or set "
                'data.partition = "column"'
            )
        task = self.task
        number = task.kind != CUSTOM_KIND and task_class(task.kind).answer_kind == "number"
        if self.clients.names and task.label and not task.labels and not number:
            raise ValueError("no site sees all labels: list them in task.labels")
        return self

    @model_validator(mode="after")
    def _validate_dual_encoder(self) -> Study:
        """Check that a dual encoder has the task image-text, and no dtype or adapter."""
        if self.model.vision and self.task.kind != "image-text":
            raise ValueError('model.vision and model.text need task.kind = "image-text"')
        if self.task.kind == "image-text" and not self.model.is_plain:
            raise ValueError(
                "model.dtype, model.quantization and model.adapter cannot be used with a dual "
                "encoder"
            )
        return self


def read_study(file: Path, overrides: list[str] | None = None) -> Study:
    """Read a study file; `overrides` are texts such as "train.rounds=5".

    Relative paths in the file start from its folder. Raises ConfigError for an invalid study.
    """
    return resolve_paths(
        study_from_dict(apply_overrides(read_study_values(file), overrides)), file.parent
    )


def read_study_values(file: Path) -> dict[str, Any]:
    """Return the values of a study file as nested dicts; raise ConfigError if it cannot be read."""
    try:
        return parse_toml(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        names = [other.name for other in sorted(file.parent.glob("*.toml"))]
        suggestion = unknown_name_message("study file", file.name, names)
        raise ConfigError(f"{file} cannot be read: {suggestion}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def resolve_paths(study: Study, base: Path) -> Study:
    """Return the study with relative paths made absolute, from folder `base`; Hub ids are kept."""
    return study.model_copy(
        update={
            name: _resolve_path(getattr(study, name), base, fields)
            for name, fields in PATH_FIELDS.items()
        }
    )


def _resolve_path(value: Any, base: Path, path_fields: Mapping[str, Any]) -> Any:
    """Return a path made absolute, or a section with its path fields made absolute."""
    if isinstance(value, BaseModel):
        changes = {
            name: _resolve_path(getattr(value, name), base, path_fields[name])
            for name in path_fields
        }
        return value.model_copy(update=changes)
    if not value:
        return value
    path = base.resolve() / value
    return value if is_hub_id(value) and not path.exists() else str(path)


def changed_fields(first: Study, second: Study) -> list[str]:
    """Return the dotted names of fields that differ and that affect training."""
    left, right = (
        flatten_fields(study.model_dump(mode="json", exclude=PATH_FIELDS | NON_BINDING_FIELDS))
        for study in (first, second)
    )
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def study_from_dict(values: dict[str, Any]) -> Study:
    """Return the study of nested dicts; raise ConfigError with one line for each invalid field."""
    faults = [
        f"{section}: {fault}"
        for section, value in values.items()
        if (fault := unserializable_reason(value))
    ]
    code = ConfigError.code
    try:
        study = Study.model_validate(values) if not faults else None
    except ValidationError as error:
        study, faults = (
            None,
            [f"{_field_name(e['loc'])}: {_fault_message(e)}" for e in error.errors()],
        )
        code = _error_code(error)
    if study is None:
        raise ConfigError("invalid study file:\n  " + "\n  ".join(faults)).with_code(code)
    return study


def _error_code(error: ValidationError) -> str:
    """Return the code of an invalid study: unknown-name for a missing plug-in, else settings."""
    causes = [cause.get("ctx", {}).get("error") for cause in error.errors()]
    unknown_name = any(
        isinstance(getattr(cause, "__cause__", None), UnknownName) for cause in causes
    )
    return UnknownName.code if unknown_name else ConfigError.code


def _fault_message(error: Mapping[str, Any]) -> str:
    """Return the message of one pydantic error, with the invalid value if the text lacks it."""
    if error["type"] == "extra_forbidden":
        return unknown_field_message(Study, error["loc"])
    if error["type"] in ("value_error", "missing"):
        return str(error["msg"]).removeprefix("Value error, ")
    return f"{error['msg']}, not {str(error['input'])[:60]!r}"


def _field_name(location: tuple[int | str, ...]) -> str:
    """Return the dotted name of a field's location in a study."""
    names = (str(name) for name in location)
    return ".".join(n if n.isprintable() else repr(n) for n in names) or "study"


def apply_overrides(values: dict[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    """Set fields given as `section.field=value` in nested dicts, in place, and return these."""
    for override in overrides or ():
        field, separator, text = override.partition("=")
        if not separator or not field:
            raise ConfigError(f"an override has the form section.field=value, not {override!r}")
        set_field(values, field.strip(), parse_toml_value(text.strip()))
    return values


def set_field(values: dict[str, Any], field: str, value: Any) -> None:
    """Set a field by its dotted name in nested dicts, in place; create missing sections."""
    *sections, name = field.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if type(values) is not dict:
            raise ConfigError(f"{field}: {section} is a value, not a section")
    values[name] = value
