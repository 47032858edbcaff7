# SPDX-License-Identifier: Apache-2.0
"""A private run killed again and again around its releases: all is charged, and nothing changes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_resume import ROUNDS, expected, federation, left, played
from torch import Tensor

from fedplan.privacy.guard import ClientGuard, ServerGuard
from fedplan.runners.executors import executor as runner
from fedplan.tensors.named import digest

ALWAYS = ("round.before_close", "round.ledger_written", "round.before_commit", "store.begun")
"""Points of every round, before it is for good: whoever dies there plays it again."""
BEFORE = (*ALWAYS, "log.begun", "log.written", "log.synced", "log.head_written")
"""The same, and those of a charge that is not on disk yet."""
AFTER = ("store.manifest_renamed", "round.committed")


def known(value: Any) -> str:
    if isinstance(value, Tensor):
        return digest(value)
    values = getattr(value, "values", None)
    held = values if isinstance(values, dict) else value
    return hashlib.sha256(
        repr([(str(k), known(v)) for k, v in held.items()]).encode()
        if isinstance(held, dict)
        else repr(held).encode()
    ).hexdigest()[:16]


def watched(made: Callable[..., Any], file: Path, about: Callable[..., str]) -> Callable[..., Any]:
    """The same function, that writes down on disk all that it lets out, as it does."""

    def watching(*args: Any, **kwargs: Any) -> Any:
        found = made(*args, **kwargs)
        with file.open("a") as out:
            out.write(json.dumps([about(*args), known(found)]) + "\n")
            out.flush()
            os.fsync(out.fileno())
        return found

    return watching


@pytest.mark.parametrize(
    "kills", [8, pytest.param(50, marks=pytest.mark.nightly)], ids=lambda kills: f"{kills} kills"
)
@pytest.mark.parametrize("name", ["veiled", "cloaked"])
def test_all_that_was_released_was_charged(
    name: str, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, _ = expected(name, False)
    run, out, draw = tmp_path / "run", tmp_path / "out.jsonl", random.Random(name)
    run.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(
            ServerGuard, "release_mean", watched(ServerGuard.release_mean, out, lambda *a: a[4])
        )
        patch.setattr(
            ServerGuard,
            "release_votes",
            watched(ServerGuard.release_votes, out, lambda *a: f"{a[4]}: vote"),
        )
        patch.setattr(
            ClientGuard,
            "release_votes",
            watched(ClientGuard.release_votes, out, lambda *a: f"{a[4]}: vote"),
        )
        if name == "cloaked":
            sent = watched(runner.train_round, out, lambda agreement, site, down: down.name)
            patch.setattr(runner, "train_round", sent)
        done = 0
        while done < kills:
            rest = ROUNDS - 1 - federation(run, name, replies=False).global_state.round
            some = BEFORE + AFTER if rest * (kills / ROUNDS) > kills - done else BEFORE
            some = some if rest else ALWAYS
            point, time = draw.choice(some), draw.randint(1, 2 if rest > 1 else 1)
            ended = played(run, name, replies=False, failpoint=f"{point}:kill@{time}")
            done += ended == -signal.SIGKILL
            assert ended == -signal.SIGKILL, (point, time, rest)
        assert played(run, name, replies=False) == 0
    assert left(run, name, replies=False) == reference
    fed = federation(run, name, replies=False)
    guards = (
        [fed.server.aggregation.guard]
        if fed.server.aggregation.guard
        else [site.privacy.guard for site in fed.clients.values()]
    )
    charged = Counter(c.name for guard in guards if guard for c in guard.budget.charges)
    released = {tuple(json.loads(line)) for line in out.read_text().splitlines()}
    assert released
    for about, contents in Counter(about for about, _ in released).items():
        assert charged[about] >= contents
