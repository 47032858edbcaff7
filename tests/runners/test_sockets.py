# SPDX-License-Identifier: Apache-2.0
"""What really passes the sockets of a federation: as many bytes as explained, none of them private."""

from __future__ import annotations

from pathlib import Path

import pytest
from canaries import Hit, hits
from commands import run
from deployment import BIN, Deployment
from proxy import Proxy
from test_deployment import MORE, PLANS, SITES, rows_of, study_from_dict
from torch import Tensor

from fedplan.federation.endpoint import open_journal
from fedplan.federation.identity import is_run_id
from fedplan.runners.site_runtime import site_study_folder
from fedplan.storage.append_log import read_json_lines
from fedplan.studies.schema import read_study

LEAKY = """
import sys
from fedplan.federation.endpoint import open_journal
from fedplan.federation.messages import read_run_id
from fedplan.runners.site_runtime import SiteRuntime, site_study_folder
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack

answer = SiteRuntime.answer

def leaky(self, kind, message):
    found = answer(self, kind, message)
    if kind != "train":
        return found
    folder = site_study_folder(self.site.state, self.study, self.site.name) / read_run_id(message)
    home = open_journal(folder).client_state()[0]
    return Message(found.header, (*found.blobs, pack({f"stolen {k}": v for k, v in home.items()}, {})))

SiteRuntime.answer = leaky
from fedplan.cli import main
main()
"""
"""A site whose own fedplan was changed: nobody else can make it leak."""


def private(fed: Path) -> dict[str, Tensor]:
    """What each site keeps at the end of a run."""
    study = read_study(fed / "study.toml")
    found = dict[str, Tensor]()
    for name in SITES:
        folder = site_study_folder(str(fed / "sites" / name / "state"), study, name)
        runs = [each for each in folder.iterdir() if is_run_id(each.name)]
        kept = open_journal(max(runs, key=lambda each: each.stat().st_mtime)).client_state()[0]
        found |= {f"{name}/{key}": v for key, v in kept.items()}
    return found


def scanned(fed: Path, wire: Path) -> tuple[list[Hit], int]:
    """Where anything private is outside the sites, and how many bytes were looked at."""
    outside = [*wire.rglob("*"), *fed.glob("server/*"), *fed.glob("*.log"), *fed.glob("run*/**/*")]
    files = [file for file in outside if file.is_file()]
    kept = private(fed)
    assert kept
    plain = {key.partition("/")[2]: value for key, value in kept.items()}
    on_wire = [f for f in files if wire in f.parents or f.suffix == ".db"]
    found = [hit for hit in hits(kept, files) if hit.form != "name"]
    found += [hit for hit in hits(plain, on_wire) if hit.form == "name"]
    return found, sum(file.stat().st_size for file in files)


@pytest.mark.nightly
def test_nothing_private_is_in_sockets_database_logs_or_checkpoints(here: Path) -> None:
    plans = {name: PLANS[name] for name in ("fedper", "parts")}
    plans["own"] = 'plan = "chain(share(), when(after(2), freeze(query | key)), keep(head))"'
    wires = list[Proxy]()

    def through(port: int) -> int:
        (here / "wire").mkdir()
        wires.append(Proxy(port, record=here / "wire"))
        return wires[0].__enter__().port

    fed = here / "fed"
    deployed = Deployment(fed, SITES, rows_of(here), insecure=True, more=MORE, through=through)
    try:
        with deployed:
            for name, plan in plans.items():
                study = study_from_dict(here, "fedavg", name=name).replace(PLANS["fedavg"], plan)
                deployed.run(study, f"run-{name}")
                found, size = scanned(fed, here / "wire")
                assert found == [] and size > 500_000
            (here / "leaky.py").write_text(LEAKY)
            for script in fed.glob("sites/*/serve.sh"):
                said = f"exec {BIN}/python {here}/leaky.py site serve"  # words that end it too
                script.write_text(script.read_text().replace("exec fedplan site serve", said))
            for name in SITES:
                deployed.stop(name)
                deployed.start_site(name)
            study = study_from_dict(here, "fedper", name="leaky", more="min_updates = 1")
            with pytest.raises(RuntimeError, match="needs 1"):
                deployed.run(study, "run-leaky")
            found, _ = scanned(fed, here / "wire")
            assert {hit.form for hit in found} >= {"raw"}
            assert any("wire" in hit.place for hit in found)
    finally:
        for each in wires:
            each.__exit__(None, None, None)


SIZE = "config = { image_size = 8, patch_size = 4, hidden_size = 256, num_hidden_layers = 6, num_attention_heads = 4, intermediate_size = 1024 }"
BYTES = {
    "full": 'name = "fedavg"',
    "fedfrozen": 'name = "fedfrozen"\nsettings = { warmup = 2 }',
    "backbone": 'plan = "chain(freeze(), share(blocks(4, 5)), keep(head))"',
}


@pytest.mark.nightly
def test_the_bytes_on_the_sockets_are_those_explained(here: Path, record_property: object) -> None:
    wires = list[Proxy]()

    def through(port: int) -> int:
        wires.append(Proxy(port))
        return wires[0].__enter__().port

    try:
        fed = Deployment(here / "fed", SITES, rows_of(here), more=MORE, through=through)
        with fed as deployed:
            for name, plan in BYTES.items():
                study = study_from_dict(here, "fedavg", name=name).replace(PLANS["fedavg"], plan)
                old = next(line for line in study.splitlines() if line.startswith("config = { im"))
                wires[0].mark()
                out = deployed.run(study.replace(old, SIZE), name)
                up, down = wires[0].mark()
                assert run("verify", str(out))[0] == 0
                turns = [x for x in read_json_lines(out / "ledger.jsonl") if "changed" not in x]
                said = [
                    sum(line[way] for line in turns) for way in ("upload_bytes", "download_bytes")
                ]
                ratios = [up / said[0], down / said[1]]
                with (here / "bytes.txt").open("a") as told:
                    told.write(f"{name} {said} {[up, down]} {ratios}\n")
                assert all(1 <= ratio < 1.02 for ratio in ratios), (name, said, up, down)
    finally:
        for each in wires:
            each.__exit__(None, None, None)
