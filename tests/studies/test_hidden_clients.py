# SPDX-License-Identifier: Apache-2.0
"""The folder of a run whose study hides clients: no file has a number of one client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_score_sums import NOISY, PLAIN, SECURE, written

from fedplan.runners.simulation import Simulation
from fedplan.studies.schema import Study

CLIENT_LEVEL = PLAIN.replace("on_clients = true\n", "").replace(
    "when(after(1), freeze(query | key)), ", ""
)
CLIENT_LEVEL += (
    '[privacy]\nunit = "client"\nepsilon = 8.0\nnoise_multiplier = 2.0\nclipping_norm = 0.5\n'
)


def without_sites(text: str) -> str:
    return text.replace("on_clients = true\n", "").replace("noise_multiplier = 2.0\n", "")


STUDIES = {
    "secure": SECURE,
    "secure, scores by the simulation": without_sites(SECURE),
    "example-level": NOISY,
    "example-level, scores by the simulation": without_sites(NOISY),
    "client-level": CLIENT_LEVEL,
}
PUBLIC = {
    "run.json: examples",  # a digest of the examples
    "global/1.json: manifest meta client_sync",  # last round and versions
    "metrics.jsonl: sites silent",  # why a site sent nothing
}
"""Where something may stand under a client's name. Folders of one client are its state and its
privacy account, and a turn in the ledger is looked at by itself."""


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All numbers and texts in JSON, with the keys that lead there."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, path)
    else:
        yield path, value


def contents(folder: Path) -> Iterator[tuple[str, Any]]:
    """All JSON in a run's folder, line by line; other files are tensors and secrets."""
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.suffix in (".json", ".jsonl", ".head") and name.split("/")[0] != "clients":
            text = file.read_text()
            for part in text.splitlines() if file.suffix == ".jsonl" else [text]:
                yield name, json.loads(part)


def test_every_study_that_hides_clients_says_so(here: Path) -> None:
    assert all(written(text).hides_clients for text in STUDIES.values())
    assert not written(PLAIN).hides_clients


@pytest.mark.parametrize("case", STUDIES)
def test_no_file_has_a_number_of_one_client(case: str, here: Path) -> None:
    study: Study = written(STUDIES[case].replace("rounds = 3", "rounds = 1"))
    run = Simulation(study, here / "run").run()
    names, files = set(run.data.train), set[str]()
    for file, content in contents(here / "run"):
        files.add(file)
        if content_is_turn := file == "ledger.jsonl" and content["kind"] == "turn":
            assert (content["loss"], content["scores"], content["weight"]) == (None, None, 1)
        for path, leaf in leaves(content):
            if names & set(path) and not content_is_turn:
                place = f"{file}: {' '.join(path[: min(map(path.index, names & set(path)))])}"
                assert place in PUBLIC, (place, leaf)
            counted = {"labels", "confusion"} & set(path) and isinstance(leaf, int | float)
            assert not counted or file == "study.json", (file, path, leaf)
    assert {"data.json", "initial_scores.json", "ledger.jsonl", "metrics.jsonl"} <= files
    assert "evaluation.json" not in files
    assert (here / "run").stat().st_mode & 0o077 == 0
    assert all(each.stat().st_mode & 0o077 == 0 for each in (here / "run").rglob("*"))


def test_without_hiding_they_do(here: Path) -> None:
    """The test above would see them."""
    study = written(without_sites(PLAIN).replace("rounds = 3", "rounds = 1"))
    Simulation(study, here / "run").run()
    places = {
        f"{file}: {path[0]}"
        for file, content in contents(here / "run")
        for path, _ in leaves(content)
        if "client-00" in path
    }
    assert {
        "data.json: train",
        "data.json: test",
        "initial_scores.json: clients",
        "metrics.jsonl: clients",
        "evaluation.json: sets",
    } <= places
