# SPDX-License-Identifier: Apache-2.0
"""Draw the parts of a Transformer, coloured by the roles that a plan gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.errors import FedplanError
from fedplan.language.plan import Plan, Role, Roles
from fedplan.language.predicates import Turn
from fedplan.language.resolution import permitted_roles, resolve
from fedplan.models.params import Kind, Param, Params
from fedplan.reports.figures.palette import ROLE_PAINTS, light_color, text_paint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND = {
    Role.SHARE: "SHARE  trained, uploaded",
    Role.KEEP: "KEEP  trained, personal",
    Role.FREEZE: "FREEZE  frozen, the same for all",
    Role.HOLD: "HOLD  frozen, personal",
}
BEFORE = (Kind.EMBED, Kind.PROMPT)
"""Kinds drawn left of the first block; other params outside of blocks go right of the last."""


@dataclass(frozen=True)
class RoleFigure:
    """The roles of a model's params in one turn of a plan, to be drawn by `draw_roles`.

    `params` are the model's, from `describe`. `turn` is a client in a round, by default an unnamed
    client in the first; without layer scores, blocks that scores may choose are drawn as chosen.
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
    """Draw figures one below the other into the file `output`, which is overwritten.

    The suffix (.svg, .png, .pdf) sets the format. Selects matplotlib's backend "agg" for the
    process. Raises FedplanError if matplotlib is missing or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        matplotlib.rcParams["svg.hashsalt"] = "fedplan"
        from matplotlib import pyplot
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise FedplanError(
            "matplotlib is not installed; run: pip install 'fedplan[draw]'"
        ) from error
    grids = [_Grid(figure) for figure in figures]
    canvas, axes = pyplot.subplots(
        len(grids),
        1,
        figsize=(8, sum(g.height for g in grids) * 0.24 + 0.5),
        height_ratios=[g.height for g in grids],
        squeeze=False,
    )
    for ax, grid in zip(axes[:, 0], grids, strict=True):
        grid.draw(ax)
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=light_color(ROLE_PAINTS[r])) for r in Role]
    canvas.legend(handles, LEGEND.values(), loc="lower center", ncols=4, frameon=False, fontsize=8)
    canvas.subplots_adjust(
        left=0.02, right=0.99, top=1, bottom=0.4 / canvas.get_figheight(), hspace=0
    )
    try:
        canvas.savefig(
            output, dpi=150, metadata={"Date": None} if output.suffix == ".svg" else None
        )
    except (OSError, ValueError) as error:
        raise FedplanError(f"cannot write {output}: {error}") from error
    finally:
        pyplot.close(canvas)


class _Grid:
    """The layout of a figure: a band per stack, with a column per block and a row per kind.

    Reserve `height` rows on matplotlib axes, then call `draw`.
    """

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
        self.height = sum(len(k) + 0.5 for k in self.kinds.values()) + 2.5

    def draw(self, ax: Axes) -> None:
        """Draw the title, the plan and all bands onto matplotlib axes, from the top down."""
        ax.set_axis_off()
        ax.set_xlim(-3.7, self.depth + 1.7)
        ax.set_ylim(-self.height, 0)
        ax.text(-3.7, -0.9, self.figure.title, fontsize=11, fontweight="bold", va="center")
        ax.text(-3.7, -1.8, self.figure.plan.text, fontsize=7.5, family="monospace", va="center")
        top = -2.4
        for stack, params in self.params.items():
            kinds = self.kinds[stack]
            bottom = top - len(kinds)
            for i, kind in enumerate(kinds):
                y = top - i - 1
                label = f"{stack} {kind}" if len(self.params) > 1 else str(kind)
                ax.text(-1.7, y + 0.5, label, fontsize=7.5, va="center", ha="right")
                for block in range(self.depth):
                    here = [p for p in params if p.kind is kind and p.block == block]
                    self._cell(ax, here, block, y, 1, 1)
                if not any(p.block_id for p in params):
                    self._cell(ax, [p for p in params if p.kind is kind], 0, y, self.depth, 1)
            outside = [p for p in params if p.block is None and p.depth]
            outside += [p for p in params if not p.stack and p.block is None]
            left = [p for p in outside if p.kind in BEFORE]
            self._side(ax, left, -1.5, top, bottom)
            right = [p for p in outside if p.kind not in BEFORE]
            self._side(ax, right, self.depth + 0.2, top, bottom)
            top = bottom - 0.5

    def _side(self, ax: Axes, params: list[Param], x: float, top: float, bottom: float) -> None:
        """Draw params outside of blocks at `x`, from `top` to `bottom`.

        Each kind gets one labelled cell; params tagged "common" and "own" get separate cells.
        """
        groups: dict[str, list[Param]] = {}
        for p in params:
            groups.setdefault(" ".join([*sorted(p.tags & {"common", "own"}), p.kind]), []).append(p)
        for i, (label, group) in enumerate(groups.items()):
            height = (top - bottom) / len(groups)
            y = top - (i + 1) * height
            self._cell(ax, group, x, y, 1.3, height)
            color = light_color(text_paint(ROLE_PAINTS[self.roles[group[0]]]))
            text = label.replace(" ", "\n")
            at = (x + 0.65, y + height / 2)
            ax.text(*at, text, fontsize=6.5, ha="center", va="center", color=color)

    def _cell(
        self, ax: Axes, params: list[Param], x: float, y: float, width: float, height: float
    ) -> None:
        """Draw a rectangle in the colour of the params' role; several roles split its width.

        `x`, `y` is the lower left corner. Draws nothing without params.
        """
        from matplotlib.patches import Rectangle

        roles = sorted({self.roles[p] for p in params}, key=list(Role).index)
        for i, role in enumerate(roles):
            part, color = width / len(roles), light_color(ROLE_PAINTS[role])
            corner = (x + i * part, y)
            ax.add_patch(Rectangle(corner, part, height, facecolor=color, edgecolor="white"))
