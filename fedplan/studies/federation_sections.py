# SPDX-License-Identifier: Apache-2.0
"""Sections of a study file on the federation: clients, evaluation, privacy and aggregation."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from fedplan.federation.aggregation.defence import RULES, Defence
from fedplan.federation.client import EvalSet
from fedplan.federation.evaluation import BestBy, EvalConfig
from fedplan.federation.ledger.callbacks import EarlyStopping, make_tracker
from fedplan.federation.ledger.events import Callback
from fedplan.federation.participation import Participation, Timeouts
from fedplan.privacy.accounting.budget import Unit
from fedplan.privacy.guarantee import Guarantee
from fedplan.secagg.config import AGGREGATION_KINDS, SecAggConfig
from fedplan.storage.files import validate_client_names
from fedplan.studies.field_types import (
    ClippingNorm,
    Count,
    EvaluationNoise,
    Fraction,
    MetricName,
    NoiseMultiplier,
    Positive,
    one_of_validator,
)
from fedplan.studies.section import Section, as_value_error


def _validate_statement(text: str) -> str:
    if not text.strip():
        raise ValueError("it is blank: write a text")
    if not text.isprintable():
        raise ValueError("leave out line breaks and other characters that are not printable")
    return text


def _validate_date(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise ValueError(f"{text[:40]!r} is no date such as 2027-01-31") from error


Statement = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_validate_statement)]


class ClientsConfig(Section):
    """Participation of clients in each round, and simulated dropouts.

    A round of real sites ends when all asked clients have replied, or when there are `min_updates`
    valid updates and `timeouts.updates` is over or all other sites are away. With fewer valid
    updates the server waits `timeouts.sites` longer, then the run stops with an error. A simulation
    by `fedplan run` ignores `min_updates`.
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
    edges: dict[str, list[str]] = {}
    """Clients whose updates an edge sums, by the name of the edge: { east = ["a", "b"] }."""
    traits: dict[str, dict[str, str]] = {}
    """Traits of single clients, for by(...) and trait(...) in a plan: { a = { size = "big" } }."""

    @model_validator(mode="after")
    def _validate_edges(self) -> ClientsConfig:
        below = [name for names in self.edges.values() for name in names]
        validate_client_names([*self.edges, *below])
        if self.names and (unknown := set(below) - set(self.names)):
            raise ValueError(f"edges: {min(unknown)!r} is not in clients.names")
        if self.names and (known := set(self.edges) & set(self.names)):
            raise ValueError(f"edges: {min(known)!r} is a client: give the edge another name")
        return self


class TimeoutsSection(Section):
    """Timeouts of a server with real sites, in seconds, and the interval between two polls."""

    sites: Annotated[float, Field(gt=0)] = Timeouts.sites
    """Seconds to wait for enough sites of a round; time without the SuperLink does not count."""
    updates: Annotated[float, Field(gt=0)] = Timeouts.updates
    """Seconds to wait for the updates of a round."""
    reconnect: Annotated[float, Field(ge=0)] = Timeouts.reconnect
    """Seconds to wait for a site that disconnected during a round."""
    poll_interval: Annotated[float, Field(gt=0)] = Timeouts.poll_interval
    """Shortest pause between two checks for new messages, in seconds; longer after slow checks."""
    evaluations: Annotated[float, Field(gt=0)] = Timeouts.evaluations
    """Seconds to wait for the evaluation metrics of a round."""


class EvaluateConfig(Section):
    """Evaluation: how often, on which data, and with which metrics.

    With `on_clients`, each client evaluates the global model, and with `personal` the personal
    model, on the client's held-out examples, and sends the metrics that the client allows. With
    secure aggregation or example-level privacy, a client sends counts of right and wrong
    predictions and of probabilities instead, and the metrics are of the sum over all clients.
    """

    every: Positive = EvalConfig.every
    """Evaluate every so many rounds; the last round is always evaluated."""
    batch_size: Positive = 128
    """Batch size of the evaluation."""
    personal: bool = EvalSet.personal
    """Evaluate personal models, too, not only the global model."""
    on_clients: bool = EvalConfig.on_clients
    """Each client evaluates on its own held-out examples."""
    noise_multiplier: EvaluationNoise = 0.0
    """Example-level privacy: noise on the counts of `on_clients`, which epsilon then covers."""
    keep_best: BestBy = EvalConfig.keep_best
    """Keep the best round's global model, by the metric of the "global" or "personal" models on
    validation examples; default: do not."""
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

    Rounds without the metric do not count.
    """

    metric: str
    """Metric of a round: loss of the training, validation.global.accuracy or another on validation
    examples."""
    patience: Positive = EarlyStopping.patience
    """Number of rounds without improvement after which the run stops."""
    min_delta: Annotated[float, Field(ge=0)] = EarlyStopping.min_delta
    """Minimum change that counts as an improvement."""
    mode: Literal["", "max", "min"] = ""
    """Direction of improvement: "max" or "min"; default: as the metric says."""

    @property
    def callback(self) -> EarlyStopping:
        """The section as an EarlyStopping callback."""
        higher = self.mode == "max" if self.mode else None
        return EarlyStopping(self.metric, self.patience, self.min_delta, higher)


class DefenceConfig(Section):
    """Robust aggregation: limits the influence of manipulated updates and weights.

    All rules except "mean" give each client the same weight.
    """

    rule: Annotated[
        str,
        AfterValidator(one_of_validator("rule", RULES)),
        Field(json_schema_extra={"enum": [*RULES]}),
    ] = Defence.rule
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
    """Aggregation of updates: in the clear, or by secure aggregation, which shows only the sum."""

    kind: Annotated[
        str,
        AfterValidator(one_of_validator("kind", AGGREGATION_KINDS)),
        Field(json_schema_extra={"enum": [*AGGREGATION_KINDS]}),
    ] = SecAggConfig.kind
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
    """Differential privacy: the protected unit, and the (epsilon, delta) guarantee.

    A client joins each round with probability `clients.fraction`, if that is below 1; an example
    joins each step with probability `train.batch_size` / `examples_per_site`.
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
    ghost_clipping: bool = Guarantee.ghost_clipping
    """Example-level: run several examples at a time; trusts the server's values (see statement)."""

    @model_validator(mode="after")
    def _validate_unit(self) -> PrivacyConfig:
        if self.unit == "client" and self.ghost_clipping:
            raise ValueError('ghost_clipping needs unit = "example"')
        if self.unit == "example" and (self.clipping_quantile or self.max_weight):
            raise ValueError('clipping_quantile and max_weight need unit = "client"')
        return self


class PurposeSection(Section):
    """Why the study runs and who answers for it: sites read this first. It changes no results."""

    question: Statement
    """The question that the study answers, in plain words."""
    requester: Statement
    """Name of the person who asks the sites."""
    institution: Statement
    """Institution of the requester."""
    contact: Statement
    """Address for questions, as an e-mail address."""
    legal_basis: Statement
    """Legal basis of the processing, and the ethics approval."""
    recipients: Statement
    """Who receives the trained model."""
    ends: Annotated[str, AfterValidator(_validate_date)]
    """Last day on which sites answer, as 2027-01-31; approvals end with it."""
