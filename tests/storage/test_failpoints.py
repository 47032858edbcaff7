# SPDX-License-Identifier: Apache-2.0
"""Laws of failpoints: silent unless armed, exact when armed."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from fedplan.errors import FedplanError
from fedplan.storage.files import POINTS, VARIABLE, failpoint, reset_failpoints


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    reset_failpoints()


def test_without_the_variable_nothing_happens() -> None:
    for name in POINTS:
        failpoint(name)


@pytest.mark.parametrize("action,reason", [("raise", errno.EIO), ("enospc", errno.ENOSPC)])
@pytest.mark.parametrize("name", POINTS)
def test_only_the_kth_time_fails(
    name: str, action: str, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{name}:{action}@3")
    others = [each for each in POINTS if each != name]
    for _ in range(2):
        failpoint(name)
        for each in others:
            failpoint(each)
    with pytest.raises(OSError, match=name) as raised:
        failpoint(name)
    assert raised.value.errno == reason
    failpoint(name)


def test_kill_is_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, how: sent.append((process, how)))
    monkeypatch.setenv(VARIABLE, f"{POINTS[0]}:kill@1")
    with pytest.raises(KeyError):
        failpoint(POINTS[0])  # a process that outlives its kill must not go on
    assert sent == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize(
    "asked",
    [
        *("x", ":", "@", "store.begun", "store.begun:kill", "store.begun:kill@"),
        *("store.begun:kill@0", "store.begun:kill@-1", "store.begun:kill@1.5"),
        *("store.begun:maim@1", "nowhere:kill@1", "store.begun:kill@1 ", "store.begun:kill@\u0663"),
        *("store.begun:kill@1,store.pruned:kill@1", "store.begun:kill@" + "9" * 5000),
    ],
)
def test_wrong_syntax_is_told(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(FedplanError, match=VARIABLE):
        failpoint(POINTS[0])


def test_unknown_points_are_refused() -> None:
    with pytest.raises(FedplanError, match=r"'store\.begin'.*POINTS"):
        failpoint("store.begin")
    assert len(set(POINTS)) == len(POINTS)
