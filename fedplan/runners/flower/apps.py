# SPDX-License-Identifier: Apache-2.0
"""The server of a study on a Flower grid, and the study's apps for Flower's own simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedplan.data.examples import Examples
from fedplan.errors import FedplanError
from fedplan.federation.ledger.events import Callback
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.participation import Timeouts
from fedplan.federation.server import Server
from fedplan.models.values import set_values
from fedplan.runners.flower.records import make_reply
from fedplan.runners.flower.server import GlobalTest, ServerLoop
from fedplan.runners.local import study_faults
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import SiteRuntime
from fedplan.secagg.config import SECAGG_STEPS
from fedplan.studies.evaluation import is_evaluated, predict_all, write_evaluation
from fedplan.studies.experiment import (
    Experiment,
    build_experiment,
    make_participation,
    make_scoring,
    validated_models,
)
from fedplan.studies.record import DATA_FILE, data_record, record_session, write_record
from fedplan.studies.resume import prepare_folder
from fedplan.studies.run import claim_run_folder, update_run_files
from fedplan.studies.schema import Study, read_study
from fedplan.tensors.devices import move_model, resolve_device
from fedplan.tensors.message import Message
from fedplan.tensors.named import Tensors


def run_server(
    grid: Grid | None,
    study: Study,
    folder: Path,
    callbacks: Sequence[Callback] = (),
    events: EventStream | None = None,
    registered_names: Callable[[], Iterable[str]] | None = None,
    renew_grid: Callable[[], Grid] | None = None,
) -> None:
    """Run all rounds of a study's server with the sites on `grid`, or continue the run in `folder`.

    Blocks until the last round or a stop. `callbacks` are called before the study's own.
    `registered_names` returns the names of registered sites; a continued run waits for no others.
    `renew_grid` returns the grid of a new Flower run: of the first if `grid` is None, of another if
    Flower ends one. Raises ConfigError if the folder has another study, FlowerRunEnded if Flower
    ends its run and there is no `renew_grid`, FedplanError if too few sites take part.
    """
    prepare_folder(folder, study, resume=True)
    experiment = build_experiment(study)
    folder_lock = claim_run_folder(folder, study, experiment)
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
    update_run_files(server, study, experiment)
    write_record(server, DATA_FILE, data_record(study, experiment.data))
    record_session(folder, study, "flower", server.global_state.round)
    timeouts = Timeouts(**study.timeouts.model_dump())
    quorum, faults = study.clients.min_updates, study_faults(study)
    early_stopping = [study.early_stopping.callback] if study.early_stopping else []
    scoring = make_scoring(study, experiment.data, server.agreement, at_sites=True)
    tests = make_global_tests(study, experiment)
    for callback in early_stopping:
        callback.require_validation(validated_models(study, experiment.data, at_sites=True))
    evaluate = None
    if "test" in tests:
        agreement = experiment.agreement
        evaluate = partial(predict_all, study, experiment.data, experiment.model, agreement)
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
        tests=tests,
        events=events,
    )
    loop.rpc.registered_names = registered_names if server.global_state.round else None
    loop.rpc.renew_grid = renew_grid
    with events.track_run(server, study.name, timeouts, has_examples=False):
        loop.run()
        number = server.global_state.round
        if evaluate is not None and number and not is_evaluated(server):
            write_evaluation(server, evaluate(number, server.global_values(), None))
    del folder_lock


def make_global_tests(study: Study, experiment: Experiment) -> dict[str, GlobalTest]:
    """Return functions from global values to metrics, for the study's common sets."""
    data, model = experiment.data, experiment.model
    sets = {"test": data.common_test, "validation": data.common_validation}
    common = {name: examples for name, examples in sets.items() if examples is not None}
    if common:
        move_model(model, resolve_device(study.device))

    def test(examples: Examples, values: Tensors) -> dict[str, float]:
        set_values(model, values, experiment.agreement.trainable)
        return data.task.score(model, examples, batch_size=study.evaluate.batch_size)

    return {name: partial(test, examples) for name, examples in common.items()}


def study_client_app(file: Path) -> ClientApp:
    """The ClientApp of a study file, of which a node's `partition-id` is the client's index."""

    def answer(context: Context, kind: str, message: Message) -> Message:
        number = int(context.node_config["partition-id"])
        return _site_runtime(file, _run_folder(context), number).answer(kind, message)

    return client_app(answer)


def client_app(answer: Callable[[Context, str, Message], Message]) -> ClientApp:
    """Return a ClientApp that passes every fedplan message to `answer`, with context and kind."""
    app = ClientApp()

    def reply(envelope: FlowerMessage, context: Context) -> FlowerMessage:
        return make_reply(envelope, lambda kind, message: answer(context, kind, message))

    for kind in ("hello", "statistics", "poll", *SECAGG_STEPS):
        app.query(kind)(reply)
    app.train()(reply)
    app.evaluate()(reply)
    return app


def study_server_app(file: Path) -> ServerApp:
    """Return the ServerApp that runs or continues a study file in the run config's `folder`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run_server(grid, read_study(file), _run_folder(context))

    _ = main
    return app


def _run_folder(context: Context) -> Path:
    folder = context.run_config.get("folder")
    if not folder:
        raise FedplanError("the run has no folder: give --run-config 'folder=\"/a/folder\"'")
    return Path(str(folder))


@cache
def _site_runtime(file: Path, folder: Path, number: int) -> SiteRuntime:
    """The runtime of client `number` of a study file, made once; all share FOLDER/sites."""
    study = read_study(file)
    name = (study.clients.names or list(build_experiment(study).data.train))[number]
    return SiteRuntime(Site(name=name, state=str(folder / "sites"), dataset=name), study)
