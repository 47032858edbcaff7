# SPDX-License-Identifier: Apache-2.0
"""Run the variants of a study over its seeds as a sweep: one result file each, as it ends."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from fedplan.federation.ledger.records import RoundRecord, TurnRecord
from fedplan.models.params import Params
from fedplan.storage.append_log import read_json_lines
from fedplan.studies.run import read_run
from fedplan.studies.schema import study_from_dict
from fedplan.sweeps.sweeping import SweepEvent, run_trials
from fedplan.sweeps.trials import Trial

LAB = Path(__file__).parent
SIGNS = (
    *("round", "phase", "upload_bytes", "download_bytes"),
    *("drift", "attention", "products"),
)


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
    """The studies that a file of research/studies holds, by variant, and its seeds."""
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


def in_place(said: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """A study with the folders that its places stand for."""
    here = json.dumps(said)
    for name, place in places.items():
        here = here.replace(name, place)
    return json.loads(here)


def told(news: SweepEvent, folder: Path, asked: dict[str, dict[str, Any]], out: Path) -> None:
    """Say how a run ended, and keep what it came to."""
    print(news.name, news.result.error or f"{news.result.seconds:.1f} s", flush=True)
    if news.result.finished:
        keep(news.name, news.result.seconds, folder, asked[news.name], out)


def keep(name: str, seconds: float, folder: Path, said: dict[str, Any], out: Path) -> None:
    """Write what a run came to into its result file."""
    run = read_run(folder / name)
    turns = [each for each in run.records if isinstance(each, TurnRecord)]
    rounds = [each.json() for each in run.records if isinstance(each, RoundRecord)]
    variant, _, seed = name.rpartition("-")
    result = {
        "command": f"python research/study.py {out.name} --variants {variant} --seeds {seed}",
        "study": said,
        "facts": FACTS,
        "seconds": round(seconds, 1),
        "clients": len({turn.client for turn in turns}),
        "params": sum(p.numel for p in run.params),
        "bytes_up": sum(turn.upload_bytes for turn in turns),
        "bytes_down": sum(turn.download_bytes for turn in turns),
        "chosen": _chosen(turns, run.params),
        "rounds": [{sign: line[sign] for sign in SIGNS if sign in line} for line in rounds],
        "metrics": read_json_lines(run.folder / "metrics.jsonl"),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def _chosen(turns: Sequence[TurnRecord], params: Params) -> dict[str, int]:
    """How many turns shared each block, where scores decide."""
    found = dict[str, int]()
    for turn in turns:
        if turn.scores:
            pairs = zip(params, turn.roles, strict=True)
            for block in {p.block for p, letter in pairs if letter == "S" and p.block_id}:
                found[str(block)] = found.get(str(block), 0) + 1
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def main() -> None:
    from words import (
        translate_study,
    )  # beside this script; `research.study` is imported elsewhere too

    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("study", help="the name of a file in research/studies")
    ask.add_argument("--place", action="append", default=[], help="DATA=folder, MINILM=folder ...")
    ask.add_argument("--variants", nargs="+")
    ask.add_argument("--seeds", nargs="+", type=int)
    ask.add_argument("--parallel", type=int, default=1)
    ask.add_argument("--folder", type=Path, help="where runs are kept until they end")
    ask.add_argument("--results", type=Path, default=LAB / "results")
    said = ask.parse_args()
    places = dict(place.split("=", 1) for place in said.place)
    found, seeds = variants(said.study)
    out, folder = said.results / said.study, said.folder or Path("sweeps") / said.study
    asked = {
        f"{name}-{seed}": found[name] | {"seed": seed}
        for seed in said.seeds or seeds
        for name in said.variants or found
        if not (out / f"{name}-{seed}.json").exists()
    }
    trials = [
        Trial(name, study_from_dict(translate_study(in_place(each, places))))
        for name, each in asked.items()
    ]
    tell = partial(told, folder=folder, asked=asked, out=out)
    swept = run_trials(folder, trials, parallel=said.parallel, on_trial_end=tell)
    for name in asked.keys() - swept.failures.keys():
        if not (out / f"{name}.json").exists() and swept.results[name].finished:  # it ended before
            keep(name, swept.results[name].seconds, folder, asked[name], out)
    if not swept.unfinished:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
