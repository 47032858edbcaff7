# SPDX-License-Identifier: Apache-2.0
"""Whatever the numbers and the names are, a figure is sound SVG, and its table has the numbers."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from io import StringIO
from itertools import pairwise
from math import isfinite
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplan.errors import FedplanError
from fedplan.reports.figures.charts import (
    Bar,
    Series,
    axis_ticks,
    bar_chart,
    line_chart,
    mean_series,
    small_multiples,
    spread_labels,
    tick_labels,
)
from fedplan.reports.figures.drawing import LIGHT, PALETTE, Drawing, palette_css
from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid

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
    for element in found.iter():
        places = [float(element.attrib[k]) for k in ("x", "y", "cx", "cy") if k in element.attrib]
        places += map(float, re.findall(r"-?[0-9.]+", element.attrib.get("d", "")))
        for x, y in zip(places[::2], places[1::2], strict=True):
            assert isfinite(x) and -1 <= y <= drawing.height + 1, element.attrib
            assert -20 <= x <= drawing.width + 1, element.attrib
        assert not {"id", "href"} & set(element.attrib)
        colours = {element.attrib.get(k) for k in ("fill", "stroke")}
        assert colours <= {None, "none"}, "every colour is of the palette"
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
    cells = (GridCell(1, rounds, (("c0", 0.5), ("keep", 0.5)), "shared and kept", "SK"),)
    rows = [GridRow(name, cells, name) for name, _ in bars]
    sound(cell_grid("grid", rows, rounds=rounds, legend={"c0": "shared", "keep": "kept"}))


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
def test_an_axis_holds_every_number_and_its_ticks_ascend(numbers: list[float], whole: bool) -> None:
    numbers = [float(round(n)) for n in numbers] if whole else numbers
    (low, high), ticks, log = axis_ticks(numbers, whole=whole)
    smallest = 0.0 if log else 1e-100
    assert low <= min(numbers) + smallest and max(numbers) - smallest <= high and low < high
    assert 1 <= len(ticks) <= 12 and all(b > a for a, b in pairwise(ticks))
    assert len(tick_labels(ticks, log=log)) == len(ticks)


def test_an_axis_of_bytes_begins_at_zero() -> None:
    chart = line_chart("x", [Series("a", ((1, 1000.0), (2, 5.0)))], y="kB", from_zero=True)
    assert "log" not in chart.svg() and ">0</text>" in chart.svg()


def test_a_figure_has_the_same_bytes_whatever_the_settings_of_the_process() -> None:
    import matplotlib

    chart = bar_chart("x", [Bar("a", 3.0), Bar("b", 2.0)])
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path"}):
        other = chart.svg()
    assert other == chart.svg()


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
    assert len(set(LIGHT.values())) == len(LIGHT), "a drawn colour tells its paint"
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
    chart = line_chart("x", forms, limit=("limit", 3.0))
    for suffix, begins in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<svg")):
        chart.save(tmp_path / f"x{suffix}")
        assert (tmp_path / f"x{suffix}").read_bytes().startswith(begins)
    with pytest.raises(FedplanError, match=r"cannot write .*x\.doc"):
        chart.save(tmp_path / "x.doc")


def test_matplotlib_is_imported_when_a_chart_is_drawn() -> None:
    modules = "figures.charts, fedplan.reports.figures.grids, fedplan.reports.role_figure"
    said = f"import fedplan.reports.{modules}, sys; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", said], check=True)
