# SPDX-License-Identifier: Apache-2.0
"""Mistakes in calls from Python: each message has the thing, the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedplan as fp
from fedplan.audits.run import verify_run
from fedplan.models.catalog import params_of

CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "positional": (lambda: fp.TrainConfig(5), r"TrainConfig\(5\).*TrainConfig\(rounds=5\)"),
    "lr": (lambda: fp.TrainConfig(learning_rate=0.1), "did you mean train.lr"),
    "lone epsilon": (lambda: fp.PrivacyConfig(epsilon=3.0), "unit: it is missing.*set it"),
    "explain a method": (
        lambda: fp.explain(fp.methods.fedper(), params_of("vit-tiny-16")),
        r"fp.methods.fedper\(\).plan",
    ),
    "verify a run": (lambda: verify_run(fp.Run(Path("run"))), r"as run\.folder"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_a_call_is_told(name: str) -> None:
    call, text = CASES[name]
    with pytest.raises(fp.FedplanError, match=text):
        call()
