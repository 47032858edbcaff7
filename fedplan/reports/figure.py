# SPDX-License-Identifier: Apache-2.0
"""Figures: the parts of a Transformer, coloured by the roles that a plan gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.errors import FedplanError
from fedplan.language.plan import Plan, Role, Roles
from fedplan.language.resolution import permitted, resolve
from fedplan.language.turn import Turn
from fedplan.models.params import Kind, Param, Params

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAINT = {
    Role.SHARE: "#1f9e77",
    Role.KEEP: "#8a63c4",
    Role.FREEZE: "#d3dae1",
    Role.HOLD: "#e8b33c",
}
LEGEND = {
    Role.SHARE: "SHARE  trained, sent",
    Role.KEEP: "KEEP  trained, stays home",
    Role.FREEZE: "FREEZE  the same for all",
    Role.HOLD: "HOLD  own, at rest",
}
BEFORE = (Kind.EMBED, Kind.PROMPT)
"""Kinds that stand before the first block; what else stands in none comes after the last."""


@dataclass(frozen=True)
class Figure:
    """One model under one plan in one turn. Without scores, what scores may choose is painted."""

    title: str
    params: Params
    plan: Plan
    turn: Turn = field(default_factory=Turn)

    def roles(self) -> Roles:
        say = permitted if self.turn.scores is None else resolve
        return say(self.plan, self.params, self.turn)


def draw(pictures: Sequence[Figure], output: Path) -> None:
    """Draw pictures one below the other into a file; its ending says the format."""
    try:
        import matplotlib

        matplotlib.use("agg")
        matplotlib.rcParams["svg.hashsalt"] = "fedplan"
        from matplotlib import pyplot
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise FedplanError("to draw takes matplotlib: pip install 'fedplan[draw]'") from error
    grids = [_Grid(picture) for picture in pictures]
    figure, axes = pyplot.subplots(
        len(grids),
        1,
        figsize=(8, sum(g.height for g in grids) * 0.24 + 0.5),
        height_ratios=[g.height for g in grids],
        squeeze=False,
    )
    for ax, grid in zip(axes[:, 0], grids, strict=True):
        grid.paint(ax)
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=PAINT[r]) for r in Role]
    figure.legend(handles, LEGEND.values(), loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.subplots_adjust(
        left=0.02, right=0.99, top=1, bottom=0.4 / figure.get_figheight(), hspace=0
    )
    try:
        figure.savefig(
            output, dpi=150, metadata={"Date": None} if output.suffix == ".svg" else None
        )
    except (OSError, ValueError) as error:
        raise FedplanError(f"{output} cannot be drawn: {error}") from error
    finally:
        pyplot.close(figure)


class _Grid:
    """A picture laid out: a band a stack, a column a block, a row a kind."""

    def __init__(self, picture: Figure) -> None:
        self.picture, self.roles = picture, picture.roles()
        self.stacks = list(dict.fromkeys(p.stack for p in picture.params if p.stack)) or [""]
        self.depth = max(1, *(p.depth for p in picture.params))
        self.kinds = {s: self._kinds(s) for s in self.stacks}
        self.height = sum(len(k) + 0.5 for k in self.kinds.values()) + 2.5

    def _kinds(self, stack: str) -> list[Kind]:
        held = {p.kind for p in self._of(stack) if p.at or not p.depth}
        return [kind for kind in Kind if kind in held and kind is not Kind.HEAD]

    def _of(self, stack: str) -> list[Param]:
        """A stack's params; the last stack also shows what belongs to none."""
        last = stack == self.stacks[-1]
        return [p for p in self.picture.params if p.stack == stack or (last and not p.stack)]

    def paint(self, ax: Axes) -> None:
        """Paint it all, from the top down."""
        ax.set_axis_off()
        ax.set_xlim(-3.7, self.depth + 1.7)
        ax.set_ylim(-self.height, 0)
        ax.text(-3.7, -0.9, self.picture.title, fontsize=11, fontweight="bold", va="center")
        ax.text(-3.7, -1.8, self.picture.plan.text, fontsize=7.5, family="monospace", va="center")
        top = -2.4
        for stack in self.stacks:
            top = self._band(ax, stack, top)

    def _band(self, ax: Axes, stack: str, top: float) -> float:
        kinds, params = self.kinds[stack], self._of(stack)
        for i, kind in enumerate(kinds):
            y = top - i - 1
            label = f"{stack} {kind}" if len(self.stacks) > 1 else str(kind)
            ax.text(-1.7, y + 0.5, label, fontsize=7.5, va="center", ha="right")
            for block in range(self.depth):
                here = [p for p in params if p.kind is kind and p.block == block]
                self._cell(ax, here, block, y, 1, 1)
            if not any(p.at for p in params):
                self._cell(ax, [p for p in params if p.kind is kind], 0, y, self.depth, 1)
        bottom = top - len(kinds)
        outside = [p for p in params if p.block is None and p.depth] + [
            p for p in params if not p.stack and p.block is None
        ]
        self._side(ax, [p for p in outside if p.kind in BEFORE], -1.5, top, bottom)
        self._side(ax, [p for p in outside if p.kind not in BEFORE], self.depth + 0.2, top, bottom)
        return bottom - 0.5

    def _side(self, ax: Axes, params: list[Param], x: float, top: float, bottom: float) -> None:
        """What stands outside the blocks: one cell for each kind and level of it."""
        groups: dict[str, list[Param]] = {}
        for p in params:
            groups.setdefault(" ".join([*sorted(p.tags & {"common", "own"}), p.kind]), []).append(p)
        for i, (label, held) in enumerate(groups.items()):
            tall = (top - bottom) / len(groups)
            y = top - (i + 1) * tall
            self._cell(ax, held, x, y, 1.3, tall)
            ink = "black" if self.roles[held[0]] is Role.FREEZE else "white"
            text = label.replace(" ", "\n")
            at = (x + 0.65, y + tall / 2)
            ax.text(*at, text, fontsize=6.5, ha="center", va="center", color=ink)

    def _cell(
        self, ax: Axes, params: list[Param], x: float, y: float, wide: float, tall: float
    ) -> None:
        """One rectangle, split where its params have several roles."""
        from matplotlib.patches import Rectangle

        roles = sorted({self.roles[p] for p in params}, key=list(Role).index)
        for i, role in enumerate(roles):
            part = wide / len(roles)
            ax.add_patch(
                Rectangle((x + i * part, y), part, tall, facecolor=PAINT[role], edgecolor="white")
            )
