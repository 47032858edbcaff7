# SPDX-License-Identifier: Apache-2.0
"""Explain what a plan does with a model before anything runs, as terminal tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.federation.wire_cost import WireCost
from fedplan.language.client_classes import Participants
from fedplan.language.plan import Plan, Role
from fedplan.models.params import Kind, Param, Params
from fedplan.reports.figures.palette import ROLE_STYLES
from fedplan.reports.forecast_types import ByteRange, ClientForecast, Forecast, StageForecast
from fedplan.reports.forecasts import forecast
from fedplan.reports.memory import GPU_BYTES, MemoryEstimate, TrainingStep, estimate_memory
from fedplan.reports.units import megabytes, millions, percent

if TYPE_CHECKING:
    from torch import nn

ROLE_MEANINGS = {
    Role.SHARE: "clients train it and upload it; the server averages it",
    Role.KEEP: "personal: each client trains its own copy and never uploads it",
    Role.FREEZE: "frozen: not trained, the same for all clients",
    Role.HOLD: "personal and frozen: each client's own copy, never uploaded",
}
"""The legend of the roles."""
MAX_STAGE_COLUMNS = 3
"""The most stages with columns side by side; more stages get one row each."""


@dataclass(frozen=True)
class PartRow:
    """A table row: params of one kind that have the same role in every stage."""

    part: str
    params: tuple[Param, ...]

    @property
    def numel(self) -> int:
        """The number of values in the row's params."""
        return sum(p.numel for p in self.params)

    @property
    def nbytes(self) -> int:
        """The bytes of the row's params."""
        return sum(p.nbytes for p in self.params)

    def role(self, stage: StageForecast) -> Text:
        """Return the coloured name of the role in a stage.

        If layer scores choose blocks, their number follows: `SHARE 4/12`.
        """
        role = stage.permitted[self.params[0]]
        best = stage.choosing_step(self.params[0])
        if best is None:
            return Text(role.name, style=ROLE_STYLES[role])
        blocks = len({p.block_id for p in stage.permitted if p.block_id and best.part.holds(p)})
        return Text(f"{role.name} {best.count}/{blocks}", style=ROLE_STYLES[role])

    def upload_bytes(self, stage: StageForecast, wire_cost: WireCost) -> int:
        """Return the bytes of these params that a client uploads per round, if most are chosen."""
        return sum(
            wire_cost.upload_bytes(p) for p in self.params if stage.heaviest[p] is Role.SHARE
        )


@dataclass(frozen=True)
class Explanation:
    """The explanation of a plan: print it with rich or `str`, or take it as `json`.

    It has the memory of a training step only if `step` is given.
    """

    forecast: Forecast
    step: TrainingStep | None = None

    def __str__(self) -> str:
        out = StringIO()
        Console(file=out, width=100, color_system=None).print(self.__rich__())
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())

    def __rich__(self) -> RenderableType:
        clients = self.forecast.clients
        tables = [t for c in clients for t in self._tables(c, alone=len(clients) == 1)]
        notes = map(Text, self.forecast.notes)
        return Group(self._title(), *tables, self._legend(), *notes, *self._memory_tables())

    def memory(self, client: ClientForecast) -> dict[str, MemoryEstimate]:
        """Return the memory of a training step by stage name, for the largest choice of blocks.

        It is empty if the explanation has no `step`.
        """
        if self.step is None:
            return {}
        params = self.forecast.params
        return {s.name: estimate_memory(params, s.heaviest, self.step) for s in client.stages}

    def _memory_tables(self) -> list[RenderableType]:
        """Return a heading, then a memory table and a fit note per class of clients."""
        if self.step is None:
            return []
        parts = list[RenderableType]([Text(f"\nTraining step, memory in MB: {self.step.text}\n")])
        for client in self.forecast.clients:
            stages = self.memory(client)
            largest = max(stages.values(), key=lambda memory: memory.total)
            columns = stages if len(stages) <= MAX_STAGE_COLUMNS else {"largest stage": largest}
            if len(self.forecast.clients) > 1:
                parts.append(Text(client.client_class, style="bold underline"))
            parts += [_memory_table(columns), _gpu_note(largest)]
        return parts

    def rows(self, client: ClientForecast) -> list[PartRow]:
        """Return the table rows for a class of clients: params by stack, kind and roles."""
        groups: dict[tuple[object, ...], list[Param]] = {}
        for p in sort_params(self.forecast.params):
            roles = tuple((s.certain[p], s.permitted[p]) for s in client.stages)
            groups.setdefault((p.stack if self._has_stacks else "", p.kind, roles), []).append(p)
        named = [(f"{stack} {kind}".strip(), ps) for (stack, kind, _), ps in groups.items()]
        split = {part for part, _ in named if sum(part == other for other, _ in named) > 1}
        return [
            PartRow(f"{part} {_block_text(ps) or 'outside'}" if part in split else part, tuple(ps))
            for part, ps in named
        ]

    @property
    def _has_stacks(self) -> bool:
        """Whether the model has several stacks, so that rows name theirs."""
        return len({p.stack for p in self.forecast.params if p.stack}) > 1

    def _title(self) -> Text:
        """Return the plan's text, the size of the model, and the cost of compression, if any."""
        f = self.forecast
        numel, tensors = sum(p.numel for p in f.params), len({p.name for p in f.params})
        text = Text(f"{f.plan.text}\n", style="bold")
        return text.append(
            f"{millions(numel)} params in {tensors} tensors, {megabytes(f.nbytes)} MB; "
            f"plan {f.plan.fingerprint}\n" + (f"{f.wire_cost.text}\n" if f.wire_cost.text else ""),
            style="not bold",
        )

    def _tables(self, client: ClientForecast, *, alone: bool) -> list[RenderableType]:
        """Return the table of a class of clients and its totals; a heading unless it is `alone`."""
        heading = [] if alone else [Text(client.client_class, style="bold underline")]
        few = len(client.stages) <= MAX_STAGE_COLUMNS
        table = self._stage_columns(client) if few else self._stage_rows(client)
        return [*heading, table, self._total(client)]

    def _stage_columns(self, client: ClientForecast) -> Table:
        """Return a table with a row per part and, per stage, a column of roles and of upload."""
        table = _columns("part", "params>", "MB>")
        for stage in client.stages:
            table.add_column(stage.name, no_wrap=True)
            table.add_column("upload", justify="right", no_wrap=True)
        for row in self.rows(client):
            cells = list[RenderableType]()
            for stage in client.stages:
                upload = row.upload_bytes(stage, self.forecast.wire_cost)
                cells += [row.role(stage), megabytes(upload) if upload else "-"]
            table.add_row(row.part, millions(row.numel), megabytes(row.nbytes), *cells)
        table.add_row()
        costs = [self._costs(stage) for stage in client.stages]
        for label in costs[0]:
            cells = [cell for cost in costs for cell in ("", cost[label])]
            table.add_row(label, "", "", *cells, style="bold")
        return table

    def _stage_rows(self, client: ClientForecast) -> Table:
        """Return a table with a row per stage: the trained params and the costs."""
        labels = self._costs(client.stages[0])
        table = _columns("stage", "trained", *(f"{label}>" for label in labels))
        for stage in client.stages:
            trained = [p for p in stage.permitted if stage.permitted[p].is_trained]
            table.add_row(stage.name, _trained_text(trained), *self._costs(stage).values())
        return table

    def _costs(self, stage: StageForecast) -> dict[str, str]:
        """Return the costs of a stage per client and round by their labels, in MB and percent."""
        return {
            "upload": _at_most(stage.min_upload, stage.max_upload),
            "download": _at_most(stage.min_download, stage.max_download),
            "AdamW state": megabytes(stage.optimizer_bytes),
            "upload saved": percent(1 - stage.max_upload / self.forecast.nbytes),
        }

    def _total(self, client: ClientForecast) -> Text:
        """Return the sentence of a client's upload and download over the whole run."""
        rounds = sum(len(s.rounds) for s in client.stages)
        saved = 1 - client.max_upload / (self.forecast.nbytes * rounds)
        than = f"{percent(abs(saved))} {'less' if saved >= 0 else 'more'} than share()"
        least, most = client.upload_range
        than = than if least == most else f"{'at least' if saved >= 0 else 'at most'} {than}"
        return Text(
            f"\nOver {rounds} rounds a client uploads {_range_text(client.upload_range)} MB, "
            f"{than}, and downloads {_range_text(client.download_range)} MB, "
            f"{megabytes(client.first_download)} MB of it in its first round.\n"
        )

    def _legend(self) -> Text:
        """Return the meaning of each role in the tables, and of their columns."""
        stages = [stage for client in self.forecast.clients for stage in client.stages]
        used = {role for stage in stages for role in stage.permitted.values()}
        legend = Text()
        for role in (role for role in Role if role in used):
            legend.append(f"{role.name:7}", style=ROLE_STYLES[role])
            legend.append(f"{ROLE_MEANINGS[role]}\n")
        return legend.append(
            "Upload, download and AdamW state are MB per client and round; upload saved is "
            "relative to share()."
        )

    def json(self) -> dict[str, Any]:
        """Return the explanation as plain values; sizes are in bytes."""
        f = self.forecast
        return {
            "plan": f.plan.text,
            "fingerprint": f.plan.fingerprint,
            "params": sum(p.numel for p in f.params),
            "bytes": f.nbytes,
            "rounds": f.rounds,
            "clients": [self._client_json(client) for client in f.clients],
            "notes": list(f.notes),
        }

    def _client_json(self, client: ClientForecast) -> dict[str, Any]:
        """Return the forecast of a class of clients as plain values."""
        return {
            "who": client.client_class,
            "bytes_up": client.max_upload,
            "bytes_up_least": client.upload_range[0],
            "bytes_down": client.max_download,
            "bytes_down_least": client.download_range[0],
            "bytes_first": client.first_download,
            "stages": [self._stage_json(client, stage) for stage in client.stages],
        }

    def _stage_json(self, client: ClientForecast, stage: StageForecast) -> dict[str, Any]:
        """Return a stage of a client's forecast, with its rows, as plain values."""
        return {
            "name": stage.name,
            "rounds": len(stage.rounds),
            "bytes_up": stage.max_upload,
            "bytes_up_least": stage.min_upload,
            "bytes_down": stage.max_download,
            "bytes_down_least": stage.min_download,
            "bytes_optimizer": stage.optimizer_bytes,
            "params_trained": stage.trained_params,
            **({"memory": self.memory(client)[stage.name].json()} if self.step else {}),
            "saved": 1 - stage.max_upload / self.forecast.nbytes,
            "parts": [
                {
                    "part": row.part,
                    "role": row.role(stage).plain,
                    "params": row.numel,
                    "bytes": row.nbytes,
                    "bytes_up": row.upload_bytes(stage, self.forecast.wire_cost),
                }
                for row in self.rows(client)
            ],
        }


def explain(
    plan: Plan,
    model: nn.Module | Params,
    *,
    rounds: int = 100,
    phases: Mapping[str, int] | None = None,
    participants: Participants | None = None,
    wire_cost: WireCost | None = None,
    step: TrainingStep | None = None,
) -> Explanation:
    """Return the explanation of a plan on a model: the role of each part by round, and its costs.

    The model may be on the meta device. `phases` maps each phase of the plan to the round after
    which the server announces it; `participants` are the clients of the run (by default every class
    of clients that the plan distinguishes); `wire_cost` gives the bytes of an upload (by default
    uncompressed). With `step` the memory of a training step is estimated too. Raises PlanError if
    the plan does not fit the model or has no such phase.
    """
    if not isinstance(model, tuple):
        from fedplan.models.description import describe

        model = describe(model)
    return Explanation(
        forecast(
            plan,
            model,
            rounds=rounds,
            phases=phases,
            participants=participants,
            wire_cost=wire_cost,
        ),
        step,
    )


def parts_table(params: Params) -> Table:
    """Return a table of a model's parts: blocks, size and one param's name for each kind."""
    table = _columns("stack", "part", "blocks", "params>", "MB>", "of model>", "example")
    groups: dict[tuple[str, Kind], list[Param]] = {}
    for p in sort_params(params):
        groups.setdefault((p.stack, p.kind), []).append(p)
    total = sum(p.numel for p in params)
    for (stack, kind), ps in groups.items():
        numel, nbytes = sum(p.numel for p in ps), sum(p.nbytes for p in ps)
        blocks = sorted({p.block for p in ps if p.block is not None})
        table.add_row(
            stack,
            kind,
            _number_ranges(blocks),
            millions(numel),
            megabytes(nbytes),
            percent(numel / total),
            Text(".".join(ps[0].key.split(".")[-2:])),
        )
    return table


def sort_params(params: Params) -> list[Param]:
    """Return params ordered by stack (params without a stack last), then by kind as in a block."""
    kinds, several = list(Kind), len({p.stack for p in params if p.stack}) > 1
    return sorted(params, key=lambda p: (several and (p.stack or "~"), kinds.index(p.kind)))


def _columns(*names: str) -> Table:
    """Return an empty table without lines; a column name that ends in `>` is right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        justify = "right" if name.endswith(">") else "left"
        table.add_column(name.removesuffix(">"), no_wrap=True, justify=justify)
    return table


def _memory_table(stages: Mapping[str, MemoryEstimate]) -> Table:
    """Return a table with a column per stage and a row per use of memory, weights by dtype."""
    table = _columns("", *(f"{name}>" for name in stages))
    memories = list(stages.values())
    for dtype in memories[0].weights:
        table.add_row(f"weights, {dtype}", *(megabytes(m.weights[dtype]) for m in memories))
    table.add_row("gradients", *(megabytes(m.gradients) for m in memories))
    table.add_row("optimizer state", *(megabytes(m.optimizer) for m in memories))
    table.add_row("activations, estimated", *(megabytes(m.activations) for m in memories))
    if any(m.logits for m in memories):
        table.add_row("logits, estimated", *(megabytes(m.logits) for m in memories))
    table.add_row("total, estimated", *(megabytes(m.total) for m in memories), style="bold")
    return table


def _gpu_note(memory: MemoryEstimate) -> Text:
    """Return whether a GPU of 24 GB holds a training step; PyTorch's own memory is not counted."""
    free = GPU_BYTES - memory.total
    if free < 0:
        return Text(f"\nDoes not fit on a GPU of 24 GB: {megabytes(-free)} MB too much.")
    close = " This is close: PyTorch itself takes 1 to 2 GB more." if free < 3 * 10**9 else ""
    return Text(f"\nFits on a GPU of 24 GB, with {megabytes(free)} MB free.{close}")


def _at_most(least: int, most: int) -> str:
    """Return bytes in MB, with ≤ if they may be fewer."""
    return megabytes(most) if least == most else f"≤ {megabytes(most)}"


def _range_text(span: ByteRange) -> str:
    """Return a range of bytes in MB: `3.0 to 4.5`, or one number if both ends look the same."""
    least, most = map(megabytes, span)
    return most if least == most else f"{least} to {most}"


def _trained_text(params: list[Param]) -> str:
    """Return the kinds and blocks of trained params in short: `mlp, out in 0-3`."""
    kinds, blocks = sorted({str(p.kind) for p in params}), _block_text(params)
    text = ", ".join(kinds) if len(kinds) <= 4 else f"{len(kinds)} kinds"
    return f"{text} in {blocks}" if blocks else text or "nothing"


def _block_text(params: list[Param]) -> str:
    """Return the numbers of the params' blocks as ranges; empty if they are outside of blocks."""
    return _number_ranges(sorted({p.block for p in params if p.block is not None}))


def _number_ranges(numbers: list[int]) -> str:
    """Return sorted numbers as ranges: `0-3, 7`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges)
