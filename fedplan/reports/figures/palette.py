# SPDX-License-Identifier: Apache-2.0
"""Palette: what figures are painted with, on light and on dark, told apart by the colour-blind."""

from __future__ import annotations

# After Okabe and Ito. On dark the same hues are lighter; a form or a word stands beside each.
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
"""Each paint by its name: its colour on light, and on dark."""
HUES = ("c0", "c1", "c2", "c3", "c4", "c5")
"""What series are painted with, in this order."""
FORMS = ("disc", "square", "triangle", "diamond", "ring", "cross")
"""The form of a series' points: hue and form change together."""


def colour(paint: str) -> str:
    """A paint's colour on light."""
    return PALETTE[paint][0]


def colours() -> str:
    """The style sheet that all figures need: one rule a paint, and the same for dark."""
    dark = _rules(1).replace("\n", "\n  ")
    return f"{_rules(0)}\n@media screen and (prefers-color-scheme: dark) {{\n  {dark}\n}}"


def ink_on(paint: str) -> str:
    """What words are written with on a paint."""
    return f"on-{paint}" if f"on-{paint}" in PALETTE else "ink"


def _rules(place: int) -> str:
    return "\n".join(
        f".f-{name} {{ fill: {each[place]} }} .s-{name} {{ stroke: {each[place]} }}"
        for name, each in PALETTE.items()
    )
