# SPDX-License-Identifier: Apache-2.0
"""Sections of a study file with their fields and defaults; [model] and [train] have own modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from pydantic._internal._model_construction import ModelMetaclass

from fedplan.data.partition import Partition
from fedplan.data.tasks import Task
from fedplan.federation.aggregation.defence import RULES, Defence
from fedplan.federation.client import EvalSet
from fedplan.federation.evaluation import BestBy, EvalConfig
from fedplan.federation.ledger.callbacks import EarlyStopping, make_tracker
from fedplan.federation.ledger.events import Callback
from fedplan.federation.participation import Participation, Timeouts
from fedplan.federation.secagg_config import AGGREGATION_KINDS, SecAggConfig
from fedplan.methods.method import Method
from fedplan.privacy.accounting.budget import Unit
from fedplan.privacy.guarantee import Guarantee
from fedplan.storage.files import validate_client_names
from fedplan.studies.field_types import (
    STRICT,
    ClientHookName,
    ClippingNorm,
    Count,
    Fraction,
    LoopName,
    MetricName,
    NoiseMultiplier,
    PartitionKind,
    Positive,
    ProbeName,
    ProductText,
    Scalar,
    ServerOptimizerName,
    TaskKind,
    as_value_error,
    one_of_validator,
)


class _SectionType(ModelMetaclass):
    """Type of sections, whose constructors raise ConfigError in place of a ValidationError."""

    if not TYPE_CHECKING:  # the constructor keeps its signature for editors

        def __call__(cls, **fields: object) -> Section:
            try:
                return super().__call__(**fields)
            except ValidationError as error:
                from fedplan.studies.schema import config_error

                raise config_error(cls, error) from error


class Section(BaseModel, metaclass=_SectionType):
    """Base class of all sections of a study; rejects unknown fields and values of another type.

    Sections are frozen pydantic models. The constructor raises ConfigError, with the field that an
    unknown word may mean; `model_validate` raises pydantic's ValidationError.
    """

    model_config = STRICT


class TaskSection(Section):
    """The task of the model (`kind`), and the dataset's columns of inputs and labels.

    `input`, `label`: column names. `labels`: all labels. `tokenizer`, `max_length`, `packing`: of
    texts. `image_size`: of images. `prompt_template`: of image-text models. `class_weights`: of the
    loss. `from_python` is set by fedplan.simulate.
    """

    kind: TaskKind
    """Task, such as "text-classification" or "causal-lm", or the name of your own."""
    input: str = "text"
    """Input column of the dataset; for two columns, both names separated by a space."""
    label: str = ""
    """Label column, for tasks with labels."""
    labels: list[str | int] = []
    """All labels; needed if clients are sites, or with [privacy]. Default: read from the data."""
    tokenizer: str = ""
    """Folder or hub:org/name of the tokenizer; default: the model's own."""
    max_length: Positive = Task.max_length
    """Maximum number of tokens of an example; longer texts are truncated, or split (causal-lm)."""
    image_size: Count = Task.image_size
    """Height and width of the model's input images, in pixels; required for images."""
    prompt_template: str = Task.template
    """Sentence around a label, for the task image-text."""
    packing: bool = Task.packing
    """Pack several conversations into one sequence."""
    class_weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Loss weight of each label, such as { rare = 5.0 }; default: 1."""
    from_python: str = ""
    """Set by fedplan.simulate: text of an in-memory task. Leave empty in files."""


class DataSection(Section):
    """The dataset (`path`), its training and test rows, and how rows are divided among clients.

    Set `test_path`, `test_split` or `test_filter` to have a common test set, which is never trained
    on. `split`, the filters and `max_examples` select rows. `partition` with `num_clients`,
    `partition_column`, `alpha`, `classes_per_client`, `clients_per_value` and `min_examples`
    divides the rows among clients; each client holds out `holdout_fraction`.
    """

    path: str = ""
    """Dataset: a file, folder or hub:org/name; empty if each site has its own."""
    split: str = ""
    """Split of the dataset to train on, if it has several."""
    test_path: str = ""
    """Dataset of the common test set, if it is another file."""
    test_split: str = ""
    """Split of the dataset that is the common test set."""
    train_filter: dict[str, str | int] = {}
    """Train only on rows with these column values, such as { year = 2024 }."""
    test_filter: dict[str, str | int] = {}
    """Use the rows with these column values as the common test set."""
    filter: dict[str, list[Scalar]] = {}
    """Use only rows with one of these values, to train and to test: { ward = ["a", "b"] }."""
    max_examples: Count = 0
    """Maximum number of training rows, drawn by the seed; 0: all."""
    max_test_examples: Count = 0
    """Maximum number of common test rows, drawn by the seed; 0: all."""
    partition: PartitionKind = "iid"
    """Partition among clients: "iid", "dirichlet", "pathological" or "column"."""
    num_clients: Count = 10
    """Number of clients; with partition = "column", the largest so many values, 0: all."""
    partition_column: str = Partition.column
    """Column whose values define the clients, or the labels to partition by."""
    alpha: Annotated[float, Field(ge=0)] = Partition.alpha
    """Concentration of labels with partition dirichlet; the smaller, the more clients differ."""
    classes_per_client: Count = Partition.classes_per_client
    """Maximum number of labels of a client, with partition pathological."""
    clients_per_value: Positive = Partition.clients_per_value
    """Clients per value of the column."""
    min_examples: Annotated[int, Field(ge=0)] = (
        Partition.min_examples + 1
    )  # to be tested on one more
    """Minimum number of examples of a client."""
    holdout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Fraction of each client's examples that is held out for its own test."""
    from_python: bool = False
    """Set by fedplan.simulate: the data came from Python. Leave out in files."""


class MethodSection(Section):
    """A published method by `name` with its `settings`, your own `plan`, or both.

    A plan beside a name is applied after the method's plan. `phases`, `probe` and `joint_choice`
    configure a plan; `base_method`, `loop`, `client_hooks`, `server_optimizer`, `lora_aggregation`
    and `compression` replace parts of the method. Your own code is named as
    `package.module:attribute`, or by an entry point of an installed package. `from_python` is set
    by fedplan.simulate.
    """

    name: str = ""
    """Method, such as "fedavg" (see `fedplan methods`), or the name of your own."""
    plan: str = ""
    """Plan, such as "chain(share(), keep(head))"; with a name, it is applied after the method's."""
    settings: dict[str, Scalar] = {}
    """Settings of the method."""
    probe: ProbeName = ""
    """Scoring function by which a plan with best(...) chooses layers; default: random."""
    joint_choice: bool = Method.joint_choice
    """All clients choose the same layers, by the sum of their scores."""
    phases: dict[str, Count] = {}
    """Number of rounds after which each phase of the plan starts, such as { frozen = 20 }."""
    base_method: MethodSection | None = None
    """Another method, whose local training and server optimizer are used."""
    compression: str = ""
    """Compression of updates, such as "pipe(delta(), bf16())"; default: none."""
    loop: LoopName = ""
    """Training loop of the clients; default: fedplan's own."""
    client_hooks: list[ClientHookName] = []
    """Client hooks around the local training, outermost first, outside the method's own."""
    server_optimizer: ServerOptimizerName = ""
    """Server optimizer, applied to the clients' mean; default: the method's."""
    server_optimizer_settings: dict[str, Scalar] = {}
    """Settings of the server optimizer."""
    lora_aggregation: ProductText = ""
    """Aggregation of LoRA matrices: average_separately(), by_svd() or by_residual(scale=1.0)."""
    from_python: list[str] = []
    """Set by fedplan.simulate: text of an in-memory method. Leave empty in files."""

    @model_validator(mode="after")
    def _validate_choice(self) -> MethodSection:
        """Raise ValueError if name and plan are both missing, or for fields without effect."""
        if self.from_python:
            return self
        if not self.name and not self.plan:
            raise ValueError("set name (a published method), plan (your own), or both")
        if self.name and (self.probe or self.joint_choice):
            raise ValueError("probe and joint_choice are for a plan without name: use settings")
        if self.server_optimizer_settings and not self.server_optimizer:
            raise ValueError("server_optimizer_settings need a server_optimizer: set it")
        return self


class ClientsConfig(Section):
    """Participation of clients in each round, and simulated dropouts.

    The server asks a `fraction` of all clients. A round of real sites ends when all asked clients
    have replied, or when there are `min_updates` valid updates and `timeouts.updates` is over or
    all other sites are away. With fewer valid updates the server waits `timeouts.sites` longer,
    then the run stops with an error. A simulation by `fedplan run` ignores `min_updates`.
    `dropout_fraction` and `late_fraction`: simulated probability that an asked client does not
    reply, or replies too late. `names` lists sites with their own data, or the clients of
    `data.partition = "column"`, and `traits` properties of clients for the plan.
    """

    fraction: Annotated[float, Field(gt=0, le=1)] = Participation.fraction
    """Fraction of all clients that is asked in each round."""
    dropout_fraction: Fraction = 0.0
    """Simulation: fraction of the asked clients that do not answer."""
    late_fraction: Fraction = 0.0
    """Simulation: fraction of the asked clients that answer too late."""
    names: Annotated[list[str], AfterValidator(validate_client_names)] = []
    """Names of the sites with their own data, or of all clients that a column may name."""
    min_updates: Positive = 1
    """Minimum number of answers of a round."""
    traits: dict[str, dict[str, str]] = {}
    """Traits of single clients, for by(...) and trait(...) in a plan: { a = { size = "big" } }."""


class TimeoutsSection(Section):
    """Timeouts of a server with real sites, in seconds, and the interval between two polls.

    The longest wait for: `sites` to connect, `updates` of a round, a site to `reconnect`, and
    `evaluations`.
    """

    sites: Annotated[float, Field(gt=0)] = Timeouts.sites
    """Seconds to wait until enough sites are connected for a round."""
    updates: Annotated[float, Field(gt=0)] = Timeouts.updates
    """Seconds to wait for the updates of a round."""
    reconnect: Annotated[float, Field(ge=0)] = Timeouts.reconnect
    """Seconds to wait for a site that disconnected during a round."""
    poll_interval: Annotated[float, Field(gt=0)] = Timeouts.poll_interval
    """Seconds between two checks for new messages."""
    evaluations: Annotated[float, Field(gt=0)] = Timeouts.evaluations
    """Seconds to wait for the evaluation metrics of a round."""


class EvaluateConfig(Section):
    """Evaluation: how often (`every`), on which data, and with which metrics.

    With `on_clients`, each client evaluates the global model, and with `personal` the personal
    model, on the client's held-out examples, and sends the metrics that the client allows.
    `keep_best` stores the global model of the best round. `trackers` names experiment trackers; the
    property `callbacks` returns new callbacks for these.
    """

    every: Positive = EvalConfig.every
    """Evaluate every so many rounds; the last round is always evaluated."""
    batch_size: Positive = 128
    """Batch size of the evaluation."""
    personal: bool = EvalSet.personal
    """Evaluate personal models, too, not only the global model."""
    on_clients: bool = EvalConfig.on_clients
    """Each client evaluates on its own held-out examples."""
    keep_best: BestBy = EvalConfig.keep_best
    """Keep the best round's global model, by the metric of the "global" or "personal" models;
    default: do not."""
    attention_examples: Count = 0
    """Number of common test examples on which attention shift is measured; 0: none."""
    metrics: list[MetricName] = []
    """Additional metrics besides those of the task."""
    trackers: list[str] = []
    """Experiment trackers, such as "wandb"; needed only where the run is started."""

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """New tracker callbacks; imports their modules."""
        return tuple(map(make_tracker, self.trackers))


class EarlyStoppingSection(Section):
    """Early stopping: end the run after `patience` rounds without improvement of a metric.

    `min_delta`: the least change that counts; `mode`: "max" or "min". Rounds without the metric do
    not count.
    """

    metric: str
    """Metric of a round, such as loss, global.accuracy or personal.accuracy."""
    patience: Positive = EarlyStopping.patience
    """Number of rounds without improvement after which the run stops."""
    min_delta: Annotated[float, Field(ge=0)] = EarlyStopping.min_delta
    """Minimum change that counts as an improvement."""
    mode: Literal["", "max", "min"] = ""
    """Direction of improvement: "max" or "min"; default: by the metric's name."""

    @property
    def callback(self) -> EarlyStopping:
        """The section as an EarlyStopping callback."""
        higher = self.mode == "max" if self.mode else None
        return EarlyStopping(self.metric, self.patience, self.min_delta, higher)


class DefenceConfig(Section):
    """Robust aggregation: limits the influence of manipulated updates and weights.

    `rule`: the aggregation rule; all rules except "mean" give each client the same weight, and
    tolerate `malicious_clients`. `max_weight`, `max_weight_fraction` and `max_norm_ratio` limit
    each client's weight and update norm. `config` returns the section as a Defence.
    """

    rule: Annotated[str, AfterValidator(one_of_validator("rule", RULES))] = Defence.rule
    """Aggregation rule: "mean", "median", "trimmed-mean", "krum" or "multi-krum"."""
    malicious_clients: Positive = Defence.malicious_clients
    """Number of malicious clients to tolerate, for every rule except "mean"."""
    max_weight: Count = Defence.max_weight
    """Maximum number of examples that a client counts for in the mean; 0: no limit."""
    max_weight_fraction: Annotated[float, Field(ge=0, lt=1)] = Defence.max_weight_fraction
    """Maximum fraction of the total weight that a client may have; 0: no limit."""
    max_norm_ratio: Annotated[float, Field(ge=0)] = Defence.max_norm_ratio
    """Maximum norm of an update, as a multiple of the round's typical norm; 0: no limit."""

    @property
    def config(self) -> Defence:
        """The section as a Defence; raises FedplanError for values that exclude each other."""
        return Defence(**self.model_dump())

    @model_validator(mode="after")
    def _validate(self) -> DefenceConfig:
        with as_value_error():
            _ = self.config
        return self


class AggregationConfig(Section):
    """Aggregation of updates: in the clear, or by secure aggregation, which shows only the sum.

    `kind`: "plain" or "secure". For secure aggregation: `threshold` clients unmask the sum, up to
    `colluders` may collude, and a param needs `min_contributors`; `equal_weights` and
    `wide_integers` set the encoding. `config` returns the section as a SecAggConfig.
    """

    kind: Annotated[str, AfterValidator(one_of_validator("kind", AGGREGATION_KINDS))] = (
        SecAggConfig.kind
    )
    """Protocol: "plain" (the server sees each update) or "secure" (secure aggregation)."""
    threshold: Count = SecAggConfig.threshold
    """Secure aggregation: clients needed to unmask the sum; 0: two thirds plus one."""
    min_contributors: Annotated[int, Field(ge=2)] = SecAggConfig.min_contributors
    """Secure aggregation: minimum number of senders of a parameter for its sum to be revealed."""
    wide_integers: bool = SecAggConfig.wide_integers
    """Secure aggregation: use two words per number, for large weighted updates."""
    colluders: Count = SecAggConfig.colluders
    """Clients that may collude with the server without breaking masks and noise."""
    equal_weights: bool = SecAggConfig.equal_weights
    """Secure aggregation: weigh all clients equally, which hides their numbers of examples."""

    @property
    def config(self) -> SecAggConfig:
        """The section as a secure-aggregation configuration; raises FedplanError if invalid."""
        return SecAggConfig(**self.model_dump())

    @model_validator(mode="after")
    def _validate(self) -> AggregationConfig:
        with as_value_error():
            _ = self.config
        return self


class PrivacyConfig(Section):
    """Differential privacy: the protected `unit`, and the (`epsilon`, `delta`) guarantee.

    `clipping_norm`, `noise_multiplier`: of client updates or example gradients. `clipping_quantile`
    and `max_weight` are for the unit "client"; `vote_noise_multiplier` and `vote_every` for a
    private vote on layers. Sampling rates: a client joins each round with probability
    `clients.fraction`, if that is below 1; an example joins each step with probability
    `train.batch_size` / `examples_per_site`.
    """

    unit: Unit
    """Protected unit: "client" or "example"."""
    epsilon: Annotated[float, Field(gt=0)]
    """Epsilon of the guarantee; the run stops before it would be exceeded."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Delta of the guarantee."""
    clipping_norm: ClippingNorm = 1.0
    """Clipping norm of a client's update, or of an example's gradient."""
    noise_multiplier: NoiseMultiplier = 0.0
    """Noise multiplier, relative to the clipping norm; 0: calibrated to epsilon."""
    examples_per_site: Count = 0
    """Example-level: approximate number of examples of a site, as a public number."""
    vote_noise_multiplier: NoiseMultiplier = Guarantee.vote_noise_multiplier
    """Noise multiplier of the private vote on layers; 0: no vote."""
    vote_every: Positive = Guarantee.vote_every
    """Number of rounds for which a vote holds."""
    clipping_quantile: Annotated[float, Field(ge=0, lt=1)] = Guarantee.clipping_quantile
    """Client-level: quantile of update norms for adaptive clipping; 0: fixed clipping norm."""
    max_weight: Count = Guarantee.max_weight
    """Client-level: weigh clients by examples, up to this number; 0: equal weights."""

    @model_validator(mode="after")
    def _validate_unit(self) -> PrivacyConfig:
        if self.unit == "example" and (self.clipping_quantile or self.max_weight):
            raise ValueError('clipping_quantile and max_weight need unit = "client"')
        return self
