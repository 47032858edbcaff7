# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a local run, of a server and of a site, as multiples of the model.

`python lab/memory_peaks.py` plays every case; `python lab/memory_peaks.py gpt2-bf16` some of them,
and leaves the others of the result file as they are. The cases stand in tests/kit/peaks.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from study import FACTS, LAB

sys.path.insert(0, str(LAB.parent / "tests" / "kit"))
from peaks import CASES, peaks

RESULT = LAB / "results" / "memory-peaks.json"


def rows_of(name: str) -> list[dict[str, Any]]:
    """What each end of a case held at most."""
    local, server = peaks("local", name), peaks("server", name)
    site = max(server.pop("sites"), key=lambda each: each["peak"])
    return [
        {"case": name, "place": place, **found, "facts": FACTS}
        for place, found in (("local run", local), ("Flower's server", server), ("site", site))
    ]


def main(names: list[str]) -> None:
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    for name in names:
        fresh = rows_of(name)
        for row in fresh:
            print(json.dumps(row), flush=True)
        rows = [row for row in rows if row["case"] != name] + fresh
        said = {"command": "python lab/memory_peaks.py", "facts": FACTS, "rows": rows}
        RESULT.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
