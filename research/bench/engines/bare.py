# SPDX-License-Identifier: Apache-2.0
"""Bare torch: one model, one loop, a weighted mean, and nothing else."""

from __future__ import annotations

import random

import torch
from gate import Gate
from work import moved, read_work


def main() -> None:
    work = read_work()
    model, draw = work.model(), random.Random(0)
    live = {k: v for k, v in model.named_parameters() if v.requires_grad}
    start = {k: v.detach().clone() for k, v in live.items()}
    current, cohort = start, work.spec["cohort"]
    _ = work.rows
    gate = Gate(work.line, work.rounds)
    gate.ready()
    for _ in range(work.rounds):
        mean = {k: torch.zeros_like(v) for k, v in current.items()}
        for number in draw.sample(range(work.spec["clients"]), cohort):
            with torch.no_grad():
                for key, value in current.items():
                    live[key].copy_(value)
            work.fit(model, number)
            with torch.no_grad():
                for key, value in live.items():
                    mean[key].add_(value, alpha=1 / cohort)
        current = mean
        gate.closed(lambda now=mean: moved(now, start))


if __name__ == "__main__":
    main()
