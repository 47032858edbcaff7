# SPDX-License-Identifier: Apache-2.0
"""Clients that lie: their updates and records fit each other, and nothing that they trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client
from fedplan.federation.client_round import train_round
from fedplan.federation.ledger.records import join_digests, split_digests
from fedplan.federation.messages import Request, Update
from fedplan.runners.executors import executor
from fedplan.tensors.named import digests

Lie = Callable[[Tensor], Tensor]


def lied(agreement: Agreement, update: Update, lie: Lie, weight: int = 0) -> Update:
    """An update with other values or another weight, and a record that says the same."""
    values = {key: lie(value) for key, value in update.values.items()}
    weight = weight or update.weight
    after = split_digests(agreement.params, update.ledger_line["after"]) | digests(values)
    line: dict[str, Any] = {**update.ledger_line, "after": join_digests(agreement.params, after)}
    return replace(update, values=values, weight=weight, ledger_line={**line, "weight": weight})


def let_lie(patch: pytest.MonkeyPatch, names: set[str], lie: Lie, weight: int = 0) -> None:
    """Have some clients of the local runner lie from now on."""

    def turn(agreement: Agreement, client: Client, request: Request, **how: Any) -> Update:
        update = train_round(agreement, client, request, **how)
        return lied(agreement, update, lie, weight) if client.name in names else update

    patch.setattr(executor, "train_round", turn)
