# SPDX-License-Identifier: Apache-2.0
"""Whatever the numbers and the names are, a figure is sound SVG, and its table has the numbers."""

from __future__ import annotations

import csv
from io import StringIO
from itertools import pairwise
from math import isfinite
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplan.reports.figures import (
    Bar,
    Drawing,
    GridCell,
    GridRow,
    Series,
    bar_chart,
    cell_grid,
    line_chart,
    mean_series,
    palette_css,
    save_png,
    small_multiples,
)
from fedplan.reports.figures.lines import spread_labels
from fedplan.reports.figures.palette import PALETTE
from fedplan.reports.figures.scales import make_scale

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
LENGTHS = st.lists(NUMBERS, max_size=8)
NAMES = st.text(max_size=30)
FINITE = st.floats(-1e9, 1e9)
LINES = st.lists(st.tuples(NAMES, LENGTHS), max_size=9)


def series_of(lines: list[tuple[str, list[float]]]) -> list[Series]:
    return [Series(name, tuple(enumerate(map(float, ys), 1))) for name, ys in lines]


def sound(drawing: Drawing) -> ElementTree.Element:
    """The figure as it is read back; every place on it is a number on its sheet."""
    found = ElementTree.fromstring(drawing.svg(alone=True))
    for text in found.iter("{http://www.w3.org/2000/svg}text"):
        assert isfinite(float(text.attrib["x"])) and isfinite(float(text.attrib["y"]))
        assert -1 <= float(text.attrib["y"]) <= drawing.height + 1
    for box in found.iter("{http://www.w3.org/2000/svg}rect"):
        left, wide = float(box.attrib["x"]), float(box.attrib["width"])
        assert wide >= 0 and left + wide <= drawing.width + 1
    return found


@given(LINES, st.one_of(st.none(), st.tuples(NAMES, FINITE)))
def test_lines_of_any_numbers_and_names_are_sound(
    lines: list[tuple[str, list[float]]], limit: tuple[str, float] | None
) -> None:
    sound(line_chart("a chart", series_of(lines), y="score", limit=limit))
    sound(small_multiples("panels", series_of(lines), marked={"": "worst"}, y="score"))


@given(st.lists(st.tuples(NAMES, st.floats(0, 1e12)), max_size=9), st.integers(1, 400))
def test_bars_and_grids_are_sound(bars: list[tuple[str, float]], rounds: int) -> None:
    sound(bar_chart("bars", [Bar(name, x, (x / 2, x)) for name, x in bars], unit="MB"))
    cells = (GridCell(1, rounds, (("share", 0.5), ("keep", 0.5)), "shared and kept", "SK"),)
    rows = [GridRow(name, cells, name) for name, _ in bars]
    sound(cell_grid("grid", rows, rounds=rounds, legend={"share": "shared", "keep": "kept"}))


def test_a_name_stays_a_text() -> None:
    name = '<script>alert("&")</script>'
    found = sound(line_chart(name, [Series(name, ((1, 2.0),))]))
    assert found.attrib["aria-label"] == name
    assert not list(found.iter("script")) and "<script" not in ElementTree.tostring(
        found, encoding="unicode"
    )


@given(st.lists(st.floats(0, 100), max_size=7))
def test_names_at_the_ends_of_lines_never_lie_over_each_other(wanted: list[float]) -> None:
    places = sorted(spread_labels(wanted, 13.0, 0.0, 100.0))
    assert all(b - a >= 13.0 - 1e-9 for a, b in pairwise(places))
    assert not places or (places[0] >= -1e-9 and places[-1] <= 100 + 1e-9)


@given(st.lists(FINITE, min_size=1), st.booleans())
def test_a_scale_holds_every_number_in_their_order(numbers: list[float], whole: bool) -> None:
    numbers = [float(round(n)) for n in numbers] if whole else numbers
    scale = make_scale(numbers, 0.0, 100.0, whole=whole)
    places = [scale(n) for n in sorted(numbers)]
    assert places == sorted(places) and places[0] >= -1e-6 and places[-1] <= 100 + 1e-6
    assert len(scale.ticks) <= 12 and all(b > a for a, b in pairwise(scale.ticks))


def test_a_table_has_the_numbers_and_no_formula() -> None:
    drawn = line_chart("x", [Series("=1+1", ((1, 0.1), (2, -0.3)), ((0.0, 0.2), (-0.4, -0.2)))])
    rows = list(csv.reader(StringIO(drawn.csv())))
    assert rows[1:] == [["'=1+1", "1", "0.1", "0.0", "0.2"], ["'=1+1", "2", "-0.3", "-0.4", "-0.2"]]


def test_the_mean_of_seeds_is_where_all_have_a_point() -> None:
    several = [Series("a", ((1, 1.0), (2, 3.0))), Series("b", ((1, 3.0), (2, 5.0), (3, 9.0)))]
    found = mean_series("both", several)
    assert found.points == ((1, 2.0), (2, 4.0)) and found.band == ((1.0, 3.0), (3.0, 5.0))
    assert mean_series("one", several[:1]).band == () and mean_series("none", []).points == ()


def test_every_paint_has_a_rule_on_light_and_on_dark() -> None:
    light, _, dark = palette_css().partition("@media")
    for name, (one, other) in PALETTE.items():
        assert (
            f".f-{name} {{ fill: {one} }}" in light and f".s-{name} {{ stroke: {other} }}" in dark
        )


@pytest.mark.parametrize("ink", ["ink", "faint", "c0", "c1", "c2", "c3", "c4", "c5"])
def test_what_is_written_can_be_read(ink: str) -> None:
    """By the contrast of WCAG 2, level AA, on the paper of either scheme."""
    for place in (0, 1):
        light, dark = sorted((luminance(PALETTE[n][place]) for n in (ink, "paper")), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, place)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_picture_is_png(tmp_path: Path) -> None:
    forms = [
        Series(f"${n}", ((1, float(n)), (2, n + 0.5)), ((n, n), (n, n + 1.0))) for n in range(6)
    ]
    save_png(line_chart("x", forms, limit=("limit", 3.0)), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
