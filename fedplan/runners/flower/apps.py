# SPDX-License-Identifier: Apache-2.0
"""Apps: a study as the two ends of an app that Flower's own simulation starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedplan.errors import FedplanError
from fedplan.federation.masking import STEPS
from fedplan.runners.flower.carriage import carry_study
from fedplan.runners.flower.executor import answered
from fedplan.runners.site import Site
from fedplan.runners.worker import Worker, roster_of
from fedplan.studies.schema import read_study
from fedplan.tensors.message import Message


def client_of(file: Path) -> ClientApp:
    """The app of every client of a study, each by its place among them."""

    def answer(context: Context, kind: str, message: Message) -> Message:
        number = int(context.node_config["partition-id"])
        return _worker(file, _folder(context), number).answer(kind, message)

    return client_app(answer)


def client_app(answer: Callable[[Context, str, Message], Message]) -> ClientApp:
    """An app that answers by a site's endpoint."""
    app = ClientApp()

    def reply(envelope: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(envelope, lambda kind, message: answer(context, kind, message))

    app.query("hello")(reply)
    app.query("poll")(reply)
    for step in STEPS:
        app.query(step)(reply)
    app.train()(reply)
    app.evaluate()(reply)
    return app


def server_of(file: Path) -> ServerApp:
    """The app of the server. The run is started with `folder`: where it keeps the run."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        carry_study(grid, read_study(file), _folder(context))

    _ = main
    return app


def _folder(context: Context) -> Path:
    said = context.run_config.get("folder")
    if not said:
        raise FedplanError("the run does not say its folder: --run-config 'folder=\"/a/folder\"'")
    return Path(str(said))


@cache
def _worker(file: Path, folder: Path, number: int) -> Worker:
    """A client of a simulation. All have one home, and each has an account."""
    study = read_study(file)
    name = roster_of(study)[number]
    return Worker(Site(name=name, home=str(folder / "sites"), dataset=name), study)
