# SPDX-License-Identifier: Apache-2.0
"""Estimate what a language model costs by LoRA, QLoRA or as a whole: memory, bytes, seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fedplan.language.plan import Role, Roles
from fedplan.models.params import ITEMSIZE, Kind, Param, Params
from fedplan.reports.formats import duration, megabytes
from fedplan.reports.memory import (
    PACKED_DTYPE,
    TrainingStep,
    estimate_memory,
    vocabulary_size,
)

CARDS = (24, 48, 80)
"""Memory of usual GPUs in GB (10^9 bytes)."""
RUNTIME_BYTES = 2 * 10**9
"""The most that PyTorch and the driver take beside a step."""
LOWEST_RATIO = 0.81
"""The lowest estimate of a step relative to its measurement: research/results/bench_turn.txt."""
SUM_BYTES, COPIES = 8, 2
"""A server's bytes per shared number: of the exact sum, and copies in its dtype, beside the model.
Estimated over measured is 0.96 to 0.97 if all is trained: research/results/memory-peaks.json."""
LINE = 10**8
"""Bits per second of the line on which bytes become seconds."""
LORA_RANK = 8
"""Rank of the LoRA on query and value that is assumed for a plan without adapters, as fedit's."""


@dataclass(frozen=True)
class CostRow:
    """One way to train a model: memory in bytes, estimated, and bytes of a client per round.

    `client` and `server` are of one process, without PyTorch itself and a server optimizer;
    `traffic` is upload and download, from the shapes.
    """

    name: str
    client: int
    server: int
    traffic: int

    @property
    def seconds(self) -> float:
        """The seconds that the traffic takes on a LINE, without latency and protocol."""
        return 8 * self.traffic / LINE

    @property
    def cards(self) -> dict[int, str]:
        """Whether a client fits on each of CARDS: "yes", "no", or "close".

        It is close if it fits by the estimate, and not if that is as low as the lowest measured.
        """
        high = self.client / LOWEST_RATIO + RUNTIME_BYTES
        return {
            card: "yes"
            if high <= card * 10**9
            else "close"
            if self.client + RUNTIME_BYTES <= card * 10**9
            else "no"
            for card in CARDS
        }

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text; memory has two digits, since it is an estimate."""
        marks = {"yes": "", "close": "?"}
        fits = [f"{c}{marks[word]}" for c, word in self.cards.items() if word in marks]
        memory = (_gigabytes(self.client), _gigabytes(self.server))
        return (
            self.name,
            *memory,
            megabytes(self.traffic),
            duration(self.seconds),
            ", ".join(fits) or "none",
        )

    def json(self) -> dict[str, Any]:
        """Return the row as plain values in bytes and seconds."""
        return {
            "name": self.name,
            "client_bytes_estimated": self.client,
            "server_bytes_estimated": self.server,
            "round_bytes": self.traffic,
            "seconds_at_100_mbit": self.seconds,
            "fits_gb": {str(card): word for card, word in self.cards.items()},
        }


def _gigabytes(count: int) -> str:
    """Return bytes in GB with two digits: 0.054, 7.8, 160, 1,200."""
    value = float(f"{count / 1e9:.2g}")
    if value < 1:
        return f"{value:g}"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def cost_rows(
    params: Params, roles: Roles, traffic: int, step: TrainingStep
) -> tuple[CostRow, ...]:
    """Return the costs of a language model by LoRA, QLoRA and as a whole; empty for other models.

    `params` with their `roles` and the `traffic` of a round are those of the plan. A plan that
    trains adapters is the row LoRA; for others, LoRA is assumed on query and value. A plan of
    another kind has a row of its own, too.
    """
    if not vocabulary_size(params):
        return ()
    whole = replace(step, quantized="")
    nf4 = replace(step, quantized=step.quantized or "nf4")
    base = tuple(p for p in params if p.kind is not Kind.ADAPTER)
    adapted = len(base) < len(params)
    packed = any(p.dtype == PACKED_DTYPE for p in params)
    if not adapted:
        lora = (*params, *_lora_params(params))
        rows = (
            []
            if all(role is Role.SHARE for role in roles.values())
            else [_row("this plan", params, roles, traffic, step)]
        )
        roles = {p: Role.SHARE if p.kind is Kind.ADAPTER else Role.FREEZE for p in lora}
        traffic = 2 * sum(p.nbytes for p in lora if p.kind is Kind.ADAPTER)
    else:
        lora, rows = params, list[CostRow]()
    rows += [] if packed else [_row("LoRA", lora, roles, traffic, whole)]
    name = "LoRA, int8" if nf4.quantized == "int8" else "QLoRA"
    rows.append(_row(name, lora, roles, traffic, nf4))
    if not packed:
        everything: Roles = dict.fromkeys(base, Role.SHARE)
        rows.append(_row("all of it", base, everything, 2 * sum(p.nbytes for p in base), whole))
    return tuple(rows)


def _row(name: str, params: Params, roles: Roles, traffic: int, step: TrainingStep) -> CostRow:
    idle = replace(step, autocast=False)  # a server takes no step
    weights = estimate_memory(params, dict.fromkeys(params, Role.FREEZE), idle).total
    shared = [p for p in params if roles[p] is Role.SHARE]
    server = weights + sum(p.numel * SUM_BYTES + COPIES * p.nbytes for p in shared)
    return CostRow(name, estimate_memory(params, roles, step).total, server, traffic)


def _lora_params(params: Params) -> Iterable[Param]:
    """Yield the factors of a LoRA of LORA_RANK on all queries and values of the blocks."""
    for p in params:
        matrix = p.kind in (Kind.QUERY, Kind.VALUE) and len(p.shape) == 2 and p.block_id
        if not matrix:
            continue
        dtype = p.dtype if ITEMSIZE[p.dtype] >= 4 else "float32"
        common = {"kind": Kind.ADAPTER, "dtype": dtype, "on": frozenset({p.kind}), "tied": ()}
        shapes = {"lora_A": (LORA_RANK, p.shape[1]), "lora_B": (p.shape[0], LORA_RANK)}
        for attribute, shape in shapes.items():
            tags = frozenset({attribute.lower()})
            name = f"{p.name}.{attribute}"
            yield replace(p, name=name, shape=shape, tags=tags, **common)
