# SPDX-License-Identifier: Apache-2.0
"""Simulation of a study on this machine, with evaluation after each round."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fedplan.data.examples import first_examples
from fedplan.data.metrics import metric_spread
from fedplan.errors import require_extra
from fedplan.federation.evaluation import Scores, combine_scores, join_validation
from fedplan.federation.ledger.callbacks import EarlyStopping
from fedplan.federation.ledger.events import Callback, CommittedRound
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.participation import Timeouts
from fedplan.models.attention import attention_shift
from fedplan.models.values import set_values
from fedplan.runners.executors.executor import RAY, PoolConfig
from fedplan.runners.executors.pool import PoolExecutor, start_pool
from fedplan.runners.executors.ranks import ClientDevices
from fedplan.runners.local import Federation, make_train_setup, study_faults, with_task
from fedplan.studies.evaluation import is_evaluated, predict_all, write_evaluation
from fedplan.studies.experiment import (
    build_experiment,
    make_eval_set,
    make_participation,
    make_scoring,
    require_usable_batches,
    validated_models,
)
from fedplan.studies.in_memory import InMemoryInputs
from fedplan.studies.record import (
    DATA_FILE,
    INITIAL_SCORES_FILE,
    data_record,
    record_session,
    write_record,
)
from fedplan.studies.resume import has_progress, import_kept_params, prepare_folder
from fedplan.studies.run import claim_run_folder, read_run, update_run_files
from fedplan.studies.run_scores import is_personal
from fedplan.studies.schema import ConfigError, Study, study_from_dict
from fedplan.studies.stored_model import MODEL_FOLDER, STORED_FILE, store_model, stored_files
from fedplan.tensors.devices import move_model, resolve_device
from fedplan.tensors.named import Tensors

_OPEN = WeakSet[Generator[CommittedRound]]()
"""Generators of `Simulation.rounds` that may be unfinished."""


@atexit.register
def _close_open() -> None:
    """Close unfinished runs at exit, while modules are still loaded."""
    for generator in list(_OPEN):
        with suppress(Exception):  # it may be running in another thread
            generator.close()


class Simulation:
    """A study that runs in a folder on this machine: `run` it, or iterate over `rounds`.

    The constructor loads model and data, locks the folder and starts the workers, but runs no
    round; an unfinished run in the folder is continued. `in_memory` are Python objects in place of
    the study's files, `earlier_run` is the run folder from which clients take their personal params
    if the study continues another run. `callbacks` are called before the study's own. `pool_config`
    runs clients in a worker pool, None in this process. `devices_per_client`: see ClientDevices.
    `store_model` stores the initial model, so that the run can be exported without `in_memory`.
    `stopped` says why the run ended before the last round. Raises ConfigError if study, data and
    options do not fit together.
    """

    def __init__(
        self,
        study: Study,
        folder: Path,
        in_memory: InMemoryInputs | None = None,
        *,
        earlier_run: Path | str = "",
        callbacks: Sequence[Callback] = (),
        events: EventStream | None = None,
        pool_config: PoolConfig | None = None,
        devices_per_client: int = 1,
        store_model: bool = False,
    ) -> None:
        if not study.has_central_data:
            raise ConfigError(
                "data.path is empty: the data of this study is at its sites; use --runner flower"
            )
        if pool_config is not None and study.aggregation.config.active:
            raise ConfigError(
                "aggregation.kind: secure aggregation has no partial sums for workers; "
                "use --runner local"
            )
        if pool_config is not None and study.clients.edges:
            raise ConfigError(
                "clients.edges: the workers of a pool sum their own clients; use --runner local, "
                "or leave the edges out"
            )
        if pool_config is not None and devices_per_client > 1:
            raise ConfigError(
                f"devices_per_client = {devices_per_client} is for runner local and for sites, and "
                f"a worker of runner {pool_config.runner} has one device: leave one of them out"
            )
        self.devices_per_client = devices_per_client
        self.devices: ClientDevices | None = None
        self.study, self.folder, self.in_memory = study, folder, in_memory
        self.earlier_run, self.store_model = earlier_run, store_model
        self.callbacks = (*callbacks, *study.evaluate.callbacks)
        self.events, self.pool_config = events or EventStream(), pool_config
        self.pool: PoolExecutor | None = None
        self._open()

    def _open(self) -> None:
        """Load model and data, lock the folder and make the federation, while new workers start."""
        self._close_devices()
        if self.pool is not None:
            self.pool.close()
        study = self.study
        with start_pool(self.pool_config, study, self.folder) as self.pool:
            device = resolve_device(study.device)  # before anything is written
            experiment = build_experiment(study, in_memory=self.in_memory)
            self.data, agreement = experiment.data, experiment.pinned_agreement
            if agreement.guarantee or agreement.secagg.active:
                private = "differential privacy" if agreement.guarantee else "secure aggregation"
                require_extra("cryptography", private)  # before anything is written
            names = study.clients.names or list(self.data.train)
            participation = make_participation(study)
            sources = {"clients.traits": study.clients.traits, "data": self.data.train}
            sources |= {"clients.edges": participation.edge_of}
            for source, clients in sources.items():
                if unknown := clients.keys() - set(names):
                    raise ConfigError(
                        f"{source}: there is no client {min(unknown)!r}; "
                        f"there are {', '.join(names)}"
                    )
            require_usable_batches(experiment, study.train.batch_size)
            if self.devices_per_client > 1:
                self.devices = ClientDevices(study, experiment, self.devices_per_client)
            self.scoring = make_scoring(study, self.data, agreement)
            self.folder_lock = claim_run_folder(self.folder, study, experiment)
            if study.continue_from and not has_progress(self.folder):
                import_kept_params(study, agreement, self.earlier_run, self.folder)
            tested = names if study.evaluate.on_clients else ()
            move_model(experiment.model.eval(), device)
            setup = make_train_setup(study, experiment, first_examples(self.data.train.values()))
            self.federation = Federation(
                agreement,
                experiment.model,
                self.data.train,
                setup.loss,
                self.folder,
                rounds=study.train.rounds,
                participation=participation,
                faults=study_faults(study),
                traits=study.clients.traits,
                names=names,
                synced=self.pool_config is not None and self.pool_config.runner == RAY,
                examples_digests=self.data.digests,
                eval_sets={n: make_eval_set(study, self.data, n) for n in tested},
                events=self.events,
                make_executor=self.pool.bind if self.pool else None,
                setup=replace(setup, spread=self.devices),
            )
            update_run_files(self.federation.server, study, experiment)
            server = self.federation.server
            if self.store_model and not server.is_recorded(f"{MODEL_FOLDER}/{STORED_FILE}"):
                store_model(experiment.model, self.data.task, self.folder / MODEL_FOLDER)
                server.record_files(stored_files(self.folder))
            write_record(server, DATA_FILE, data_record(study, self.data))
            runner = self.pool_config.runner if self.pool_config else "local"
            done, count = self.federation.global_state.round, self.devices_per_client
            record_session(self.folder, study, runner, done, count)
            if self.devices:
                self.devices.start()

    def run(self) -> Simulation:
        """Run all remaining rounds, each committed before the next starts; return this object."""
        for _ in self.rounds():
            pass
        return self

    def rounds(self) -> Iterator[CommittedRound]:
        """Run the remaining rounds one by one; yield each after its commit and its callbacks.

        The run waits while the caller holds the iterator, and stops if the iterator is closed.
        """
        _OPEN.add(rounds := self._run_rounds())
        return rounds

    def _run_rounds(self) -> Generator[CommittedRound]:
        """Run, evaluate, commit and yield rounds until the last, a stop, or a `resume`."""
        events, federation = self.events, self.federation
        server, executor = federation.server, federation.executor
        events.callbacks = self._check_callbacks()
        timeouts = Timeouts(**self.study.timeouts.model_dump())
        try:
            with events.track_run(server, self.study.name, timeouts):
                last = server.last_round()
                server.keep_best(self.scoring.best_round(server.history))
                events.call_back(with_task(last, self.scoring) if last else None)
                if last is None:
                    write_record(server, INITIAL_SCORES_FILE, self.initial_scores())
                server.require_unchanged(INITIAL_SCORES_FILE)
                while (
                    server.global_state.round < server.rounds
                    and not events.stop_text
                    and self.federation is federation  # else it was resumed meanwhile
                ):
                    closed = with_task(self._run_round(), self.scoring)
                    events.emit(closed)
                    yield closed
                if self.federation is federation:
                    self._write_evaluation()
        finally:
            executor.close()
            self._close_devices()

    def _close_devices(self) -> None:
        if self.devices is not None:
            self.devices.close()

    @property
    def stopped(self) -> str:
        """Why the run ended before the last round; "" if it did not."""
        return self.events.stop_text

    def _run_round(self) -> CommittedRound:
        """Run, evaluate if due, and commit the next round; keep the checkpoint if it is best."""
        # A method of its own, so that the round's tensors are freed before the next round.
        # Only with attention shifts: else the old values would stay in memory for the round.
        before = self.federation.global_values() if self.study.evaluate.attention_examples else {}
        round_state = self.federation.run_round()
        due = self.scoring.is_due(self.federation.global_state.round, self.study.train.rounds)
        scores, shifts = self.evaluate() if due else {}, self.attention_shifts(before)
        closed = self.federation.commit(round_state, scores, shifts)
        self.federation.server.keep_best(self.scoring.best_round(closed.metrics))
        return closed

    def _write_evaluation(self) -> None:
        """Write the tables of all test predictions to the folder, unless they are there."""
        federation, number = self.federation, self.federation.global_state.round
        if number and not is_evaluated(federation.server):
            predictions = predict_all(
                self.study,
                self.data,
                federation.model,
                federation.agreement,
                number,
                federation.global_values(),
                federation.personal_values,
            )
            write_evaluation(federation.server, predictions)

    def _check_callbacks(self) -> tuple[Callback, ...]:
        """Return all callbacks, the study's last; early stopping must use a metric it may see."""
        early_stopping = (self.study.early_stopping.callback,) if self.study.early_stopping else ()
        callbacks = (*self.callbacks, *early_stopping)
        for callback in callbacks:
            if isinstance(callback, EarlyStopping):
                if self.study.privacy is not None:
                    callback.require_public()
                callback.require_validation(validated_models(self.study, self.data))
        return callbacks

    def resume(
        self, rounds: int | None = None, *, callbacks: Sequence[Callback] | None = None
    ) -> Simulation:
        """Reload model and data, run the remaining rounds, and return this object.

        `rounds` is a new total number of rounds. `callbacks` replace all earlier ones and the
        study's early stopping. Raises ConfigError if the folder has another study.
        """
        fields = self.study.model_dump(mode="json")
        fields |= {"early_stopping": None} if callbacks is not None else {}
        fields["train"] |= {"rounds": rounds} if rounds is not None else {}
        study = study_from_dict(fields)
        prepare_folder(self.folder, study, resume=True)
        self.study = study
        self.callbacks = self.callbacks if callbacks is None else tuple(callbacks)
        self._open()
        return self.run()

    @property
    def metrics(self) -> Metrics:
        """A row of numbers for each round: loss, bytes, and scores if it was evaluated."""
        return read_run(self.folder).metrics

    def global_model(self) -> nn.Module:
        """Return a copy of the model with the global values."""
        return self._model(self.federation.global_values())

    def personal_model(self, name: str) -> nn.Module:
        """Return a copy of the model with a client's personal values over the global ones."""
        if (name := str(name)) not in self.federation.clients:
            names = ", ".join(self.federation.clients)
            raise ConfigError(f"there is no client {name!r}; there are {names}")
        return self._model(self.federation.personal_values(name))

    def _model(self, values: dict[str, Tensor]) -> nn.Module:
        model = copy.deepcopy(self.federation.model)
        set_values(model, values, self.federation.agreement.trainable)
        return model.eval()

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the global model on the common sets, and personal models on clients' examples.

        Returns "global", "clients" (metrics of personal models, unless the study hides clients),
        "personal" (`metric_spread` over clients) and "validation"; entries without examples are
        left out. Without a common test set, "global" is on all clients' test examples together, but
        absent under differential privacy. With `evaluate.on_clients` the clients evaluate both
        models themselves: "sites" has the combined scores. Overwrites the values of
        `federation.model`.
        """
        federation, evaluate, data = self.federation, self.study.evaluate, self.data
        model, score = federation.model, partial(data.task.score, batch_size=evaluate.batch_size)
        set_values(model, federation.global_values(), federation.agreement.trainable)
        scores: dict[str, Any] = {}
        if data.common_test is not None:
            scores["global"] = score(model, data.common_test)
        at_clients = dict[str, dict[str, float]]()
        if self._pools_tests:
            tests, size = data.client_tests, evaluate.batch_size
            at_clients, together = data.task.score_clients(model, tests, batch_size=size)
            scores["global"] = {**together, "clients": float(len(tests))}
        common, answers = None, dict[str, Scores]()
        if data.common_validation is not None:
            common = score(model, data.common_validation)
        if evaluate.on_clients:
            scores["sites"], answers = federation.joint_scores(self.scoring)
        else:
            if common is None:
                answers = {
                    name: {"validation.global": score(model, examples)}
                    for name, examples in data.client_validations.items()
                }
            personal = self._personal_scores(at_clients) if evaluate.personal else {}
            clients = {name: sets["test"] for name, sets in personal.items() if "test" in sets}
            for name, sets in personal.items():
                if "validation" in sets:
                    answers.setdefault(name, {})["validation.personal"] = sets["validation"]
            scores |= self._spread(clients) if clients else {}
        validation = join_validation(scores, answers, self.scoring, common)
        scores |= {"validation": validation} if validation else {}
        return scores

    def _personal_scores(self, at_clients: Mapping[str, dict[str, float]]) -> dict[str, Scores]:
        """Return metrics of personal models; those `at_clients` if no param is personal."""
        data, federation = self.data, self.federation
        if at_clients and not data.client_validations and not is_personal(federation.agreement):
            return {name: {"test": metrics} for name, metrics in at_clients.items()}
        names = [*dict.fromkeys((*data.client_tests, *data.client_validations))]
        if self.pool is not None and self.pool.workers:
            return self.pool.personal_scores(names)
        size, scores = self.study.evaluate.batch_size, dict[str, Scores]()
        for name in names:
            values = federation.personal_values(name)
            set_values(federation.model, values, federation.agreement.trainable)
            scores[name] = {
                kind: data.task.score(federation.model, examples, batch_size=size)
                for kind, examples in data.held_out(name).items()
            }
        return scores

    @property
    def _pools_tests(self) -> bool:
        data, study = self.data, self.study
        has_tests = data.common_test is None and bool(data.client_tests)
        return has_tests and not study.evaluate.on_clients and study.privacy is None

    def _spread(self, clients: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Return metrics by "clients", unless hidden, and the primary one's "personal" spread."""
        key, higher = self.data.task.primary, self.data.task.higher_is_better
        primary = {name: metrics[key] for name, metrics in clients.items() if key in metrics}
        spread = metric_spread(key, primary, higher_is_better=higher) if primary else None
        by_client = {} if self.study.hides_clients else {"clients": clients}
        return by_client | ({"personal": spread} if spread else {})

    def initial_scores(self) -> dict[str, Any]:
        """Evaluate the starting model before the first round; the result is as of `evaluate`.

        Without validation; under privacy on the common test set alone, and in a continued study
        without personal models, which do not start from these values.
        """
        federation, evaluate, data = self.federation, self.study.evaluate, self.data
        model, size, tests = federation.model, evaluate.batch_size, data.client_tests
        set_values(model, federation.global_values(), federation.agreement.trainable)
        scores: dict[str, Any] = {}
        if data.common_test is not None:
            scores["global"] = data.task.score(model, data.common_test, batch_size=size)
        measured = evaluate.personal or evaluate.on_clients or self._pools_tests
        if not tests or not measured or self.study.privacy is not None:
            return scores
        clients, together = data.task.score_clients(model, tests, batch_size=size)
        if self._pools_tests:
            scores["global"] = {**together, "clients": float(len(tests))}
        if self.study.continue_from or (evaluate.on_clients and self.study.hides_clients):
            return scores
        if evaluate.on_clients:
            answers = {name: {"global": each, "personal": each} for name, each in clients.items()}
            return scores | {"sites": combine_scores(answers, {}, self.scoring)}
        return scores | (self._spread(clients) if evaluate.personal else {})

    def attention_shifts(self, before: Tensors) -> dict[str, Any]:
        """Return how far each block's attention moved from the values `before` to the present.

        As {"attention": [[*block, shift], ...]} with finite ones only; {} if none is to be
        measured.
        """
        test = self.data.common_test
        count = min(self.study.evaluate.attention_examples, len(test)) if test is not None else 0
        if test is None or not count:
            return {}
        federation = self.federation
        states, batch = (before, federation.global_values()), test.batch(torch.arange(count))
        shifts = attention_shift(federation.model, federation.agreement.trainable, states, batch)
        finite = {block: far for block, far in shifts.items() if isfinite(far)}
        return {"attention": [[*block, round(far, 6)] for block, far in finite.items()]}
