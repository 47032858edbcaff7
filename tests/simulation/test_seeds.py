# SPDX-License-Identifier: Apache-2.0
"""Whatever faults a seed draws, a federation ends with the bits of an undisturbed one.

A failing seed is replayed by `make simulate SEED=n`, and stored in FOUND with its fault.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulator import MEMORY, try_seed

FOUND: dict[int, str] = {}
"""Seeds that once failed, with the fault that each has found."""
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
        seed = secrets.randbelow(2**31)
        try:
            faults += try_seed(seed, root)
        except BaseException as error:
            error.add_note(f"replay with: make simulate SEED={seed}")
            raise
    assert faults.total() > 0


def main(first: int, count: int, results: Path) -> int:
    """Try seeds and write a line for each hundred of them; return the number that failed."""
    root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    failed, faults, began = list[tuple[int, str]](), Counter[str](), time.process_time()
    end, total = first + count, 0
    for seed in range(first, end):
        try:
            faults += try_seed(seed, root)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append((seed, f"{type(error).__name__}: {error}"[:500]))
            sys.stdout.write(f"failed: {failed[-1]}\n")
            sys.stdout.flush()
            total += 1
        if seed + 1 - first == 100 or seed + 1 == end:
            seconds = round(time.process_time() - began, 1)
            line = {"first": first, "next": seed + 1, "failed": failed, "cpu_seconds": seconds}
            with results.open("a") as out:
                out.write(json.dumps(line | {"faults": dict(sorted(faults.items()))}) + "\n")
            first, failed, faults, began = seed + 1, [], Counter(), time.process_time()
    return total


if __name__ == "__main__":
    import logging

    import torch

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])) > 0)
