# SPDX-License-Identifier: Apache-2.0
"""Rows of the benchmark: a workload, its engines, and the number of rounds."""

from __future__ import annotations

from dataclasses import dataclass

from research.bench.workloads import Workload


@dataclass(frozen=True)
class Engine:
    """A program of research/bench/engines, its environment, and its number of processes."""

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
    """One row. A repetition is `each` rounds, so that short rounds are measured well, too.

    A long row has fewer `repetitions`; with --quick only its engines in `quick` run, once.
    """

    workload: Workload
    engines: tuple[str, ...]
    each: int
    base: str
    quick: tuple[str, ...] = ()
    repetitions: int = 5

    def text(self) -> str:
        """The workload as text."""
        work = self.workload
        who = f"{work.cohort} of {work.clients:,}" if work.asked else f"{work.clients}"
        steps = "1 step" if work.steps == 1 else f"{work.steps} steps"
        model = f"{work.model} with LoRA of rank {work.rank}" if work.rank else work.model
        return f"{model}, {who} clients, {steps} of {work.batch}"


ONE_PROCESS = ("bare", "before", "local", "pfl")
WORKERS = ("before", "local", "pool", "ray", "pfl 2", "flower")
LORA = ("bare", "before", "local")
QUICK = ("bare", "local", "pfl")
ROWS = {
    "turn-vit-0.2M-1": Row(Workload("ViT 0.2 M", 10, 1, 4), ONE_PROCESS, 16, "bare"),
    "turn-vit-0.2M-4": Row(Workload("ViT 0.2 M", 10, 4, 8), ONE_PROCESS, 8, "bare"),
    "turn-vit-0.2M-16": Row(Workload("ViT 0.2 M", 10, 16, 8), ONE_PROCESS, 2, "bare"),
    "turn-vit-2.7M-4": Row(Workload("ViT 2.7 M", 4, 4, 16), ONE_PROCESS, 1, "bare", repetitions=3),
    "turn-minilm-1": Row(Workload("MiniLM 22.7 M", 4, 1, 16), ONE_PROCESS, 1, "bare"),
    "turn-minilm-4": Row(Workload("MiniLM 22.7 M", 4, 4, 16), ONE_PROCESS, 1, "bare", QUICK),
    "turn-minilm-16": Row(
        Workload("MiniLM 22.7 M", 2, 16, 16), ONE_PROCESS, 1, "bare", QUICK[:2], repetitions=2
    ),
    "turn-lora-1": Row(Workload("MiniLM 22.7 M", 4, 1, 16, rank=8), LORA, 2, "bare"),
    "turn-lora-4": Row(Workload("MiniLM 22.7 M", 4, 4, 16, rank=8), LORA, 1, "bare", LORA[:2]),
    "crew-vit-0.2M": Row(Workload("ViT 0.2 M", 100, 4, 8), WORKERS, 1, "local", repetitions=3),
    "crew-vit-2.7M": Row(
        Workload("ViT 2.7 M", 8, 4, 16), WORKERS[1:], 1, "local", WORKERS[1:], repetitions=2
    ),
    "crew-minilm": Row(
        Workload("MiniLM 22.7 M", 8, 4, 16), WORKERS[1:], 1, "local", WORKERS[1:], repetitions=2
    ),
    "flute-lr-mnist": Row(
        Workload("LR 7,850", 1000, 6, 10, asked=10),
        ("bare", "before", "local", "pfl", "flower"),
        20,
        "bare",
        repetitions=3,
    ),
}
