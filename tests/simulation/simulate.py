# SPDX-License-Identifier: Apache-2.0
"""Try many seeds, and write a record of each; the records are summed up by `summary.py`.

python tests/simulation/simulate.py FIRST COUNT FILE: a file that has records of later seeds is gone
on with, so that the same command continues after a stop.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from calls import failpoints
from simulator import MEMORY, try_seed

FAILED = Path(__file__).parents[2] / "failed-seeds.jsonl"
"""File of all seeds that failed."""


def environment() -> dict[str, Any]:
    """Commit and versions of the records that follow."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "failpoints": list(failpoints()),
    }


def record_of(seed: int, root: Path) -> dict[str, Any]:
    """Try a seed, and return its record; `reached` is a number with a bit for each failpoint."""
    began, record = time.process_time(), dict[str, Any]()
    try:
        trial = try_seed(seed, root)
        record["faults"] = dict(sorted((trial.faults + trial.network.events).items()))
        record["codes"] = dict(sorted(trial.codes.items()))
        bits = (1 << i for i, point in enumerate(failpoints()) if point in trial.reached)
        record["reached"] = hex(sum(bits))
        record["named"] = sorted(p for p in trial.reached if p.startswith("failpoint "))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        record["failed"] = f"{type(error).__name__}: {error}"[:2000]
        record["traceback"] = "".join(traceback.format_exception(error))[-6000:]
    return {"seed": seed, "cpu": round(time.process_time() - began, 3), **record}


def store_failure(record: dict[str, Any]) -> None:
    """Append the record of a failed seed to FAILED, with commit and versions."""
    facts = {key: value for key, value in environment().items() if key != "failpoints"}
    with FAILED.open("a") as out:
        out.write(json.dumps(record | facts) + "\n")


def last_seed(file: Path) -> int:
    """Return the last seed with a record in a file; -1 if there is none."""
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line).get("seed", -1) for line in lines[-5:]), default=-1)


def main(first: int, seeds: int, file: Path) -> int:
    """Try seeds, and append a record of each to a file; return how many failed."""
    root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    file.parent.mkdir(parents=True, exist_ok=True)
    begin, failed = max(first, last_seed(file) + 1 if seeds > 1 else first), 0
    try:
        with file.open("a") as out:
            out.write(json.dumps(environment()) + "\n")
            for seed in range(begin, first + seeds):
                record = record_of(seed, root)
                out.write(json.dumps(record) + "\n")
                out.flush()
                if "failed" in record:
                    failed += 1
                    store_failure(record)
                    sys.stdout.write(f"seed {seed} failed: {record['failed']}\n")
                    sys.stdout.flush()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return failed


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])) > 0)
