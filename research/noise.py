# SPDX-License-Identifier: Apache-2.0
"""Measure the noise of differential privacy: exact probabilities, impossible pairs, and cost.

    python research/noise.py --output research/results/noise.json

Each section is written as soon as it is measured, and not measured again by a later call. The
comparison is Box and Muller's method from 53-bit uniform numbers, rounded to the same grid: near
the origin most pairs of grid points are impossible under it, so that one pair refutes a false
hypothesis about the sum. The new noise has no impossible pair; the count of pairs that the old
method could not make is then the same under both hypotheses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import chisquare, mannwhitneyu

from fedplan.privacy.mechanisms.noise import NoiseStream

Floats = NDArray[np.float64]
SIGMA = 2.0**47 * 1.2
"""Standard deviation in grid steps of the pairs, as fine as the noise was before."""


def box_muller(count: int, sigma: float) -> Floats:
    """Rounded Gaussian numbers by Box and Muller's method; number i pairs with i + count / 2."""
    words = NoiseStream(os.urandom(32)).words(count).reshape(2, -1) >> np.uint64(11)
    first, second = (torch.from_numpy(each.view(np.int64)).double() * 2.0**-53 for each in words)
    radius, angle = (1 - first).log().mul(-2).sqrt(), second * (2 * math.pi)
    values = torch.cat([radius * angle.cos(), radius * angle.sin()])
    return values.mul_(sigma).round_().numpy()


def exact(count: int, sigma: float) -> Floats:
    """Rounded Gaussian numbers of the package."""
    return NoiseStream(os.urandom(32)).rounded_gaussian((count,), sigma, 1.0).numpy()


def impossible(noise: Floats, sigma: float) -> int:
    """Number of pairs near the origin that Box and Muller's method cannot make."""
    x, y = np.abs(noise / sigma).reshape(2, -1)
    near = x * x + y * y < 0.02**2
    x, y, half = x[near], y[near], 0.51 / sigma
    low = np.maximum(x - half, 0) ** 2 + np.maximum(y - half, 0) ** 2
    high = (x + half) ** 2 + (y + half) ** 2
    first, last = (np.expm1(-square / 2) * -(2.0**53) for square in (low, high))
    return int((np.floor(last) < np.ceil(first)).sum())


def pairs(sample: Callable[[int, float], Floats], trials: int, count: int) -> dict[str, Any]:
    """Impossible pairs of the noise under the true hypothesis and under a false one."""
    change = np.full(count, round(0.9 / math.sqrt(count) / 1.2 * SIGMA))
    counts = [[], []]
    for _ in range(trials):
        noise = sample(count, SIGMA)
        counts[0].append(impossible(noise, SIGMA))
        counts[1].append(impossible(noise + change, SIGMA))
    refuted = [sum(map(bool, each)) for each in counts]
    p = float(mannwhitneyu(*counts).pvalue) if counts[0] != counts[1] else 1.0
    means = [float(np.mean(each)) for each in counts]
    return {"trials": trials, "numbers": count, "refuted": refuted, "mean": means, "p": p}


def probabilities(sigma: float, draws: int) -> dict[str, Any]:
    """Chi-square of the integers against their exact probabilities."""
    counts = dict[int, int]()
    for _ in range(draws // 10**6):
        values, number = np.unique(exact(10**6, sigma).astype(int), return_counts=True)
        for value, each in zip(values.tolist(), number.tolist(), strict=True):
            counts[value] = counts.get(value, 0) + each
    edge = math.ceil(9 * sigma)
    numbers = np.arange(-edge, edge + 1)
    sizes = np.abs(numbers)
    expected = (ndtr(-(sizes - 0.5) / sigma) - ndtr(-(sizes + 0.5) / sigma)) * draws
    seen = np.array([counts.get(int(each), 0) for each in numbers], float)
    keep = expected > 10
    rest = expected[~keep].sum() > 5
    seen, expected = (
        np.append(each[keep], [each[~keep].sum()] * int(rest)) for each in (seen, expected)
    )
    test = chisquare(seen, expected * seen.sum() / expected.sum())
    return {"draws": draws, "cells": len(seen), "p": float(test.pvalue)}


def cost(count: int) -> dict[str, float]:
    """CPU seconds per million numbers, in alternating parts of at most 10**7."""
    exact(1, SIGMA)  # makes the table of this sigma, in 35 ms
    seconds = {"exact": 0.0, "box_muller": 0.0}
    for _ in range(max(1, count // 10**7)):
        for name, sample in (("exact", exact), ("box_muller", box_muller)):
            start = time.process_time()
            sample(min(count, 10**7), SIGMA)
            seconds[name] += time.process_time() - start
    return {name: value / count * 10**6 for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    file = parser.parse_args().output
    torch.set_num_threads(1)
    results = (
        json.loads(file.read_text())
        if file.exists()
        else {
            "command": "python research/noise.py",
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
            "machine": f"{platform.processor() or platform.machine()}, one thread, shared with other work",
        }
    )
    sections: dict[str, Callable[[], Any]] = {
        f"cost {count:.0e}": lambda count=count: cost(count)
        for count in (10**4, 10**5, 10**6, 10**7, 10**8)
    }
    for sigma in (0.25, 0.5, 1.0, 3.7, 100.0):
        sections[f"probabilities {sigma}"] = lambda sigma=sigma: probabilities(sigma, 3 * 10**7)
    for count, trials in ((10**5, 200), (10**6, 200)):
        sections[f"pairs box_muller {count:.0e}"] = lambda c=count, t=trials: pairs(
            box_muller, t, c
        )
        sections[f"pairs exact {count:.0e}"] = lambda c=count, t=trials: pairs(exact, t, c)
    for name, measure in sections.items():
        if name not in results:
            results[name] = measure()
            file.write_text(json.dumps(results, indent=1) + "\n")
            print(name, results[name], flush=True)


if __name__ == "__main__":
    os.nice(5)
    main()
