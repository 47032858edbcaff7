# SPDX-License-Identifier: Apache-2.0
"""Flower's client: a module of its own, so that an actor imports it once and keeps its model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from work import Work


@cache
def built(request: str) -> tuple[Work, nn.Module]:
    """One model for each actor: an app that builds a model in each turn would be slower."""
    torch.set_num_threads(1)
    fields = json.loads(Path(request).read_text())
    work = Work(**fields | {"folder": Path(fields["folder"])})
    return work, work.model()


def app_of(request: str) -> ClientApp:
    """The client of a workload."""
    client = ClientApp()

    @client.train()
    def _(message: Message, context: Context) -> Message:
        work, model = built(request)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss = work.fit(model, int(context.node_config["partition-id"]))
        metrics = MetricRecord({"loss": loss, "num-examples": work.spec["steps"]})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return client
