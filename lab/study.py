# SPDX-License-Identifier: Apache-2.0
"""Run the variants of a study over its seeds: one result file each, written as it goes."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
import transformers

from fedplan.runners.simulation import Simulation
from fedplan.storage.lines import read_lines
from fedplan.studies.schema import study_of

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
        "commit": commit + ("+changes" if changed.strip() else ""),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cores": 2,
    }


# Read once: the code that runs is the code that was there when it started.
FACTS = facts()


def variants(name: str) -> tuple[dict[str, dict[str, Any]], list[int]]:
    """The studies that a file of lab/studies holds, by variant, and its seeds."""
    said = tomllib.loads((LAB / "studies" / f"{name}.toml").read_text())
    changes, seeds = said.pop("variants"), said.pop("seeds")
    return {variant: _laid_over(said, change) for variant, change in changes.items()}, seeds


def _laid_over(said: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A study with some fields changed; a method is replaced whole."""
    found = dict(said)
    for key, value in change.items():
        whole = key == "method" or not isinstance(value, dict) or key not in said
        found[key] = value if whole else _laid_over(said[key], value)
    return found


def one(said: dict[str, Any], places: dict[str, str], command: str, out: Path) -> None:
    """Run one study in a folder of its own, and keep what it scored."""
    folder = Path(tempfile.mkdtemp())
    started = time.monotonic()
    here = json.dumps(said)
    for name, place in places.items():
        here = here.replace(name, place)
    simulation = Simulation(study_of(json.loads(here)), folder)
    simulation.run()
    lines = read_lines(folder / "ledger.jsonl")
    turns = [line for line in lines if "moved" not in line]
    signs = [
        {name: line[name] for name in ("round", "phase", "up", "down", "drift", "attention", "products")
         if name in line}
        for line in lines if "moved" in line
    ]  # fmt: skip
    result = {
        "command": command,
        "study": said,
        "facts": FACTS,
        "seconds": round(time.monotonic() - started, 1),
        "clients": len({line["client"] for line in turns}),
        "params": sum(p.numel for p in simulation.federation.agreement.params),
        "bytes_up": sum(line["up"] for line in turns),
        "bytes_down": sum(line["down"] for line in turns),
        "chosen": _chosen(turns, simulation),
        "rounds": signs,
        "metrics": read_lines(folder / "metrics.jsonl"),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(folder)


def _chosen(turns: list[dict[str, Any]], simulation: Simulation) -> dict[str, int]:
    """How many turns shared each block, where scores decide."""
    params, found = simulation.federation.agreement.params, dict[str, int]()
    for line in turns:
        if line["scores"]:
            pairs = zip(params, line["roles"], strict=True)
            for block in {p.block for p, letter in pairs if letter == "S" and p.at}:
                found[str(block)] = found.get(str(block), 0) + 1
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("study", help="the name of a file in lab/studies")
    ask.add_argument("--place", action="append", default=[], help="DATA=folder, MINILM=folder ...")
    ask.add_argument("--variants", nargs="+")
    ask.add_argument("--seeds", nargs="+", type=int)
    asked = ask.parse_args()
    places = dict(place.split("=", 1) for place in asked.place)
    found, seeds = variants(asked.study)
    for seed in asked.seeds or seeds:
        for name in asked.variants or found:
            out = LAB / "results" / asked.study / f"{name}-{seed}.json"
            if not out.exists():
                command = f"python lab/study.py {asked.study} --variants {name} --seeds {seed}"
                one(found[name] | {"seed": seed}, places, command, out)
                print(out.name, json.loads(out.read_text())["seconds"], "s", flush=True)


if __name__ == "__main__":
    main()
