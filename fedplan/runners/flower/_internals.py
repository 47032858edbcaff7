# SPDX-License-Identifier: Apache-2.0
"""Every name of Flower outside its public API that fedplan uses, each with its purpose.

The public API is flwr.app, flwr.clientapp and flwr.serverapp; other modules of this package import
from there or from here. Other versions of Flower may move or rename the names below:
`python tests/runners/test_internals.py FOLDER` lists those that the flwr unpacked in FOLDER lacks,
and of their attributes, which that file names.
"""
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from math import inf
from threading import Lock
from typing import Any

from flwr.app import Error, Message, Metadata  # public: replies, and errors in their place
from flwr.app.message import make_message  # makes an error reply of the metadata alone
from flwr.cli.build import build_fab_from_disk  # packs the empty app, without which no run starts
from flwr.common.constant import (
    ACCESS_TOKEN_KEY,  # the metadata key of the operator's token
    SUPERLINK_NODE_ID,  # the sender of the SuperLink's own error replies
    ErrorCode,  # which error replies say that a message is lost
    SubStatus,  # how a task ended
)
from flwr.common.serde import (
    fab_to_proto,  # the empty app, as sent by StartRun
    run_from_proto,  # the run of a server task, for the grid
)
from flwr.common.serde_utils import metadata_from_proto  # the verified metadata of a reply
from flwr.proto.control_pb2 import (
    ListNodesRequest,  # control API: list the sites
    RegisterNodeRequest,  # control API: register a site's key
    StartRunRequest,  # control API: start a run
    UnregisterNodeRequest,  # control API: revoke a site
)
from flwr.proto.fleet_pb2 import ActivateNodeRequest  # fleet API: asks whether a key is registered
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,  # runtime API: the parts of a message may be deleted
    ObjectTree,  # the ids of the parts of a message
    PullObjectRequest,  # runtime API: a part of a message
    PullObjectResponse,  # says that the part will not come
)
from flwr.proto.node_pb2 import NodeInfo  # a registered site, as the control API lists it
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,  # runtime API: take a task
    PullAppMessagesRequest,  # runtime API: the replies that have arrived
    PullTaskInputRequest,  # runtime API: the run of a server task
    PushTaskOutputRequest,  # runtime API: how a server task ended
    SendTaskHeartbeatRequest,  # runtime API: one heartbeat of a task
)
from flwr.supercore.auth.typing import AccountInfo  # the account that the plugin returns
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,  # the header with the node key of who sends a request
    TaskType,  # which tasks are taken: of a server or a client
)
from flwr.supercore.control import ControlHttpClient  # client of the control API
from flwr.supercore.error import ApiErrorCode  # tells a registered key from an unknown one
from flwr.supercore.fab import Fab  # the empty app
from flwr.supercore.heartbeat import HeartbeatSender  # keeps a task alive during a round
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree  # ids of the parts
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,  # gets a part of a message by its id
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,  # a part of a message never came
    inflate_object_from_contents,  # makes a message of its parts
    pull_objects,  # gets all parts of a message
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,  # authenticates calls for one task
    RuntimeVersionHttpInterceptor,  # tells the server our version of Flower
    SuperExecAuthHttpInterceptor,  # authenticates who takes tasks, by the secret
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # a node key to be sent
from flwr.supercore.protobuf.client import (
    ProtobufCall,  # type of the call that an interceptor passes on
    ProtobufClientInterceptor,  # type of an interceptor
    ProtobufRequestContext,  # type of a request, to which the operator's token is added
)
from flwr.supercore.run import RunNotRunningException  # Flower has ended its run: start another
from flwr.supercore.runtime import RuntimeHttpClient  # client of the runtime API
from flwr.supercore.task_identity import TaskIdentity  # the server task in the grid's messages
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin  # base of the plugin for the operator
from flwr.superlink.dependencies.linkstate import get_linkstate  # which node keys are registered
from flwr.superlink.grid.http_grid import HttpGrid  # the grid of a server task
from flwr.superlink.routers.fleet.node_auth import authenticate_node  # checks a signature
from flwr.supernode.fleet_http_client import FleetHttpClient  # client of the fleet API
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # signs by the key
from flwr.supernode.runtime.run_clientapp import (
    pull_task_input,  # the message of a client task
    push_message,  # the reply to it
    push_task_output,  # the end of a client task
)
from starlette.middleware import Middleware
from starlette.types import ASGIApp

LOST_CODES = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""Codes of the SuperLink's error replies for a request or reply that it no longer has."""


class ReplyGrid(HttpGrid):
    """The grid of a server task, where a malformed or too large reply fails alone.

    Flower's own raises the error of one malformed reply for all that are pulled together, and takes
    the request that a reply answers from the reply's body, which the SuperLink does not verify.
    """

    reply_limit: float = inf
    """Most bytes of a reply. Of a larger reply the rest is not fetched."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived to these messages.

        A reply that is incomplete, too large, cannot be read, or names another request or sender
        than the SuperLink verified, becomes an error reply. If a call raises, replies given out by
        then are lost.
        """
        request = PullAppMessagesRequest(message_ids=message_ids)
        response = self._runtime_client.PullMessages(request)
        replies = zip(response.messages_list, response.message_object_trees, strict=True)
        return [self._fetch(metadata_from_proto(each.metadata), tree) for each, tree in replies]

    def _fetch(self, verified: Metadata, tree: ObjectTree) -> Message:
        """Return the message of an object tree, or an error reply by its verified metadata."""
        client, run = self._runtime_client, self.run.run_id
        pull = make_pull_object_fn_protobuf(client.PullObject, self.node, run)
        lock, room = Lock(), self.reply_limit

        def pull_within_limit(object_id: str) -> bytes:
            nonlocal room
            content = pull(object_id)
            with lock:  # several threads pull
                room -= len(content)
            if room < 0:
                raise ObjectPullError(object_id, "the reply is too large")
            return content

        error, contents, number = None, dict[str, bytes](), verified.message_id
        try:
            ids = [each.object_id for each in iterate_object_tree(tree)]
            contents = pull_objects(ids, pull_within_limit)
        except ObjectPullError:
            if room >= 0:
                return _error_reply(verified, "the reply is incomplete")
            error = f"the reply is larger than {self.reply_limit} bytes"
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=number)
        )
        return read_reply(verified, contents) if error is None else _error_reply(verified, error)


def read_reply(verified: Metadata, contents: dict[str, bytes]) -> Message:
    """Return the reply whose objects are `contents` by id; empties `contents`.

    It is an error reply if it cannot be read, names another request or sender than `verified`, or
    is a site's error with one of LOST_CODES.
    """
    try:
        message = inflate_object_from_contents(verified.message_id, contents)
    except Exception as error:  # the content is the site's, and Flower checks little of it
        return _error_reply(verified, f"the reply cannot be read: {type(error).__name__}")
    if not isinstance(message, Message):
        return _error_reply(verified, "the reply is no message")
    metadata = message.metadata
    if (metadata.reply_to_message_id, metadata.src_node_id) != (
        verified.reply_to_message_id,
        verified.src_node_id,
    ):
        return _error_reply(verified, "the reply names another request or sender")
    is_site = verified.src_node_id != SUPERLINK_NODE_ID
    if is_site and message.has_error() and message.error.code in LOST_CODES:
        # Such errors of the SuperLink count as no failure of the site.
        return _error_reply(verified, "the reply has an error code of the SuperLink")
    metadata.__dict__["_message_id"] = verified.message_id
    return message


def _error_reply(verified: Metadata, reason: str) -> Message:
    return make_message(verified, error=Error(ErrorCode.UNKNOWN, reason))


def run_flower_superlink(
    plugin: NoOpControlAuthnPlugin,
    middleware: Callable[[ASGIApp], ASGIApp],
    arguments: Sequence[str],
) -> None:
    """Run flower-superlink with `plugin` for its control API, in this process; sets `sys.argv`.

    `middleware` wraps the ASGI application: it gets each request before Flower does.
    """
    # The package exports a function of the same name, which hides the module.
    module: Any = import_module("flwr.superlink.cli.flower_superlink")
    module.load_control_authn_plugin = lambda: plugin
    extensions: Any = import_module("flwr.superlink.extensions")
    extensions.get_middleware = lambda: (Middleware(middleware),)
    sys.argv = ["flower-superlink", *arguments]
    module.flower_superlink()
