# SPDX-License-Identifier: Apache-2.0
"""Draw the parts of a Transformer, coloured by the roles that a plan gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedplan.errors import printable
from fedplan.language.plan import Plan, Role, Roles
from fedplan.language.predicates import Turn
from fedplan.language.resolution import permitted_roles, resolve
from fedplan.models.params import Kind, Param, Params
from fedplan.reports.figures.drawing import (
    LIGHT,
    ROLE_PAINTS,
    TEXT_PAINTS,
    Drawing,
    add_sheet,
    text_width,
    tip,
)
from fedplan.reports.figures.grids import draw_box

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedplan.reports.figures.drawing import Canvas

LEGEND = {
    Role.SHARE: "SHARE  trained, uploaded",
    Role.KEEP: "KEEP  trained, personal",
    Role.FREEZE: "FREEZE  frozen, the same for all",
    Role.HOLD: "HOLD  frozen, personal",
}
BEFORE = (Kind.EMBED, Kind.PROMPT)
"""Kinds drawn left of the first block; other params outside of blocks go right of the last."""
WIDTH, ROW, HEADER, BAND_GAP, SIDE, LEFT = 760.0, 20.0, 50.0, 9.0, 58.0, 10.0
"""Sizes in pixels: the drawing, a row, title and plan, gap between bands, side cells, margin."""


@dataclass(frozen=True)
class RoleFigure:
    """The roles of a model's params in one turn of a plan, by default of any client in round 1.

    Without layer scores, blocks that scores may choose are drawn as chosen.
    """

    title: str
    params: Params
    plan: Plan
    turn: Turn = field(default_factory=Turn)

    def roles(self) -> Roles:
        """Return the role of each param in the turn."""
        resolve_roles = permitted_roles if self.turn.scores is None else resolve
        return resolve_roles(self.plan, self.params, self.turn)


def draw_roles(figures: Sequence[RoleFigure], output: Path) -> None:
    """Draw figures one below the other into a file, in the format of its suffix (.svg, .png, .pdf).

    Replaces the file; raises FedplanError if it cannot be written.
    """
    grids = [_Grid(figure) for figure in figures]
    height = sum(grid.height for grid in grids) + 30

    def draw(canvas: Canvas) -> None:
        ax, top = add_sheet(canvas), 0.0
        for grid in grids:
            grid.draw(ax, top)
            top += grid.height
        at = LEFT
        for role, text in LEGEND.items():
            draw_box(ax, at, height - 20, 12, 12, ROLE_PAINTS[role])
            ax.text(at + 18, height - 10, text, size=11)
            at += text_width(text, 11) + 28

    title = "; ".join(figure.title for figure in figures)
    Drawing(title, WIDTH, height, draw).save(output)


class _Grid:
    """The layout of a figure: a band per stack, a column per block, a row per kind."""

    def __init__(self, figure: RoleFigure) -> None:
        self.figure, self.roles = figure, figure.roles()
        self.depth = max(1, *(p.depth for p in figure.params))
        stacks = list(dict.fromkeys(p.stack for p in figure.params if p.stack)) or [""]
        # The last stack also has the params without a stack; the head is drawn beside the band.
        self.params = {
            s: [p for p in figure.params if p.stack == s or (s == stacks[-1] and not p.stack)]
            for s in stacks
        }
        self.kinds = dict[str, list[Kind]]()
        for stack, params in self.params.items():
            present = {p.kind for p in params if p.block_id or not p.depth} - {Kind.HEAD}
            self.kinds[stack] = [kind for kind in Kind if kind in present]
        self.height = HEADER + sum(len(k) * ROW + BAND_GAP for k in self.kinds.values()) + 6

    def draw(self, ax: Axes, top: float) -> None:
        """Draw the title, the plan and all bands onto a sheet, from `top` down."""
        title, plan = map(printable, (self.figure.title, self.figure.plan.text))
        ax.text(LEFT, top + 20, title, size=14, weight="bold")
        ax.text(LEFT, top + 37, plan, size=10.5, family="monospace", color=LIGHT["faint"])
        top += HEADER
        names = {
            (stack, kind): f"{stack} {kind}" if len(self.params) > 1 else str(kind)
            for stack, kinds in self.kinds.items()
            for kind in kinds
        }
        side = LEFT + 8 + max(92.0, *(text_width(name, 11) for name in names.values()))
        left = side + SIDE + 6
        step = (WIDTH - LEFT - SIDE - 6 - left) / self.depth
        for stack, params in self.params.items():
            kinds = self.kinds[stack]
            bottom = top + len(kinds) * ROW
            for i, kind in enumerate(kinds):
                y = top + i * ROW
                ax.text(side - 8, y + 14, names[stack, kind], size=11, ha="right")
                for block in range(self.depth):
                    here = [p for p in params if p.kind is kind and p.block == block]
                    self._cell(ax, here, left + block * step, y, step, ROW, f"{kind} {block}")
                if not any(p.block_id for p in params):
                    here = [p for p in params if p.kind is kind]
                    self._cell(ax, here, left, y, self.depth * step, ROW, str(kind))
            outside = [p for p in params if p.block is None and p.depth]
            outside += [p for p in params if not p.stack and p.block is None]
            self._side(ax, [p for p in outside if p.kind in BEFORE], side, top, bottom)
            right = left + self.depth * step + 6
            self._side(ax, [p for p in outside if p.kind not in BEFORE], right, top, bottom)
            top = bottom + BAND_GAP

    def _side(self, ax: Axes, params: list[Param], x: float, top: float, bottom: float) -> None:
        """Draw a labelled cell for each kind of params outside of blocks."""
        groups: dict[str, list[Param]] = {}
        for p in params:
            groups.setdefault(p.label, []).append(p)
        height = (bottom - top) / max(1, len(groups))
        for i, (label, group) in enumerate(groups.items()):
            y = top + i * height
            self._cell(ax, group, x, y, SIDE, height, label)
            paint = TEXT_PAINTS.get(ROLE_PAINTS[self.roles[group[0]]], "ink")
            words = label.split(" ")
            for line, word in enumerate(words):
                baseline = y + height / 2 + 4 + 12 * (line - (len(words) - 1) / 2)
                ax.text(x + SIDE / 2, baseline, word, size=10, ha="center", color=LIGHT[paint])

    def _cell(
        self,
        ax: Axes,
        params: list[Param],
        x: float,
        y: float,
        width: float,
        height: float,
        name: str,
    ) -> None:
        """Draw a box in the colours of the params' roles, which split its width."""
        roles = sorted({self.roles[p] for p in params}, key=list(Role).index)
        for i, role in enumerate(roles):
            part = width / len(roles)
            gid = tip(f"{name}: {role.word}")
            draw_box(ax, x + i * part, y, part - 1, height - 1, ROLE_PAINTS[role], gid)
