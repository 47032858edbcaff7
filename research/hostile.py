# SPDX-License-Identifier: Apache-2.0
"""Attack random sites and runs by a hostile server, and count what was tried and found.

python research/hostile.py --minutes 20

Each attack is played against two worlds that differ in one row or one client; see
tests/kit/hostile.py for what is chosen and tests/kit/hostile_worlds.py for what is compared.
Writes research/results/hostile.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))

import torch
from differences import Finding
from hostile import Attack, drawn_attack
from hostile_runs import carried
from hostile_worlds import Outcome
from neighbours import prepare
from study import FACTS, LAB

KINDS = (
    ("example", "plain"),
    ("example", "secure"),
    ("example", "plain"),
    ("client", "secure"),
    ("example", "plain"),
    ("client", "plain"),
)
"""Units and aggregations, in turn."""
COUNTED = ("task", "method", "unit", "aggregation", "values", "order", "row")
Played = list[tuple[Attack, Outcome]]


def play(worker: int, *, workers: int, first: int, minutes: float) -> Played:
    """Carry every `workers`-th attack from the seed `first` on, until the time is over."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found, until, seed = Played(), time.monotonic() + 60 * minutes, first + worker
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        while time.monotonic() < until:
            attack = drawn_attack(seed, *KINDS[seed % len(KINDS)])
            try:
                outcome = carried(attack, Path(folder))
            except Exception as error:  # of the audit itself: the attack counts as a finding
                outcome = Outcome([Finding("error", repr(error))], 0, 0.0, [])
            found.append((attack, outcome))
            for each in outcome.findings:
                print(attack, each.what, each.text[:300], flush=True)
            seed += workers
    return found


def counted(played: Played) -> dict[str, Any]:
    """The number of attacks by each choice, their releases, answers and codes, and all findings."""
    tried = {name: Counter(getattr(a, name) for a, _ in played) for name in COUNTED}
    tried["settings"] = Counter(setting for attack, _ in played for setting in attack.settings)
    kinds = dict[str, Counter[str]]()
    for attack, outcome in played:
        row = kinds.setdefault(f"{attack.unit}, {attack.aggregation}", Counter())
        row["attacks"] += 1
        row["with a release"] += outcome.releases > 0
        row["with sums that differ"] += outcome.reached > 0
        row["releases"] += outcome.releases
        row["answers"] += len(outcome.codes)
        row["with findings"] += bool(outcome.findings)
    codes = Counter(code or "answered" for _, outcome in played for code in outcome.codes)
    return {
        "attacks": len(played),
        "largest difference of two sums, in sensitivities": max(o.reached for _, o in played),
        "by unit and aggregation": dict(sorted(kinds.items())),
        **{f"by {name}": dict(sorted(each.items())) for name, each in tried.items()},
        "codes": dict(codes.most_common()),
        "findings": [
            {"attack": str(attack), "what": each.what, "text": each.text}
            for attack, outcome in played
            for each in outcome.findings
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--output", type=Path, default=LAB / "results" / "hostile.json")
    options = parser.parse_args()
    part = partial(play, workers=options.workers, first=options.first, minutes=options.minutes)
    with ProcessPoolExecutor(options.workers) as pool:
        played = [each for part in pool.map(part, range(options.workers)) for each in part]
    command = f"python research/hostile.py --minutes {options.minutes:g} --first {options.first}"
    found = {"command": command, "facts": FACTS, **counted(played)}
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["by unit and aggregation"], indent=1))


if __name__ == "__main__":
    main()
