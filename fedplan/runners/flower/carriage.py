# SPDX-License-Identifier: Apache-2.0
"""A study on Flower's grid: its server, its patience and its tests, put together and carried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flwr.serverapp import Grid

from fedplan.federation.callbacks import Callback
from fedplan.federation.patience import Patience
from fedplan.federation.server import Server
from fedplan.federation.status import Status
from fedplan.federation.trackers import close_all
from fedplan.models.values import put
from fedplan.runners.faults import faults_of
from fedplan.runners.flower.calls import Ended
from fedplan.runners.flower.carrier import Carrier, Test
from fedplan.studies.continuation import require_free
from fedplan.studies.folder import agreed_run, opened_run
from fedplan.studies.schema import Study
from fedplan.studies.stage import Stage, participation_of, scoring_of, stage_of
from fedplan.tensors.devices import device_named, settled
from fedplan.tensors.named import Tensors


def carry_study(
    grid: Grid,
    study: Study,
    folder: Path,
    callbacks: Sequence[Callback] = (),
    status: Status | None = None,
    registered: Callable[[], Iterable[str]] | None = None,
) -> None:
    """Carry a study, or go on with it from what its folder holds.

    A run that goes on waits for no site that is `registered` no longer.
    """
    require_free(folder, study, resume=True)
    stage = stage_of(study)
    claim = opened_run(folder, study, stage.agreement.params, stage.shares)
    names = study.clients.names or list(stage.shares.train)
    server = Server(
        stage.agreed,
        stage.start,
        folder,
        rounds=study.train.rounds,
        roster={name: study.clients.traits.get(name, {}) for name in names},
        participation=participation_of(study),
        marks=stage.marks,
    )
    agreed_run(server, study, stage.shares)
    patience = Patience(**study.patience.model_dump())
    quorum, faults = study.clients.quorum, faults_of(study)
    stop = study.stop.callback if study.stop else None
    scoring, test = scoring_of(study, stage.shares), tester_of(study, stage)
    if stop is not None:
        # The rows are at the sites, and so is every score but that of a common test.
        stop.require_measured([*(["world"] if test else []), *(["sites"] if scoring.sites else [])])
    # A server needs no model, unless it tests one: what it starts with is in its world.
    del stage
    told = status or Status(folder)
    carrier = Carrier(
        grid,
        server,
        patience,
        quorum=quorum,
        faults=faults,
        callbacks=[*callbacks, *study.evaluate.callbacks, *([stop] if stop else [])],
        study=study,
        scoring=scoring,
        test=test,
        status=told,
    )
    carrier.calls.registered = registered if server.world.round else None
    try:
        with told.driving(server, study.name, patience, rows=False, passing=Ended):
            carrier.carry()
    finally:
        close_all(carrier.callbacks)
    del claim


def tester_of(study: Study, stage: Stage) -> Test | None:
    """What scores the world on the common test, where the study has one."""
    task, rows, model = stage.shares.task, stage.shares.test, stage.model
    if rows is None:
        return None
    settled(model, device_named(study.device))

    def test(values: Tensors) -> dict[str, float]:
        put(model, values, stage.agreement.trainable)
        return task.score(model, rows, batch_size=study.evaluate.batch)

    return test
