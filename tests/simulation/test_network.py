# SPDX-License-Identifier: Apache-2.0
"""A server continues when the network loses its messages."""

from __future__ import annotations

import time
from random import Random

import pytest
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from network import Network, VirtualClock, Weather

from fedplan.federation.participation import Timeouts
from fedplan.runners.flower.records import make_reply
from fedplan.runners.flower.rpc import SiteRpc
from fedplan.tensors.serialization import pack_message


@pytest.mark.parametrize("waits_for_approval", [False, True])
def test_a_hello_that_is_lost_is_sent_again(
    waits_for_approval: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, replies = VirtualClock(), [{"client": "site"}]
    if waits_for_approval:
        replies.append({"refused": "not-approved"})

    def answer(_: str, message: FlowerMessage, __: Context) -> FlowerMessage:
        return make_reply(message, lambda *_: pack_message({}, {**replies.pop()}))

    def sleep(seconds: float) -> None:
        clock.at(seconds, lambda: None)  # else a long time passes if no message is on its way
        clock.progress()
        clock.sleep(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    network = Network(["site"], clock, Random(0), answer)
    rpc = SiteRpc(network, ["site"], Timeouts())
    if waits_for_approval:
        while not rpc.refusals:
            rpc.poll_nodes()
            sleep(1.0)
    network.weather = Weather(lost=1.0)
    sleep(10.0)
    rpc.poll_nodes()
    network.weather = Weather()
    rpc.wait_for_sites(1)
    assert list(rpc.sites) == ["site"]
