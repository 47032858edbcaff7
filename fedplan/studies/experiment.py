# SPDX-License-Identifier: Apache-2.0
"""Build an experiment from a study: data, initial model, method, agreement, privacy guarantee."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from fedplan import seeds
from fedplan.data.custom_task import CUSTOM_KIND
from fedplan.data.examples import Examples, token_lengths
from fedplan.data.score_counts import BINS, MAX_CLASSES, NOISY_BINS, ScoreCounts
from fedplan.data.tasks.language import require_attention_mask
from fedplan.federation.agreement import Agreement, require_private_method
from fedplan.federation.client import EvalSet
from fedplan.federation.evaluation import EvalConfig
from fedplan.federation.ledger.callbacks import VALIDATION_REMEDY
from fedplan.federation.ledger.digests import InitialModel, digest_initial_model
from fedplan.federation.ledger.records import join_digests
from fedplan.federation.participation import Participation
from fedplan.federation.score_sums import ScoreVector
from fedplan.language.parser import parse
from fedplan.language.resolution import check_plan, phase_names
from fedplan.methods.lora import parse_product_rule
from fedplan.methods.method import Method, RecordedMethod, parse_recorded_method
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.registry import make_server_optimizer, method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Params
from fedplan.models.values import get_values, pin_packed_layout
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.statement import Expense, Statement
from fedplan.studies.federated_data import FederatedData, load_federated_data
from fedplan.studies.in_memory import InMemoryInputs
from fedplan.studies.model_builder import (
    add_method_adapter,
    build_meta_model,
    build_model,
    initial_expenses,
    new_head_note,
)
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.sections import DataSection, MethodSection
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.devices import (
    eval_mode,
    fork_rng_state,
    model_device,
    require_unsharded,
    to_device,
)
from fedplan.training.client_hooks import get_client_hook
from fedplan.training.loops import get_training_loop
from fedplan.training.probes import get_probe

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Experiment:
    """Data, initial model and agreement of one study; server and clients each build the same.

    Values and digests are computed from `model` on first access: do that before it is trained.
    """

    data: FederatedData
    model: nn.Module
    agreement: Agreement

    @cached_property
    def initial_values(self) -> dict[str, Tensor]:
        """CPU copies of the initial values of all params that may change, by param key."""
        return get_values(self.model, self.agreement.trainable)

    @cached_property
    def initial_model(self) -> InitialModel:
        """Digests of the initial model, and checksums of the tensors that never change."""
        return digest_initial_model(self.model, self.agreement.params, self.initial_values)

    @property
    def param_digests(self) -> Mapping[str, str]:
        """The digest of each param's initial value, by param key."""
        return self.initial_model.short_digests

    @cached_property
    def model_digest(self) -> str:
        """The first 16 hex digits of SHA-256 over all params' digests."""
        digests = join_digests(self.agreement.params, self.param_digests)
        return hashlib.sha256(digests.encode()).hexdigest()[:16]

    def require_start(self, start: str) -> None:
        """Raise ConfigError if the digest of the initial model is not `start`, that of a run."""
        if self.model_digest != start:
            raise ConfigError(
                f"the run started from the model {start}, but the study's model is now "
                f"{self.model_digest}: restore the initial weights"
            )

    @cached_property
    def pinned_agreement(self) -> Agreement:
        """The agreement with the digest of the initial model."""
        return replace(self.agreement, start=self.model_digest)


def build_experiment(
    study: Study,
    site_table: tuple[str, Dataset] | None = None,
    in_memory: InMemoryInputs | None = None,
) -> Experiment:
    """Build data, initial model and agreement of a study; the same on every machine.

    `site_table`: at a client's site, the client's name and own dataset, in place of `data.path`.
    `in_memory`: Python objects that replace the study's files; the model among these is copied.
    Sets the number of torch threads to `study.threads`. Raises ConfigError if the model's digest
    differs from `model.digest`, or for a study of in-memory inputs without `in_memory`, and
    FedplanError if data, model or plan cannot be used.
    """
    if in_memory is not None:
        inputs = in_memory.configure_for(study)
        torch.set_num_threads(study.threads)
        # New layers are drawn from the study's seed, as for a model from a file, to allow resuming.
        with fork_rng_state(seed=seeds.seed(study.name, "model", study.seed)):
            require_unsharded(inputs.model)
            model = pin_packed_layout(copy.deepcopy(inputs.model))
            if inputs.task.kind != CUSTOM_KIND:
                require_attention_mask(model, inputs.task.kind)
            model = add_method_adapter(model, inputs.task, inputs.method)
        agreement = make_agreement(study, describe(model), inputs.method)
        check_plan(inputs.method.plan, agreement.params)
        _require_positions(model, inputs.federated_data)
        return Experiment(inputs.federated_data, model, agreement)
    require_study_from_files(study)
    torch.set_num_threads(study.threads)
    data, method = load_federated_data(study, site_table), make_method(study)
    model = build_model(study, data.task, method)
    require_unsharded(model)
    if note := new_head_note(study.model, data.task):
        data = replace(data, notes=(*data.notes, note))
    experiment = Experiment(data, model, make_agreement(study, describe(model)))
    check_plan(experiment.agreement.method.plan, experiment.agreement.params)
    _require_positions(model, data)
    pinned = study.model.digest
    if pinned and experiment.model_digest != pinned:
        raise ConfigError(
            f"model.digest is {pinned}, but this model's digest is {experiment.model_digest}"
        )
    return experiment


_POSITION_TABLE = re.compile(r"(.*\.)?(position_embeddings?|embed_positions|wpe)")
"""Names of tables of absolute positions."""


def _require_positions(model: nn.Module, data: FederatedData) -> None:
    """Raise ConfigError if a text of a built-in task has more tokens than the model positions."""
    tables = list[int]()
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, nn.Embedding) and _POSITION_TABLE.fullmatch(name):
            reserved = int(getattr(module, "offset", (module.padding_idx or -1) + 1))
            tables.append(module.num_embeddings - reserved)
    task = data.task
    if not tables or task.kind == CUSTOM_KIND:
        return
    sets = [*data.train.values(), *data.client_tests.values(), *data.client_validations.values()]
    sets += [rows for rows in (data.common_test, data.common_validation) if rows is not None]
    texts = [rows for rows in sets if len(rows) and "attention_mask" in rows.batch(torch.arange(1))]
    longest = max((int(token_lengths(rows).max()) for rows in texts), default=0)
    if longest > min(tables):
        raise ConfigError(
            f"task.max_length is {task.max_length}, and an example has {longest} tokens, but "
            f"the model has positions for {min(tables)}: set task.max_length = {min(tables)}, at "
            "which longer texts are cut, or use another model"
        )


def require_study_from_files(study: Study) -> None:
    """Raise ConfigError for a study that was made from Python objects (`data.from_python`)."""
    if study.data.from_python:
        raise ConfigError(
            f"{study.name} got its model and data from Python: continue it with "
            "fedplan.simulate(..., options=RunOptions(folder=..., resume=True)), with the same "
            "objects: the run that it returns has the models"
        )


def outline_agreement(study: Study) -> Agreement:
    """Return the agreement of a study from the names and shapes of the model's params alone.

    Loads no data. Raises FedplanError if the plan does not match the model.
    """
    require_study_from_files(study)
    task = load_federated_data(study.model_copy(update={"data": DataSection()}), None).task
    model = build_meta_model(study, task, make_method(study))
    agreement = make_agreement(study, describe(model))
    check_plan(agreement.method.plan, agreement.params)
    return agreement


def require_usable_batches(experiment: Experiment, batch_size: int) -> None:
    """Raise ConfigError if the task's loss fails on the model, or is not a single number.

    Tries one batch of the first client, and two examples of every other client and test set.
    """
    data, model = experiment.data, experiment.model
    examples_by_owner: dict[str, Examples | None] = {
        **{repr(name): examples for name, examples in data.train.items()},
        **{f"{name!r} (test)": examples for name, examples in data.client_tests.items()},
        **{f"{name!r} (validation)": each for name, each in data.client_validations.items()},
        "the common test set": data.common_test,
        "the common validation set": data.common_validation,
    }
    count = batch_size
    for owner, examples in examples_by_owner.items():
        if examples is None or not len(examples):
            continue
        try:
            batch = examples.batch(torch.arange(min(count, len(examples))))
            batch = to_device(batch, model_device(model))
            with torch.no_grad(), eval_mode(model):
                loss = data.task.loss(model, batch)
            if loss.numel() != 1:
                raise ValueError(f"the loss has shape {tuple(loss.shape)}: it must be one number")
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
            lines = str(error).strip().splitlines() or [""]
            raise ConfigError(
                f"the model cannot use the examples of {owner}: {type(error).__name__}: "
                f"{lines[0][:300]}; check [model] and [task], or in "
                "Python the model, the loss and the data"
            ) from error
        count = 2


def make_eval_set(study: Study, data: FederatedData, client: str) -> EvalSet | None:
    """Return the held-out examples of a client, and how to evaluate; None if it does not."""
    section = study.evaluate
    if not section.on_clients:
        return None
    task, size = data.task, section.batch_size
    counts = make_score_counts(study, data)
    return EvalSet(
        data.client_tests.get(client),
        partial(task.score, batch_size=size),
        section.personal,
        section.every,
        study.train.rounds,
        data.client_validations.get(client),
        counts,
        partial(task.predict, batch_size=size) if counts is not None else None,
        counts is not None and bool(study.data.validation_fraction),
    )


def make_score_counts(study: Study, data: FederatedData) -> ScoreCounts | None:
    """Return what clients count in place of metrics; None if they send metrics, or nothing.

    Raises ConfigError if the task has too many labels.
    """
    labels = len(data.task.labels)
    if not study.evaluate.on_clients or not study.hides_clients:
        return None
    if labels > MAX_CLASSES:
        raise ConfigError(
            f"evaluate.on_clients: {labels} labels are too many for counts of right and wrong "
            f"predictions, which have a limit of {MAX_CLASSES}: use a common test set"
        )
    bins = NOISY_BINS if study.privacy else BINS
    return ScoreCounts(labels, data.task.answer_kind == "labels", bins)


def make_scoring(
    study: Study, data: FederatedData, agreement: Agreement, *, at_sites: bool = False
) -> EvalConfig:
    """Return when the models of a study are evaluated, and which metric selects the best round.

    Raises ConfigError if `evaluate.keep_best` names models without scores on validation examples,
    or if clients have such examples in a study with privacy.
    """
    section, task = study.evaluate, data.task
    if study.privacy and data.client_validations:
        raise ConfigError(
            "clients have validation examples: a choice on these would reveal them, and the "
            "privacy guarantee does not cover it; give a common, public validation set"
        )
    validated = validated_models(study, data, at_sites=at_sites)
    if section.keep_best and section.keep_best not in validated:
        on_clients = "set evaluate.on_clients = true, and " if at_sites else ""
        raise ConfigError(
            f"evaluate.keep_best is {section.keep_best!r}, but this run has no validation scores "
            "of that model to choose by, and a test that chooses is no test: "
            f"{on_clients}{VALIDATION_REMEDY}"
        )
    counts, vector = make_score_counts(study, data), None
    if counts is not None:
        validates = bool(study.data.validation_fraction)
        vector = ScoreVector.of(agreement, counts, personal=section.personal, validation=validates)
    return EvalConfig(
        section.every,
        section.on_clients,
        section.keep_best,
        task.primary,
        task.higher_is_better,
        task.directions,
        vector,
    )


def validated_models(study: Study, data: FederatedData, *, at_sites: bool = False) -> list[str]:
    """Return which of the models "global" and "personal" get scores on validation examples."""
    has_examples = bool(study.data.validation_fraction or data.client_validations)
    by_client = has_examples and (study.evaluate.on_clients or not at_sites)
    personal = ["personal"] if by_client and study.evaluate.personal else []
    return (["global"] if by_client or data.common_validation is not None else []) + personal


def make_participation(study: Study) -> Participation:
    """Return the rule that draws the clients of each round."""
    return Participation(study.clients.fraction, study.clients.edges)


def make_method(study: Study) -> Method:
    """Return the method of a study; raises FedplanError for an unknown name, setting or phase.

    With a private vote on layers, `joint_choice` is set: all clients use the same layers.
    """
    method = _method_from_section(study.method)
    has_vote = study.privacy and study.privacy.vote_noise_multiplier
    return replace(method, joint_choice=True) if has_vote else method


def _method_from_section(section: MethodSection) -> Method:
    if section.from_python:
        return parse_recorded_method(section.from_python)
    if section.name:
        method = method_by_name(section.name, section.settings)
        if section.plan:
            method = method.then(parse(section.plan))
    else:
        probe = get_probe(section.probe or "random")
        method = Method(parse(section.plan), probe=probe, joint_choice=section.joint_choice)
    if section.base_method is not None:
        method = method.with_training_of(_method_from_section(section.base_method))
    if section.phases:
        if unknown := section.phases.keys() - set(phase_names(method.plan)):
            raise ConfigError(f"method.phases: the plan has no phase {min(unknown)!r}")
        method = replace(method, phase_rule=PlannedPhases(section.phases))
    hooks = (*map(get_client_hook, section.client_hooks), *method.client_hooks)
    method = replace(method, client_hooks=hooks)
    if section.loop:
        method = replace(method, loop=get_training_loop(section.loop))
    if section.server_optimizer:
        server = make_server_optimizer(section.server_optimizer, section.server_optimizer_settings)
        method = replace(method, server_optimizer=server)
    if section.lora_aggregation:
        method = replace(method, lora_aggregation=parse_product_rule(section.lora_aggregation))
    if section.compression:
        method = replace(method, compression=parse_codec(section.compression))
    return method


def make_agreement(study: Study, params: Params, method: Method | None = None) -> Agreement:
    """Return the agreement of a study, or of another `method`, for a model's params.

    Raises FedplanError if the method cannot keep the study's privacy guarantee.
    """
    guarantee = privacy_guarantee(study)
    agreed_method = (method or make_method(study)).for_params(params)
    if study.clients.edges and agreed_method.joint_choice:
        raise ConfigError(
            "clients.edges: the method chooses layers by the scores of each client, and an edge "
            "sends up one sum: use joint_choice = false, or leave the edges out"
        )
    # A recorded method was checked when it ran.
    if guarantee is not None and not isinstance(agreed_method, RecordedMethod):
        require_private_method(guarantee, agreed_method)
    return Agreement(
        f"{study.name}/{study.seed}",
        params,
        agreed_method,
        study.train.train_arguments,
        guarantee,
        study.digest,
        defence=study.defence.config,
        secagg=study.aggregation.config,
    )


def privacy_statement(
    study: Study,
    folder: Path | None = None,
    *,
    run: str = "",
    earlier: tuple[Expense, ...] | None = None,
) -> Statement | None:
    """Return the privacy statement (guarantee and spent budget) of a study; None without DP.

    `folder`: a run's folder, or a site's privacy ledger, with the epsilon spent. `run`: count only
    ledger entries whose names start with this text. `earlier`: what the initial model has cost;
    None: as the files of the study's model say now. Raises PrivacyError if an entry does not fit
    the guarantee, or if a ledger is damaged.
    """
    guarantee, secagg, noise_shares = privacy_guarantee(study), study.aggregation.config, ""
    if guarantee is None:
        return None
    if secagg.active and guarantee.unit == "client":
        clients = len(study.clients.names) or study.data.num_clients
        noise, norm = guarantee.noise_multiplier, guarantee.clipping_norm
        noise_shares = secagg.describe_noise(clients, noise, norm)
    earlier = initial_expenses(study) if earlier is None else earlier
    rounds = study.train.rounds
    statement = Statement.of(guarantee, rounds, folder, run=run, noise_shares=noise_shares)
    return replace(statement, earlier=earlier)


_calibrate_noise = cache(Guarantee.with_calibrated_noise)


def privacy_guarantee(study: Study) -> Guarantee | None:
    """Return the privacy guarantee of a study, with calibrated noise if it sets none, or None."""
    section, train, fraction = study.privacy, study.train, study.clients.fraction
    if section is None:
        return None
    by_client = section.unit == "client"
    client_rate = fraction if fraction < 1 else None
    guarantee = Guarantee(
        unit=section.unit,
        epsilon=section.epsilon,
        delta=section.delta,
        clipping_norm=section.clipping_norm,
        noise_multiplier=section.noise_multiplier or 1.0,
        sampling_rate=client_rate if by_client else train.batch_size / section.examples_per_site,
        steps=0 if by_client else train.steps,
        batch_size=0 if by_client else train.batch_size,
        vote_noise_multiplier=section.vote_noise_multiplier,
        vote_every=section.vote_every,
        clipping_quantile=section.clipping_quantile,
        max_weight=section.max_weight,
        ghost_clipping=section.ghost_clipping,
        evaluation_noise_multiplier=study.evaluate.noise_multiplier,
        evaluate_every=study.evaluate.every,
    )
    return guarantee if section.noise_multiplier else _calibrate_noise(guarantee, train.rounds)
