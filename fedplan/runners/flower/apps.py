# SPDX-License-Identifier: Apache-2.0
"""Apps: a study as the two ends that Flower starts: `client_of` at each site, `server_of` once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedplan.errors import FedplanError
from fedplan.runners.flower.client import client_app
from fedplan.runners.worker_client import WorkerSpec, ask
from fedplan.tensors.message import Message

# What needs torch is imported where it is used: a client's process lives for one message.


def client_of(file: Path, rows: Callable[[str], Any] | None = None) -> ClientApp:
    """The app of a site. Its node is started with `name`, `home` and, to train on, `data`.

    `rows` reads the site's table from what `data` says; without it, `data` is a file or folder.
    """
    reader = f"{inspect.getsourcefile(rows)}:{rows.__name__}" if rows is not None else ""

    def answer(context: Context, kind: str, message: Message) -> Message:
        spec = _spec(file, context, reader)
        if spec.node.get("resident", True) and "partition-id" not in spec.node:
            return ask(spec, kind, message)
        from fedplan.runners.worker import answered

        return answered(spec, kind, message)

    return client_app(answer)


def server_of(file: Path) -> ServerApp:
    """The app of the server. The run is started with `folder`: where it keeps the run."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedplan.runners.flower.carrier import carry_study

        carry_study(grid, file, _folder(context))

    _ = main
    return app


def _folder(context: Context) -> Path:
    said = context.run_config.get("folder")
    if not said:
        raise FedplanError("the run does not say its folder: --run-config 'folder=\"/a/folder\"'")
    return Path(str(said))


def _spec(file: Path, context: Context, rows: str) -> WorkerSpec:
    node = dict(context.node_config)
    if "home" in node:
        home = str(node["home"])
    elif "partition-id" in node:
        home = str(_folder(context) / "sites")
    else:
        raise FedplanError(
            "this node does not say its home: --node-config 'home=\"/a/folder\"'"
        ).coded("settings")
    return WorkerSpec(str(file), home, node, rows)
