# SPDX-License-Identifier: Apache-2.0
"""Build an experiment from a study: data, initial model, method, agreement, privacy guarantee."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedplan import seeds
from fedplan.data.causality import require_attention_mask
from fedplan.data.custom_task import CUSTOM_KIND
from fedplan.data.examples import Examples
from fedplan.federation.agreement import Agreement, require_private_method
from fedplan.federation.eval_sets import EvalSet
from fedplan.federation.evaluation import EvalConfig
from fedplan.federation.initial_model import InitialModel, digest_initial_model
from fedplan.federation.participation import Participation
from fedplan.federation.record import join_digests
from fedplan.language.client_classes import phase_names
from fedplan.language.parser import parse
from fedplan.language.plan import chain
from fedplan.language.resolution import check_plan
from fedplan.methods.lora_products import parse_product_rule
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.recorded_method import RecordedMethod, parse_recorded_method
from fedplan.methods.registry import make_server_optimizer, method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Params
from fedplan.models.quantized import pin_packed_layout
from fedplan.models.values import get_values
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.statement import Statement
from fedplan.studies.federated_data import FederatedData, load_federated_data
from fedplan.studies.in_memory import InMemoryInputs
from fedplan.studies.model_builder import add_method_adapter, build_meta_model, build_model
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.sections import DataSection, MethodSection
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.devices import eval_mode, fork_rng_state, model_device, to_device
from fedplan.training.client_hooks import get_client_hook
from fedplan.training.loops import get_training_loop
from fedplan.training.probes import get_probe

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Experiment:
    """Everything that server and clients each build from the same study.

    `data`: the clients' examples. `model`: the initial model. `agreement`: the terms that server
    and clients must share.
    """

    data: FederatedData
    model: nn.Module
    agreement: Agreement

    @cached_property
    def initial_values(self) -> dict[str, Tensor]:
        """The initial values of all params that may change, by key."""
        return get_values(self.model, self.agreement.trainable)

    @cached_property
    def initial_model(self) -> InitialModel:
        """Digests of the initial model, and checksums of the tensors that never change."""
        return digest_initial_model(self.model, self.agreement.params, self.initial_values)

    @property
    def param_digests(self) -> dict[str, str]:
        """The digest of each param's initial value."""
        return self.initial_model.short_digests

    @cached_property
    def model_digest(self) -> str:
        """The first 16 hex digits of SHA-256 over all params' digests."""
        return hashlib.sha256(
            join_digests(self.agreement.params, self.param_digests).encode()
        ).hexdigest()[:16]

    @cached_property
    def pinned_agreement(self) -> Agreement:
        """The agreement with the digest of the initial model."""
        return replace(self.agreement, start=self.model_digest)


def build_experiment(
    study: Study,
    site_table: tuple[str, Dataset] | None = None,
    in_memory: InMemoryInputs | None = None,
) -> Experiment:
    """Build the experiment of a study; the same study gives the same experiment on every machine.

    `site_table`: at a site, its name and its own dataset. `in_memory`: Python objects that replace
    the study's files. Sets the number of torch threads. Raises ConfigError if `model.digest` does
    not match, or for a study of in-memory inputs without `in_memory`.
    """
    if in_memory is not None:
        return _build_in_memory(study, in_memory)
    require_study_from_files(study)
    torch.set_num_threads(study.threads)
    data, method = load_federated_data(study, site_table), make_method(study)
    model = build_model(study, data.task, method)
    experiment = Experiment(data, model, make_agreement(study, describe(model)))
    check_plan(experiment.agreement.method.plan, experiment.agreement.params)
    pinned = study.model.digest
    if pinned and experiment.model_digest != pinned:
        raise ConfigError(
            f"model.digest is {pinned}, but this model's digest is {experiment.model_digest}"
        )
    return experiment


def _build_in_memory(study: Study, inputs: InMemoryInputs) -> Experiment:
    """Build an experiment from a copy of a model given as Python object, and its data."""
    inputs = inputs.configure_for(study)
    torch.set_num_threads(study.threads)
    # New layers are drawn from the study's seed, as for a model from a file, to allow resuming.
    with fork_rng_state(seed=seeds.seed(study.name, "model", study.seed)):
        model = pin_packed_layout(copy.deepcopy(inputs.model))
        if inputs.task.kind != CUSTOM_KIND:
            require_attention_mask(model, inputs.task.kind)
        model = add_method_adapter(model, inputs.task, inputs.method)
    agreement = make_agreement(study, describe(model), inputs.method)
    check_plan(inputs.method.plan, agreement.params)
    return Experiment(inputs.federated_data, model, agreement)


def require_study_from_files(study: Study) -> None:
    """Raise ConfigError for a study of in-memory inputs, whose model and data have no files."""
    if study.data.from_python:
        raise ConfigError(
            f"{study.name} got its model and data from Python: continue it with "
            "fedplan.simulate(..., folder=..., resume=True), with the same objects; its models are "
            "run.global_model() and run.client_model(name)"
        )


def build_experiment_without_data(study: Study, labels: list[str]) -> Experiment:
    """Build the experiment of a study with the given labels and no clients, as for an export."""
    task = study.task.model_copy(update={"labels": labels})
    return build_experiment(study.model_copy(update={"data": DataSection(), "task": task}))


def outline_agreement(study: Study) -> Agreement:
    """Return the agreement of a study from the model's names and shapes alone.

    Loads neither data nor weights.
    """
    require_study_from_files(study)
    task = load_federated_data(study.model_copy(update={"data": DataSection()}), None).task
    model = build_meta_model(study, task, make_method(study))
    agreement = make_agreement(study, describe(model))
    check_plan(agreement.method.plan, agreement.params)
    return agreement


def require_usable_batches(experiment: Experiment, batch: int) -> None:
    """Raise ConfigError if the model cannot compute the loss of some client's examples.

    Tries one batch of the first client, and two examples of every other client and test set.
    """
    data = experiment.data
    examples_by_name = {
        repr(name): examples for name, examples in data.train.items() if len(examples)
    }
    examples_by_name |= {
        f"{name!r} (test)": examples
        for name, examples in data.client_tests.items()
        if len(examples)
    }
    examples_by_name |= (
        {"the common test set": data.common_test}
        if data.common_test is not None and len(data.common_test)
        else {}
    )
    for index, (owner, examples) in enumerate(examples_by_name.items()):
        _require_usable_batch(experiment, owner, examples, 2 if index else batch)


def _require_usable_batch(
    experiment: Experiment, owner: str, examples: Examples, count: int
) -> None:
    """Compute the loss of the first `count` examples; raise ConfigError if that fails."""
    try:
        batch = to_device(
            examples.batch(torch.arange(min(count, len(examples)))), model_device(experiment.model)
        )
        with torch.no_grad(), eval_mode(experiment.model):
            loss = experiment.data.task.loss(experiment.model, batch)
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}: it must be one number")
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"the model cannot use the examples of {owner}: {type(error).__name__}: "
            f"{lines[0][:300]}; check [model] and [task]"
        ) from error


def make_eval_set(study: Study, data: FederatedData, client: str) -> EvalSet | None:
    """Return a client's held-out examples and metrics; None unless `evaluate.on_clients` is set."""
    section = study.evaluate
    if not section.on_clients:
        return None
    score = partial(data.task.score, batch_size=section.batch_size)
    return EvalSet(
        data.client_tests.get(client), score, section.personal, section.every, study.train.rounds
    )


def make_scoring(study: Study, data: FederatedData) -> EvalConfig:
    """Return when and how the models of a study are evaluated.

    Raises ConfigError if `evaluate.keep_best` needs a metric that nobody measures.
    """
    section, task = study.evaluate, data.task
    measured = {
        "global": data.common_test is not None or section.on_clients,
        "personal": section.personal and section.on_clients,
    }
    measured["personal"] |= section.personal and bool(data.client_tests)
    if section.keep_best and not measured[section.keep_best]:
        raise ConfigError(
            f"evaluate.keep_best is {section.keep_best!r}, but nobody measures that: set "
            "evaluate.on_clients, or give the study a test set"
        )
    return EvalConfig(
        section.every, section.on_clients, section.keep_best, task.primary, task.higher_is_better
    )


def make_participation(study: Study) -> Participation:
    """Return the rule that draws the clients of each round."""
    return Participation(study.clients.fraction)


def make_method(study: Study) -> Method:
    """Return the method of a study, or a method of its own plan.

    With a private vote on layers (`privacy.vote_noise_multiplier`), all clients choose the same
    layers.
    """
    method = _method_from_section(study.method)
    return (
        replace(method, joint_choice=True)
        if study.privacy and study.privacy.vote_noise_multiplier
        else method
    )


def _method_from_section(section: MethodSection) -> Method:
    """Return the method of a section with its plan, inner method, phases and plug-ins.

    Raises ConfigError for a phase that the plan does not have.
    """
    if section.from_python:
        return parse_recorded_method(section.from_python)
    if section.name:
        method = method_by_name(section.name, section.settings)
        method = (
            replace(method, plan=chain(method.plan, parse(section.plan)))
            if section.plan
            else method
        )
    else:
        probe = get_probe(section.probe or "random")
        method = Method(parse(section.plan), probe=probe, joint_choice=section.joint_choice)
    if section.base_method is not None:
        method = method.with_training_of(_method_from_section(section.base_method))
    if section.phases:
        if unknown := section.phases.keys() - set(phase_names(method.plan)):
            raise ConfigError(f"method.phases: the plan has no phase {min(unknown)!r}")
        method = replace(method, phase_rule=PlannedPhases(section.phases))
    method = _apply_plugins(method, section)
    method = (
        replace(method, lora_aggregation=parse_product_rule(section.lora_aggregation))
        if section.lora_aggregation
        else method
    )
    return (
        replace(method, compression=parse_codec(section.compression))
        if section.compression
        else method
    )


def _apply_plugins(method: Method, section: MethodSection) -> Method:
    """Return the method with the training loop, client hooks and server optimizer of a section."""
    hooks = (*map(get_client_hook, section.client_hooks), *method.client_hooks)
    loop = get_training_loop(section.loop) if section.loop else method.loop
    server = method.server_optimizer
    if section.server_optimizer:
        server = make_server_optimizer(section.server_optimizer, section.server_optimizer_settings)
    return replace(method, client_hooks=hooks, loop=loop, server_optimizer=server)


def make_agreement(study: Study, params: Params, method: Method | None = None) -> Agreement:
    """Return the agreement of a study for a model with these params.

    `method`: replaces the study's own method. Raises FedplanError if the method cannot keep the
    privacy guarantee.
    """
    guarantee, train_config = privacy_guarantee(study), study.train.train_config
    agreed_method = method or make_method(study)
    # A recorded method was checked when it ran.
    if guarantee is not None and not isinstance(agreed_method, RecordedMethod):
        require_private_method(guarantee, agreed_method)
    return Agreement(
        f"{study.name}/{study.seed}",
        params,
        agreed_method,
        train_config,
        guarantee,
        study.digest,
        defence=study.defence.config,
        secagg=study.aggregation.config,
    )


def privacy_statement(
    study: Study, folder: Path | None = None, *, run: str = ""
) -> Statement | None:
    """Return the privacy statement of a study, or None without differential privacy.

    `folder`: a run's folder or a site's account; then the statement has the epsilon spent there, of
    the run `run` if given.
    """
    guarantee, secagg = privacy_guarantee(study), study.aggregation.config
    if guarantee is None:
        return None
    clients, distributed_noise = len(study.clients.names) or study.data.num_clients, ""
    if secagg.active and guarantee.unit == "client":
        distributed_noise = secagg.describe_noise(
            clients, guarantee.noise_multiplier, guarantee.clipping_norm
        )
    return Statement.of(
        guarantee, study.train.rounds, folder, run=run, noise_shares=distributed_noise
    )


@cache
def _calibrate_noise(guarantee: Guarantee, rounds: int) -> Guarantee:
    """Return the guarantee with the least noise that keeps epsilon over the rounds; cached."""
    return guarantee.with_calibrated_noise(rounds)


def privacy_guarantee(study: Study) -> Guarantee | None:
    """Return the differential-privacy guarantee of a study, or None.

    If `privacy.noise_multiplier` is 0, the noise multiplier is calibrated to epsilon and the
    rounds.
    """
    section, train = study.privacy, study.train
    if section is None:
        return None
    if section.unit == "client":
        sampling_rate, steps, batch = (
            (study.clients.fraction if study.clients.fraction < 1 else None),
            0,
            0,
        )
    else:
        sampling_rate, steps, batch = (
            train.batch_size / section.examples_per_site,
            train.steps,
            train.batch_size,
        )
    noise = section.noise_multiplier or 1.0
    guarantee = Guarantee(
        unit=section.unit,
        epsilon=section.epsilon,
        delta=section.delta,
        clipping_norm=section.clipping_norm,
        noise_multiplier=noise,
        sampling_rate=sampling_rate,
        steps=steps,
        batch_size=batch,
        vote_noise_multiplier=section.vote_noise_multiplier,
        vote_every=section.vote_every,
        clipping_quantile=section.clipping_quantile,
        max_weight=section.max_weight,
    )
    return guarantee if section.noise_multiplier else _calibrate_noise(guarantee, train.rounds)
