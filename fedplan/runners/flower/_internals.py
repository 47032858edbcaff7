# SPDX-License-Identifier: Apache-2.0
"""Every name of Flower outside its public API that fedplan uses, each with its purpose.

The public API is flwr.app, flwr.clientapp and flwr.serverapp; other modules of this package import
from there or from here. Other versions of Flower may move or rename the names below:
`python tests/runners/test_internals.py FOLDER` lists those that the flwr unpacked in FOLDER lacks.
"""
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from flwr.cli.build import build_fab_from_disk  # packs the empty app, without which no run starts
from flwr.common.constant import (
    ACCESS_TOKEN_KEY,  # the metadata key of the operator's token
    SubStatus,  # how a task ended
)
from flwr.common.serde import (
    fab_to_proto,  # the empty app, as sent by StartRun
    run_from_proto,  # the run of a server task, for the grid
)
from flwr.proto.control_pb2 import (
    ListNodesRequest,  # control API: list the sites
    RegisterNodeRequest,  # control API: register a site's key
    StartRunRequest,  # control API: start a run
    UnregisterNodeRequest,  # control API: revoke a site
)
from flwr.proto.fleet_pb2 import ActivateNodeRequest  # fleet API: asks whether a key is registered
from flwr.proto.message_pb2 import (
    PullObjectRequest,  # runtime API: a part of a message
    PullObjectResponse,  # says that the part will not come
)
from flwr.proto.node_pb2 import NodeInfo  # a registered site, as the control API lists it
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,  # runtime API: take a task
    PullTaskInputRequest,  # runtime API: the run of a server task
    PushTaskOutputRequest,  # runtime API: how a server task ended
    SendTaskHeartbeatRequest,  # runtime API: one heartbeat of a task
)
from flwr.supercore.auth.typing import AccountInfo  # the account that the plugin returns
from flwr.supercore.constant import TaskType  # which tasks are taken: of a server or a client
from flwr.supercore.control import ControlHttpClient  # client of the control API
from flwr.supercore.error import ApiErrorCode  # tells a registered key from an unknown one
from flwr.supercore.fab import Fab  # the empty app
from flwr.supercore.heartbeat import HeartbeatSender  # keeps a task alive during a round
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,  # authenticates calls for one task
    RuntimeVersionHttpInterceptor,  # tells the server our version of Flower
    SuperExecAuthHttpInterceptor,  # authenticates who takes tasks, by the secret
)
from flwr.supercore.primitives.asymmetric import (
    public_key_to_bytes,  # a node key as Flower sends it
)
from flwr.supercore.protobuf.client import (
    ProtobufCall,  # type of the call that an interceptor passes on
    ProtobufClientInterceptor,  # type of an interceptor
    ProtobufRequestContext,  # type of a request, to which the operator's token is added
)
from flwr.supercore.run import RunNotRunningException  # Flower has ended its run: start another
from flwr.supercore.runtime import RuntimeHttpClient  # client of the runtime API
from flwr.supercore.task_identity import (
    TaskIdentity,  # the server task, as messages of the grid name it
)
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin  # base of the plugin for the operator
from flwr.superlink.grid.http_grid import HttpGrid  # the grid of a server task
from flwr.supernode.fleet_http_client import FleetHttpClient  # client of the fleet API
from flwr.supernode.node_auth_http_interceptor import (
    NodeAuthHttpInterceptor,  # signs by the node key
)
from flwr.supernode.runtime.run_clientapp import (
    pull_task_input,  # the message of a client task
    push_message,  # the reply to it
    push_task_output,  # the end of a client task
)

ATTRIBUTES = {
    "ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL": "the key is registered",
    "ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED": "the key is not registered",
    "ControlHttpClient.ListNodes": "lists the sites",
    "ControlHttpClient.RegisterNode": "registers a site's key",
    "ControlHttpClient.StartRun": "starts a run",
    "ControlHttpClient.UnregisterNode": "revokes a site",
    "ControlHttpClient.from_server_address": "makes the client, with TLS and interceptors",
    "FleetHttpClient.ActivateNode": "asks whether a key is registered",
    "FleetHttpClient.from_server_address": "makes the client, with TLS and interceptors",
    "HttpGrid._retry_invoker": "limited: Flower repeats for ever, or interrupts this process",
    "HttpGrid.get_nodes": "registered names of nodes, and when each came online",
    "HttpGrid.set_run": "the run that messages belong to",
    "NoOpControlAuthnPlugin.validate_tokens_in_metadata": "admits the operator alone",
    "RuntimeHttpClient.AcquireTask": "takes a task",
    "RuntimeHttpClient.PullObject": "wrapped, to give up a message whose rest never comes",
    "RuntimeHttpClient.PullTaskInput": "the run of a server task",
    "RuntimeHttpClient.PushTaskOutput": "how a server task ended",
    "RuntimeHttpClient.SendTaskHeartbeat": "keeps a task alive",
    "RuntimeHttpClient.from_server_address": "makes the client, with TLS and interceptors",
    "SubStatus.COMPLETED": "a task that ended well",
    "SubStatus.FAILED": "a task that failed",
    "TaskIdentity.node_id": "the server task, as messages of the grid name it",
    "TaskIdentity.run_id": "the server task, as messages of the grid name it",
    "TaskIdentity.task_id": "the server task, as messages of the grid name it",
    "TaskType.CLIENT_APP": "tasks of a site",
    "TaskType.SERVER_APP": "tasks of a server",
    "flwr.superlink.cli.flower_superlink.flower_superlink": "the program flower-superlink",
    "flwr.superlink.cli.flower_superlink.load_control_authn_plugin": "replaced by the operator's",
}
"""Attributes of these names that fedplan uses, with their purposes."""


def run_flower_superlink(plugin: NoOpControlAuthnPlugin, arguments: Sequence[str]) -> None:
    """Run flower-superlink with `plugin` for its control API, in this process; sets `sys.argv`."""
    # The package exports a function of the same name, which hides the module.
    module: Any = import_module("flwr.superlink.cli.flower_superlink")
    module.load_control_authn_plugin = lambda: plugin
    sys.argv = ["flower-superlink", *arguments]
    module.flower_superlink()
