# SPDX-License-Identifier: Apache-2.0
"""Run the bench: `python -m research.bench`, all of it or the rows that are named.

A row's file in research/results/bench is written after each repetition. A row with all repetitions
is skipped, so that a stopped bench continues with the next; `--again` measures it anew. The engines
of a row are separate processes that run in turn, in another order in each repetition. Start-up and
first round are recorded apart; with `--quick` all engines start at once, and start-up is no figure.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from research.bench.facts import facts_of
from research.bench.measure import EngineFault, Places, Running
from research.bench.rows import ENGINES, ROWS, Row
from research.bench.workloads import laid_out

OUT = Path(__file__).parents[1] / "results" / "bench"
QUICK = 2
"""Repetitions with --quick, for rows that do not take long."""


def engines_of(row: Row, places: Places, asked: argparse.Namespace) -> list[str]:
    """The engines of a row that are asked for and installed."""
    played = row.quick if asked.quick and row.quick else row.engines
    names = [name for name in played if not asked.engines or name in asked.engines]
    found = list[str]()
    for name in names:
        home = places.environments / ENGINES[name].environment
        if ENGINES[name].environment and not home.is_dir():
            print(f"  {name}: no {home}: run bash research/bench/environments.sh", flush=True)
        elif ENGINES[name].before and places.before is None:
            print(f"  {name}: give --before FOLDER, an older tree of fedplan", flush=True)
        else:
            found.append(name)
    return found


def params_of(row: Row, places: Places) -> int:
    """Number of values of a workload's model."""
    return json.loads((laid_out(row.workload, places.work) / "workload.json").read_text())["params"]


def begun(
    row: Row, names: list[str], rounds: int, places: Places, *, together: bool
) -> dict[str, Running]:
    """The engines of a row; one that does not start is left out, and its log printed."""
    folder = laid_out(row.workload, places.work)

    def begin(name: str) -> Running | None:
        try:
            made = Running(name, rounds, folder, places)
        except EngineFault as error:
            print(f"  left out: {error}", flush=True)
            return None
        print(f"  {name}: ready after {made.startup:.1f} s", flush=True)
        return made

    with ThreadPoolExecutor(len(names) if together else 1) as pool:
        found = zip(names, pool.map(begin, names), strict=True)
        return {name: engine for name, engine in found if engine is not None}


def times(row: Row, asked: argparse.Namespace) -> int:
    """Repetitions of each engine of a row."""
    usual = (1 if row.quick else QUICK) if asked.quick else row.repetitions
    return asked.repetitions or usual


def measure(name: str, names: list[str], often: int, places: Places, *, quick: bool) -> None:
    """Run a row's repetitions, and write the result file after each."""
    row = ROWS[name]
    each = max(1, row.each // 2) if quick else row.each
    command = f"python -m research.bench {name}" + (" --quick" if quick else "")
    running = begun(row, names, 1 + each * often, places, together=quick)
    trees = {"local": places.tree} | ({"before": places.before} if places.before else {})
    result: dict[str, Any] = {
        "row": name,
        "text": row.text(),
        "base": row.base,
        "command": command,
        "facts": {word: facts_of(tree) for word, tree in trees.items()},
        "cohort": row.workload.cohort,
        "params": params_of(row, places),
        "rounds": each,
        "startup": {name: round(engine.startup, 2) for name, engine in running.items()},
        "first": {},
        "seconds": {name: [] for name in running},
        "told": {},
    }
    try:
        for turn in range(often + 1 if running else 0):
            order = sorted(running)[turn % len(running) :] + sorted(running)[: turn % len(running)]
            for engine in order:
                try:
                    took = running[engine].play(each if turn else 1)
                except EngineFault as error:
                    print(f"  left out: {error}", flush=True)
                    running.pop(engine).end()
                    continue
                took = {word: round(value, 4) for word, value in took.items()}
                if turn:
                    result["seconds"][engine].append(took)
                else:
                    result["first"][engine] = took
                print(f"  {turn} {engine}: {took}", flush=True)
            (OUT / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        result["told"] = {name: running[name].told() for name in running}
        (OUT / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    finally:
        for engine in running.values():
            engine.end()


def whole(name: str, engines: list[str], repetitions: int) -> bool:
    """Whether a row's file has all repetitions of these engines."""
    file = OUT / f"{name}.json"
    row = json.loads(file.read_text()) if file.exists() else {"told": {}, "seconds": {}}
    return all(n in row["told"] and len(row["seconds"][n]) >= repetitions for n in engines)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; without any, all")
    ask.add_argument("--engines", nargs="+", choices=sorted(ENGINES))
    ask.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    ask.add_argument("--before", type=Path, help="another tree of fedplan, measured beside it")
    ask.add_argument("--environments", type=Path, default=Path("/opt"))
    ask.add_argument("--work", type=Path, default=Path(gettempdir()) / "fedplan-bench")
    ask.add_argument("--repetitions", type=int, default=0)
    ask.add_argument(
        "--quick",
        action="store_true",
        help="two repetitions of fewer rounds; engines start at once",
    )
    ask.add_argument("--again", action="store_true", help="measure rows that are whole, too")
    asked = ask.parse_args()
    if strange := set(asked.rows) - ROWS.keys():
        ask.error(f"there is no row {min(strange)!r}; there are {', '.join(ROWS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else its engines would outlive it
    OUT.mkdir(parents=True, exist_ok=True)
    before = asked.before.resolve() if asked.before else None
    places = Places(asked.tree.resolve(), before, asked.environments, asked.work)
    started = time.monotonic()
    for name in asked.rows or ROWS:
        row, so_far = ROWS[name], time.monotonic() - started
        print(f"{name}: {row.text()} ({so_far:.0f} s so far)", flush=True)
        engines, often = engines_of(row, places, asked), times(row, asked)
        if whole(name, engines, often) and not asked.again:
            print("  has all repetitions", flush=True)
        else:
            measure(name, engines, often, places, quick=asked.quick)
    from research.bench.table import write

    write()


if __name__ == "__main__":
    main()
