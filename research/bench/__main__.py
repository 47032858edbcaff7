# SPDX-License-Identifier: Apache-2.0
"""Run the benchmark: `python -m research.bench`, all rows or the named ones.

The file of a row in research/results/bench is written after each repetition. A row with all
repetitions is skipped, so that a stopped benchmark continues with the next row; `--again` measures
it again. The engines of a row are separate processes that take turns, in another order in each
repetition. Start-up and first round are measured separately; with `--quick` all engines start at
once, so that start-up times say little.
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
from research.bench.workloads import write_workload

OUT = Path(__file__).parents[1] / "results" / "bench"
QUICK = 2
"""Repetitions of short rows with --quick."""


def engines_of(row: Row, places: Places, args: argparse.Namespace) -> list[str]:
    """The engines of a row that are selected and installed."""
    usual = row.quick if args.quick and row.quick else row.engines
    names = [name for name in usual if not args.engines or name in args.engines]
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
    folder = write_workload(row.workload, places.work)
    return json.loads((folder / "workload.json").read_text())["params"]


def start_engines(
    row: Row, names: list[str], rounds: int, places: Places, *, together: bool
) -> dict[str, Running]:
    """Start the engines of a row; leave out an engine that does not start, and print its log."""
    folder = write_workload(row.workload, places.work)

    def begin(name: str) -> Running | None:
        try:
            engine = Running(name, rounds, folder, places)
        except EngineFault as error:
            print(f"  left out: {error}", flush=True)
            return None
        print(f"  {name}: ready after {engine.startup:.1f} s", flush=True)
        return engine

    with ThreadPoolExecutor(len(names) if together else 1) as pool:
        found = zip(names, pool.map(begin, names), strict=True)
        return {name: engine for name, engine in found if engine is not None}


def times(row: Row, args: argparse.Namespace) -> int:
    """Repetitions of each engine of a row."""
    usual = (1 if row.quick else QUICK) if args.quick else row.repetitions
    return args.repetitions or usual


def measure(name: str, names: list[str], often: int, places: Places, *, quick: bool) -> None:
    """Run a row's repetitions, and write the result file after each."""
    row = ROWS[name]
    each = max(1, row.each // 2) if quick else row.each
    command = f"python -m research.bench {name}" + (" --quick" if quick else "")
    running = start_engines(row, names, 1 + each * often, places, together=quick)
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
                    took = running[engine].run_rounds(each if turn else 1)
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
        result["told"] = {name: running[name].final_state() for name in running}
        (OUT / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    finally:
        for engine in running.values():
            engine.end()


def has_all(name: str, engines: list[str], repetitions: int) -> bool:
    """Whether the file of a row has all repetitions of these engines."""
    file = OUT / f"{name}.json"
    row = json.loads(file.read_text()) if file.exists() else {"told": {}, "seconds": {}}
    return all(n in row["told"] and len(row["seconds"][n]) >= repetitions for n in engines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; without any, all")
    parser.add_argument("--engines", nargs="+", choices=sorted(ENGINES))
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--before", type=Path, help="another tree of fedplan, measured beside it")
    parser.add_argument("--environments", type=Path, default=Path("/opt"))
    parser.add_argument("--work", type=Path, default=Path(gettempdir()) / "fedplan-bench")
    parser.add_argument("--repetitions", type=int, default=0)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two repetitions of fewer rounds; engines start at once",
    )
    parser.add_argument("--again", action="store_true", help="measure complete rows, too")
    args = parser.parse_args()
    if unknown := set(args.rows) - ROWS.keys():
        parser.error(f"there is no row {min(unknown)!r}; there are {', '.join(ROWS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end the engines, too
    OUT.mkdir(parents=True, exist_ok=True)
    before = args.before.resolve() if args.before else None
    places = Places(args.tree.resolve(), before, args.environments, args.work)
    started = time.monotonic()
    for name in args.rows or ROWS:
        row, so_far = ROWS[name], time.monotonic() - started
        print(f"{name}: {row.text()} ({so_far:.0f} s so far)", flush=True)
        engines, often = engines_of(row, places, args), times(row, args)
        if has_all(name, engines, often) and not args.again:
            print("  has all repetitions", flush=True)
        else:
            measure(name, engines, often, places, quick=args.quick)
    from research.bench.table import write

    write()


if __name__ == "__main__":
    main()
