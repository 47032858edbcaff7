# SPDX-License-Identifier: Apache-2.0
"""ClientApp and ServerApp of a study, for Flower's own simulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedplan.errors import FedplanError
from fedplan.federation.secagg_config import SECAGG_STEPS
from fedplan.runners.flower.server import run_server
from fedplan.runners.flower.superexec import make_reply
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import SiteRuntime
from fedplan.studies.experiment import build_experiment
from fedplan.studies.schema import read_study
from fedplan.tensors.message import Message


def study_client_app(file: Path) -> ClientApp:
    """Return the ClientApp of a study file, which loads the study at the first message.

    The `partition-id` of a node is the client's index in the study; the run config needs `folder`.
    """

    def answer(context: Context, kind: str, message: Message) -> Message:
        number = int(context.node_config["partition-id"])
        return _site_runtime(file, _run_folder(context), number).answer(kind, message)

    return client_app(answer)


def client_app(answer: Callable[[Context, str, Message], Message]) -> ClientApp:
    """Return a ClientApp that passes every fedplan message to `answer`, and sends the result.

    `answer` gets the node's context, the kind ("hello", "poll", "train", "evaluate" or a step of
    secure aggregation) and the message. If `answer` raises, only the error's code is sent.
    """
    app = ClientApp()

    def reply(envelope: FlowerMessage, context: Context) -> FlowerMessage:
        return make_reply(envelope, lambda kind, message: answer(context, kind, message))

    for kind in ("hello", "poll", *SECAGG_STEPS):
        app.query(kind)(reply)
    app.train()(reply)
    app.evaluate()(reply)
    return app


def study_server_app(file: Path) -> ServerApp:
    """Return the ServerApp that runs or continues a study file in the run config's `folder`.

    The app raises FedplanError without a `folder`.
    """
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
    """Return the runtime of the client with index `number` in a study file, made once and cached.

    All clients share the state folder FOLDER/sites.
    """
    study = read_study(file)
    name = (study.clients.names or list(build_experiment(study).data.train))[number]
    return SiteRuntime(Site(name=name, state=str(folder / "sites"), dataset=name), study)
