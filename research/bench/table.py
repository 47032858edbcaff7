# SPDX-License-Identifier: Apache-2.0
"""Table and figure of the benchmark, from its result files: `python -m research.bench.table`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from research.bench.rows import ENGINES, ROWS

RESULTS = Path(__file__).parents[1] / "results"
OUT = RESULTS / "bench" / "table.md"
FIGURE = RESULTS / "bench" / "figure.png"
NAMES = {
    "bare": "bare torch",
    "before": "fedplan before",
    "local": "fedplan",
    "pool": "fedplan, pool of 2",
    "ray": "fedplan, Ray of 2",
    "pfl": "pfl 0.6",
    "pfl 2": "pfl 0.6, 2 processes",
    "flower": "Flower 1.41, Ray of 2",
}
COLOURS = {
    "bare": "#bbbbbb",
    "before": "#ccbb44",
    "local": "#4477aa",
    "pool": "#66ccee",
    "ray": "#228833",
    "pfl": "#ee6677",
    "pfl 2": "#ee6677",
    "flower": "#aa3377",
}
FURTHER = {
    "turn-cost": "The turn, piece by piece",
    "crew-cost": "The crew",
    "many-clients": "Many clients",
    "memory-peaks": "Peak memory",
    "prefix-cost": "Frozen prefixes",
}
"""Result files of other programs of research, with the titles of their tables."""


def kept() -> dict[str, dict[str, Any]]:
    """The rows that have a file, in the order of the benchmark."""
    files = {name: RESULTS / "bench" / f"{name}.json" for name in ROWS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def seconds(row: dict[str, Any], engine: str, clock: str) -> list[float]:
    """An engine's seconds of a round, one for each repetition."""
    return [took[clock] for took in row["seconds"].get(engine, [])]


def ratios(row: dict[str, Any], engine: str, clock: str) -> list[float]:
    """Seconds of an engine divided by those of the row's base, for each repetition."""
    pairs = zip(seconds(row, engine, clock), seconds(row, row["base"], clock), strict=False)
    return [one / other for one, other in pairs if other]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, smallest and largest value as text."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table() -> str:
    """All tables as Markdown: those of the benchmark, and those of other programs."""
    return "\n".join([own(), *_further()]) + "\n"


def own() -> str:
    """The tables of the benchmark."""
    rows = kept()
    return "\n".join([*_facts(rows), *_turns(rows), *_crews(rows), *_starts(rows)])


def _facts(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "# The bench"
    yield ""
    yield "`python -m research.bench` writes these files and this page. Medians, and from where to where."
    for name, row in rows.items():
        said = ", ".join(f"{word} {told['commit']}" for word, told in row["facts"].items())
        first = next(iter(row["facts"].values()))
        machine = f"{first['machine']}, {first['cores']} cores, load {first['load']} at its start"
        count = max(map(len, row["seconds"].values()), default=0)
        yield (
            f"- `{name}`: {first['day']}, {said}; {machine}; {count} repetitions of {row['rounds']} "
            f"rounds; {_alike(row)}"
        )
    yield ""


def _alike(row: dict[str, Any]) -> str:
    """Whether all engines did the same work: distance from the start, and trained values."""
    ways = [told["moved"] for told in row["told"].values()]
    if not ways:
        return "repetitions are missing"
    counts = {told["trained"] for told in row["told"].values() if "trained" in told}
    trained = " or ".join(f"{count:,}" for count in sorted(counts)) or "unknown"
    apart = 100 * (max(ways) / min(ways) - 1)
    return f"distances from the start differ by {apart:.2f} %; trained values: {trained}"


def _turns(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Rows whose base is bare torch: CPU time relative to it."""
    found = {name: row for name, row in rows.items() if row["base"] == "bare"}
    engines = [name for name in ENGINES if any(row["seconds"].get(name) for row in found.values())]
    yield "## One process: CPU time of a round, as a multiple of bare torch's"
    yield ""
    others = [name for name in engines if name != "bare"]
    yield from _head(["", "bare torch, ms a turn", *(NAMES[name] for name in others)])
    for row in found.values():
        bare = [1000 * s / row["cohort"] for s in seconds(row, "bare", "cpu")]
        cells = [spread(ratios(row, name, "cpu")) for name in others]
        yield _line([row["text"], spread(bare, 1), *cells])
    yield ""


def _crews(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Rows whose base is the local run: wall and CPU time relative to it."""
    found = {name: row for name, row in rows.items() if row["base"] == "local"}
    engines = [name for name in ENGINES if any(row["seconds"].get(name) for row in found.values())]
    others = [name for name in engines if name != "local"]
    for clock, word in (("wall", "wall time"), ("cpu", "CPU time of all processes")):
        yield f"## Two processes: {word} of a round, as a multiple of the local run's"
        yield ""
        yield from _head(["", "fedplan, s a round", *(NAMES[name] for name in others)])
        for row in found.values():
            cells = [spread(ratios(row, name, clock)) for name in others]
            yield _line([row["text"], spread(seconds(row, "local", clock)), *cells])
        yield ""


def _starts(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Seconds until an engine is ready, and of its first round."""
    yield "## Start-up, seconds: until it stands, and its first round"
    yield ""
    yield from _head(["", *NAMES.values()])
    for row in rows.values():
        cells = [
            f"{row['startup'][name]:.1f} + {row['first'][name]['wall']:.1f}"
            if name in row["first"]
            else "-"
            for name in NAMES
        ]
        yield _line([row["text"], *cells])
    yield ""


def _further() -> Iterator[str]:
    """The rows of the result files of other programs."""
    for name, title in FURTHER.items():
        file = RESULTS / f"{name}.json"
        held = json.loads(file.read_text()) if file.exists() else {}
        rows = held.get("rows") or []
        if not rows or not all(isinstance(row, dict) for row in rows):
            continue
        columns = list(dict.fromkeys(word for row in rows for word in row))
        yield f"## {title}"
        yield ""
        yield f"`{held.get('command', file.name)}`, `research/results/{file.name}`"
        yield ""
        yield from _head(columns)
        for row in rows:
            yield _line([_told(row.get(word, "-")) for word in columns])
        yield ""


def _told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _head(cells: Sequence[str]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(rows: dict[str, dict[str, Any]]) -> None:
    """Draw CPU time relative to bare torch, and wall time relative to the local run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    parts = {
        "CPU time, bare torch = 1": ("cpu", [r for r in rows.values() if r["base"] == "bare"]),
        "wall time, fedplan in one process = 1": (
            "wall",
            [r for r in rows.values() if r["base"] == "local"],
        ),
    }
    parts = {title: (clock, held) for title, (clock, held) in parts.items() if held}
    figure, axes = plt.subplots(
        len(parts), 1, figsize=(10, 4 * len(parts)), layout="constrained", squeeze=False
    )
    for axis, (title, (clock, held)) in zip(axes[:, 0], parts.items(), strict=True):
        for place, row in enumerate(held):
            engines = [name for name in ENGINES if name != row["base"] and ratios(row, name, clock)]
            for at, name in enumerate(engines):
                found = ratios(row, name, clock)
                middle, x = statistics.median(found), place + 0.8 * (at + 0.5) / len(engines) - 0.4
                axis.bar(x, middle, 0.7 / len(engines), color=COLOURS[name], label=NAMES[name])
                axis.plot([x, x], [min(found), max(found)], color="black", linewidth=1)
                axis.text(x, max(found), f"{middle:.2f}", ha="center", va="bottom", fontsize=7)
        axis.axhline(1.0, color="black", linewidth=0.8)
        labels = [row["text"].replace(", ", "\n").replace(" with ", "\n") for row in held]
        axis.set_xticks(range(len(held)), labels, fontsize=7)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        told = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        axis.legend(told.values(), told.keys(), frameon=False, fontsize=8)
    figure.savefig(FIGURE, dpi=130)
    plt.close(figure)


def write() -> None:
    """Write the table, draw the figure, and print the table."""
    OUT.write_text(table())
    if rows := {name: row for name, row in kept().items() if row["seconds"].get(row["base"])}:
        draw(rows)
    print(table())


if __name__ == "__main__":
    write()
