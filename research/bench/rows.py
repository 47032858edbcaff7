# SPDX-License-Identifier: Apache-2.0
"""Rows: what the bench measures: a workload, the engines that do it, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from research.bench.workloads import Workload


@dataclass(frozen=True)
class Engine:
    """A program of research/bench/engines, the environment that it runs in, and its processes."""

    program: str
    environment: str = ""
    workers: int = 1
    before: bool = False


ENGINES = {
    "bare": Engine("bare"),
    "before": Engine("ours", before=True),
    "local": Engine("ours"),
    "pool": Engine("ours", workers=2),
    "ray": Engine("ours", workers=2),
    "pfl": Engine("stock_pfl", "bench-pfl"),
    "pfl 2": Engine("stock_pfl", "bench-pfl", workers=2),
    "flower": Engine("stock_flower", "bench-flower", workers=2),
}


@dataclass(frozen=True)
class Row:
    """One row: `each` rounds make a repetition, so that a short round is measured well too.

    Of a row that takes long, `quick` are the engines that play when it is to be quick, and once.
    """

    workload: Workload
    engines: tuple[str, ...]
    each: int
    base: str
    quick: tuple[str, ...] = ()

    def text(self) -> str:
        """What it is, in words."""
        work = self.workload
        who = f"{work.cohort} of {work.clients:,}" if work.asked else f"{work.clients}"
        steps = "1 step" if work.steps == 1 else f"{work.steps} steps"
        return f"{work.model}, {who} clients, {steps} of {work.batch}"


TURN = ("bare", "before", "local", "pfl")
CREW = ("before", "local", "pool", "ray", "pfl 2", "flower")
SHORT = ("bare", "local", "pfl")
ROWS = {
    "turn-vit-0.2M-1": Row(Workload("ViT 0.2 M", 10, 1, 4), TURN, 16, "bare"),
    "turn-vit-0.2M-4": Row(Workload("ViT 0.2 M", 10, 4, 8), TURN, 8, "bare"),
    "turn-vit-0.2M-16": Row(Workload("ViT 0.2 M", 10, 16, 8), TURN, 2, "bare"),
    "turn-vit-2.7M-4": Row(Workload("ViT 2.7 M", 4, 4, 16), TURN, 1, "bare"),
    "turn-minilm-1": Row(Workload("MiniLM 22.7 M", 4, 1, 16), TURN, 1, "bare"),
    "turn-minilm-4": Row(Workload("MiniLM 22.7 M", 4, 4, 16), TURN, 1, "bare", SHORT),
    "turn-minilm-16": Row(Workload("MiniLM 22.7 M", 2, 16, 16), TURN, 1, "bare", SHORT[:2]),
    "crew-vit-0.2M": Row(Workload("ViT 0.2 M", 100, 4, 8), CREW, 1, "local"),
    "crew-vit-2.7M": Row(Workload("ViT 2.7 M", 8, 4, 16), CREW, 1, "local", CREW[1:]),
    "crew-minilm": Row(Workload("MiniLM 22.7 M", 8, 4, 16), CREW, 1, "local", CREW[1:]),
    "flute-lr-mnist": Row(
        Workload("LR 7,850", 1000, 6, 10, asked=10),
        ("bare", "before", "local", "pfl", "flower"),
        20,
        "bare",
    ),
}
