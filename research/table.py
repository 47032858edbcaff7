# SPDX-License-Identifier: Apache-2.0
"""Print the tables of the studies from their result files, as Markdown."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from study import variants
from words import translate_metrics

from fedplan.data.tasks.kinds import task_class
from fedplan.sweeps.comparisons import markdown_table as written
from fedplan.sweeps.statistics import mean_interval

RESULTS = Path(__file__).parent / "results"

Result = dict[str, Any]
Measure = Callable[[Result], float]


def last(result: Result) -> dict[str, Any]:
    """The metrics of the last round, under today's names."""
    return translate_metrics(result["metrics"][-1], primary(result))


def primary(result: Result) -> str:
    """The primary metric of the result's task."""
    return task_class(result["study"]["task"]["kind"]).primary


def measured(score: str, own: str = "") -> dict[str, Measure]:
    """The world on the common test, and the clients on their own rows.

    own: the primary metric of the task, if it is not `score`.
    """
    return {
        f"world {score}": lambda r: last(r)["global"][score],
        f"own {own or score}": lambda r: last(r)["personal"][primary(r)],
        "worst client": lambda r: last(r)["personal"][f"{primary(r)}_worst"],
    }


def domain(name: str) -> Measure:
    def mean(result: Result) -> float:
        clients = last(result)["clients"].items()
        return statistics.mean(s["accuracy"] for n, s in clients if n.startswith(name))

    return mean


def later(result: Result) -> list[dict[str, Any]]:
    """The second half of the rounds."""
    return result["rounds"][len(result["rounds"]) // 2 :]


def apart(*without: str) -> Measure:
    """How far the clients' changes lie apart in the second half of the run, but for some kinds."""

    def mean(result: Result) -> float:
        drifts = [line["drift"] for line in later(result)]
        return statistics.mean(
            sum(far for kind, (far, _) in drift.items() if kind not in without) for drift in drifts
        )

    return mean


def moved(result: Result) -> float:
    """How far the attention moves a round, in the second half of the run."""
    far = [block[-1] for line in later(result) for block in line["attention"]]
    return statistics.mean(far)


def product(number: int, which: int) -> Measure:
    """In some round: the error of LoRA's mean sides (0), or of what the world then has (1)."""
    return lambda result: result["rounds"][number]["products"][which]


FROZEN = measured("accuracy") | {
    "drift": apart(),
    "drift but query and key": apart("query", "key"),
    "attention moved": moved,
}
NCBI, MEDQUAD = (
    {n: m for n, m in measured("f1", own).items() if n != "worst client"}
    for own in ("f1", "accuracy")
)
PROMPTS = {
    "own accuracy": lambda r: last(r)["personal"][primary(r)],
    **{n: domain(n) for n in ("photo", "cartoon", "art_painting", "sketch")},
    "worst client": lambda r: last(r)["personal"][f"{primary(r)}_worst"],
}
LORA = {
    "world accuracy": lambda r: last(r)["global"]["accuracy"],
    "world loss": lambda r: last(r)["global"]["loss"],
    **{f"error of the sides, round {n + 1}": product(n, 0) for n in range(4)},
    "error left, round 1": product(0, 1),
    "error left, round 4": product(3, 1),
}
TABLES: dict[str, dict[str, Measure]] = {
    "frozen-vision": FROZEN,
    "frozen-text": FROZEN,
    "safl-medquad": MEDQUAD,
    "safl-ncbi": NCBI,
    "prompts-domains": PROMPTS,
    "prompts-sites": PROMPTS,
    "exact-lora": LORA,
}


def spread(numbers: list[float]) -> str:
    """Mean and the half width of its 95 % interval over seeds."""
    return mean_interval(numbers).text()


def megabytes(result: Result, way: str) -> float:
    rounds = result["study"]["train"]["rounds"]
    return result[f"bytes_{way}"] / rounds / result["clients"] / 1e6


def sent(number: float) -> str:
    return f"{number:.2f}" if number >= 1 or number == 0 else f"{number:.3f}"


def row(name: str, results: dict[int, Result], base: dict[int, Result], first: str) -> list[str]:
    """One variant over its seeds; the difference to the first is taken seed by seed."""
    study = next(iter(results.values()))["study"]["name"]
    measures = TABLES[study]
    cells = [name, str(len(results))]
    cells += [spread([measure(r) for r in results.values()]) for measure in measures.values()]
    main = measures[first]
    paired = [main(r) - main(base[seed]) for seed, r in results.items() if seed in base]
    cells.append(spread(paired) if results is not base and paired else "")
    for way in ("up", "down"):
        cells.append(sent(statistics.mean(megabytes(r, way) for r in results.values())))
    return cells


def titled(name: str, heads: list[str], rows: list[list[str]]) -> str:
    """A table under the name of its study."""
    return f"### {name}\n\n{written(heads, rows)}"


def table(study: str) -> str:
    """The table of one study, in the order of its file; the first variant is the base."""
    said, _ = variants(study)
    found = {name: _seeds(study, name) for name in said}
    found = {name: results for name, results in found.items() if results}
    measures = list(TABLES[study])
    base = next(iter(found))
    heads = ["variant", "seeds", *measures, f"{measures[0]} minus {base}", "MB up", "MB down"]
    lines = [row(name, results, found[base], measures[0]) for name, results in found.items()]
    return titled(study, heads, lines)


GRIDS = {"private-digits": "accuracy", "private-medquad": "f1"}
"""Studies whose variants are methods at several epsilons, and the score of the world."""
EPSILONS = {"none": "none", "8": "8", "4": "4", "2": "2", "1": "1", "05": "0.5"}


def scores(study: str) -> dict[str, dict[str, list[float]]]:
    """The score of each method at each epsilon, over its seeds."""
    found = dict[str, dict[str, list[float]]]()
    for variant in variants(study)[0]:
        method, _, epsilon = variant.rpartition("-")
        results = _seeds(study, variant).values()
        if results:
            held = [last(result)["global"][GRIDS[study]] for result in results]
            found.setdefault(method, {})[epsilon] = held
    return found


def grid(study: str) -> str:
    """Methods by epsilons; where there is not the usual number of seeds, it stands in brackets."""
    found = scores(study)
    columns = [e for e in EPSILONS if any(e in row for row in found.values())]
    usual = max(len(held) for row in found.values() for held in row.values())
    heads = [f"{GRIDS[study]} at epsilon", *(EPSILONS[e] for e in columns)]
    lines = list[list[str]]()
    for method, row in found.items():
        cells = [row.get(e) for e in columns]
        said = ["" if c is None else spread(c) + _short(c, usual) for c in cells]
        lines.append([method, *said])
    return titled(study, heads, lines)


LIARS = "liars-digits"
GONE = "gone"


def liars() -> str:
    """Accuracy under each defence and lie; the worst of a row, less two runs without the liar."""
    runs = json.loads((RESULTS / f"{LIARS}.json").read_text())["runs"]
    found = dict[str, dict[str, dict[int, float]]]()
    for run in runs:
        held = found.setdefault(run["defence"], {}).setdefault(run["lie"], {})
        held[run["seed"]] = run["accuracy"]
    mean = {d: {lie: statistics.mean(s.values()) for lie, s in r.items()} for d, r in found.items()}
    base, lies = next(iter(mean.values()))[GONE], [lie for lie in mean["mean"] if lie != GONE]
    heads = ["accuracy", "liar gone", *lies, "worst less its own gone", "worst less mean gone"]
    lines = list[list[str]]()
    for defence, row in mean.items():
        worst = min(row[lie] for lie in lies)
        cells = [f"{row[lie]:.3f}" for lie in (GONE, *lies)]
        cells += [f"{worst - row[GONE]:+.3f}", f"{worst - base:+.3f}"]
        lines.append([defence, *cells])
    return titled(LIARS, heads, lines)


def _short(held: list[float], usual: int) -> str:
    return f" ({len(held)})" if len(held) < usual else ""


def _seeds(study: str, variant: str) -> dict[int, Result]:
    files = sorted((RESULTS / study).glob(f"{variant}-[0-9].json"))
    return {int(f.stem.rpartition("-")[2]): json.loads(f.read_text()) for f in files}


def main() -> None:
    asked = sys.argv[1:] or [name for name in (*TABLES, *GRIDS) if (RESULTS / name).is_dir()]
    asked += [LIARS] if not sys.argv[1:] and (RESULTS / f"{LIARS}.json").is_file() else []
    print("\n".join(shown(name) for name in asked), end="")


def shown(name: str) -> str:
    """The table of a study, by what its variants are."""
    if name == LIARS:
        return liars()
    return grid(name) if name in GRIDS else table(name)


if __name__ == "__main__":
    main()
