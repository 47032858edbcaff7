# SPDX-License-Identifier: Apache-2.0
"""Sections: the parts of a study file, each with its fields and their defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from fedplan.data.partition import Partition
from fedplan.data.tasks import Task
from fedplan.federation.callbacks import Callback, EarlyStopping
from fedplan.federation.defence import RULES, Defence
from fedplan.federation.evaluation import Kept, Scoring
from fedplan.federation.exams import Exam
from fedplan.federation.participation import Participation
from fedplan.federation.patience import Patience
from fedplan.federation.trackers import tracker_named
from fedplan.methods.method import Method
from fedplan.privacy.accounting.budget import Unit
from fedplan.privacy.guarantee import Guarantee
from fedplan.storage.names import client_names
from fedplan.studies.words import (
    STRICT,
    Clip,
    Count,
    Division,
    LoopName,
    MetricName,
    Noise,
    OptimiserName,
    Positive,
    ProbeName,
    ProductText,
    Scalar,
    ServerOptimiserName,
    Share,
    TaskKind,
    WrapName,
    as_fault,
    one_of,
)
from fedplan.training.features import ROOM, Features
from fedplan.training.fit import Pace
from fedplan.training.optimisers import DECAY, MOMENTUM, ClientOptimiser, optimiser_named
from fedplan.training.schedules import Schedule, schedule_named

_PLAIN = tuple(f.name for f in fields(Pace) if f.name not in ("optimiser", "schedule"))
"""What a pace and its section say in the same words."""


class Section(BaseModel):
    """A part of the file, with fields of its own."""

    model_config = STRICT


class TaskSection(Section):
    """What the model is asked to do, and in which columns the answer stands.

    `labels` are all that there are, where no end sees the rows of all. Of pictures, `image_size`
    must be said: the side that the model takes. `given` is what came from Python: the task, or a
    loss and a collator of one's own. `packing` puts several conversations into one row of tokens.
    `weights` are what the loss of a label is multiplied by.
    """

    kind: TaskKind
    input: str = "text"
    label: str = ""
    labels: list[str | int] = []
    tokenizer: str = ""
    max_length: Positive = Task.max_length
    image_size: Count = Task.image_size
    template: str = Task.template
    packing: bool = Task.packing
    weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    given: str = ""


class DataSection(Section):
    """The table, which of its rows are trained on and tested on, and how clients divide it.

    Without a path each site brings a table of its own. There is a common test if `test_path`,
    `test_split` or `test` says of which rows; no row of it is trained on. `given` are rows that
    came from Python.
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
    given: bool = False


class MethodSection(Section):
    """A published method with its settings, a plan of your own, or both: the plan is said after it.

    `inside` is another method, whose local fit and server optimiser this one takes. A plan of your
    own names its `probe`, if it chooses blocks; `phases` are announced after so many rounds. A
    method that came from Python is told by its lines, `given`.

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
    product: ProductText = ""
    given: list[str] = []

    @model_validator(mode="after")
    def _one(self) -> MethodSection:
        if self.given:
            return self
        if not self.name and not self.plan:
            raise ValueError("say name (a published method), plan (your own) or both")
        if self.name and (self.probe or self.together):
            raise ValueError("probe and together are for a plan without a name: see settings")
        if self.server_settings and not self.server_optimiser:
            raise ValueError("server_settings are those of a server_optimiser: name it")
        return self


class TrainSection(Section):
    """How each client trains in its turn.

    `schedule` goes over all rounds, or over each turn anew; `warmup` is a share of that below 1,
    and else a number of rounds, or of a turn's steps. `optimiser_settings` and `schedule_settings`
    are what else these two take by their names. `cache` is how many megabytes of frozen outputs
    each machine keeps under `reuse`: it changes no bit.
    """

    rounds: Positive = 10
    optimiser: OptimiserName = Pace.optimiser.name
    optimiser_settings: dict[str, Scalar | list[Scalar]] = {}
    rate: Annotated[float, Field(gt=0)] = Pace.rate
    schedule: str = Pace.schedule.name
    schedule_settings: dict[str, str | float] = {}
    warmup: Annotated[float, Field(ge=0)] = Schedule.warmup
    over: Literal["run", "turn"] = "run"
    decay: Annotated[float, Field(ge=0)] = DECAY
    decay_all: bool = Pace.decay_all
    momentum: Annotated[float, Field(ge=0, lt=1)] = MOMENTUM
    epochs: Positive = Pace.epochs
    steps: Count = Pace.steps
    batch: Positive = Pace.batch
    accumulate: Positive = Pace.accumulate
    clip: Annotated[float, Field(ge=0)] = Pace.clip
    precision: str = Pace.precision
    checkpointing: bool = Pace.checkpointing
    compile: str = Pace.compile
    by_length: bool = Pace.by_length
    workers: Count = Pace.workers
    reuse: bool = Pace.reuse
    cache: Count = ROOM

    @property
    def pace(self) -> Pace:
        """The same as a value, the optimiser and the schedule by their names."""
        said = {name: getattr(self, name) for name in _PLAIN}
        return Pace(self._optimiser, schedule=self._schedule, **said)

    @property
    def features(self) -> Features | None:
        """Where a process keeps frozen outputs, if they are to be used again."""
        return Features(self.cache) if self.reuse else None

    @property
    def _optimiser(self) -> ClientOptimiser:
        settings = {w: v for w in ("decay", "momentum") if (v := getattr(self, w))}
        return optimiser_named(self.optimiser, {**self.optimiser_settings, **settings})

    @property
    def _schedule(self) -> Schedule:
        # One that stays the same does not follow from the rounds: these may be added later.
        over = self.rounds if self.over == "run" and self.schedule != Pace.schedule.name else 0
        settings, warm = self.schedule_settings, self.warmup
        return schedule_named(self.schedule, settings, warmup=warm, rounds=over)

    @model_validator(mode="after")
    def _makes_steps(self) -> TrainSection:
        with as_fault():
            self.pace.schedule.factor(self.rate, 1, 1)
        if not self.decay_all and not self.decay:
            raise ValueError("decay_all = false spares norms and biases: say the decay of the rest")
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
    for a site that went away, `scores` for the scores of a round; `look` is the time between two
    looks.
    """

    sites: Annotated[float, Field(gt=0)] = Patience.sites
    answers: Annotated[float, Field(gt=0)] = Patience.answers
    absent: Annotated[float, Field(ge=0)] = Patience.absent
    look: Annotated[float, Field(gt=0)] = Patience.look
    scores: Annotated[float, Field(gt=0)] = Patience.scores


class EvaluateSection(Section):
    """When and on what the models are tested.

    With `sites` each client scores the world and its own model on the rows that it holds out
    (`data.own_test`), wherever it is, and lets leave of that what it allows; `personal` says that
    clients' own models are scored. `keep_best` keeps the world of the round whose score of the
    `world`, or of the clients' `own` models, was best.

    `attention` is on how many of the common test's rows each round's move of the attention maps is
    measured; 0 is not at all. `metrics` are measured beside those of the task. `trackers` are
    callbacks, by name, of whoever runs the study: no site needs them.
    """

    every: Positive = Scoring.every
    batch: Positive = 128
    personal: bool = Exam.personal
    sites: bool = Scoring.sites
    keep_best: Kept = Scoring.keep_best
    attention: Count = 0
    metrics: list[MetricName] = []
    trackers: list[str] = []

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """The trackers, imported, and made for a run."""
        return tuple(map(tracker_named, self.trackers))


class StopSection(Section):
    """When a run stops before its last round: once a metric has not become better for a while.

    `metric` is a number of each round, such as `loss`, `world.accuracy` or `personal.mean`; rounds
    that do not have it do not count. Better is by more than `least`, and upward unless the name
    ends as a loss does; `better` says it otherwise.
    """

    metric: str
    patience: Positive = EarlyStopping.patience
    least: Annotated[float, Field(ge=0)] = EarlyStopping.least
    better: Literal["", "higher", "lower"] = ""

    @property
    def callback(self) -> EarlyStopping:
        """The same as a callback."""
        higher = self.better == "higher" if self.better else None
        return EarlyStopping(self.metric, self.patience, self.least, higher)


class DefenceSection(Section):
    """What a server does against weights and values that a client may have made up.

    `weight_cap` is the most rows that a client may weigh, `share_cap` the largest share of the
    weight of all who sent a param. A change longer than `change_bound` times what is usual in the
    round is shortened to that. `rule` makes one value of all that came, and all but the mean count
    each client alike; it is told how many `liars` there may be.
    """

    rule: Annotated[str, AfterValidator(one_of("rule", RULES))] = Defence.rule
    liars: Positive = Defence.liars
    weight_cap: Count = Defence.weight_cap
    share_cap: Annotated[float, Field(ge=0, lt=1)] = Defence.share_cap
    change_bound: Annotated[float, Field(ge=0)] = Defence.change_bound

    @property
    def made(self) -> Defence:
        """The same as a value."""
        return Defence(**self.model_dump())

    @model_validator(mode="after")
    def _sound(self) -> DefenceSection:
        with as_fault():
            _ = self.made
        return self


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
