# SPDX-License-Identifier: Apache-2.0
"""The one palette of terminal tables, HTML reports and figures; it is safe for the colour-blind."""

from __future__ import annotations

from fedplan.language.plan import Role

# After Okabe and Ito. On dark the same hues are lighter; a marker or a word goes with each hue.
PALETTE = {
    "ink": ("#1b1f24", "#e6e9ed"),
    "faint": ("#5d6672", "#a3acb8"),
    "grid": ("#dfe3e8", "#39414b"),
    "paper": ("#ffffff", "#15191e"),
    "c0": ("#0072b2", "#56b4e9"),
    "c1": ("#bf5400", "#ff9a4d"),
    "c2": ("#00805d", "#35c49b"),
    "c3": ("#b0568a", "#e39ac6"),
    "c4": ("#8a6200", "#f0c24a"),
    "c5": ("#5b5fc7", "#a5a8ff"),
    "share": ("#0072b2", "#3d9bd6"),
    "keep": ("#e69f00", "#e69f00"),
    "freeze": ("#dfe3e8", "#39414b"),
    "hold": ("#cc79a7", "#cc79a7"),
    "good": ("#9fd8c4", "#1f6e57"),
    "warn": ("#f2cf7e", "#8a6200"),
    "bad": ("#f0a27a", "#a84a00"),
    "away": ("#dfe3e8", "#39414b"),
    "on-share": ("#ffffff", "#0b0d10"),
    "on-keep": ("#1b1f24", "#0b0d10"),
    "on-hold": ("#1b1f24", "#0b0d10"),
}
"""The colours of each paint by its name: on a light background, and on a dark one."""
ROLE_PAINTS = {role: role.name.lower() for role in Role}
"""The paint of each role, in reports and figures."""
ROLE_STYLES = {role: PALETTE[paint][1] for role, paint in ROLE_PAINTS.items()} | {
    Role.FREEZE: "#8a929c"  # the grey of its cells is too faint for text
}
"""The colour of each role for text in a terminal, readable on light and on dark."""
HUES = ("c0", "c1", "c2", "c3", "c4", "c5")
"""The paints of series, in this order."""
FORMS = ("disc", "square", "triangle", "diamond", "ring", "cross")
"""The markers of series: hue and marker change together."""


def light_color(paint: str) -> str:
    """Return the colour of a paint on a light background, as #rrggbb; KeyError if unknown."""
    return PALETTE[paint][0]


def palette_css() -> str:
    """Return the CSS rules `.f-PAINT` (fill) and `.s-PAINT` (stroke) of each paint."""
    dark = _rules(1).replace("\n", "\n  ")
    return f"{_rules(0)}\n@media screen and (prefers-color-scheme: dark) {{\n  {dark}\n}}"


def text_paint(paint: str) -> str:
    """Return the paint of text that is written on top of a paint."""
    return f"on-{paint}" if f"on-{paint}" in PALETTE else "ink"


def _rules(background: int) -> str:
    """Return the CSS rules of all paints for a background: 0 is light, 1 is dark."""
    return "\n".join(
        f".f-{name} {{ fill: {pair[background]} }} .s-{name} {{ stroke: {pair[background]} }}"
        for name, pair in PALETTE.items()
    )
