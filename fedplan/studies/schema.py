# SPDX-License-Identifier: Apache-2.0
"""The study file: its schema, reading and overriding fields, and digests of a study."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from fedplan.data.custom_task import CUSTOM_KIND
from fedplan.data.metrics import METRIC_NAMES
from fedplan.data.tasks.kinds import has_score_counts, task_class
from fedplan.errors import FedplanError
from fedplan.federation.client import TrainSetup
from fedplan.language.parser import parse
from fedplan.methods.registry import METHOD_REGISTRY, method_by_name
from fedplan.models.catalog import is_hub_id
from fedplan.naming import unknown_name_message
from fedplan.privacy.dpsgd.fit import require_train_arguments
from fedplan.storage.files import validate_study_name
from fedplan.studies.dictionary import StatisticsSection, statistics_refusal
from fedplan.studies.federation_sections import (
    AggregationConfig,
    ClientsConfig,
    DefenceConfig,
    EarlyStoppingSection,
    EvaluateConfig,
    PrivacyConfig,
    PurposeSection,
    TimeoutsSection,
)
from fedplan.studies.field_types import (
    Positive,
    code_fingerprints,
    named_objects,
)
from fedplan.studies.section import (
    MAX_DEPTH,
    ConfigError,
    DeviceName,
    Section,
    apply_overrides,
    as_value_error,
    field_lines,
    parse_toml,
    validate_section,
)
from fedplan.studies.section_errors import line_prefix
from fedplan.studies.sections import (
    DataSection,
    MethodSection,
    ModelSection,
    TaskSection,
    TrainConfig,
)
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.devices import AUTO

PATH_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"path": ..., "vision": ..., "text": ..., "bridge": ..., "adapter": {"path": ...}},
    "task": {"tokenizer": ...},
    "data": {"path": ..., "test_path": ...},
}
"""Fields with paths; they are not part of a study's digest, since files have their own digests."""
NON_BINDING_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("purpose", "statistics", "evaluate", "timeouts", "early_stopping"), True),
    **dict.fromkeys(("threads", "device", "deterministic"), True),
    "train": {"rounds", "activation_cache_mb"},
    "clients": {"edges"},
}
"""Fields that do not affect training: texts, statistics, evaluation, timeouts, hardware, edges."""
LATER_FIELDS = {
    "data": ("group", "validation_fraction", "validation_split"),
    "task": ("label_separator",),
    "train": ("lr_by_part",),
}
"""Fields by section that digests leave out if empty, so that older studies keep their digest."""


def read_json_object(file: Path, remedy: str = "restore it from a backup") -> dict[str, Any]:
    """Return the JSON object in a file, {} without the file; raise ConfigError if unreadable."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if not isinstance(content, dict):
            raise TypeError("it contains no JSON object")
        return cast("dict[str, Any]", content)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; {remedy}") from error


class Study(Section):
    """The settings of one study, as in a study file; frozen, and validated when it is created.

    Get one by `read_study` or `study_from_dict`; the constructor raises ConfigError.
    """

    name: Annotated[str, AfterValidator(validate_study_name)] = "study"
    """Name of the study and of its folders; another name draws other new weights and batches."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random choices: partition, participants, batches and new weights."""
    continue_from: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")] = ""
    """Id of an earlier run: each client starts from the parameters that it kept there."""
    threads: Positive = 1
    """Number of CPU threads of torch in each process."""
    device: DeviceName = AUTO
    """Device: "auto", "cpu", "cuda", "cuda:1", "mps" or "xpu"; "auto" is the best available."""
    deterministic: bool = TrainSetup.deterministic
    """Allow only deterministic operations of torch."""
    purpose: PurposeSection | None = None
    """Why the study runs, for the people who approve it; a site's policy may require it."""
    model: ModelSection
    """The initial model."""
    task: TaskSection
    """The task of the model."""
    data: DataSection = DataSection()
    """The dataset, its tests, and its partition among clients."""
    method: MethodSection
    """The method: which part of the model is trained, shared and kept."""
    train: TrainConfig = TrainConfig()
    """Training arguments of the clients."""
    clients: ClientsConfig = ClientsConfig()
    """Participation of clients."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation of the models."""
    timeouts: TimeoutsSection = TimeoutsSection()
    """Timeouts of a server with real sites."""
    early_stopping: EarlyStoppingSection | None = None
    """Early stopping; default: off."""
    privacy: PrivacyConfig | None = None
    """Differential privacy; default: off."""
    defence: DefenceConfig = DefenceConfig()
    """Robust aggregation."""
    aggregation: AggregationConfig = AggregationConfig()
    """Plain or secure aggregation."""
    statistics: StatisticsSection | None = None
    """Data dictionary of the sites, by which their data are checked and counted."""

    @model_serializer(mode="wrap")
    def _without_new_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer fields that are not set, so that older digests stay the same."""
        fields: dict[str, Any] = write(self)
        for name in ("purpose", "statistics"):
            if not fields.get(name):
                fields.pop(name, None)
        if "clients" in fields and not fields["clients"].get("edges"):
            fields["clients"].pop("edges", None)
        return fields

    @property
    def digest(self) -> str:
        """32 hex digits of SHA-256 over the fields that affect training, and plug-ins' code."""
        binding = self.model_dump(mode="json", exclude=PATH_FIELDS | NON_BINDING_FIELDS)
        text = json.dumps(_without_later(binding), sort_keys=True)
        text += code_fingerprints(named_objects(self))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def client_level_dp(self) -> bool:
        """Whether the study has client-level differential privacy."""
        return self.privacy is not None and self.privacy.unit == "client"

    @property
    def hides_clients(self) -> bool:
        """Whether privacy or secure aggregation hides clients: no file has numbers of one."""
        return self.privacy is not None or self.aggregation.config.active

    @property
    def full_digest(self) -> str:
        """SHA-256 over every field and the code of all plug-ins; a site approves this digest."""
        text = json.dumps(_without_later(self.model_dump(mode="json")), sort_keys=True)
        metrics = map(METRIC_NAMES.find, self.evaluate.metrics)
        text += code_fingerprints([*named_objects(self), *metrics])
        return hashlib.sha256(text.encode()).hexdigest()

    @model_validator(mode="after")
    def _validate_privacy(self) -> Study:
        privacy, clients = self.privacy, self.clients
        if privacy and privacy.unit == "client":
            if clients.dropout_fraction or clients.late_fraction:
                raise ValueError(
                    "client-level privacy draws its own participants: leave out "
                    "clients.dropout_fraction and clients.late_fraction"
                )
            if clients.min_updates > 1:
                raise ValueError(
                    f"clients.min_updates is {clients.min_updates}: with client-level privacy, a "
                    "round that fails for lack of answers would reveal who was absent; leave it out"
                )
            if self.data.partition == "column" and not clients.names:
                raise ValueError(
                    'with client-level privacy and data.partition = "column", list all possible '
                    "clients in clients.names: names read from the data would reveal who is in it"
                )
        if privacy and privacy.unit == "example":
            if not (self.train.steps and privacy.examples_per_site):
                raise ValueError(
                    "example-level privacy needs train.steps and privacy.examples_per_site, as "
                    "public numbers"
                )
            if privacy.examples_per_site < self.train.batch_size:
                raise ValueError(
                    "privacy.examples_per_site is below train.batch_size: a batch cannot be "
                    "larger than the data"
                )
            with as_value_error():
                require_train_arguments(self.train.train_arguments)
        if privacy and self.continue_from:
            raise ValueError(
                "continue_from: params kept in an earlier run reveal examples, which this study's "
                "privacy guarantee does not cover: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _validate_edges(self) -> Study:
        refusals = {
            'aggregation.kind = "secure"': (
                self.aggregation.config.active,
                "sites agree masks with the server that sums, and unmask only for it",
            ),
            'privacy.unit = "client"': (
                self.client_level_dp,
                "the noise, the sampling and the clipping norm belong to one sum at the server",
            ),
            "defence": (
                self.defence.config.buffers_updates,
                "the rule compares all single updates: of the defences, only max_weight works "
                "with edges",
            ),
            "evaluate.on_clients": (
                self.evaluate.on_clients,
                "an edge passes on no metrics of single clients: use a common test set",
            ),
        }
        for field, (applies, reason) in refusals.items():
            if self.clients.edges and applies:
                raise ValueError(f"clients.edges cannot be used with {field}: {reason}")
        return self

    @property
    def has_central_data(self) -> bool:
        """Whether the data of all clients is available here, instead of at sites."""
        return bool(self.data.path) or self.data.from_python

    @model_validator(mode="after")
    def _validate_in_memory(self) -> Study:
        for name in ("model", "task", "method"):
            if bool(getattr(self, name).from_python) != self.data.from_python:
                raise ValueError(
                    f"{name}.from_python is set by fedplan.simulate only: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _validate_evaluation(self) -> Study:
        section = self.evaluate
        noisy = self.privacy is not None and self.privacy.unit == "example"
        if self.privacy and section.on_clients and not noisy:
            raise ValueError(
                "evaluate.on_clients: a client may have any number of examples, so client-level "
                "privacy cannot bound what it adds to a score; leave it out, or use a common test "
                "set"
            )
        if noisy and section.on_clients and not section.noise_multiplier:
            raise ValueError(
                "evaluate.on_clients: the privacy guarantee covers scores of clients only with "
                "noise; set evaluate.noise_multiplier, for example to 5, or use a common test set"
            )
        if section.noise_multiplier and not (noisy and section.on_clients):
            raise ValueError(
                "evaluate.noise_multiplier is for evaluate.on_clients with privacy.unit = "
                '"example": leave it out'
            )
        if self.privacy and section.keep_best == "personal":
            raise ValueError(
                'evaluate.keep_best = "personal" reveals metrics of clients, which the privacy '
                "guarantee does not cover: leave it out, or use a common test set"
            )
        if section.on_clients and self.hides_clients and not has_score_counts(self.task.kind):
            raise ValueError(
                "evaluate.on_clients: with privacy or secure aggregation the sites send counts of "
                f"right and wrong predictions, and a task of kind {self.task.kind!r} has no such "
                "counts: leave it out, or use a common test set"
            )
        if section.on_clients and not (self.data.holdout_fraction or self.data.from_python):
            raise ValueError(
                "evaluate.on_clients needs held-out examples of the clients: raise "
                "data.holdout_fraction"
            )
        if self.privacy and self.early_stopping:
            with as_value_error():
                self.early_stopping.callback.require_public()
        if self.privacy and self.data.validation_fraction:
            raise ValueError(
                "data.validation_fraction: a choice on clients' examples would reveal them, and "
                "the privacy guarantee does not cover it: leave it out, or name public examples "
                "by data.validation_split"
            )
        by_label = self.data.partition in ("dirichlet", "pathological")
        by_label = by_label or self.data.clients_per_value > 1
        if self.privacy and self.data.group and by_label:
            raise ValueError(
                "data.group: by the labels of a group, one example would decide where others are, "
                'which [privacy] excludes: use data.partition = "iid" or "column"'
            )
        return self

    @model_validator(mode="after")
    def _validate_sites(self) -> Study:
        if not self.data.path and not self.clients.names:
            raise ValueError("set data.path, or clients.names of sites with their own data")
        if self.data.path and self.clients.names and self.data.partition != "column":
            raise ValueError(
                "clients.names lists sites with their own data: leave out data.path, or set "
                'data.partition = "column"'
            )
        task, counts = self.task, self.statistics
        if counts and counts.require and (reason := statistics_refusal(self)):
            raise ValueError(f"statistics.require: {reason}")
        if task.class_weights == "balanced" and (self.privacy or not self.has_central_data):
            hidden = "[privacy] hides" if self.privacy else "are at the sites"
            raise ValueError(
                f'task.class_weights = "balanced" is computed from the labels of all clients, '
                f"which {hidden}: give the weights, as {{ rare = 5.0 }}"
            )
        number = task.kind != CUSTOM_KIND and task_class(task.kind).answer_kind == "number"
        if self.clients.names and task.label and not task.labels and not number:
            raise ValueError("no site sees all labels: list them in task.labels")
        if self.model.vision and task.kind != "image-text":
            raise ValueError('model.vision and model.text need task.kind = "image-text"')
        if task.kind == "image-text" and not self.model.is_plain:
            raise ValueError(
                "model.dtype, model.quantization and model.adapter cannot be used with a dual "
                "encoder"
            )
        return self


def _without_later(fields: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the fields of a study, by section, without those of LATER_FIELDS that are empty."""
    for section, names in LATER_FIELDS.items():
        for name in names:
            if not fields[section].get(name):
                fields[section].pop(name, None)
    return fields


def read_study(file: Path | str, overrides: list[str] | None = None) -> Study:
    """Read and validate a study file (TOML).

    `overrides`: texts such as "train.rounds=5", applied before validation. Relative paths become
    absolute, from the file's folder. Raises ConfigError for an unreadable or invalid study.
    """
    file = Path(file)
    values = apply_overrides(read_study_values(file), overrides)
    try:
        study = study_from_dict(values)
        _require_method_texts(study.method, {})
    except ConfigError:
        lines = field_lines(file.read_text(encoding="utf-8"))  # slow for long lists
        for override in overrides or ():  # its value is on no line
            path = tuple(override.partition("=")[0].strip().split("."))
            lines |= {each: 0 for each in lines if each[: len(path)] == path} | {path: 0}
        _require_method_texts(study_from_dict(values, lines).method, lines)
        raise
    return resolve_paths(study, file.parent)


def _require_method_texts(
    section: MethodSection,
    lines: Mapping[tuple[str, ...], int],
    prefix: tuple[str, ...] = ("method",),
) -> None:
    """Raise ConfigError, or an error of its code, for a name or text that make_method rejects.

    A stored study is not checked: it may name an object of the process that ran it.
    """
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("name", lambda: not section.name or METHOD_REGISTRY.find(section.name)),
        ("settings", lambda: not section.name or method_by_name(section.name, section.settings)),
        ("plan", lambda: not section.plan or parse(section.plan)),
        ("compression", lambda: not section.compression or parse_codec(section.compression)),
    )
    for field, check in checks:
        try:
            check()
        except FedplanError as error:
            path, message = (*prefix, field), str(error).replace("\n", "\n    ")
            fault = f"{line_prefix(lines, path)}{'.'.join(path)}: {message}"
            raise ConfigError(f"invalid study file:\n  {fault}").with_code(error.code) from error
    if section.base_method is not None:
        _require_method_texts(section.base_method, lines, (*prefix, "base_method"))


def read_study_values(file: Path) -> dict[str, Any]:
    """Return the values of a study file as nested dicts; raise ConfigError if unreadable."""
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

    def resolve(value: Any, path_fields: Mapping[str, Any]) -> Any:
        if isinstance(value, BaseModel):
            changes = {
                name: resolve(getattr(value, name), path_fields[name]) for name in path_fields
            }
            return value.model_copy(update=changes)
        path = base.resolve() / (value or "")
        return value if not value or (is_hub_id(value) and not path.exists()) else str(path)

    return resolve(study, PATH_FIELDS)


def changed_fields(first: Study, second: Study) -> list[str]:
    """Return the dotted names of fields that affect training and differ in two studies."""
    left, right = (
        flatten_fields(study.model_dump(mode="json", exclude=PATH_FIELDS | NON_BINDING_FIELDS))
        for study in (first, second)
    )
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def study_from_dict(values: dict[str, Any], lines: Mapping[tuple[str, ...], int] = {}) -> Study:
    """Return the study of nested dicts of plain values, sections by name.

    Raises ConfigError with one line for each invalid field, and the number of its line in the file
    if `lines` are the `field_lines` of that file. If a name, for example of a plug-in, is unknown,
    the error's `code` is `UnknownName.code`.
    """
    if faults := [
        f"{line_prefix(lines, path)}{'.'.join(path)}: {reason}"
        for path, reason in _invalid_values(values)
    ]:
        raise ConfigError("invalid study file:\n  " + "\n  ".join(faults))
    return validate_section(Study, values, lines)


def _invalid_values(
    values: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield path and `_unserializable_reason` of each field that has one."""
    for name, value in values.items():
        path = (*prefix, name)
        if isinstance(value, dict) and len(path) < MAX_DEPTH:
            yield from _invalid_values(cast("dict[str, Any]", value), path)
        elif reason := _unserializable_reason(value, len(path) - 1):
            yield path, reason


def _unserializable_reason(value: Any, depth: int = 0) -> str:
    """Return why a value cannot be written to TOML or JSON and read unchanged; "" if it can."""
    if depth > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} deep"
    if isinstance(value, dict | list):
        children = cast("Any", value.values() if isinstance(value, dict) else value)
        reasons = (_unserializable_reason(child, depth + 1) for child in children)
        return next(filter(None, reasons), "")
    if value is not None and type(value) not in (str, int, float, bool):
        return f"{str(value)[:60]} is a {type(value).__name__}: write it as a string or a number"
    if type(value) is float and not isfinite(value):
        return f"{value} is not a finite number"
    if type(value) is str and any("\ud800" <= character <= "\udfff" for character in value):
        return f"{value[:60]!r} cannot be written as UTF-8"
    return ""


def flatten_fields(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted names.

    >>> flatten_fields({"train": {"lr": 0.1}, "seed": 1})
    {'train.lr': 0.1, 'seed': 1}
    """
    fields = dict[str, Any]()
    for name, value in values.items():
        nested = type(value) is dict
        fields |= flatten_fields(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return fields
