# SPDX-License-Identifier: Apache-2.0
"""Print the tables of the studies from their result files, as Markdown."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
HEADING = """| method | seeds | world | own | own, worst client | MB up per client and round |
|---|---|---|---|---|---|"""


def spread(numbers: list[float]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{statistics.mean(numbers):.3f} ± {statistics.pstdev(numbers):.3f}"


def row(method: str, results: list[dict]) -> str:
    """One method: the scores after the last round, over its seeds."""
    last = [result["metrics"][-1] for result in results]
    rounds = results[0]["study"]["train"]["rounds"]
    clients = results[0]["study"]["data"]["clients"]
    up = statistics.mean(result["bytes_up"] for result in results) / rounds / clients / 1e6
    cells = (
        method,
        str(len(results)),
        spread([m["world"]["accuracy"] for m in last]),
        spread([m["personal"]["mean"] for m in last]),
        spread([m["personal"]["worst"] for m in last]),
        f"{up:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def table(study: str) -> str:
    """The table of one study."""
    found: dict[str, list[dict]] = {}
    for file in sorted((RESULTS / study).glob("*.json")):
        found.setdefault(file.stem.rpartition("-")[0], []).append(json.loads(file.read_text()))
    lines = [row(method, results) for method, results in found.items()]
    return "\n".join([f"### {study}", "", HEADING, *lines, ""])


def main() -> None:
    studies = sorted(folder.name for folder in RESULTS.iterdir() if folder.is_dir())
    print("\n".join(map(table, studies)), end="")


if __name__ == "__main__":
    main()
