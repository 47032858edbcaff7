# SPDX-License-Identifier: Apache-2.0
"""AUROC and calibration error from secure sums and from noisy sums, beside the pooled values.

Five sites have made-up probabilities of two classes, of a model with an AUROC of about 0.84, which
is evaluated once.

python -m research.site_scores --output research/results/site_scores.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from math import sqrt
from pathlib import Path

import numpy as np

from fedplan.data.metrics import METRICS, Predictions
from fedplan.data.score_counts import BINS, NOISY_BINS, Counts, ScoreCounts
from fedplan.federation.aggregation.secure_input import COUNTS_SLOT, counts_slots
from fedplan.privacy.accounting.accountant import Release, calibrate
from fedplan.privacy.mechanisms.noise import NoiseStream
from fedplan.secagg.round import ClientInput, simulate_secagg_round
from fedplan.secagg.terms import Terms

SITES, DELTA = 5, 1e-5
EXAMPLES, EPSILONS = (100, 1_000, 10_000), (0.5, 1.0, 2.0, 4.0, 8.0)
NAMES = ("auroc", "calibration_error", "accuracy")


def draw_sites(examples: int, seed: int) -> list[Predictions]:
    """Return the predictions at each site, of `examples` examples in all."""
    draw, sites = np.random.default_rng(seed), list[Predictions]()
    for _ in range(SITES):
        count = examples // SITES
        truth = (draw.random(count) < 0.3).astype(int)
        logit = 1.6 * (1.4 * truth - 1.1 + draw.normal(0, 1, count))
        yes = 1 / (1 + np.exp(-logit))
        probabilities = np.column_stack([1 - yes, yes])
        predicted, ones = (yes > 0.5).astype(int), np.ones(count, int)
        sites.append(Predictions(truth, predicted, probabilities, np.zeros(count), ones))
    return sites


def secure_sum(counts: list[Counts]) -> Counts:
    """Return the sum of the sites' counts by the protocol of secure aggregation."""
    terms = Terms("scores", "", "", 1, "", 4, 3, counts_slots(len(counts[0])))
    inputs = {
        f"site-{i}": ClientInput({COUNTS_SLOT: each.view(np.uint64)}, 1)
        for i, each in enumerate(counts)
    }
    return simulate_secagg_round(terms, inputs).numbers[COUNTS_SLOT].view(np.int64)


def noisy_sum(counts: list[Counts], stddev: float) -> Counts:
    """Return the sum of the sites' counts, to each of which the site has added noise."""
    total = np.zeros_like(counts[0])
    for each in counts:
        noise = NoiseStream(os.urandom(32)).rounded_gaussian((len(each),), stddev, 1.0)
        total += each + noise.numpy().astype(np.int64)
    return total


def compare(examples: int, epsilon: float, trials: int) -> dict[str, float]:
    """Return errors, widths and coverage over trials; an epsilon of 0 is for sums without noise."""
    noise = calibrate(epsilon, DELTA, lambda noise: [Release(noise)]) if epsilon else 0.0
    layout = ScoreCounts(2, bins=NOISY_BINS if epsilon else BINS)
    stddev, found = noise * layout.sensitivity, dict[str, list[float]]()
    for seed in range(trials):
        sites = draw_sites(examples, seed)
        counts, pooled = [layout.count(site) for site in sites], Predictions.join(sites)
        total = noisy_sum(counts, stddev) if epsilon else secure_sum(counts)
        assert epsilon or (total == layout.count(pooled)).all()
        told = layout.metrics(total, stddev * sqrt(SITES))
        for name in NAMES:
            right, value = METRICS[name](pooled), told.get(name)
            if value is None or right is None:
                found.setdefault(f"{name} missing", []).append(1.0)
                continue
            low, high = told.get(f"{name}_low", value), told.get(f"{name}_high", value)
            found.setdefault(f"{name} pooled", []).append(right)
            found.setdefault(f"{name} error", []).append(abs(value - right))
            found.setdefault(f"{name} width", []).append(high - low)
            found.setdefault(f"{name} covered", []).append(low - 1e-9 <= right <= high + 1e-9)
    means = {
        name: len(each) if "missing" in name else float(np.mean(each))
        for name, each in found.items()
    }
    return {"examples": examples, "epsilon": epsilon, "noise_multiplier": noise, **means}


def main() -> None:
    """Compare, print a line for each setting, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    began, rows = time.process_time(), list[dict[str, float]]()
    for examples in EXAMPLES:
        for epsilon in (0.0, *EPSILONS):
            rows.append(compare(examples, epsilon, arguments.trials))
            print({name: round(value, 4) for name, value in rows[-1].items()})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    result = {
        "command": "python -m research.site_scores --output research/results/site_scores.json",
        "commit": commit.stdout.strip(),
        "hardware": f"{platform.machine()}, one thread, {time.process_time() - began:.0f} s of CPU",
        "python": platform.python_version(),
        "seeds": f"0 to {arguments.trials - 1}",
        "sites": SITES,
        "delta": DELTA,
        "bins": {"secure sums": BINS, "with noise": NOISY_BINS},
        "rows": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
