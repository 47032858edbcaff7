# SPDX-License-Identifier: Apache-2.0
"""Let a federation of three real sites run for many rounds, and see what grows.

    python research/soak.py 1000 --folder /tmp/soak

Samples memory, open files, CPU and folders of all processes every 20 rounds. Called again with the
same folder it goes on. Writes research/results/soak.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from real_servers import Play
from study import FACTS, LAB

from commands import some_digits  # isort: skip
from deployment import Deployment, free_ports  # isort: skip
from test_deployment import MORE, SITES, rows_of, study_from_dict  # isort: skip

SOAK = LAB / "results" / "soak.json"
EVERY = 20
"""Rounds between two samples."""


def process_sample(pids: list[int]) -> dict[str, float]:
    """Memory in MB, open files, threads and CPU seconds of processes."""
    found = {"processes": 0.0, "mb": 0.0, "open_files": 0.0, "threads": 0.0, "cpu_seconds": 0.0}
    for pid in pids:
        with suppress(OSError):
            place = Path("/proc") / str(pid)
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            found["cpu_seconds"] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            found["threads"] += int(fields[17])
            found["mb"] += int((place / "statm").read_text().split()[1]) * 4096 / 1e6
            found["open_files"] += len(list((place / "fd").iterdir()))
            found["processes"] += 1
    return {key: round(value, 1) for key, value in found.items()}


def folder_sample(folder: Path) -> dict[str, int]:
    """Files and bytes in a folder."""
    sizes = list[int]()
    for file in folder.rglob("*"):
        with suppress(OSError):
            if file.is_file() and not file.is_symlink():
                sizes.append(file.stat().st_size)
    return {"files": len(sizes), "bytes": sum(sizes)}


def sample(fed: Deployment, number: int) -> dict[str, Any]:
    """All processes and folders of a federation at a round."""
    processes = {"driver": "run", "superlink": "link", "proxy": "proxy"}
    processes |= {f"site {name}": name for name in SITES}
    processes |= {f"node {name}": f"node {name}" for name in SITES}
    folders = {"run": fed.folder / "run", "server": fed.folder / "server"}
    folders |= {f"site {name}": fed.folder / "sites" / name / "state" for name in SITES}
    return {
        "round": number,
        "time": round(time.time(), 1),
        "load": round(os.getloadavg()[0], 1),
        "processes": {key: process_sample(fed.pids(what)) for key, what in processes.items()},
        "folders": {key: folder_sample(place) for key, place in folders.items()},
    }


def soak(rounds: int, folder: Path) -> None:
    """Run so many rounds of three real sites; append a sample to samples.jsonl every EVERY rounds."""
    fresh = not (folder / "fed").exists()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    if fresh:
        some_digits(folder)
    ports = folder / "ports.json"
    if fresh:
        ports.write_text(json.dumps(free_ports(2)))
    fed = Deployment(
        folder / "fed", SITES, rows_of(folder), more=MORE, ports=json.loads(ports.read_text())
    )
    study = study_from_dict(folder, "fedper", name="soak", rounds=rounds)
    (fed.folder / "study.toml").write_text(study)
    samples, play = folder / "samples.jsonl", Play(fed)
    with fed:
        play.drive()
        last = json.loads(samples.read_text().splitlines()[-1])["round"] if samples.exists() else 0
        while last < rounds:
            if (number := play.status().get("round", 0)) >= min(last + EVERY, rounds):
                last = number
                with samples.open("a") as file:
                    file.write(json.dumps(sample(fed, last)) + "\n")
                if last > EVERY:
                    write_soak(samples, rounds)
            time.sleep(1.0)
        play.finish(600)


def write_soak(samples: Path, rounds: int) -> None:
    """Write the result file of the samples so far, of a soak of so many rounds."""
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    command = f"python research/soak.py {rounds}"
    done = {"command": command, "rounds": rows[-1]["round"], "seed": 0}
    text = {**done, **FACTS, **summary(rows), "samples": rows}
    SOAK.write_text(json.dumps(text, indent=1) + "\n")


def slope(pairs: list[tuple[float, float]]) -> float:
    """The least-squares growth of the second number with the first."""
    count = len(pairs)
    x, y = (sum(pair[i] for pair in pairs) / count for i in (0, 1))
    spread = sum((pair[0] - x) ** 2 for pair in pairs)
    return sum((pair[0] - x) * (pair[1] - y) for pair in pairs) / spread if spread else 0.0


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Growth a round over the last half, and the seconds and CPU seconds of a round."""
    late = rows[len(rows) // 2 :]
    growth = dict[str, Any]()
    for kind, keys in (
        ("processes", ("mb", "open_files", "threads")),
        ("folders", ("files", "bytes")),
    ):
        for name in rows[-1][kind]:
            for key in keys:
                pairs = [(row["round"], row[kind][name][key]) for row in late]
                growth[f"{name}: {key}"] = round(slope(pairs), 4)
    spans = [
        (b["time"] - a["time"]) / (b["round"] - a["round"])
        for a, b in pairwise(rows)
        if b["round"] > a["round"]
    ]
    cpu = {
        name: round(slope([(r["round"], r["processes"][name]["cpu_seconds"]) for r in late]), 4)
        for name in rows[-1]["processes"]
    }
    quarter = max(1, len(spans) // 4)
    return {
        "seconds a round, first quarter": round(sorted(spans[:quarter])[quarter // 2], 3),
        "seconds a round, last quarter": round(sorted(spans[-quarter:])[quarter // 2], 3),
        "CPU seconds a round": cpu,
        "growth a round, last half": growth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rounds", type=int)
    parser.add_argument("--folder", type=Path, required=True, help="where to work and to go on")
    args = parser.parse_args()
    soak(args.rounds, args.folder.absolute())


if __name__ == "__main__":
    main()
