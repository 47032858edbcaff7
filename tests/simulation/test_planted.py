# SPDX-License-Identifier: Apache-2.0
"""The simulator finds faults that are planted in the product, and counts the seeds until then.

python tests/simulation/test_planted.py FILE writes the table of seeds.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from setting import Setting
from simulate import environment
from simulator import MEMORY, try_seed, undisturbed

from fedplan.federation import client, rounds
from fedplan.privacy.accounting import budget
from fedplan.runners.flower import rpc
from fedplan.sites.gateway import SiteGateway
from fedplan.storage import append_log, files, journal, store

Plant = Callable[[pytest.MonkeyPatch], None]


def without(module: Any, name: str, result: object = None) -> Plant:
    """Let a function do nothing."""
    return lambda patch: patch.setattr(module, name, lambda *_, **__: result)


class _Silent:
    """`os` without fsync."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return (lambda _: None) if name == "fsync" else getattr(self._module, name)


def unsynced(module: Any) -> Plant:
    """Let a module sync no file's content."""
    return lambda patch: patch.setattr(module, "os", _Silent(module.os))


def _ledger_last(patch: pytest.MonkeyPatch) -> None:
    """Commit the global state, and write the ledger's lines when the next round is committed."""
    append = append_log.CommittedLog.append
    held = list[Any]()

    def late(self: Any, lines: Any) -> None:
        if self.file.name == "ledger.jsonl":
            held.append(list(lines))
            lines = held.pop(0) if len(held) > 1 else []
        append(self, lines)

    patch.setattr(append_log.CommittedLog, "append", late)


def _forgetful_journal(patch: pytest.MonkeyPatch) -> None:
    """Send the reply before the state is stored: every third state is lost."""
    commit, calls = journal.Journal.commit, list[int]()

    def sometimes(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) % 3:
            commit(self, *arguments)

    patch.setattr(journal.Journal, "commit", sometimes)


def _old_state(patch: pytest.MonkeyPatch) -> None:
    """Train on from any state, however old: neither the client nor the gateway looks."""
    patch.setattr(SiteGateway, "_require_current_state", lambda *_: None)
    plain = client.load_client_state
    patch.setattr(client, "load_client_state", lambda j, c, _, before="": plain(j, c, 0, before))


def _stale_versions(patch: pytest.MonkeyPatch) -> None:
    """Leave out a value, though the site lost it and asks for all of them."""
    original = rounds.RequestBuilder.request

    def request(self: Any, name: str, traits: Any, *, full: bool = False) -> Any:
        made = original(self, name, traits, full=full)
        return replace(made, values=dict(list(made.values.items())[1:]))

    patch.setattr(rounds.RequestBuilder, "request", request)


def _one_hello(patch: pytest.MonkeyPatch) -> None:
    """Wait for the reply to a hello for ever, though it may be lost."""
    plain = rpc.SiteRpc._greet_nodes

    def greet(self: Any) -> Any:
        online = plain(self)
        for node in self._pending_hellos.values():
            self._hello_after.pop(node, None)
        return online

    patch.setattr(rpc.SiteRpc, "_greet_nodes", greet)


PLANTED: dict[str, Plant] = {
    "small files are not synced": unsynced(files),
    "lines of logs are not synced": unsynced(append_log),
    "checkpoints are not synced": unsynced(store),
    "names of checkpoints are not synced": without(store, "sync_folder"),
    "names of small files are not synced": without(files, "sync_folder"),
    "states are stored after replies": _forgetful_journal,
    "the ledger is written after the state": _ledger_last,
    "an old state is trained on": _old_state,
    "values are left out of a request": _stale_versions,
    "a charge is not written": without(budget.Budget, "charge"),
    "a lost hello is not sent again": _one_hello,
}
"""Faults in order of commits, syncs, replay, budget, versions and liveness."""
SEEDS = 2000


def seeds_until_found(fault: str, root: Path, first: int = 0) -> tuple[int, str]:
    """Return how many seeds the simulator needs to find a planted fault, and what it then says.

    Raises LookupError if SEEDS do not find it.
    """
    for seed in range(first, first + SEEDS):
        undisturbed(Setting.draw(Random(seed)), root)
        with pytest.MonkeyPatch.context() as patch:
            PLANTED[fault](patch)
            try:
                try_seed(seed, root)
            except Exception as error:
                return seed + 1 - first, f"{type(error).__name__}: {error}"[:200]
    raise LookupError(f"{fault}: not found in {SEEDS} seeds")


@pytest.mark.nightly
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    assert seeds_until_found(fault, tmp_path)[0] <= SEEDS


def main(file: Path) -> None:
    """Write for each planted fault how many seeds find it, from seed 0 on."""
    root, found = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None)), dict[str, Any]()
    for fault in PLANTED:
        began = time.process_time()
        seeds, sentence = seeds_until_found(fault, root)
        seconds = round(time.process_time() - began, 1)
        found[fault] = {"seeds": seeds, "CPU seconds": seconds, "says": sentence}
        facts = {key: value for key, value in environment().items() if key != "failpoints"}
        table = {"command": f"python tests/simulation/test_planted.py {file}", "facts": facts}
        file.write_text(json.dumps(table | {"first seed": 0, "faults": found}, indent=1) + "\n")
    shutil.rmtree(root)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
