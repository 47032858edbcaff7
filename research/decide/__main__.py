# SPDX-License-Identifier: Apache-2.0
"""Play what is left of a question, and write its verdicts: python -m research.decide QUESTION.toml."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from fedplan.errors import FedplanError
from research.decide.places import places_of
from research.decide.playing import Bench, play_all, todo
from research.decide.question import read_question
from research.decide.results import RESULTS, Played, read_results, report, write_results
from research.decide.verdicts import power

LOOK = 5.0
"""Seconds between two looks at whether the machine is free."""


def waited(until: float, pause: Path | None) -> bool:
    """Whether a run may begin, once nobody wants the machine to be quiet."""
    while pause is not None and pause.exists():
        time.sleep(LOOK)
    return time.monotonic() < until


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("question", type=Path, help="a file of research/questions")
    ask.add_argument("--place", action="append", default=[], help="PREPARED=folder ...")
    ask.add_argument("--folder", type=Path, help="where runs are kept until all ended")
    ask.add_argument("--results", type=Path, default=RESULTS)
    ask.add_argument("--only", choices=["first"], help="play the deciding corner alone")
    ask.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many")
    ask.add_argument("--pause-while", type=Path, help="begin no run while this file is there")
    ask.add_argument("--look", action="store_true", help="play nothing: the verdicts as they are")
    said = ask.parse_args()
    try:
        decide(said)
    except FedplanError as error:
        sys.exit(f"research.decide: {error}")


def decide(said: argparse.Namespace) -> None:
    """Do what was asked for."""
    asked = read_question(said.question)
    runs, first = read_results(asked.name, said.results), said.only == "first"
    for each in asked.question.comparisons:
        print(f"power {power(asked.question, each):.2f}: {each.name}", flush=True)
    if not said.look:
        bench = Bench(said.folder or Path("sweeps") / asked.name, places_of(said.place))
        until = time.monotonic() + 60 * said.minutes

        def keep(found: Played) -> None:
            write_results(asked, runs, said.results)
            left = len(todo(asked, runs, first=first))
            print(f"{found.name} {found.seconds:.0f} s, {left} left", flush=True)

        play_all(asked, bench, runs, keep=keep, first=first,
                 wait=lambda: waited(until, said.pause_while))  # fmt: skip
        if not todo(asked, runs) and bench.home(asked).is_dir():
            shutil.rmtree(bench.home(asked))
    print(report(asked, runs))


if __name__ == "__main__":
    main()
