# SPDX-License-Identifier: Apache-2.0
"""The schema: one study as one TOML file, read by one strict schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedplan.data.partition import Partition
from fedplan.data.tasks import Task
from fedplan.errors import FedplanError
from fedplan.federation.participation import Participation
from fedplan.federation.patience import Patience
from fedplan.methods.method import Method
from fedplan.models.hub import is_hub_id
from fedplan.naming import UnknownName
from fedplan.privacy.accounting.budget import Unit
from fedplan.privacy.guarantee import Guarantee
from fedplan.storage.names import a_study_name, client_names
from fedplan.studies.names import code_of_names
from fedplan.studies.plain import flat, odd, read_toml, value_of
from fedplan.studies.words import (
    Clip,
    Count,
    Division,
    LoopName,
    Noise,
    OptimiserName,
    Positive,
    ProbeName,
    Scalar,
    ServerOptimiserName,
    Share,
    TaskKind,
    WrapName,
    as_fault,
)
from fedplan.training.fit import Pace
from fedplan.training.optimisers import DECAY, MOMENTUM, optimiser_named

PLACES = {
    "model": {"path", "vision", "text", "bridge"},
    "task": {"tokenizer"},
    "data": {"path", "test_path"},
}
"""Where files lie: what is in them is told apart by digests of its own."""
ASIDE: dict[str, Any] = {"evaluate": True, "patience": True, "threads": True, "train": {"rounds"}}
"""What changes no turn: when is tested, how long is waited, when to stop."""


class ConfigError(FedplanError):
    """A study file that does not fit the schema: the message names the field."""

    code = "settings"


class Section(BaseModel):
    """A part of the file: unknown fields are refused, values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model: a folder or hub:org/name with weights, or a type and settings to start from.

    A model of two towers may also be made of two: `vision` and `text`, joined by a `bridge`.
    `digest` pins it: every end refuses a model whose `fedplan digest` is another. `still` has batch
    norms use the statistics that they have: a run moves params, and nothing else. For a type that
    fedplan does not know, `like` names the row of one that it does, or `anatomy` says its own.
    """

    path: str = ""
    type: str = ""
    settings: dict[str, Any] = {}
    vision: str = ""
    text: str = ""
    bridge: str = ""
    digest: str = ""
    still: bool = False
    like: str = ""
    anatomy: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one(self) -> ModelSection:
        if bool(self.vision) != bool(self.text) or (self.bridge and not self.vision):
            raise ValueError("two towers are both vision and text, and a bridge is between them")
        if sum(map(bool, (self.path, self.type, self.vision))) != 1:
            raise ValueError("say one of path (pretrained), type (from scratch), vision and text")
        if (self.like or self.anatomy) and (self.vision or (self.like and self.anatomy)):
            raise ValueError("say like, or an anatomy (which may say like), of a model of one type")
        return self


class TaskSection(Section):
    """What the model is asked to do, and in which columns the answer stands.

    `labels` are all that there are, where no end sees the rows of all. Of pictures, `image_size`
    must be said: the side that the model takes.
    """

    kind: TaskKind
    input: str = "text"
    label: str = ""
    labels: list[str | int] = []
    tokenizer: str = ""
    max_length: Positive = Task.max_length
    image_size: Count = Task.image_size
    template: str = Task.template


class DataSection(Section):
    """The table, which of its rows are trained on and tested on, and how clients divide it.

    Without a path each site brings a table of its own. There is a common test if `test_path`,
    `test_split` or `test` says of which rows; no row of it is trained on.
    """

    path: str = ""
    split: str = ""
    test_path: str = ""
    test_split: str = ""
    train: dict[str, str | int] = {}
    test: dict[str, str | int] = {}
    only: dict[str, list[Scalar]] = {}
    limit: Count = 0
    test_limit: Count = 0
    by: Division = "iid"
    clients: Count = 10
    column: str = Partition.column
    alpha: Annotated[float, Field(ge=0)] = Partition.alpha
    classes: Count = Partition.classes
    each: Positive = Partition.each
    least: Annotated[int, Field(ge=0)] = Partition.least + 1  # to be tested on one more
    own_test: Annotated[float, Field(ge=0, lt=1)] = 0.2


class MethodSection(Section):
    """A published method with its settings, a plan of your own, or both: the plan is said after it.

    `inside` is another method, whose local fit and server optimiser this one takes. A plan of your
    own names its `probe`, if it chooses blocks; `phases` are announced after so many rounds.

    What is yours is named by where it stands, as `package.module:attribute`, or as an installed
    package offers it: the method, its probe, the `loop` that trains a client, `wraps` around it
    (the first outermost, and all of them around the method's own), and the `server_optimiser`, made
    with `server_settings`.
    """

    name: str = ""
    plan: str = ""
    settings: dict[str, Scalar] = {}
    probe: ProbeName = ""
    together: bool = Method.together
    phases: dict[str, Count] = {}
    inside: MethodSection | None = None
    wire: str = ""
    loop: LoopName = ""
    wraps: list[WrapName] = []
    server_optimiser: ServerOptimiserName = ""
    server_settings: dict[str, Scalar] = {}

    @model_validator(mode="after")
    def _one(self) -> MethodSection:
        if not self.name and not self.plan:
            raise ValueError("say name (a published method), plan (your own) or both")
        if self.name and (self.probe or self.together):
            raise ValueError("probe and together are for a plan without a name: see settings")
        if self.server_settings and not self.server_optimiser:
            raise ValueError("server_settings are those of a server_optimiser: name it")
        return self


class TrainSection(Section):
    """How each client trains in its turn."""

    rounds: Positive = 10
    optimiser: OptimiserName = Pace.optimiser.name
    rate: Annotated[float, Field(gt=0)] = Pace.rate
    decay: Annotated[float, Field(ge=0)] = DECAY
    momentum: Annotated[float, Field(ge=0, lt=1)] = MOMENTUM
    epochs: Positive = Pace.epochs
    steps: Count = Pace.steps
    batch: Positive = Pace.batch
    clip: Annotated[float, Field(ge=0)] = Pace.clip
    bf16: bool = Pace.bf16

    @property
    def pace(self) -> Pace:
        """The same as a value, the optimiser by its name."""
        settings = {w: v for w in ("decay", "momentum") if (v := getattr(self, w))}
        said = self.model_dump(exclude={"rounds", "optimiser", "decay", "momentum"})
        return Pace(optimiser_named(self.optimiser, settings), **said)

    @model_validator(mode="after")
    def _makes_steps(self) -> TrainSection:
        with as_fault():
            _ = self.pace
        return self


class ClientsSection(Section):
    """Who takes part: a share of all, of whom some drop out and some answer too late.

    `names` are those of the sites, where each brings its own table, or of all that a column of one
    table may name; `traits` are what single clients say of themselves. A round waits for all until
    it is time, and closes with no fewer than `quorum`.
    """

    share: Annotated[float, Field(gt=0, le=1)] = Participation.share
    dropped: Share = 0.0
    late: Share = 0.0
    names: Annotated[list[str], AfterValidator(client_names)] = []
    quorum: Positive = 1
    traits: dict[str, dict[str, str]] = {}


class PatienceSection(Section):
    """How many seconds a server of real sites waits.

    `sites` is for those that a round needs to come, `answers` for the answers of a round, `absent`
    for a site that went away; `look` is the time between two looks.
    """

    sites: Annotated[float, Field(gt=0)] = Patience.sites
    answers: Annotated[float, Field(gt=0)] = Patience.answers
    absent: Annotated[float, Field(ge=0)] = Patience.absent
    look: Annotated[float, Field(gt=0)] = Patience.look


class EvaluateSection(Section):
    """When and on what the models are tested.

    `attention` is on how many of the common test's rows each round's move of the attention maps is
    measured; 0 is not at all.
    """

    every: Positive = 1
    batch: Positive = 128
    personal: bool = True
    attention: Count = 0


class PrivacySection(Section):
    """What a run promises: whose presence is hidden, and the epsilon that it stops at.

    The unit is a client, drawn into each round with the chance `clients.share` if that is below 1;
    or an example, drawn into each step with the chance `train.batch` / `size`, where `size` is a
    public number for how many rows a site has. Without `noise` it is the least that keeps to
    epsilon over all rounds.

    `vote` is the noise of a vote on the layers, every `period` rounds. Of clients, `quantile` has
    the clip follow the lengths of their changes, and `cap` has them weigh by their rows, up to it.
    """

    unit: Unit
    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Clip = 1.0
    noise: Noise = 0.0
    size: Count = 0
    vote: Noise = Guarantee.vote
    period: Positive = Guarantee.period
    quantile: Annotated[float, Field(ge=0, lt=1)] = Guarantee.quantile
    cap: Count = Guarantee.cap

    @model_validator(mode="after")
    def _of_clients(self) -> PrivacySection:
        if self.unit == "example" and (self.quantile or self.cap):
            raise ValueError("quantile and cap are of clients, and this hides examples")
        return self


class Study(Section):
    """One study: a model, data, a method and a seed."""

    name: Annotated[str, AfterValidator(a_study_name)] = "study"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    threads: Positive = 1
    model: ModelSection
    task: TaskSection
    data: DataSection = DataSection()
    method: MethodSection
    train: TrainSection = TrainSection()
    clients: ClientsSection = ClientsSection()
    evaluate: EvaluateSection = EvaluateSection()
    patience: PatienceSection = PatienceSection()
    privacy: PrivacySection | None = None

    @property
    def digest(self) -> str:
        """Tells two studies apart by all that changes a turn, wherever their files lie."""
        said = self.model_dump(mode="json", exclude=PLACES | ASIDE)
        told = json.dumps(said, sort_keys=True) + "".join(code_of_names(self))
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    @model_validator(mode="after")
    def _private(self) -> Study:
        said = self.privacy
        if said and said.unit == "client" and (self.clients.dropped or self.clients.late):
            raise ValueError("privacy draws its own cohorts: no clients.dropped or clients.late")
        if said and said.unit == "client" and self.clients.quorum > 1:
            raise ValueError(
                f"clients.quorum is {self.clients.quorum}: where clients are hidden, a round that "
                "stops for want of answers would tell who was away; leave it out"
            )
        if said and said.unit == "client" and self.data.by == "column" and not self.clients.names:
            raise ValueError(
                "to hide clients that a column names, say all that there may be in clients.names: "
                "a roster read off the rows would tell who is in it"
            )
        if said and said.unit == "example" and not (self.train.steps and said.size):
            raise ValueError("to hide examples, say train.steps and privacy.size, both public")
        if said and said.unit == "example" and said.size < self.train.batch:
            raise ValueError("privacy.size is below train.batch: a step takes no more than all")
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
        if self.clients.names and self.task.label and not self.task.labels:
            raise ValueError("no end sees all labels: say them in task.labels")
        return self

    @model_validator(mode="after")
    def _towers(self) -> Study:
        if self.model.vision and self.task.kind != "image-text":
            raise ValueError("a model of vision and text is for the task image-text")
        return self


def read_study(file: Path, overrides: list[str] | None = None) -> Study:
    """A study from its file, with `section.field=value` laid over it.

    Relative paths in it start from the file's folder, whatever folder one works in.
    """
    try:
        said = read_toml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return placed(study_of(laid_over(said, overrides)), file.parent)


def placed(study: Study, base: Path) -> Study:
    """The study with every relative path made absolute, from a folder; hub ids stay as they are."""
    changes = {
        section: {name: _place(getattr(getattr(study, section), name), base) for name in names}
        for section, names in PLACES.items()
    }
    sections = {s: getattr(study, s).model_copy(update=said) for s, said in changes.items()}
    return study.model_copy(update=sections)


def _place(said: str, base: Path) -> str:
    found = base.resolve() / said
    return said if not said or (is_hub_id(said) and not found.exists()) else str(found)


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
        found, faults = None, [f"{_field(e['loc'])}: {e['msg']}{_said(e)}" for e in error.errors()]
        code = _code(error)
    if found is None:
        raise ConfigError("the study does not fit:\n  " + "\n  ".join(faults)).coded(code)
    return found


def _code(error: ValidationError) -> str:
    """The code of a study that names what is not here; of any other fault, that of settings."""
    causes = [each.get("ctx", {}).get("error") for each in error.errors()]
    lacking = any(isinstance(getattr(each, "__cause__", None), UnknownName) for each in causes)
    return UnknownName.code if lacking else ConfigError.code


def _said(error: Mapping[str, Any]) -> str:
    """The value that does not fit, unless the message is our own, or there is none."""
    if error["type"] in ("value_error", "missing", "extra_forbidden"):
        return ""
    return f", not {str(error['input'])[:60]!r}"


def _field(where: tuple[int | str, ...]) -> str:
    names = (str(name) for name in where)
    return ".".join(n if n.isprintable() else repr(n) for n in names) or "study"


def laid_over(said: dict[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    """Plain values of a study with `section.field=value` laid over them."""
    for override in overrides or ():
        _lay_over(said, override)
    return said


def _lay_over(said: dict[str, Any], override: str) -> None:
    where, sign, text = override.partition("=")
    if not sign or not where:
        raise ConfigError(f"an override is section.field=value, not {override!r}")
    *sections, name = where.strip().split(".")
    for section in sections:
        said = said.setdefault(section, {})
        if type(said) is not dict:
            raise ConfigError(f"{where}: {section} is a value, not a section")
    said[name] = value_of(text.strip())
