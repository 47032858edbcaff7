# SPDX-License-Identifier: Apache-2.0
"""Two ranks train one model: as one does, to the last bits; and neither waits for a lost one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import texts
from together import CASES, Double, Other, Tagger, tag_loss
from torch import nn

from fedplan.errors import FedplanError
from fedplan.models.values import get_values
from fedplan.runners import ProcessTransport
from fedplan.tensors.devices import CPU
from fedplan.training.ranks import RankLost, Ranks, require_mean_loss


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessTransport]:
    """A process that plays rank 1 of two, in one group for all tests; the last one breaks it."""
    file = tmp_path_factory.mktemp("group") / "group"
    transport = ProcessTransport(2, Other)
    transport.start(1, {"do": "start"})
    assert transport.receive(600.0) == [(1, ({}, {}))]
    transport.send(1, {"do": "join", "file": str(file)})
    Ranks(0, 2, 60.0).join(file, CPU)
    assert transport.receive(60.0) == [(1, ({}, {}))]
    yield transport
    Ranks.leave()
    transport.close()


def test_a_loss_over_the_whole_batch_is_refused() -> None:
    model, rows = Tagger().double(), Double(texts(9, tags=True))
    require_mean_loss(model, tag_loss, rows)
    for loss in (lambda m, b: tag_loss(m, b) * len(b["input_ids"]), mean_square):
        with pytest.raises(FedplanError, match="devices_per_client: the loss of two examples"):
            require_mean_loss(model, loss, rows)


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["input_ids"]).sum((1, 2)).var(correction=0) + 1


@pytest.mark.parametrize("name", [name for name in CASES if name != "broken"])
def test_two_ranks_train_as_one(name: str, other: ProcessTransport) -> None:
    """Each case ends with a step of one row, so that rank 1 has none."""
    other.send(1, {"do": name})
    job, done = CASES[name].fit(Ranks(0, 2))
    ((_, reply),) = other.receive(120.0)
    assert reply is not None and "error" not in reply[1], reply
    alone, whole = CASES[name].fit(None)
    assert (done.steps, reply[1]["steps"]) == (whole.steps, whole.steps)
    assert done.loss == pytest.approx(whole.loss, rel=1e-6) == reply[1]["loss"]
    values, expected = (get_values(each.model, each.roles) for each in (job, alone))
    for param, role in job.roles.items():
        key = param.key
        assert torch.equal(values[key], reply[0][key]), key
        assert torch.allclose(values[key], expected[key], rtol=0, atol=1e-6), key
        assert role.is_trained or torch.equal(values[key], job.start[key]), key
    for name, value in {**whole.aux, **whole.memory}.items():
        mine = {**done.aux, **done.memory}[name]
        assert torch.allclose(mine, value, rtol=0, atol=1e-6), name
    assert any(not torch.equal(values[k], v) for k, v in job.start.items())


def test_a_rank_that_fails_is_not_waited_for(other: ProcessTransport) -> None:
    other.send(1, {"do": "broken"})
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 0 of 2 lost another"):
        CASES["broken"].fit(Ranks(0, 2))
    assert time.monotonic() - began < 50.0, "a timeout ended it"
    ((_, reply),) = other.receive(60.0)
    assert reply is not None and "this rank fails" in reply[1]["error"]
    with pytest.raises(FedplanError, match="has a process group"):
        Ranks(0, 2).join(Path("group"), CPU)
