# SPDX-License-Identifier: Apache-2.0
"""Apps: a study as the two ends that Flower starts: `client_of` at each site, `server_of` once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedplan.attendance import Attendance
from fedplan.config import ConfigError, read_study
from fedplan.journal import Journal
from fedplan.ledger import digests
from fedplan.manifest import written
from fedplan.runners.flower.client import Seat, client_app
from fedplan.runners.flower.server import carry
from fedplan.server import Server
from fedplan.site import Site
from fedplan.state import take
from fedplan.store import Store
from fedplan.studies import stage_of


def client_of(file: Path) -> ClientApp:
    """The app of a site. Its node is started with `name`, and `home`: a folder on its own disk."""
    return client_app(lambda context: _seat(file, _said(context, "name"), _said(context, "home")))


def server_of(file: Path) -> ServerApp:
    """The app of the server. The run is started with `folder`: where it keeps the run."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        folder = Path(str(context.run_config["folder"]))
        study, stage = read_study(file), stage_of(read_study(file))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "study.json").write_text(study.model_dump_json(indent=1))
        (folder / "manifest.json").write_text(written(stage.setup.params))
        server = Server(
            stage.setup,
            take(stage.model, stage.setup.params),
            folder,
            rounds=study.train.rounds,
            roster={name: study.clients.traits.get(name, {}) for name in stage.shares.train},
            attendance=Attendance(**study.clients.model_dump(exclude={"traits"})),
        )
        carry(grid, server)

    _ = main
    return app


def _said(context: Context, name: str) -> str:
    if name not in context.node_config:
        raise ConfigError(f"this node does not say its {name}: start it with --node-config")
    return str(context.node_config[name])


@cache
def _seat(file: Path, name: str, home: str) -> Seat:
    study = read_study(file)
    stage = stage_of(study)
    if name not in stage.shares.train:
        raise ConfigError(f"the study has no client {name!r}")
    start = take(stage.model, stage.setup.params)
    folder = Path(home) / study.name
    site = Site(
        name=name,
        rows=stage.shares.train[name],
        journal=Journal(folder / "home", replies=True),
        model=stage.model,
        start=start,
        marks=digests(start),
        loss=stage.shares.task.loss,
        traits=dict(study.clients.traits.get(name, {})),
    )
    return Seat(stage.setup, site, Store(folder / "seen"))
