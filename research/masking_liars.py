# SPDX-License-Identifier: Apache-2.0
"""What one site that lies costs a round of secure aggregation: attempts, bytes and seconds.

`python -m research.masking_liars` plays rounds of 5, 10 and 30 sites with 100,000 numbers, in one process on
one core, and writes research/results/masking/liars.json; `--table` prints the table of
docs/explanation/secure-aggregation.md from that file. Seconds are of all sites and the server
together; bytes are of all replies after the key adverts.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "kit"))

from masked_liars import LEFT_OUT, STILL_SUMMED, Liars  # noqa: E402

from research.bench.facts import facts_of  # noqa: E402

RESULTS = ROOT / "research" / "results" / "masking" / "liars.json"
COUNTS, NUMBERS, TRIES = (5, 10, 30), 10**5, 3
CASES: dict[str, tuple[str, Any, str]] = {
    "nobody lies": ("", None, ""),
    **{name: STILL_SUMMED[name] for name in ("wrong unmask shares", "one wrong dealt share")},
    **{name: LEFT_OUT[name] for name in ("wrong dealt shares", "input of a wrong length")},
}


def row_of(case: str, count: int) -> dict[str, Any]:
    """One case: what came of it, and the middle of some tries of its seconds."""
    step, lie, _ = CASES[case]
    tries = list[float]()
    for _ in range(TRIES):
        liars = Liars(count, step, lie, NUMBERS)
        drive = liars.play()
        assert drive.unmasked is not None, drive.failure
        assert set(drive.dropouts) == ({liars.liar} if lie else set())
        tries.append(liars.seconds)
    values = 8 * NUMBERS * sum(n in drive.survivors for n in liars.names)
    return {
        **{"case": case, "sites": count, "attempts": drive.attempt},
        "summed": len(drive.survivors),
        "named": drive.dropouts.get(liars.liar, ""),
        "bytes": sum(liars.sent.values()),
        "bytes_beside_values": sum(liars.sent.values()) - values,
        "seconds": round(statistics.median(tries), 3),
    }


def table() -> str:
    """The rows of the file as a table."""
    rows = json.loads(RESULTS.read_text())["rows"]
    plain = {row["sites"]: row for row in rows if row["case"] == "nobody lies"}
    lines = ["| sites | case | attempts | sites in the sum | bytes | s, all sites and the server |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        more = f"{row['bytes']:,}"
        if row["case"] != "nobody lies":
            more = f"{row['bytes'] - plain[row['sites']]['bytes']:+,}"
        said = f"{row['sites']} | {row['case']} | {row['attempts']} | {row['summed']}"
        lines.append(f"| {said} | {more} | {row['seconds']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all cases, and write the file."""
    logging.getLogger("fedplan").setLevel(logging.ERROR)
    rows = [row_of(case, count) for count in COUNTS for case in CASES]
    told = {"command": "python -m research.masking_liars", "facts": facts_of(ROOT), "threads": 1}
    told |= {"numbers": NUMBERS, "tries": TRIES, "load": round(os.getloadavg()[0], 2), "rows": rows}
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.stdout.write(table()) if "--table" in sys.argv else main()
