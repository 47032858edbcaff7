# SPDX-License-Identifier: Apache-2.0
"""A federation ends with the bits of an undisturbed one, whatever faults a seed draws.

A failing seed is printed and stored in failed-seeds.jsonl with its fault; `make simulate SEED=n
SEEDS=1` runs it again. After the fault is mended, the seed goes into FOUND.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulate import record_of, store_failure
from simulator import MEMORY, try_seed

FOUND: dict[int, str] = {
    14: "a server waited for ever for the reply to a hello that was lost while approval was due",
    19: "a joint choice of layers was made without a site whose disk failed, whatever the quorum",
    46: "after one read error an encrypted checkpoint got another folder id, and was refused",
    3000396: "a bit of a site's key file flipped before its first use: it was another key",
    20000502: "a bit of a new run's id flipped: sites were asked about another run",
    1246070610: "a request that came twice brought back older values under the newer version",
}
"""Seeds that once failed, with the fault that each seed found."""
SECONDS = 15.0
"""Seconds of a processor that fresh seeds have by day."""


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Folders of trials: in memory, if there is such a place."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_once_failed_passes(seed: int, root: Path) -> None:
    try_seed(seed, root)


def test_fresh_seeds_end_with_the_bits_of_an_undisturbed_run(root: Path) -> None:
    end, faults = time.process_time() + SECONDS, Counter[str]()
    while time.process_time() < end:
        record = record_of(secrets.randbelow(2**31), root)
        if "failed" in record:
            store_failure(record)
            command = f"replay with: make simulate SEED={record['seed']} SEEDS=1"
            pytest.fail(f"{command}\n{record['failed']}\n{record['traceback']}", pytrace=False)
        faults.update(record["faults"])
    assert faults.total() > 0
