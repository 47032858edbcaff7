# SPDX-License-Identifier: Apache-2.0
"""Damage each file of runs and sites, one at a time, and count what becomes of it.

python research/damage.py --flips 3 --minutes 60

Each file is deleted once, each log also together with its head, and a bit of each file is flipped
`--flips` times; with `--repairs` the folders of REPAIRS are repaired. tests/kit/damage.py and tests/kit/damage_sites.py say what is compared. Each
outcome is appended to build/damage.jsonl; another call goes on. Writes research/results/damage.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "simulation"))

import torch
from damage import KINDS, Workshop
from damage_sites import SETTINGS, STUDIES, FederationWorkshop, SiteWorkshop
from study import FACTS, LAB

from fedplan.storage.append_log import head_file

CASES = LAB.parent / "build" / "damage.jsonl"
BUILD: dict[str, Callable[[str, Path], Any]] = {
    **dict.fromkeys(KINDS, Workshop.build),
    **dict.fromkeys(SETTINGS, FederationWorkshop.build),
    **dict.fromkeys(STUDIES, SiteWorkshop.build),
}
"""The maker of a folder of each kind."""
RANDOM = re.compile(r"\b[0-9a-f]{64}\b|\b[0-9a-f]{16}\b|(?<=clients/)[0-9a-f]{2}/[0-9a-f]{2}")
CLIENT = re.compile(r"client-[0-9]+")


def cases(workshop: Any, flips: int) -> Iterator[tuple[Path, str, int]]:
    """Yield file, manner and number of each damage."""
    files = workshop.files()
    for name in files:
        yield name, "deleted", 0
        if head_file(name) in files:
            yield name, "deleted with its head", 0
    for number in range(flips):
        yield from ((name, "flipped", number) for name in files)


def play(kinds: list[str], flips: int, until: float) -> None:
    """Try all cases that CASES does not have, and append each."""
    CASES.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in CASES.read_text().splitlines()] if CASES.exists() else []
    known = {(x["kind"], x["file"], x["how"], x["number"]) for x in lines}
    for kind in kinds:
        place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            workshop = BUILD[kind](kind, place / "work")
            for name, how, number in cases(workshop, flips):
                file = RANDOM.sub("*", str(name))
                if (kind, file, how, number) in known or time.time() > until:
                    continue
                began = time.process_time()
                outcome = workshop.damage(name, how, Random(f"{kind} {file} {how} {number}"))
                seconds = round(time.process_time() - began, 2)
                case = {"kind": kind, "file": file, "how": how, "number": number}
                case |= {"outcome": outcome.replace(str(place), ""), "seconds": seconds}
                case["commit"] = FACTS["commit"]
                with CASES.open("a") as out:
                    out.write(json.dumps(case) + "\n")
                if not outcome.startswith(("same", "repaired", "refused", "harmless")):
                    print(kind, how, file, outcome, flush=True)
        finally:
            shutil.rmtree(place)


REPAIRS = (
    ("personal", "clients/*/*/*/3.json", "deleted"),
    ("personal", "clients/*/*/*/3.*.safetensors", "flipped"),
    ("personal", "clients/*/*/*/[0-9]*", "deleted"),
    ("personal", "global/3.json", "deleted"),
    ("personal", "global/3.*.safetensors", "flipped"),
    ("personal", "global/*", "deleted"),
    ("personal", "ledger.jsonl", "flipped"),
    ("personal", "ledger.jsonl", "deleted"),
    ("personal", "metrics.jsonl", "deleted"),
    ("personal", "manifest.json", "flipped"),
    ("personal", "data.json", "deleted"),
    ("personal", "study.json", "deleted"),
    ("personal", "run.json", "flipped"),
    ("personal", "clients/*/*/*/key", "deleted"),
    ("best", "best/*.safetensors", "flipped"),
    ("best", "best/*", "deleted"),
    ("scaffold", "clients/*/*/*/3.*", "deleted"),
    ("adam", "global/3.*.safetensors", "flipped"),
    ("client", "privacy/charges.jsonl", "deleted"),
    ("client", "privacy/secret", "deleted"),
    ("example", "privacy/*/charges.jsonl", "flipped"),
    ("example", "clients/*/*/*/3.json", "deleted"),
    ("secure", "clients/*/*/*/3.json", "deleted"),
)
"""Kind of run, files that are damaged, and how: a repair restores them, or says why not."""


def repairs() -> Iterator[dict[str, Any]]:
    """Yield what came of each of REPAIRS."""
    for kind in dict.fromkeys(kind for kind, _, _ in REPAIRS):
        place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        workshop = Workshop.build(kind, place / "work")
        for _, pattern, how in (each for each in REPAIRS if each[0] == kind):
            outcome = workshop.repair(pattern, how, Random(pattern))
            print(kind, pattern, how, outcome, flush=True)
            yield {"kind": kind, "damaged": pattern, "how": how, **outcome}
        shutil.rmtree(place)


def table() -> dict[str, Any]:
    """Return the outcomes by kind and file, and their sums."""
    rows = dict[str, dict[str, dict[str, Any]]]()
    commits = Counter[str]()
    sums = {how: Counter[str]() for how in ("deleted", "deleted with its head", "flipped")}
    for line in map(json.loads, CASES.read_text().splitlines()):
        result, _, reason = line["outcome"].partition(": ")
        file = CLIENT.sub("CLIENT", line["file"])
        row = rows.setdefault(line["kind"], {}).setdefault(file, {})
        counts = row.setdefault(line["how"], {})
        counts[result] = counts.get(result, 0) + 1
        if reason:
            row.setdefault("reasons", {}).setdefault(result, reason[:160])
        sums[line["how"]][result] += 1
        commits[line["commit"]] += 1
    return {"cases by commit": commits, "sums": sums, "kinds": rows}


def main() -> None:
    """Play, and write the table of all that was played so far."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="*", default=list(BUILD))
    parser.add_argument("--flips", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--repairs", action="store_true", help="repair the folders of REPAIRS, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    file = LAB / "results" / "damage.json"
    old = json.loads(file.read_text()).get("repairs", []) if file.exists() else []
    repaired = list(repairs()) if options.repairs else old
    play(options.kinds, options.flips, time.time() + 60 * options.minutes)
    seeds = "the words of each case: kind, file, manner, number"
    result = {"command": f"python research/damage.py --flips {options.flips}", "seeds": seeds}
    result |= {"facts": FACTS, **table(), "repairs": repaired}
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
