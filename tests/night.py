# SPDX-License-Identifier: Apache-2.0
"""Run every test at night, one part per file; a later call goes on with the parts that are missing."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Timer
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "night"
RESULTS = ROOT / "research" / "results" / "night.jsonl"


def run_part(part: str, limit: float) -> dict[str, Any]:
    """Run one file of tests and return its record; after `limit` seconds interrupt it."""
    log = LOGS / part.replace("/", "-")
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "-ojunit_family=xunit1",  # the other one has no properties of tests
        part,
    ]
    with log.with_suffix(".log").open("w") as out:
        pid = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True
        ).pid
    # pytest still writes its report after an interrupt, unless it hangs.
    interrupt = Timer(limit, os.kill, (pid, signal.SIGINT))
    kill = Timer(limit + 60, os.killpg, (pid, signal.SIGKILL))
    for timer in (interrupt, kill):
        timer.start()
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status) if interrupt.is_alive() else None
    for timer in (interrupt, kill):
        timer.cancel()
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failures = [case.get("name") for case in cases if {c.tag for c in case} & {"failure", "error"}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    result = {None: "too long", 0: "passed", 1: "failed"}.get(code, f"exit {code}")
    counts = {"passed": len(cases) - len(failures) - skipped, "failed": len(failures)}
    counts |= {"skipped": skipped, "cpu_seconds": round(usage.ru_utime + usage.ru_stime)}
    return {"part": part, "result": result, **counts, "failures": failures}


def main() -> int:
    """Run the missing parts, the short ones first; return 1 if a part did not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "tests"])
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="parts at a time")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of one part")
    parser.add_argument("--any-commit", action="store_true", help="count records of other commits")
    parser.add_argument("--again", action="store_true", help="repeat parts that have a record")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    results: Path = args.results
    # A job in the background of a shell ignores Ctrl-C, and so would the processes of its tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    LOGS.mkdir(parents=True, exist_ok=True)
    os.environ["FEDPLAN_LAWS"] = "night"
    commit = subprocess.check_output(["git", "rev-parse", "--short=9", "HEAD"], text=True).strip()
    lines = results.read_text().splitlines() if results.exists() else []
    records: dict[str, dict[str, Any]] = {each["part"]: each for each in map(json.loads, lines)}
    paths: list[Path] = args.paths
    files = (f for p in paths for f in ([p] if p.is_file() else p.rglob("test_*.py")))
    parts = {str(file.resolve().relative_to(ROOT)) for file in files}
    if not args.again:
        parts -= {p for p, r in records.items() if args.any_commit or r["commit"] == commit}
    order = sorted(parts, key=lambda part: records.get(part, {}).get("cpu_seconds", 60))
    with ThreadPoolExecutor(args.processes) as pool:
        for done in as_completed([pool.submit(run_part, part, args.limit) for part in order]):
            record = done.result() | {"commit": commit}
            records[record["part"]] = record
            fresh = results.with_suffix(".new")
            fresh.write_text("".join(json.dumps(records[p]) + "\n" for p in sorted(records)))
            fresh.replace(results)
            sys.stderr.write(json.dumps(record) + "\n")
    hours = sum(record["cpu_seconds"] for record in records.values()) / 3600
    sys.stderr.write(f"{len(records)} parts, {hours:.1f} h of CPU\n")
    return int(any(record["result"] != "passed" for record in records.values()))


if __name__ == "__main__":
    sys.exit(main())
