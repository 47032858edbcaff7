# SPDX-License-Identifier: Apache-2.0
"""Runs the server of a study on a Flower grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flwr.serverapp import Grid

from fedplan.federation.ledger.events import Callback
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.participation import Timeouts
from fedplan.federation.server import Server
from fedplan.models.values import set_values
from fedplan.runners.clients import study_faults
from fedplan.runners.flower.rpc import FlowerRunEnded
from fedplan.runners.flower.server_loop import GlobalTest, ServerLoop
from fedplan.studies.experiment import (
    Experiment,
    build_experiment,
    make_participation,
    make_scoring,
)
from fedplan.studies.resume import prepare_folder
from fedplan.studies.run import claim_run_folder, update_run_files
from fedplan.studies.schema import Study
from fedplan.tensors.devices import move_model, resolve_device
from fedplan.tensors.named import Tensors


def run_server(
    grid: Grid,
    study: Study,
    folder: Path,
    callbacks: Sequence[Callback] = (),
    events: EventStream | None = None,
    registered_names: Callable[[], Iterable[str]] | None = None,
) -> None:
    """Run all rounds of a study's server with the sites on `grid`, or continue the run in `folder`.

    Builds the model, locks the folder, and blocks until the last round or a stop. `callbacks` are
    called after each round, before the study's own. `events` receives progress (default: an
    EventStream of the folder). `registered_names` returns the names of registered sites; a
    continued run waits for no others. Raises ConfigError if the folder has another study,
    FlowerRunEnded if Flower ends its run, FedplanError if too few sites take part.
    """
    prepare_folder(folder, study, resume=True)
    experiment = build_experiment(study)
    folder_lock = claim_run_folder(folder, study, experiment.agreement.params, experiment.data)
    names = study.clients.names or list(experiment.data.train)
    server = Server(
        experiment.pinned_agreement,
        experiment.initial_values,
        folder,
        rounds=study.train.rounds,
        roster={name: study.clients.traits.get(name, {}) for name in names},
        participation=make_participation(study),
        start_digests=experiment.param_digests,
    )
    update_run_files(server, study, experiment.data)
    timeouts = Timeouts(**study.timeouts.model_dump())
    quorum, faults = study.clients.min_updates, study_faults(study)
    early_stopping = [study.early_stopping.callback] if study.early_stopping else []
    scoring, test = make_scoring(study, experiment.data), make_global_test(study, experiment)
    for callback in early_stopping:
        # The data is at the sites, so only these metrics are measured.
        kinds = [*(["global"] if test else []), *(["sites"] if scoring.on_clients else [])]
        callback.require_measured(kinds)
    # Free the model, unless the test uses it: the server has the initial values.
    del experiment
    events = events or EventStream(folder)
    loop = ServerLoop(
        grid,
        server,
        timeouts,
        quorum=quorum,
        faults=faults,
        callbacks=[*callbacks, *study.evaluate.callbacks, *early_stopping],
        study=study,
        scoring=scoring,
        test=test,
        events=events,
    )
    loop.rpc.registered_names = registered_names if server.global_state.round else None
    with events.track_run(
        server, study.name, timeouts, has_examples=False, retried_errors=FlowerRunEnded
    ):
        loop.run()
    del folder_lock


def make_global_test(study: Study, experiment: Experiment) -> GlobalTest | None:
    """Return a function from global values to metrics on the common test set of the study.

    None without a common test set. Moves the experiment's model to the study's device; each call of
    the function overwrites the values of the model.
    """
    task, examples, model = experiment.data.task, experiment.data.common_test, experiment.model
    if examples is None:
        return None
    move_model(model, resolve_device(study.device))

    def test(values: Tensors) -> dict[str, float]:
        set_values(model, values, experiment.agreement.trainable)
        return task.score(model, examples, batch_size=study.evaluate.batch_size)

    return test
