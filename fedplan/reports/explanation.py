# SPDX-License-Identifier: Apache-2.0
"""Explain: what a plan will do with a model, before anything runs, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.federation.fare import Fare
from fedplan.language.crowds import Crowd
from fedplan.language.plan import Plan, Role
from fedplan.models.params import Kind, Param, Params
from fedplan.reports.forecasts import forecast
from fedplan.reports.memory import CARD, Load, Memory, memory_of
from fedplan.reports.views import Forecast, Segment, Span, View

if TYPE_CHECKING:
    from torch import nn
from fedplan.reports.units import megabytes, millions, percent

COLOURS = {
    Role.SHARE: "green",
    Role.KEEP: "magenta",
    Role.FREEZE: "blue",
    Role.HOLD: "yellow",
}

MEANINGS = {
    Role.SHARE: "clients train it, the federation sees it and averages it",
    Role.KEEP: "each client trains its own, nobody else sees it",
    Role.FREEZE: "nobody trains it, all have the same",
    Role.HOLD: "each client's own, at rest, nobody else sees it",
}

WIDEST = 3
"""Stages that stand side by side in a terminal; more are listed one below the other."""


@dataclass(frozen=True)
class PartRow:
    """Params of one kind that fare alike in every stage."""

    part: str
    params: tuple[Param, ...]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.params)

    def role(self, stage: Segment) -> Text:
        """Its role in a stage; where scores decide, how many blocks are chosen."""
        role = stage.permitted[self.params[0]]
        best = stage.choice(self.params[0])
        if best is None:
            return Text(role.name, style=COLOURS[role])
        blocks = len({p.at for p in stage.permitted if p.at and best.part.holds(p)})
        return Text(f"{role.name} {best.count}/{blocks}", style=COLOURS[role])

    def up(self, stage: Segment, fare: Fare) -> int:
        return sum(fare.up(p) for p in self.params if stage.heaviest[p] is Role.SHARE)


@dataclass(frozen=True)
class Explanation:
    """What a plan will do: print it, or ask for `json`. With a `step`, the memory of a turn too."""

    forecast: Forecast
    step: Load | None = None

    def __str__(self) -> str:
        out = StringIO()
        Console(file=out, width=100, color_system=None).print(self.__rich__())
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())

    def __rich__(self) -> RenderableType:
        views = self.forecast.views
        tables = [table for v in views for table in self._tables(v, alone=len(views) == 1)]
        notes = map(Text, self.forecast.notes)
        return Group(self._title(), *tables, self._legend(), *notes, *self._memory_tables())

    def memory(self, view: View) -> dict[str, Memory]:
        """The memory of a turn in each stage of a view, by its name, for its heaviest choice."""
        if self.step is None:
            return {}
        params, step = self.forecast.params, self.step
        return {s.name: memory_of(params, s.heaviest, step) for s in view.stages}

    def _memory_tables(self) -> list[RenderableType]:
        if self.step is None:
            return []
        found = list[RenderableType]([Text(f"\nMemory of a turn in MB: {self.step.text}\n")])
        for view in self.forecast.views:
            stages = self.memory(view)
            heaviest = max(stages.values(), key=lambda each: each.total)
            alone = {} if len(stages) <= WIDEST else {"heaviest": heaviest}
            if len(self.forecast.views) > 1:
                found.append(Text(view.who, style="bold underline"))
            found += [_memory_table(alone or stages), _fits(heaviest)]
        return found

    def rows(self, view: View) -> list[PartRow]:
        """A view's params by stack and kind, apart where their roles differ."""
        groups: dict[tuple[object, ...], list[Param]] = {}
        for p in in_order(self.forecast.params):
            roles = tuple((s.certain[p], s.permitted[p]) for s in view.stages)
            groups.setdefault((p.stack if self._stacks else "", p.kind, roles), []).append(p)
        named = [(f"{stack} {kind}".strip(), ps) for (stack, kind, _), ps in groups.items()]
        split = {part for part, _ in named if sum(part == other for other, _ in named) > 1}
        return [
            PartRow(f"{part} {_where(ps)}" if part in split else part, tuple(ps))
            for part, ps in named
        ]

    @property
    def _stacks(self) -> bool:
        return len({p.stack for p in self.forecast.params if p.stack}) > 1

    def _title(self) -> Text:
        f = self.forecast
        numel, tensors = sum(p.numel for p in f.params), len({p.name for p in f.params})
        text = Text(f"{f.plan.text}\n", style="bold")
        return text.append(
            f"{millions(numel)} params in {tensors} tensors, {megabytes(f.nbytes)} MB; "
            f"plan {f.plan.fingerprint}\n" + (f"{f.fare.text}\n" if f.fare.text else ""),
            style="not bold",
        )

    def _tables(self, view: View, *, alone: bool) -> list[RenderableType]:
        heading = [] if alone else [Text(f"{view.who}", style="bold underline")]
        wide = len(view.stages) <= WIDEST
        table = self._side_by_side(view) if wide else self._listed(view)
        return [*heading, table, self._total(view)]

    def _side_by_side(self, view: View) -> Table:
        table = _columns("part", "params>", "MB>")
        for stage in view.stages:
            table.add_column(stage.name, no_wrap=True)
            table.add_column("MB up", justify="right", no_wrap=True)
        for row in self.rows(view):
            ups = (_or_dash(row.up(s, self.forecast.fare)) for s in view.stages)
            cells = [c for s, up in zip(view.stages, ups, strict=True) for c in (row.role(s), up)]
            table.add_row(row.part, millions(row.numel), megabytes(row.nbytes), *cells)
        table.add_row()
        sums = [self._sums(stage) for stage in view.stages]
        for label in sums[0]:
            cells = [c for each in sums for c in ("", each[label])]
            table.add_row(label, "", "", *cells, style="bold")
        return table

    def _listed(self, view: View) -> Table:
        sums = self._sums(view.stages[0])
        table = _columns("stage", "trained", *(f"{label}>" for label in sums))
        for stage in view.stages:
            trained = [p for p in stage.permitted if stage.permitted[p].trained]
            table.add_row(stage.name, _summary(trained), *self._sums(stage).values())
        return table

    def _sums(self, stage: Segment) -> dict[str, str]:
        """What a stage costs a client in each round."""
        return {
            "up": _at_most(stage.up_least, stage.up),
            "down": _at_most(stage.down_least, stage.down),
            "AdamW": megabytes(stage.optimiser),
            "saved": percent(1 - stage.up / self.forecast.nbytes),
        }

    def _total(self, view: View) -> Text:
        rounds = sum(len(s.rounds) for s in view.stages)
        saved = 1 - view.up / (self.forecast.nbytes * rounds)
        than = f"{percent(abs(saved))} {'less' if saved >= 0 else 'more'} than share()"
        least, most = view.up_span
        than = than if least == most else f"{'at least' if saved >= 0 else 'at most'} {than}"
        return Text(
            f"\nOver {rounds} rounds a client sends {_from_to(view.up_span)} MB, {than}, and "
            f"receives {_from_to(view.down_span)} MB, of them {megabytes(view.first)} at first "
            "contact.\n"
        )

    def _legend(self) -> Text:
        seen = {s.permitted[p] for v in self.forecast.views for s in v.stages for p in s.permitted}
        legend = Text()
        for role in (role for role in Role if role in seen):
            legend.append(f"{role.name:7}", style=COLOURS[role]).append(f"{MEANINGS[role]}\n")
        return legend.append(
            "Up, down and AdamW are MB per client and round; saved is of the upload."
        )

    def json(self) -> dict[str, Any]:
        """The same numbers for programs, in bytes."""
        f = self.forecast
        return {
            "plan": f.plan.text,
            "fingerprint": f.plan.fingerprint,
            "params": sum(p.numel for p in f.params),
            "bytes": f.nbytes,
            "rounds": f.rounds,
            "clients": [self._view_json(view) for view in f.views],
            "notes": list(f.notes),
        }

    def _view_json(self, view: View) -> dict[str, Any]:
        return {
            "who": view.who,
            "bytes_up": view.up,
            "bytes_up_least": view.up_span[0],
            "bytes_down": view.down,
            "bytes_down_least": view.down_span[0],
            "bytes_first": view.first,
            "stages": [self._stage_json(view, stage) for stage in view.stages],
        }

    def _stage_json(self, view: View, stage: Segment) -> dict[str, Any]:
        return {
            "name": stage.name,
            "rounds": len(stage.rounds),
            "bytes_up": stage.up,
            "bytes_up_least": stage.up_least,
            "bytes_down": stage.down,
            "bytes_down_least": stage.down_least,
            "bytes_optimiser": stage.optimiser,
            "params_trained": stage.trained,
            **({"memory": self.memory(view)[stage.name].json()} if self.step else {}),
            "saved": 1 - stage.up / self.forecast.nbytes,
            "parts": [
                {
                    "part": row.part,
                    "role": row.role(stage).plain,
                    "params": row.numel,
                    "bytes": row.nbytes,
                    "bytes_up": row.up(stage, self.forecast.fare),
                }
                for row in self.rows(view)
            ],
        }


def explain(
    plan: Plan,
    model: nn.Module | Params,
    *,
    rounds: int = 100,
    phases: Mapping[str, int] | None = None,
    crowd: Crowd | None = None,
    fare: Fare | None = None,
    step: Load | None = None,
) -> Explanation:
    """Say what a plan will do with a model: who trains each part, who sees it, and what it costs.

    The model may be on the meta device. `phases` says after which round the server announces each
    phase that the plan speaks of; `crowd` who takes part, and `fare` what travel costs. With a
    `step`, how a client trains, it says the memory of a turn too.
    """
    if not isinstance(model, tuple):
        from fedplan.models.description import describe

        model = describe(model)
    found = forecast(plan, model, rounds=rounds, phases=phases, crowd=crowd, fare=fare)
    return Explanation(found, step)


def parts_table(params: Params) -> Table:
    """The parts of a model: each kind with its blocks, its numbers, and one of its names."""
    table = _columns("stack", "part", "blocks", "params>", "MB>", "share>", "for example")
    groups: dict[tuple[str, Kind], list[Param]] = {}
    for p in in_order(params):
        groups.setdefault((p.stack, p.kind), []).append(p)
    whole = sum(p.numel for p in params)
    for (stack, kind), ps in groups.items():
        numel, nbytes = sum(p.numel for p in ps), sum(p.nbytes for p in ps)
        blocks = sorted({p.block for p in ps if p.block is not None})
        table.add_row(
            stack,
            kind,
            _spans(blocks),
            millions(numel),
            megabytes(nbytes),
            percent(numel / whole),
            Text(".".join(ps[0].key.split(".")[-2:])),
        )
    return table


def in_order(params: Params) -> list[Param]:
    """Stack by stack, what belongs to none last, and kinds as they stand in a block."""
    kinds, several = list(Kind), len({p.stack for p in params if p.stack}) > 1
    return sorted(params, key=lambda p: (several and (p.stack or "~"), kinds.index(p.kind)))


def _columns(*names: str) -> Table:
    """An empty table without lines; a name with `>` is of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        justify = "right" if name.endswith(">") else "left"
        table.add_column(name.removesuffix(">"), no_wrap=True, justify=justify)
    return table


def _memory_table(stages: Mapping[str, Memory]) -> Table:
    """A column for each stage; of weights, a row for each dtype."""
    table = _columns("", *(f"{name}>" for name in stages))
    each = list(stages.values())
    for dtype in each[0].weights:
        table.add_row(f"weights, {dtype}", *(megabytes(m.weights[dtype]) for m in each))
    table.add_row("gradients", *(megabytes(m.gradients) for m in each))
    table.add_row("optimiser", *(megabytes(m.optimiser) for m in each))
    table.add_row("activations, estimated", *(megabytes(m.activations) for m in each))
    if any(m.answers for m in each):
        table.add_row("answers of a word a token, estimated", *(megabytes(m.answers) for m in each))
    table.add_row("in all, estimated", *(megabytes(m.total) for m in each), style="bold")
    return table


def _fits(heaviest: Memory) -> Text:
    """Whether a card of 24 GB holds it; what torch keeps for itself is not in it."""
    left = CARD - heaviest.total
    if left < 0:
        return Text(f"\nDoes not fit a card of 24 GB, by {megabytes(-left)} MB.")
    near = " This is near: torch itself takes 1 to 2 GB more." if left < 3 * 10**9 else ""
    return Text(f"\nFits a card of 24 GB, with {megabytes(left)} MB to spare.{near}")


def _at_most(least: int, most: int) -> str:
    return megabytes(most) if least == most else f"≤ {megabytes(most)}"


def _from_to(span: Span) -> str:
    least, most = map(megabytes, span)
    return most if least == most else f"{least} to {most}"


def _or_dash(count: int) -> str:
    return megabytes(count) if count else "-"


def _where(params: list[Param]) -> str:
    return _spans(sorted({p.block for p in params if p.block is not None})) or "outside"


def _summary(params: list[Param]) -> str:
    """Trained params in a few words."""
    kinds = sorted({str(p.kind) for p in params})
    blocks = _spans(sorted({p.block for p in params if p.block is not None}))
    words = ", ".join(kinds) if len(kinds) <= 4 else f"{len(kinds)} kinds"
    return f"{words} in {blocks}" if blocks else words or "nothing"


def _spans(numbers: list[int]) -> str:
    """Sorted numbers as ranges: 0-3, 7."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][-1] + 1:
            spans[-1].append(n)
        else:
            spans.append([n])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)
