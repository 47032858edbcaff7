# SPDX-License-Identifier: Apache-2.0
"""Runs have ids and records have one reader: two runs of a name are two, whatever else is alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import STUDY
from flwr.app import Context
from grids import InProcess
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplan.errors import FedplanError
from fedplan.federation.identity import read_identity
from fedplan.federation.ledger.records import (
    DefenceRecord,
    RecordError,
    RoundRecord,
    TurnRecord,
    read_record,
    read_round,
)
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.runners.flower.apps import client_app, run_server
from fedplan.runners.simulation import Simulation
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import SiteRuntime, site_study_folder
from fedplan.studies.run import read_run
from fedplan.studies.schema import read_study
from fedplan.tensors.message import Message
from fedplan.tensors.named import digests
from fedplan.tensors.serialization import pack_message, unpack_message

NAMES = ("client-00", "client-01", "client-02")


class Sites:
    """Three sites with homes that outlast the runs in which they are asked."""

    def __init__(self, study: Path, home: Path) -> None:
        self.study = read_study(study)
        self.sites = {name: Site(name=name, state=str(home), dataset=name) for name in NAMES}
        self.offices: dict[str, SiteRuntime] = {}

    def answer(self, context: Context, kind: str, message: Message) -> Message:
        name = str(context.node_config["name"])
        worker = self.offices.get(name) or SiteRuntime(self.sites[name], self.study)
        self.offices[name] = worker
        return worker.answer(kind, message)

    def carry(self, study: Path, folder: Path) -> dict[str, str]:
        grid = InProcess(client_app(self.answer), [{"name": name} for name in NAMES])
        run_server(grid, read_study(study), folder)
        found = read_run(folder)
        assert found.round == 2
        return digests(found.global_state.values)


def study(here: Path, name: str, rate: float = 1e-3) -> Path:
    text = STUDY.replace("rounds = 3", f"rounds = 2\nsteps = 1\nlr = {rate}")
    text = text.replace("dropout_fraction = 0.1", "").replace(
        "attention_examples = 4", "personal = false"
    )
    (here / name).write_text(text + "[timeouts]\npoll_interval = 0.01\nsites = 20.0\n")
    return here / name


def in_one_process(file: Path, folder: Path) -> dict[str, str]:
    simulation = Simulation(read_study(file), folder)
    simulation.run()
    return digests(simulation.federation.global_state.values)


def test_two_runs_of_one_name_share_nothing_at_a_site(here: Path) -> None:
    slow, fast = study(here, "slow.toml"), study(here, "fast.toml", 0.5)
    alone = {file: in_one_process(file, here / f"local-{file.stem}") for file in (slow, fast)}
    assert alone[slow] != alone[fast]
    home, ids = here / "home", set[str]()
    for number, file in enumerate((slow, fast, slow)):
        folder = here / f"run-{number}"
        assert Sites(file, home).carry(file, folder) == alone[file]
        ids.add(read_identity(folder).id)
    place = site_study_folder(str(home), read_study(slow), "client-01")
    assert len(ids) == 3 and {p.name for p in place.iterdir() if p.is_dir()} >= ids
    one, other = (read_identity(here / name) for name in ("local-slow", "run-0"))
    assert one.examples and not other.examples
    assert (one.study, one.start, one.digests) == (other.study, other.start, other.digests)


def test_a_run_keeps_its_id_and_refuses_another_start_or_study(here: Path) -> None:
    file = study(here, "study.toml")
    said = read_study(file)
    first = Simulation(said, here / "run").federation.server.identity
    assert Simulation(said, here / "run").federation.server.identity == first
    assert Simulation(said, here / "other").federation.server.identity.id != first.id
    with pytest.raises(Exception, match="another study"):
        Simulation(read_study(file, ["train.lr=0.5"]), here / "run")
    changed = replace(first, start="0" * 16, digests="0" * len(first.digests))
    (here / "run/run.json").write_text(json.dumps(changed.__dict__))
    with pytest.raises(Exception, match="weights that it began with"):
        Simulation(said, here / "run")


def test_each_flipped_bit_of_a_new_run_s_identity_is_noticed(here: Path) -> None:
    Simulation(read_study(study(here, "study.toml")), here / "run")
    file = here / "run/run.json"
    whole, first = file.read_bytes(), read_identity(here / "run")
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        try:
            assert read_identity(here / "run") == first  # space for space
        except FedplanError as error:
            assert "run.json" in str(error)


@pytest.mark.parametrize("run", ["", "..", "../x", "a/b", "0" * 15, "G" * 16, 3, None])
def test_a_request_of_no_run_is_refused(here: Path, run: Any) -> None:
    file = study(here, "study.toml")
    worker = Sites(file, here / "home")
    said = worker.answer(
        Context(1, 1, {"name": "client-00"}, None, {}),  # type: ignore[arg-type]
        "hello",
        pack_message({}, {"run": run}),
    )
    assert unpack_message(said)[1] == {"failed": "message"}
    assert {each.name for each in (here / "home").iterdir()} <= {"account", "faults.log"}


def test_a_request_of_another_run_is_refused(here: Path) -> None:
    file = study(here, "study.toml")
    simulation = Simulation(read_study(file), here / "run")
    worker = SiteRuntime(Sites(file, here / "home").sites["client-00"], read_study(file))
    agreement = simulation.federation.agreement
    worker.answer("hello", pack_message({}, {"run": agreement.run}))
    request = make_request(agreement, simulation.federation.global_state, "client-00", {})
    endpoint = worker._endpoint  # pyright: ignore[reportPrivateUsage]
    assert endpoint is not None
    for change in ({"run": "0" * 16}, {"name": request.name.replace(agreement.run, "0" * 16)}):
        answer = endpoint.answer("train", request_message(replace(request, **change)))
        assert "refused" in unpack_message(answer)[1]
    assert "ledger_line" in unpack_message(endpoint.answer("train", request_message(request)))[1]


def test_all_that_changes_a_result_is_in_the_fingerprint(here: Path) -> None:
    file = study(here, "study.toml")
    agreements = [
        Simulation(read_study(file, changes), here / str(i)).federation.agreement
        for i, changes in enumerate(
            (
                [],
                ["seed=1"],
                ["train.lr=0.5"],
                ["train.optimizer=sgd"],
                ["method.compression=bf16()"],
                ["method.plan=share()"],
            )
        )
    ]
    assert len({agreement.fingerprint for agreement in agreements}) == len(agreements)
    one = agreements[0]
    assert replace(one, start="0" * 16).fingerprint != one.fingerprint
    assert replace(one, run="0" * 16).fingerprint == one.fingerprint
    assert replace(one, run="0" * 16).request_name(1, "a") != one.request_name(1, "a")


TURN = TurnRecord(1, "a", "", {}, "SK", "0" * 32, "1" * 32, 0, 0, 1, 1, 0.5, None, False)
ROUND = RoundRecord(1, "", ("a",), {"b": "late"}, {"k": "0" * 16}, {"mlp": (0.5, 0.25)}, 0, 0)
GUARDED = replace(
    ROUND,
    defence=DefenceRecord({"a": (9, 3)}, {"a": (2.5, 0.5)}, {"a": 4}, {"a": 7.5}, 2),
    warnings=("a reports 0.900 of the round's weight",),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=50)
def test_anything_that_is_no_record_is_told(said: Any) -> None:
    with pytest.raises(RecordError):
        read_record(said)


@given(st.sampled_from([TURN, ROUND, GUARDED]), st.data(), JSON)
@settings(max_examples=50)
def test_a_record_with_any_field_changed_is_told_or_reads_as_it_says(
    record: TurnRecord | RoundRecord, data: st.DataObject, said: Any
) -> None:
    line = record.json()
    assert read_record(line) == record and read_record(line).json() == line
    field = data.draw(st.sampled_from(sorted(line)))
    changed = {**line, field: said}
    try:
        assert read_record(changed).json() == changed
    except RecordError as error:
        assert str(error)


def test_a_round_whose_attention_could_not_be_measured_is_a_round() -> None:
    assert read_round({**ROUND.json(), "attention": []}).json() == ROUND.json()
