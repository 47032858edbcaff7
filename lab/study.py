# SPDX-License-Identifier: Apache-2.0
"""Run a study for several methods and seeds: one result file each, written as it goes."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from fedplan.config import study_of
from fedplan.ledger import read_lines
from fedplan.studies import Trial

LAB = Path(__file__).parent


def facts() -> dict[str, object]:
    """Where a result comes from."""
    commit = subprocess.run(
        ["git", "-C", str(LAB), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "-C", str(LAB.parent), "status", "--porcelain", "fedplan"],
        capture_output=True,
        text=True,
    ).stdout
    return {
        "command": " ".join(["python", "lab/study.py", *sys.argv[1:2]]),
        "commit": commit + ("+changes" if changed.strip() else ""),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cores": 2,
    }


# Read once: the code that runs is the code that was there when it started.
FACTS = facts()


def one(said: dict[str, object], places: dict[str, str], out: Path) -> None:
    """Run one study in a folder of its own, and keep what it scored."""
    folder = Path(tempfile.mkdtemp())
    started = time.monotonic()
    here = json.dumps(said)
    for name, place in places.items():
        here = here.replace(name, place)
    trial = Trial(study_of(json.loads(here)), folder)
    trial.run(lambda *_: None)
    lines = read_lines(folder / "ledger.jsonl")
    turns = [line for line in lines if "moved" not in line]
    result = {
        "study": said,
        "facts": FACTS,
        "seconds": round(time.monotonic() - started, 1),
        "bytes_up": sum(line["up"] for line in turns),
        "bytes_down": sum(line["down"] for line in turns),
        "metrics": read_lines(folder / "metrics.jsonl"),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(folder)


def main() -> None:
    import tomllib

    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("study", help="the name of a file in lab/studies")
    ask.add_argument("--data", required=True, help="the folder that DATA stands for")
    ask.add_argument("--minilm", default="", help="the folder that MINILM stands for")
    ask.add_argument("--methods", nargs="+", required=True)
    ask.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    asked = ask.parse_args()
    text = (LAB / "studies" / f"{asked.study}.toml").read_text()
    places = {"DATA": asked.data, "MINILM": asked.minilm}
    for seed in asked.seeds:
        for name in asked.methods:
            out = LAB / "results" / asked.study / f"{name}-{seed}.json"
            if out.exists():
                continue
            said = tomllib.loads(text) | {"seed": seed, "method": {"name": name}}
            one(said, places, out)
            print(out.name, json.loads(out.read_text())["seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
