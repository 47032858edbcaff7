# SPDX-License-Identifier: Apache-2.0
"""All methods beside each other on three data sets: their runs, kept in a file a set, and the page."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from fedplan.errors import FedplanError
from fedplan.storage.files import write_atomic
from fedplan.studies.experiment import privacy_guarantee
from fedplan.studies.schema import study_from_dict
from fedplan.sweeps.comparisons import markdown_table
from fedplan.sweeps.results import RunResult, read_run_result
from fedplan.sweeps.statistics import mean_interval
from fedplan.sweeps.sweeping import run_trials
from fedplan.sweeps.trials import Trial
from research.bench.facts import facts_of
from research.decide.places import placed, places_of
from research.study import LAB, variants
from research.words import translate_study

SETS = ("fashion", "digits", "medquad")
RESULTS = LAB / "results" / "beside"
PAGE = LAB / "pages" / "beside.md"
MARK = "## The tables\n"
BASE, PLAIN, UNMOVED = "fedavg", "fedavg-sgd", "local-only"
"""Whose last score the others are to reach; what private runs are held against, for they take its
optimizer; and whose world nobody trains."""
NEVER = "not reached"


@dataclass(frozen=True)
class Kept:
    """What a run came to: the bytes of each round, the rounds that were tested, the scores and the
    epsilon of these, and its seconds.

    `study` tells by which words it was played. `whole` says that the clients keep nothing to
    themselves: else nobody has the world's model as it is, and its score means nothing.
    """

    variant: str
    seed: int
    study: str
    plan: str
    whole: bool
    seconds: float
    cpu: float
    up: list[int]
    rounds: list[int]
    world: list[float]
    own: list[float]
    worst: list[float]
    epsilon: list[float]
    facts: dict[str, Any]


Runs = dict[tuple[str, int], Kept]


def read_kept(name: str) -> Runs:
    """The runs that were kept of a data set."""
    file = RESULTS / f"{name}.json"
    lines = json.loads(file.read_text()) if file.is_file() else []
    return {(each["variant"], each["seed"]): Kept(**each) for each in lines}


def write_kept(name: str, runs: Runs) -> None:
    """Keep runs, a line each."""
    lines = ",\n".join(json.dumps(asdict(each)) for each in runs.values())
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_atomic(RESULTS / f"{name}.json", f"[\n{lines}\n]\n".encode())


def study_digest(said: Mapping[str, Any]) -> str:
    """Tells two studies apart by all their words, before folders are put in."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def asked_for() -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """All runs, seed by seed: what is there early has every method on every set."""
    for place in range(len(variants("beside-" + SETS[0])[1])):
        for name in SETS:
            found, seeds = variants(f"beside-{name}")
            for variant, said in found.items():
                yield name, variant, seeds[place], {**said, "seed": seeds[place]}


def current(name: str) -> Runs:
    """The kept runs of a data set that are of its study as it stands; others count for nothing."""
    asked = {(variant, seed): said for of, variant, seed, said in asked_for() if of == name}
    kept = read_kept(name).items()
    return {key: run for key, run in kept if key in asked and run.study == study_digest(asked[key])}


def todo() -> list[tuple[str, str, int, dict[str, Any]]]:
    """The runs that are left; one that was played by other words is played again."""
    done = {(name, *key) for name in SETS for key in current(name)}
    return [each for each in asked_for() if each[:3] not in done]


def play(said: dict[str, Any], variant: str, folder: Path, places: Mapping[str, str]) -> Kept:
    """Play a run, or go on with it, in a folder of its own."""
    seed, name = said["seed"], f"{variant}-{said['seed']}"
    study = study_from_dict(translate_study(placed(said, places, seed)))
    began = time.process_time()
    swept = run_trials(folder, [Trial(name, study)])
    cpu = time.process_time() - began
    if name in swept.unfinished:
        raise FedplanError(f"{name}: {swept.failures.get(name, 'was asked to stop')}")
    found = read_run_result(folder / name)
    guarantee, own = privacy_guarantee(study), found.curve(f"personal.{found.primary}")
    return Kept(
        variant=variant,
        seed=seed,
        study=study_digest(said),
        plan=found.plan,
        whole="keep(" not in found.plan,
        seconds=round(swept.results[name].seconds, 1),
        cpu=round(cpu, 1),
        up=[int(row["upload_bytes"]) for row in found.metrics],
        rounds=[number for number, _ in own],
        world=_curve(found, f"global.{found.primary}"),
        own=_curve(found, f"personal.{found.primary}"),
        worst=_curve(found, f"personal.{found.primary}_worst"),
        epsilon=[guarantee.forecast_epsilon(number) for number, _ in own] if guarantee else [],
        facts=facts_of(LAB.parent),
    )


def _curve(found: RunResult, name: str) -> list[float]:
    return [round(score, 5) for _, score in found.curve(name)]


def reached(curve: Sequence[float], score: float) -> int | None:
    """The first place of a curve that has a score."""
    return next((place for place, each in enumerate(curve) if each >= score), None)


def until(runs: Runs, variant: str, cost: Callable[[Kept, int], float]) -> str:
    """What it costs until a variant scores as FedAvg at its end, on the seeds where it does.

    It is the world's score; where there is no world, that of the clients' own models.
    """
    found, own, ends = list[float](), _of(runs, variant), _of(runs, BASE)
    pairs = [(run, ends[seed]) for seed, run in own.items() if seed in ends]
    for run, end in pairs:
        curves = (run.world, end.world) if run.whole else (run.own, end.own)
        place = reached(curves[0], curves[1][-1])
        found += [] if place is None else [cost(run, place)]
    short = f" ({len(found)} of {len(pairs)})" if len(found) < len(pairs) else ""
    return f"{mean(found):.3g}{short}" if found else NEVER


def _of(runs: Runs, variant: str) -> dict[int, Kept]:
    return {seed: run for (name, seed), run in runs.items() if name == variant}


def sent(run: Kept, place: int) -> float:
    """Megabytes that all clients have sent until a test."""
    return sum(run.up[: run.rounds[place]]) / 1e6


def spent(run: Kept, place: int) -> float:
    """Epsilon until a test."""
    return run.epsilon[place]


def spread(numbers: Sequence[float]) -> str:
    """A mean with its interval, as narrow as it can be said."""
    return mean_interval(numbers).text(2)


def tables() -> str:
    """What the page tells of the runs that are kept."""
    parts = list[str]()
    for name in SETS:
        runs, (found, seeds) = current(name), variants(f"beside-{name}")
        done = f"{len(runs)} of {len(found) * len(seeds)} runs were played."
        if starts := [run.world[-1] for run in _of(runs, UNMOVED).values()]:
            done += f" The world starts at {mean(starts):.2f}."
        parts.append(f"### {name}\n\n{done}\n\n{told(runs)}")
    return MARK + "\n" + "\n".join(parts)


def told(runs: Runs) -> str:
    """The methods on one data set, and those of them that are private; the best come first."""
    names = sorted({variant for variant, _ in runs}, key=lambda name: -_own(runs, name))
    open_ = [name for name in names if not _private(runs, name)]
    heads = ["method", "own", "minus fedavg", "worst", "world", "MB up", "MB until", "CPU s"]
    parts = [markdown_table(heads, [row(runs, name) for name in open_])]
    heads = ["private", "epsilon", "own", "worst", "world", f"world minus {PLAIN}"]
    heads += ["epsilon until", "CPU s"]
    closed = [private_row(runs, name) for name in names if name not in open_]
    return "\n".join([*parts, *([markdown_table(heads, closed)] if closed else [])])


def _private(runs: Runs, name: str) -> bool:
    return any(run.epsilon for run in _of(runs, name).values())


def _own(runs: Runs, name: str) -> float:
    return mean(run.own[-1] for run in _of(runs, name).values())


def row(runs: Runs, name: str) -> list[str]:
    """One method over its seeds."""
    found, base = _of(runs, name), _of(runs, BASE)
    gains = [run.own[-1] - base[seed].own[-1] for seed, run in found.items() if seed in base]
    return [
        _named(name, found, _of(runs, BASE)),
        spread([run.own[-1] for run in found.values()]),
        "" if name == BASE or not gains else spread(gains),
        *_scores(found),
        f"{mean(sent(run, -1) for run in found.values()):.3g}",
        until(runs, name, sent),
        _cpu(found),
    ]


def private_row(runs: Runs, name: str) -> list[str]:
    """One private method over its seeds."""
    found, base = _of(runs, name), _of(runs, PLAIN)
    gains = [run.world[-1] - base[seed].world[-1] for seed, run in found.items() if seed in base]
    return [
        _named(name, found, _of(runs, BASE)),
        f"{max(run.epsilon[-1] for run in found.values()):.3g}",
        spread([run.own[-1] for run in found.values()]),
        *_scores(found),
        spread(gains) if gains else "",
        until(runs, name, spent),
        _cpu(found),
    ]


def _named(name: str, found: Mapping[int, Kept], base: Mapping[int, Kept]) -> str:
    """A method, and how many seeds it has if these are fewer than FedAvg's."""
    return f"`{name}`" + (f" ({len(found)} of {len(base)})" if len(found) < len(base) else "")


def _scores(found: Mapping[int, Kept]) -> list[str]:
    """The worst client, and the world if there is one."""
    whole = all(run.whole for run in found.values())
    worlds = spread([run.world[-1] for run in found.values()]) if whole else ""
    return [spread([run.worst[-1] for run in found.values()]), worlds]


def _cpu(found: Mapping[int, Kept]) -> str:
    """The least of its seeds: the first run of a process also imports what it needs."""
    return f"{min(run.cpu for run in found.values()):.1f}"


def play_all(
    folder: Path, places: Mapping[str, str], *, minutes: float, only: Sequence[str]
) -> list[str]:
    """Play what is left, and begin nothing after so many minutes; each is kept as it ends.

    What fails does not keep the others from being played. It is told.
    """
    last, faults = time.monotonic() + 60 * minutes, list[str]()
    if strange := set(only) - {each[1] for each in asked_for()}:
        raise FedplanError(f"there is no method {min(strange)!r} in research/studies/beside-*.toml")
    left = [each for each in todo() if not only or each[1] in only]
    for number, (name, variant, seed, said) in enumerate(left, 1):
        if time.monotonic() > last:
            break
        here = folder / f"{name}-{study_digest(said)}"
        try:
            found = play(said, variant, here, places)
        except FedplanError as error:
            faults.append(f"{name}: {error}")
            print(faults[-1], flush=True)
            continue
        write_kept(name, {**read_kept(name), (variant, seed): found})
        shutil.rmtree(here)
        print(f"{name} {variant}-{seed} {found.cpu} s, {len(left) - number} left", flush=True)
    return faults


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--place", action="append", default=[], help="PREPARED=folder, DIGITS=folder")
    ask.add_argument("--folder", type=Path, default=Path("sweeps") / "beside")
    ask.add_argument("--variants", nargs="+", default=[], help="play these methods alone")
    ask.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many")
    ask.add_argument("--write", action="store_true", help="play nothing: fill the page")
    said = ask.parse_args()
    places = places_of(said.place)
    faults = (
        []
        if said.write
        else play_all(said.folder, places, minutes=said.minutes, only=said.variants)
    )
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + tables())
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
