# SPDX-License-Identifier: Apache-2.0
"""How far forecasts were off: bytes of the result files, epsilon of a small study here.

Bytes: a result file says what a run sent, and today's code forecasts it from the study in it. Models
that are made from settings are here; those of a folder need a --place. Epsilon: a small
study (after `python examples/digits.py`) is forecast, then played whole. Writes research/results/forecasts.json and prints a table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from study import FACTS, LAB, in_place
from words import translate_study

from fedplan.errors import FedplanError
from fedplan.reports.study_explanation import explain_experiment, read_privacy_statement
from fedplan.run import run_study
from fedplan.studies.experiment import build_experiment
from fedplan.studies.schema import read_study, study_from_dict
from fedplan.sweeps.comparisons import markdown_table

RESULTS = LAB / "results"
STUDY = LAB.parent / "examples" / "digits.toml"
GONE = {"train": ("bf16",), "method": ()}
"""Fields that the schema no longer has; none of them changes a byte."""


def variants() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The results of each variant of each study, over its seeds."""
    for folder in sorted(each for each in RESULTS.iterdir() if each.is_dir()):
        found = dict[str, list[dict[str, Any]]]()
        for file in sorted(folder.glob("*-[0-9].json")):
            read = json.loads(file.read_text())
            if "bytes_up" in read:
                found.setdefault(file.stem.rpartition("-")[0], []).append(read)
        for name, results in found.items():
            yield f"{folder.name}/{name}", results


def bytes_of(result: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """What a client is forecast to send and receive in all, at least and at most."""
    said = in_place(result["study"], places)
    for section, names in GONE.items():
        said[section] = {k: v for k, v in said.get(section, {}).items() if k not in names}
    study = study_from_dict(translate_study(said))
    experiment = build_experiment(study)
    views = explain_experiment(study, experiment)[0].forecast.clients
    if sum(p.numel for p in experiment.agreement.params) != result["params"]:
        raise FedplanError("the model has another number of params")
    return {
        way: [min(v[0] for v in spans), max(v[1] for v in spans)]
        for way, spans in (
            ("up", [v.upload_range for v in views]),
            ("down", [v.download_range for v in views]),
        )
    }


def judged(results: list[dict[str, Any]], places: dict[str, str]) -> dict[str, Any]:
    """Whether what was sent lies in what is forecast, which is one number where nothing is chosen."""
    if any(each["study"].get("clients", {}).get("share", 1) < 1 for each in results):
        return {"left_out": "not all clients take part in each round"}
    try:
        forecast = bytes_of(results[0], places)
    except (FedplanError, OSError, ValueError) as error:
        return {"left_out": str(error).partition("\n")[0][:160]}
    found = dict[str, Any]()
    for way, (least, most) in forecast.items():
        sent = [each[f"bytes_{way}"] / each["clients"] for each in results]
        inside = all(least <= each <= most for each in sent)
        found[way] = {
            "least": least,
            "most": most,
            "sent": sent,
            "inside": inside,
            "exact": least == most,
        }
    return found


def epsilon() -> dict[str, float]:
    """A small private study: what is forecast for all rounds, and what they then spent."""
    labels = ",".join(f'"{digit}"' for digit in range(10))
    change = ["train.rounds=5", "privacy.unit=client", "privacy.epsilon=4.0", "evaluate.every=5",
              f"task.labels=[{labels}]"]  # fmt: skip
    study = read_study(STUDY, change)
    _, statement = explain_experiment(study, build_experiment(study))
    assert statement is not None
    with tempfile.TemporaryDirectory() as folder:
        run_study(study, Path(folder) / "run")
        spent = read_privacy_statement(Path(folder) / "run").epsilon_spent
    return {"forecast": statement.guarantee.forecast_epsilon(5), "spent": spent}


def lines(found: dict[str, Any]) -> list[list[str]]:
    """The table of research/pages/forecasts.md."""
    told = [each for each in found["bytes"].values() if "left_out" not in each]
    rows = list[list[str]]()
    for way in ("up", "down"):
        exact = [e[way] for e in told if e[way]["exact"]]
        spans = [e[way] for e in told if not e[way]["exact"]]
        for kind, held in (("one number", exact), ("a span", spans)):
            inside = sum(each["inside"] for each in held)
            rows.append([f"bytes {way}, {kind}", f"{len(held)} variants", f"{inside} as forecast"])
    spent = found["epsilon"]
    rows.append(["epsilon", "1 study", f"{abs(spent['spent'] / spent['forecast'] - 1):.2%}"])
    return rows


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--place", action="append", default=[], help="DATA=folder, GTE=folder ...")
    ask.add_argument("--bytes", action="store_true", help="those anew, and keep the rest")
    ask.add_argument("--told", action="store_true", help="print what is kept, and play nothing")
    said = ask.parse_args()
    places, kept = dict(place.split("=", 1) for place in said.place), RESULTS / "forecasts.json"
    found: dict[str, Any] = (
        json.loads(kept.read_text()) if said.told or said.bytes else {"facts": FACTS}
    )
    if not said.told:
        named = " ".join(f"--place {name}={name}" for name in places)
        found["command"] = f"python research/forecasts.py {named}"
        found["bytes"] = {name: judged(results, places) for name, results in variants()}
        if not said.bytes:
            found["epsilon"] = epsilon()
        kept.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown_table(["forecast", "of", "off by"], lines(found)), end="")


if __name__ == "__main__":
    main()
