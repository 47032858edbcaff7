# SPDX-License-Identifier: Apache-2.0
"""The schema: one study as one TOML file, read by one strict schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from fedplan.data.own import OWN
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.federation.client import Client
from fedplan.models.hub import is_hub_id
from fedplan.naming import UnknownName, unknown
from fedplan.privacy.dpsgd.fit import require_pace
from fedplan.storage.names import a_study_name
from fedplan.studies.model_section import ModelSection
from fedplan.studies.names import code_of_metrics, code_of_names
from fedplan.studies.plain import flat, odd, read_toml, value_of
from fedplan.studies.sections import (
    AggregationSection,
    ClientsSection,
    DataSection,
    DefenceSection,
    EvaluateSection,
    MethodSection,
    PatienceSection,
    PrivacySection,
    Section,
    StopSection,
    TaskSection,
)
from fedplan.studies.train_section import TrainSection
from fedplan.studies.words import DeviceName, Positive, as_fault
from fedplan.tensors.devices import AUTO

PLACES: dict[str, dict[str, Any]] = {
    "model": {"path": ..., "vision": ..., "text": ..., "bridge": ..., "adapter": {"path": ...}},
    "task": {"tokenizer": ...},
    "data": {"path": ..., "test_path": ...},
}
"""Where files lie: what is in them is told apart by digests of its own."""
ASIDE: dict[str, Any] = {
    **dict.fromkeys(("evaluate", "patience", "stop"), True),
    **dict.fromkeys(("threads", "device", "deterministic"), True),
    "train": {"rounds", "cache"},
}
"""What ends need not agree on: tests, patience, when to stop, and each one's own machine."""


class ConfigError(FedplanError):
    """A study file that does not fit the schema: the message names the field."""

    code = "settings"


class Study(Section):
    """One study: a model, data, a method and a seed."""

    name: Annotated[str, AfterValidator(a_study_name)] = "study"
    """What the study is called: the folder of its runs and of its homes is named after it."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """What all random choices follow from: rows, cohorts, batches and start values."""
    continues: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")] = ""
    """The id of an earlier run: what each client kept there is what it begins with."""
    threads: Positive = 1
    """How many threads of the processor each process computes with."""
    device: DeviceName = AUTO
    """Where models compute: auto, cpu, cuda, cuda:1, mps or xpu; auto is the best one here."""
    deterministic: bool = Client.deterministic
    """Whether torch may only use operations that give the same bits each time."""
    model: ModelSection
    """The model that all start from."""
    task: TaskSection
    """What the model is asked to do."""
    data: DataSection = DataSection()
    """The table, its tests, and how clients divide it."""
    method: MethodSection
    """Which part of the model is trained, shared and kept."""
    train: TrainSection = TrainSection()
    """How each client trains in its turn."""
    clients: ClientsSection = ClientsSection()
    """Who takes part."""
    evaluate: EvaluateSection = EvaluateSection()
    """When and on what the models are tested."""
    patience: PatienceSection = PatienceSection()
    """How long a server of real sites waits."""
    stop: StopSection | None = None
    """When a run stops before its last round; without it, never."""
    privacy: PrivacySection | None = None
    """What a run promises to hide; without it, nothing."""
    defence: DefenceSection = DefenceSection()
    """What a server does against made-up weights and values."""
    aggregation: AggregationSection = AggregationSection()
    """How updates are summed."""

    @property
    def digest(self) -> str:
        """Tells two studies apart by all that changes a turn, wherever their files lie."""
        said = self.model_dump(mode="json", exclude=PLACES | ASIDE)
        told = json.dumps(said, sort_keys=True) + "".join(code_of_names(self))
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    @property
    def hides_clients(self) -> bool:
        """Whether it hides that a client took part."""
        return self.privacy is not None and self.privacy.unit == "client"

    @property
    def whole(self) -> str:
        """Tells two studies apart by every word in them: what a site approves."""
        told = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        told += "".join([*code_of_names(self), *code_of_metrics(self)])
        return hashlib.sha256(told.encode()).hexdigest()

    @model_validator(mode="after")
    def _private(self) -> Study:
        said = self.privacy
        if self.hides_clients and (self.clients.dropped or self.clients.late):
            raise ValueError("privacy draws its own cohorts: no clients.dropped or clients.late")
        if self.hides_clients and self.clients.quorum > 1:
            raise ValueError(
                f"clients.quorum is {self.clients.quorum}: where clients are hidden, a round that "
                "stops for want of answers would tell who was away; leave it out"
            )
        if self.hides_clients and self.data.by == "column" and not self.clients.names:
            raise ValueError(
                "to hide clients that a column names, say all that there may be in clients.names: "
                "a roster read off the rows would tell who is in it"
            )
        if said and said.unit == "example" and not (self.train.steps and said.size):
            raise ValueError("to hide examples, say train.steps and privacy.size, both public")
        if said and said.unit == "example" and said.size < self.train.batch:
            raise ValueError("privacy.size is below train.batch: a step takes no more than all")
        if said and said.unit == "example":
            with as_fault():
                require_pace(self.train.pace)
        return self

    @model_validator(mode="after")
    def _continues(self) -> Study:
        if self.privacy and self.continues:
            raise ValueError(
                "continues: what was kept in an earlier run tells of rows, and what this study "
                "promises would not cover it: leave it out"
            )
        return self

    @property
    def gathered(self) -> bool:
        """Whether the rows of all clients are here, and not each at its site."""
        return bool(self.data.path) or self.data.given

    @model_validator(mode="after")
    def _given(self) -> Study:
        parts = {"model": self.model.given, "task": self.task.given, "method": self.method.given}
        if odd := [name for name, said in parts.items() if bool(said) != self.data.given]:
            raise ValueError(f"{odd[0]}.given is for what came from Python: all of it did, or none")
        return self

    @model_validator(mode="after")
    def _scores(self) -> Study:
        said = self.evaluate
        if self.privacy and (said.sites or said.keep_best == "own"):
            raise ValueError(
                'evaluate.sites and evaluate.keep_best = "own" tell of clients\' rows, and nobody '
                "pays for that under privacy: leave them out, or test on a common test"
            )
        if said.sites and self.aggregation.made.active:
            raise ValueError(
                "evaluate.sites has each client tell its scores, and sums are masked: leave it "
                "out, or test on a common test"
            )
        if said.sites and not (self.data.own_test or self.data.given):
            raise ValueError("evaluate.sites needs rows that clients hold out: raise data.own_test")
        return self

    @model_validator(mode="after")
    def _stops(self) -> Study:
        if self.privacy and self.stop:
            with as_fault():
                self.stop.callback.require_public()
        return self

    @model_validator(mode="after")
    def _sites(self) -> Study:
        if not self.data.path and not self.clients.names:
            raise ValueError("say data.path, or clients.names of sites with tables of their own")
        if self.data.path and self.clients.names and self.data.by != "column":
            raise ValueError(
                "clients.names are of sites with tables of their own: no data.path, or data.by = "
                '"column"'
            )
        task = self.task
        number = task.kind != OWN and task_class(task.kind).answers == "number"
        if self.clients.names and task.label and not task.labels and not number:
            raise ValueError("no end sees all labels: say them in task.labels")
        return self

    @model_validator(mode="after")
    def _towers(self) -> Study:
        if self.model.vision and self.task.kind != "image-text":
            raise ValueError("a model of vision and text is for the task image-text")
        if self.task.kind == "image-text" and not self.model.plain:
            raise ValueError(
                "model.dtype, model.quantised and model.adapter are of a model of one tower"
            )
        return self


def read_study(file: Path, overrides: list[str] | None = None) -> Study:
    """A study from its file, with `section.field=value` laid over it.

    Relative paths in it start from the file's folder, whatever folder one works in.
    """
    return placed(study_of(laid_over(read_said(file), overrides)), file.parent)


def read_said(file: Path) -> dict[str, Any]:
    """The plain values of a study file, as they stand there."""
    try:
        return read_toml(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        there = [each.name for each in sorted(file.parent.glob("*.toml"))]
        hint = unknown("study file", file.name, there)
        raise ConfigError(f"{file} cannot be read: {hint}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def placed(study: Study, base: Path) -> Study:
    """The study with every relative path made absolute, from a folder; hub ids stay as they are."""
    return study.model_copy(
        update={name: _place(getattr(study, name), base, held) for name, held in PLACES.items()}
    )


def _place(said: Any, base: Path, held: Mapping[str, Any]) -> Any:
    """A path made absolute; of a section, those that it holds."""
    if isinstance(said, BaseModel):
        changes = {name: _place(getattr(said, name), base, held[name]) for name in held}
        return said.model_copy(update=changes)
    if not said:
        return said
    found = base.resolve() / said
    return said if is_hub_id(said) and not found.exists() else str(found)


def differences(one: Study, other: Study) -> list[str]:
    """The fields that two studies do not share, but for those that change no turn."""
    left, right = (flat(s.model_dump(mode="json", exclude=PLACES | ASIDE)) for s in (one, other))
    return sorted(k for k in left.keys() | right.keys() if left.get(k) != right.get(k))


def study_of(said: dict[str, Any]) -> Study:
    """A study from plain values; each fault is named by its field."""
    faults = [f"{section}: {fault}" for section, held in said.items() if (fault := odd(held))]
    code = ConfigError.code
    try:
        found = Study.model_validate(said) if not faults else None
    except ValidationError as error:
        found, faults = None, [f"{_field(e['loc'])}: {_fault(e)}" for e in error.errors()]
        code = _code(error)
    if found is None:
        raise ConfigError("the study does not fit:\n  " + "\n  ".join(faults)).coded(code)
    return found


def _code(error: ValidationError) -> str:
    """The code of a study that names what is not here; of any other fault, that of settings."""
    causes = [each.get("ctx", {}).get("error") for each in error.errors()]
    lacking = any(isinstance(getattr(each, "__cause__", None), UnknownName) for each in causes)
    return UnknownName.code if lacking else ConfigError.code


def _fault(error: Mapping[str, Any]) -> str:
    """What does not fit, with the value, unless the message is our own, or there is none."""
    if error["type"] == "extra_forbidden":
        return _unknown_field(error["loc"])
    if error["type"] in ("value_error", "missing"):
        return str(error["msg"]).removeprefix("Value error, ")
    return f"{error['msg']}, not {str(error['input'])[:60]!r}"


def _unknown_field(where: tuple[int | str, ...]) -> str:
    """The words for a field that its section does not have: the nearest, or all that there are."""
    held: type[BaseModel] | None = Study
    for name in where[:-1]:
        field = held.model_fields.get(str(name)) if held else None
        kinds = get_args(field.annotation) or (field.annotation,) if field else ()
        held = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
    return unknown("field", str(where[-1])[:60], held.model_fields if held else ())


def _field(where: tuple[int | str, ...]) -> str:
    names = (str(name) for name in where)
    return ".".join(n if n.isprintable() else repr(n) for n in names) or "study"


def laid_over(said: dict[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    """Plain values of a study with `section.field=value` laid over them."""
    for override in overrides or ():
        where, sign, text = override.partition("=")
        if not sign or not where:
            raise ConfigError(f"an override is section.field=value, not {override!r}")
        lay_over(said, where.strip(), value_of(text.strip()))
    return said


def lay_over(said: dict[str, Any], where: str, value: Any) -> None:
    """Have a field of a study, by its dotted name, be a value."""
    *sections, name = where.split(".")
    for section in sections:
        said = said.setdefault(section, {})
        if type(said) is not dict:
            raise ConfigError(f"{where}: {section} is a value, not a section")
    said[name] = value
