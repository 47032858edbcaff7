# SPDX-License-Identifier: Apache-2.0
"""Sections: the parts of a study file, each with its fields and their defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from fedplan.data.partition import Partition
from fedplan.data.tasks import Task
from fedplan.federation.callbacks import Callback, EarlyStopping
from fedplan.federation.defence import RULES, Defence
from fedplan.federation.evaluation import Kept, Scoring
from fedplan.federation.exams import Exam
from fedplan.federation.masking import SUMS, Masking
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


class Section(BaseModel):
    """A part of the file, with fields of its own."""

    model_config = STRICT


class TaskSection(Section):
    """What the model is asked to do, and in which columns the answer stands."""

    kind: TaskKind
    """The kind of task, such as text-classification or causal-lm, or one of your own by name."""
    input: str = "text"
    """The column that the model reads; of two columns, both names with a space between them."""
    label: str = ""
    """The column with the answer, for tasks that have one."""
    labels: list[str | int] = []
    """All labels that there are, where no end sees the rows of all or rows are hidden."""
    tokenizer: str = ""
    """The folder or hub:org/name of another tokenizer than the model's own."""
    max_length: Positive = Task.max_length
    """The most tokens of a row; what is longer is cut off, or makes further rows."""
    image_size: Count = Task.image_size
    """The side of the pictures that the model takes; of pictures it must be said."""
    template: str = Task.template
    """For image-text: the sentence that a label stands in."""
    packing: bool = Task.packing
    """Whether several conversations are put into one row of tokens."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """What the loss of a label's answers is multiplied by; a label without one has 1."""
    given: str = ""
    """The task, or the loss and the collator, that came from Python; not for a file."""


class DataSection(Section):
    """The table, which of its rows are trained on and tested on, and how clients divide it.

    There is a common test if `test_path`, `test_split` or `test` says of which rows; no row of it
    is trained on.
    """

    path: str = ""
    """The table, a file, folder or hub:org/name; without it each site brings its own."""
    split: str = ""
    """Which split of the table is trained on, where it has several."""
    test_path: str = ""
    """The table of the common test, if it is another one."""
    test_split: str = ""
    """Which split is the common test."""
    train: dict[str, str | int] = {}
    """Which rows are trained on, by values of columns."""
    test: dict[str, str | int] = {}
    """Which rows are the common test, by values of columns."""
    only: dict[str, list[Scalar]] = {}
    """The values of a column whose rows are used at all, to train and to test."""
    limit: Count = 0
    """The most rows to train on, drawn by the seed; 0 is all."""
    test_limit: Count = 0
    """The most rows of the common test, drawn by the seed; 0 is all."""
    by: Division = "iid"
    """How rows are divided: iid, dirichlet, pathological or column."""
    clients: Count = 10
    """How many clients there are; by column, 0 is one for each value."""
    column: str = Partition.column
    """The column whose values make clients, or labels to divide by."""
    alpha: Annotated[float, Field(ge=0)] = Partition.alpha
    """How equal shares are by dirichlet: the smaller, the more skewed."""
    classes: Count = Partition.classes
    """How many labels a client has at most, by pathological."""
    each: Positive = Partition.each
    """How many clients there are for each value of a column."""
    least: Annotated[int, Field(ge=0)] = Partition.least + 1  # to be tested on one more
    """The fewest rows a client may have."""
    own_test: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The share of each client's rows that it holds out to be tested on."""
    given: bool = False
    """Whether the rows came from Python; not for a file."""


class MethodSection(Section):
    """A published method with its settings, a plan of your own, or both: the plan is said after it.

    What is yours is named by where it stands, as `package.module:attribute`, or as an installed
    package offers it: the method, its probe, loop, wraps and server optimiser.
    """

    name: str = ""
    """A published method, see `fedplan methods`, or one of your own."""
    plan: str = ""
    """A plan in the plan language; beside a name it is said after the method's own."""
    settings: dict[str, Scalar] = {}
    """What the method of this name is made with."""
    probe: ProbeName = ""
    """What gives the scores that a plan with best(...) chooses blocks by."""
    together: bool = Method.together
    """Whether all clients choose the same blocks, by the sum of their scores."""
    phases: dict[str, Count] = {}
    """After how many rounds each phase of the plan is announced."""
    inside: MethodSection | None = None
    """Another method, whose local fit and server optimiser this one takes."""
    wire: str = ""
    """How values travel, such as pipe(delta(), bf16()); without it, as they are."""
    loop: LoopName = ""
    """What trains a client in the place of fedplan's own loop."""
    wraps: list[WrapName] = []
    """What is put around the local fit, the first outermost, all around the method's own."""
    server_optimiser: ServerOptimiserName = ""
    """What the server makes of the clients' mean; without it, the method's own."""
    server_settings: dict[str, Scalar] = {}
    """What the server optimiser is made with."""
    product: ProductText = ""
    """What becomes of LoRA's two sides: apart(), by_svd() or by_residual(scale=1.0)."""
    given: list[str] = []
    """The lines of a method that came from Python; not for a file."""

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


class ClientsSection(Section):
    """Who takes part: a share of all, of whom some drop out and some answer too late.

    A round waits for all until it is time, and closes with no fewer than `quorum`.
    """

    share: Annotated[float, Field(gt=0, le=1)] = Participation.share
    """The share of all clients that is asked in a round."""
    dropped: Share = 0.0
    """In a simulation: the share of those asked that do not answer."""
    late: Share = 0.0
    """In a simulation: the share of those asked that answer too late."""
    names: Annotated[list[str], AfterValidator(client_names)] = []
    """The names of the sites that bring their own tables, or of all that a column may name."""
    quorum: Positive = 1
    """The fewest answers that a round closes with."""
    traits: dict[str, dict[str, str]] = {}
    """What single clients say of themselves, for by(...) and trait(...) in a plan."""


class PatienceSection(Section):
    """How many seconds a server of real sites waits."""

    sites: Annotated[float, Field(gt=0)] = Patience.sites
    """Seconds for the sites that a round needs to come."""
    answers: Annotated[float, Field(gt=0)] = Patience.answers
    """Seconds for the answers of a round."""
    absent: Annotated[float, Field(ge=0)] = Patience.absent
    """Seconds for a site that went away."""
    look: Annotated[float, Field(gt=0)] = Patience.look
    """Seconds between two looks at what has come."""
    scores: Annotated[float, Field(gt=0)] = Patience.scores
    """Seconds for the scores of a round."""


class EvaluateSection(Section):
    """When and on what the models are tested.

    With `sites` each client scores the world and its own model on the rows that it holds out
    (`data.own_test`), and lets leave of that what it allows.
    """

    every: Positive = Scoring.every
    """How many rounds lie between two tests; the last round is always tested."""
    batch: Positive = 128
    """How many rows are tested at a time."""
    personal: bool = Exam.personal
    """Whether clients' own models are scored, and not the world's alone."""
    sites: bool = Scoring.sites
    """Whether each client scores the models on the rows that it holds out, wherever it is."""
    keep_best: Kept = Scoring.keep_best
    """By whose score the best round's world is kept: world or own; without it, none is."""
    attention: Count = 0
    """On how many rows of the common test the move of attention is measured; 0 is none."""
    metrics: list[MetricName] = []
    """Scores that are measured beside those of the task."""
    trackers: list[str] = []
    """Callbacks by name, for whoever runs the study: no site needs them."""

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """The trackers, imported, and made for a run."""
        return tuple(map(tracker_named, self.trackers))


class StopSection(Section):
    """When a run stops before its last round: once a metric has not become better for a while.

    Rounds that do not have the metric do not count.
    """

    metric: str
    """A number of each round, such as loss, world.accuracy or personal.mean."""
    patience: Positive = EarlyStopping.patience
    """After how many rounds without a better number the run stops."""
    least: Annotated[float, Field(ge=0)] = EarlyStopping.least
    """By how much a number must be better to count."""
    better: Literal["", "higher", "lower"] = ""
    """Which way is better, higher or lower; without it, as the metric's name says."""

    @property
    def callback(self) -> EarlyStopping:
        """The same as a callback."""
        higher = self.better == "higher" if self.better else None
        return EarlyStopping(self.metric, self.patience, self.least, higher)


class DefenceSection(Section):
    """What a server does against weights and values that a client may have made up.

    Every rule but the mean counts each client alike.
    """

    rule: Annotated[str, AfterValidator(one_of("rule", RULES))] = Defence.rule
    """What one value is made of all that came: mean, median, trimmed-mean, krum or multi-krum."""
    liars: Positive = Defence.liars
    """How many clients may lie, for every rule but the mean."""
    weight_cap: Count = Defence.weight_cap
    """The most rows that a client may weigh; 0 is no cap."""
    share_cap: Annotated[float, Field(ge=0, lt=1)] = Defence.share_cap
    """The largest share that a client may have of the weight of all who sent; 0 is no cap."""
    change_bound: Annotated[float, Field(ge=0)] = Defence.change_bound
    """How many times the round's usual length a change may be; 0 is no bound."""

    @property
    def made(self) -> Defence:
        """The same as a value."""
        return Defence(**self.model_dump())

    @model_validator(mode="after")
    def _sound(self) -> DefenceSection:
        with as_fault():
            _ = self.made
        return self


class AggregationSection(Section):
    """How updates are summed: as they come, or under masks, so that a server sees the sum alone."""

    kind: Annotated[str, AfterValidator(one_of("kind", SUMS))] = Masking.kind
    """Whether updates are summed as they come (plain) or under masks (masked)."""
    threshold: Count = Masking.threshold
    """How many clients it takes to open a masked sum; 0 is two thirds and one more."""
    floor: Annotated[int, Field(ge=2)] = Masking.floor
    """How many clients must send a part for its masked sum to be opened."""
    wide: bool = Masking.wide
    """Whether masked numbers have two words, for weighted changes that pass one."""
    colluders: Count = Masking.colluders
    """How many clients may tell the server all they have, and masks and noise still hold."""
    alike: bool = Masking.alike
    """Whether all clients of a masked sum count alike: then no sum tells how many rows one has."""

    @property
    def made(self) -> Masking:
        """The same as a value."""
        return Masking(**self.model_dump())

    @model_validator(mode="after")
    def _sound(self) -> AggregationSection:
        with as_fault():
            _ = self.made
        return self


class PrivacySection(Section):
    """What a run promises: whose presence is hidden, and the epsilon that it stops at.

    A client is drawn into each round with the chance `clients.share`, if that is below 1; an
    example into each step with the chance `train.batch` / `size`.
    """

    unit: Unit
    """Whose presence is hidden: a client or an example."""
    epsilon: Annotated[float, Field(gt=0)]
    """The epsilon that the run stops before it would pass."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta that epsilon is said at."""
    clip: Clip = 1.0
    """The longest change of a client, or gradient of an example; what is longer is shortened."""
    noise: Noise = 0.0
    """The noise as a multiple of the clip; 0 takes the least that keeps to epsilon."""
    size: Count = 0
    """For examples: about how many rows a site has, as a public number."""
    vote: Noise = Guarantee.vote
    """The noise of a vote on the layers, as a multiple of one ballot; 0 is no vote."""
    period: Positive = Guarantee.period
    """How many rounds a vote holds."""
    quantile: Annotated[float, Field(ge=0, lt=1)] = Guarantee.quantile
    """For clients: the quantile of their lengths that the clip follows; 0 keeps it fixed."""
    cap: Count = Guarantee.cap
    """For clients: the rows up to which they weigh by their rows; 0 has all weigh alike."""

    @model_validator(mode="after")
    def _of_clients(self) -> PrivacySection:
        if self.unit == "example" and (self.quantile or self.cap):
            raise ValueError("quantile and cap are of clients, and this hides examples")
        return self
