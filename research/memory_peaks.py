# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a local run, of a server and of a site, as multiples of the model.

`python research/memory_peaks.py` plays every case; `python research/memory_peaks.py gpt2-bf16/local` some of
them, and leaves the others of the result file as they are. The cases stand in tests/kit/peaks.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from study import FACTS, LAB

sys.path.insert(0, str(LAB.parent / "tests" / "kit"))
from peaks import CASES, peaks

RESULT = LAB / "results" / "memory-peaks.json"


def rows_of(name: str, place: str) -> list[dict[str, Any]]:
    """What each end of a case held at most."""
    found = peaks(place, name)
    sites = sorted(found.pop("sites", []), key=lambda each: each["peak"])[-1:]
    said = [("local run" if place == "local" else "Flower's server", found)]
    said += [("site", each) for each in sites]
    return [{"case": name, "place": where, **each, **FACTS} for where, each in said]


def keep(fresh: list[dict[str, Any]]) -> None:
    """Put rows into the result file, in the order of the cases."""
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    held = {(row["case"], row["place"]): row for row in (*rows, *fresh)}
    order = sorted(held, key=lambda each: ([*CASES].index(each[0]), each[1] != "local run"))
    said = {"command": "python research/memory_peaks.py", "rows": [held[each] for each in order]}
    RESULT.write_text(json.dumps(said, indent=1) + "\n")


def main(asked: list[str]) -> None:
    for each in asked or [f"{name}/{place}" for name in CASES for place in ("local", "server")]:
        name, _, place = each.partition("/")
        fresh = rows_of(name, place)
        print(json.dumps(fresh), flush=True)
        keep(fresh)


if __name__ == "__main__":
    main(sys.argv[1:])
