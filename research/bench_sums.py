# SPDX-License-Identifier: Apache-2.0
"""The speed of the exact sum beside a plain float32 running sum, taken in turns in one run."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from fedplan.tensors.sums import ExactSum

COUNT = 25_000_000
WEIGHT = 7


def seconds(step: Callable[[], object]) -> float:
    """How long a step takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare(threads: int, turns: int) -> None:
    """Write the median time, the update's GB/s and the ratio to the float32 sum."""
    torch.set_num_threads(threads)
    values = torch.randn(COUNT)
    plain, double, exact = torch.zeros(COUNT), torch.zeros(COUNT).double(), ExactSum()
    steps: dict[str, Callable[[], object]] = {
        "float32": lambda: plain.add_(values, alpha=WEIGHT),
        "float64": lambda: double.add_(values, alpha=WEIGHT),
        "exact": lambda: exact.add({"values": values}, WEIGHT),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in steps.items():
            spent = seconds(step)
            if turn:  # the first turn touches fresh memory
                taken[name].append(spent)
    middle = {name: statistics.median(times) for name, times in taken.items()}
    for name, spent in middle.items():
        speed, ratio = values.nbytes / spent / 1e9, middle["float32"] / spent
        sys.stdout.write(
            f"threads {threads}  {name:8} {spent * 1e3:6.1f} ms  {speed:5.2f} GB/s  {ratio:.2f}\n"
        )


if __name__ == "__main__":
    for threads in (1, 2):
        compare(threads, turns=int(sys.argv[1]) if len(sys.argv) > 1 else 11)
