# SPDX-License-Identifier: Apache-2.0
"""Score counts of two tables that differ in one row, from a site's files to what its noise hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sites import NAME, RUN, Anybody, hello, study_text, words_of, world_of
from torch import nn

from fedplan.data.examples import Examples
from fedplan.data.metrics import Predictions
from fedplan.data.tasks.definition import Task
from fedplan.federation.evaluation import make_eval_request
from fedplan.federation.ledger.faults import read_faults
from fedplan.federation.messages import request_message
from fedplan.privacy.guard import ClientGuard
from fedplan.sites.gateway import SiteGateway
from fedplan.sites.policy import Policy
from fedplan.tensors.serialization import unpack_message

Rows = dict[str, Any]
ROWS, LEAST = 30, 20
DRAW = np.random.default_rng(1)
TABLE: Rows = {
    "image": DRAW.integers(0, 255, (ROWS, 8, 8), dtype=np.uint8),
    "digit": DRAW.integers(0, 3, ROWS),
    "patient": np.arange(ROWS) // 4,
}
STUDY = study_text().replace("holdout_fraction = 0.0", "holdout_fraction = 0.95")
STUDY += "[evaluate]\non_clients = true\nnoise_multiplier = 2.0\n"


class Counting(Anybody):
    """Approves of every study, and lets score counts leave, with the policy's own limits."""

    def __init__(self) -> None:
        self.policy = Policy.model_validate({"metrics": ["counts"]})
        assert self.policy.min_examples == LEAST


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, float]]:
    """The counts and the sensitivity of each release, before noise."""
    seen, release = list[tuple[Any, float]](), ClientGuard.release_counts

    def noted(self: ClientGuard, counts: Any, sensitivity: float, *more: str) -> list[int]:
        seen.append((np.array(counts), sensitivity))
        return release(self, counts, sensitivity, *more)

    monkeypatch.setattr(ClientGuard, "release_counts", noted)
    return seen


def answer(folder: Path, rows: Rows, study: str = STUDY, scale: float = 1.0) -> dict[str, Any]:
    """What a site with these rows answers to an evaluation after round 1."""
    folder.mkdir()
    np.savez(folder / "rows.npz", **rows)
    gateway = SiteGateway(words_of(folder)[0], Counting())
    told = unpack_message(gateway.answer("hello", hello(study)))[1]
    assert "agreement" in told, told
    assert gateway._runtime is not None
    endpoint = gateway._runtime[1].endpoint(RUN)
    state = replace(world_of(endpoint, scale=scale), round=1)
    request = make_eval_request(endpoint.agreement, state, NAME, {}, full=True)
    return unpack_message(gateway.answer("evaluate", request_message(request)))[1]


def rows_of(count: int, table: Rows = TABLE) -> Rows:
    return {name: column[:count] for name, column in table.items()}


def require_hidden(released: list[tuple[Any, float]]) -> None:
    """Each release differs from the next by no more than what the noise is for."""
    for (one, sensitivity), (other, same) in pairwise(released):
        assert sensitivity == same
        assert np.linalg.norm(one - other) <= sensitivity + 1e-9


def test_no_number_of_examples_is_a_limit(tmp_path: Path, released: list[Any]) -> None:
    """The policy requires 20 examples for metrics; with noise any number of them is counted."""
    sizes = [0, 1, LEAST - 1, LEAST, LEAST + 1]
    answers = [answer(tmp_path / str(n), rows_of(n)) for n in sizes]
    assert {(*each,) for each in answers} == {("counts",)}
    assert len({len(each["counts"]) for each in answers}) == 1
    examples = [int(counts[:9].sum()) for counts, _ in released]
    assert {LEAST - 1, LEAST} <= set(examples), "on both sides of the limit"
    for part in (released[:2], released[2:]):
        require_hidden(part)


def changed(**columns: Callable[[Any], Any]) -> Rows:
    """The table with other values in its last row, which one of two neighbours lacks."""
    table = {name: column.copy() for name, column in TABLE.items()}
    for name, value in columns.items():
        table[name][LEAST - 1] = value(table[name])
    return rows_of(LEAST, table)


NAN = float("nan")
CASES: dict[str, tuple[Rows, str, float]] = {
    "a label that the study has not": (changed(digit=lambda _: 7), STUDY, 1.0),
    "the only example of its class": (
        changed(digit=lambda _: 2) | {"digit": np.array([0] * (LEAST - 1) + [2])},
        STUDY,
        1.0,
    ),
    "an example twice": (changed(image=lambda c: c[3], digit=lambda c: c[3]), STUDY, 1.0),
    "an example of a group": (
        changed(),
        STUDY.replace("[clients]", 'group = "patient"\n[clients]'),
        1.0,
    ),
    "an example of no group": (
        changed(patient=lambda _: -1),
        STUDY.replace("[clients]", 'group = "patient"\n[clients]'),
        1.0,
    ),
    "an example that a filter takes": (
        changed(patient=lambda _: 1),
        STUDY.replace("[clients]", "filter = { patient = [0, 1, 2, 3, 4] }\n[clients]"),
        1.0,
    ),
    "a model without numbers": (changed(), STUDY, NAN),
    "a personal model": (
        changed(),
        STUDY.replace('plan = "share()"', 'plan = "chain(share(), keep(head))"'),
        1.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_no_example_decides_over_others(case: str, tmp_path: Path, released: list[Any]) -> None:
    rows, study, scale = CASES[case]
    for name, count in (("without", LEAST - 1), ("with", LEAST)):
        assert set(answer(tmp_path / name, rows_of(count, rows), study, scale)) == {"counts"}
    require_hidden(released)
    examples = [int(counts[:9].sum()) for counts, _ in released]
    assert examples[1] - examples[0] in (0, 1) and examples[0] > LEAST / 2


def test_an_example_that_fails_decides_over_no_other(
    tmp_path: Path, released: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    predict = Task.predict

    def failing(self: Task, model: nn.Module, examples: Examples, **more: Any) -> Predictions:
        pixels = examples.batch(torch.arange(1))["pixel_values"]
        if len(pixels.unique()) == 1:
            raise RuntimeError("out of memory")
        return predict(self, model, examples, **more)

    monkeypatch.setattr(Task, "predict", failing)
    rows = changed(image=lambda _: 255)
    for name, count in (("without", LEAST - 1), ("with", LEAST)):
        assert set(answer(tmp_path / name, rows_of(count, rows))) == {"counts"}
    require_hidden(released)
    assert "out of memory" in str(read_faults(tmp_path / "with/state"))
