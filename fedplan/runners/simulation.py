# SPDX-License-Identifier: Apache-2.0
"""Simulation of a study on this machine, with evaluation after each round."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fedplan.data.metrics import metric_spread
from fedplan.federation.callbacks import Callback, CommittedRound, EarlyStopping, run_callbacks
from fedplan.federation.evaluation import combine_scores
from fedplan.federation.history import Metrics
from fedplan.federation.status import StatusReporter
from fedplan.federation.timeouts import Timeouts
from fedplan.federation.trackers import close_trackers
from fedplan.models.attention import attention_shift
from fedplan.models.values import set_values
from fedplan.runners.executors.config import PoolConfig
from fedplan.runners.executors.factory import start_pool
from fedplan.runners.executors.pool import PoolExecutor
from fedplan.runners.faults import study_faults
from fedplan.runners.local import Federation
from fedplan.studies.experiment import (
    build_experiment,
    make_eval_set,
    make_participation,
    make_scoring,
    require_usable_batches,
)
from fedplan.studies.in_memory import InMemoryInputs
from fedplan.studies.resume import has_progress, import_kept_params, prepare_folder
from fedplan.studies.run import open_run
from fedplan.studies.run_folder import claim_run_folder, update_run_files
from fedplan.studies.schema import ConfigError, Study, study_from_dict
from fedplan.tensors.devices import resolve_device
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
    """A study that runs in a folder on this machine; an unfinished run is continued.

    `given` are Python objects in place of the study's files, `earlier` the run folder from which
    clients' personal params are taken. `callbacks` are called after each committed round.
    `pool_config` runs clients in a worker pool. `stopped` says why the run ended before its last
    round: the text of a callback, or an operator's request; empty if it did not. The constructor
    loads model and data and opens the folder; it raises ConfigError if study and data do not fit.
    """

    def __init__(
        self,
        study: Study,
        folder: Path,
        in_memory: InMemoryInputs | None = None,
        *,
        earlier_run: Path | str = "",
        callbacks: Sequence[Callback] = (),
        status: StatusReporter | None = None,
        pool_config: PoolConfig | None = None,
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
        self.study, self.folder, self.in_memory, self.earlier_run = (
            study,
            folder,
            in_memory,
            earlier_run,
        )
        self.callbacks, self.stopped = (*callbacks, *study.evaluate.callbacks), ""
        self.status, self.pool_config = status or StatusReporter(), pool_config
        self.pool: PoolExecutor | None = None
        self._open()

    def _open(self) -> None:
        """Load the study and open its folder, while the workers start."""
        if self.pool is not None:
            self.pool.close()
        with start_pool(self.pool_config, self.study, self.folder) as self.pool:
            self._build()

    def _build(self) -> None:
        """Load model and data, lock the folder, and make the federation."""
        device = resolve_device(self.study.device)  # before anything is written
        study, experiment = self.study, build_experiment(self.study, in_memory=self.in_memory)
        self.data, agreement = experiment.data, experiment.pinned_agreement
        names = study.clients.names or list(self.data.train)
        for source, clients in (
            ("clients.traits", study.clients.traits),
            ("data", self.data.train),
        ):
            if unknown := clients.keys() - set(names):
                raise ConfigError(
                    f"{source}: there is no client {min(unknown)!r}; there are {', '.join(names)}"
                )
        require_usable_batches(experiment, study.train.batch_size)
        self.scoring = make_scoring(study, self.data)
        self.folder_lock = claim_run_folder(self.folder, study, agreement.params, self.data)
        if study.continue_from and not has_progress(self.folder):
            import_kept_params(study, self.earlier_run, self.folder)
        self.federation = Federation(
            agreement,
            experiment.model,
            self.data.train,
            self.data.task.loss,
            self.folder,
            rounds=study.train.rounds,
            participation=make_participation(study),
            faults=study_faults(study),
            traits=study.clients.traits,
            names=names,
            examples_digests=self.data.digests,
            device=device,
            deterministic=study.deterministic,
            eval_sets={
                n: make_eval_set(study, self.data, n) for n in names if study.evaluate.on_clients
            },
            status=self.status,
            make_executor=self.pool.bind if self.pool else None,
            start=experiment.initial_values,
            initial_model=experiment.initial_model,
            activation_cache=study.train.activation_cache,
        )
        update_run_files(self.federation.server, study, self.data)

    def run(self) -> Simulation:
        """Run all remaining rounds; each is committed before the next starts."""
        for _ in self.rounds():
            pass
        return self

    def rounds(self) -> Iterator[CommittedRound]:
        """Run the remaining rounds one by one; yield each after its commit and its callbacks.

        The run waits while the caller holds the iterator, and stops if it is closed.
        """
        _OPEN.add(rounds := self._run_tracked())
        return rounds

    def _run_tracked(self) -> Generator[CommittedRound]:
        """Run the rounds under the status reporter; at the end stop workers and trackers."""
        callbacks, server = self._check_callbacks(), self.federation.server
        timeouts = Timeouts(**self.study.timeouts.model_dump())
        executor = self.federation.executor
        try:
            with self.status.track_run(server, self.study.name, timeouts):
                yield from self._run_rounds(callbacks)
        finally:
            executor.close()
            close_trackers(callbacks)
        self.stopped = self.status.stop_text

    def _run_rounds(self, callbacks: Sequence[Callback]) -> Iterator[CommittedRound]:
        """Run rounds until the last one, a stop, or a `resume` of this simulation.

        Callbacks are called for the last committed round first, so that they know it.
        """
        federation, status = self.federation, self.status
        server, last = federation.server, federation.server.last_round()
        server.keep_best(self.scoring.best_round(server.history))
        self.stopped = status.stop_reason(
            self._stop_reason(callbacks, self._with_task(last)) if last else ""
        )
        while (
            server.global_state.round < server.rounds
            and not self.stopped
            and self.federation is federation  # else it was resumed meanwhile
        ):
            closed = self._with_task(self._run_round())
            status.record_round(closed)
            self.stopped = status.stop_reason(self._stop_reason(callbacks, closed))
            yield closed

    def _stop_reason(self, callbacks: Sequence[Callback], closed: CommittedRound) -> str:
        """Call the callbacks, and return why to stop; empty after the last round."""
        reason = run_callbacks(callbacks, closed)
        return reason if closed.round < self.study.train.rounds else ""

    def _with_task(self, closed: CommittedRound) -> CommittedRound:
        """Return the round with the task's primary metric and its direction."""
        scoring = self.scoring
        return replace(closed, higher_is_better=scoring.higher_is_better, primary=scoring.primary)

    def _check_callbacks(self) -> tuple[Callback, ...]:
        """Return all callbacks, with the study's early stopping.

        Rejects early stopping on metrics that are private or not measured.
        """
        early_stopping = (self.study.early_stopping.callback,) if self.study.early_stopping else ()
        personal = self.study.evaluate.personal and bool(self.data.client_tests)
        kinds = {"global"} if self.data.common_test is not None else set[str]()
        if self.scoring.on_clients:
            kinds |= {"sites"}
        elif personal:
            kinds |= {"personal", "clients"}
        for callback in (*self.callbacks, *early_stopping):
            if isinstance(callback, EarlyStopping):
                callback.require_measured(kinds)
                if self.study.privacy is not None:
                    callback.require_public()
        return (*self.callbacks, *early_stopping)

    def _run_round(self) -> CommittedRound:
        """Run, evaluate and commit the next round."""
        # Only with attention shifts: else the old values would stay in memory for the round.
        before = self.federation.global_values() if self.study.evaluate.attention_examples else {}
        round_state = self.federation.run_round()
        due = self.scoring.is_due(self.federation.global_state.round, self.study.train.rounds)
        closed = self.federation.commit(
            round_state, self.evaluate() if due else {}, self.attention_shifts(before)
        )
        self.federation.server.keep_best(self.scoring.best_round(closed.metrics))
        return closed

    def resume(
        self, rounds: int | None = None, *, callbacks: Sequence[Callback] | None = None
    ) -> Simulation:
        """Continue the run in the folder to its last round, or to another number of rounds.

        `callbacks` replace the earlier ones and the study's early stopping. Reloads model and data.
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
        return open_run(self.folder).metrics

    def global_model(self) -> nn.Module:
        """Return a copy of the model with the global values."""
        return self._model(self.federation.global_values())

    def personal_model(self, name: str) -> nn.Module:
        """Return a copy of the model with a client's personal values over the global ones.

        Raises ConfigError if there is no client of this name.
        """
        if (name := str(name)) not in self.federation.clients:
            names = ", ".join(self.federation.clients)
            raise ConfigError(f"there is no client {name!r}; there are {names}")
        return self._model(self.federation.personal_values(name))

    def _model(self, values: dict[str, Tensor]) -> nn.Module:
        model = copy.deepcopy(self.federation.model)
        set_values(model, values, self.federation.agreement.trainable)
        return model.eval()

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the global model on the common test, and personal models on clients' tests.

        With `evaluate.on_clients` the clients evaluate both models, as in a real federation.
        Returns the scores in the layout of `metrics`; parts that are not measured are left out.
        """
        model, evaluate = self.federation.model, self.study.evaluate
        trainable = self.federation.agreement.trainable
        set_values(model, self.federation.global_values(), trainable)
        scores: dict[str, Any] = {}
        if self.data.common_test is not None:
            test = self.data.common_test
            scores["global"] = self.data.task.score(model, test, batch_size=evaluate.batch_size)
        if evaluate.on_clients:
            scores["sites"] = combine_scores(*self.federation.evaluate(), self.scoring)
        elif evaluate.personal and self.data.client_tests:
            scores["clients"] = self._personal_scores()
            key, higher = self.data.task.primary, self.data.task.higher_is_better
            primary = {n: s[key] for n, s in scores["clients"].items() if key in s}
            scores |= (
                {"personal": metric_spread(key, primary, higher_is_better=higher)}
                if primary
                else {}
            )
        return scores

    def attention_shifts(self, before: Tensors) -> dict[str, Any]:
        """Measure how far each block's attention moved since the values `before`.

        Uses the first `evaluate.attention_examples` examples of the common test, or returns {}.
        """
        test = self.data.common_test
        count = min(self.study.evaluate.attention_examples, len(test)) if test is not None else 0
        if test is None or not count:
            return {}
        states = (before, self.federation.global_values())
        batch = test.batch(torch.arange(count))
        shifts = attention_shift(
            self.federation.model, self.federation.agreement.trainable, states, batch
        )
        return {"attention": [[*block, round(far, 6)] for block, far in shifts.items()]}

    def _personal_scores(self) -> dict[str, dict[str, float]]:
        if self.pool is not None and self.pool.workers:
            return self.pool.personal_scores(list(self.data.client_tests))
        return {name: self._personal_score(name) for name in self.data.client_tests}

    def _personal_score(self, name: str) -> dict[str, float]:
        model = self.federation.model
        set_values(
            model, self.federation.personal_values(name), self.federation.agreement.trainable
        )
        return self.data.task.score(
            model, self.data.client_tests[name], batch_size=self.study.evaluate.batch_size
        )
