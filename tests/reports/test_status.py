# SPDX-License-Identifier: Apache-2.0
"""A status tells how a run stands, whatever became of its driver; a stop costs no bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import STUDY, TIMES, run
from often import first
from rich.console import Console

from fedplan.errors import FedplanError
from fedplan.federation import identity
from fedplan.federation.ledger.events import ClientChanged, Event, Subscriber
from fedplan.federation.ledger.faults import KINDS, describe_code
from fedplan.federation.ledger.status import (
    STATUS,
    STOP_REQUEST,
    RunState,
    RunStatus,
    SiteState,
    SiteStatus,
    ask_to_stop,
    read_status,
    read_stop_request,
    site_state_from_reason,
)
from fedplan.federation.ledger.stream import EventStream
from fedplan.privacy.mechanisms import noise
from fedplan.reports.status import DEAD, RunSnapshot, follow_run, run_snapshot, stop_run, watch
from fedplan.run import run_study
from fedplan.runners.simulation import Simulation
from fedplan.storage import files as storage_files
from fedplan.storage.files import POINTS, VARIABLE
from fedplan.storage.locks import Process, current_process
from fedplan.storage.logs import read_log
from fedplan.studies.run import read_run
from fedplan.studies.schema import read_study

REACHED = sorted(
    (p for p in POINTS if not p.startswith(("log", "secagg")) or p == "log.written"),
    key=lambda p: p[:5] != "round",
)
"""Points that a run with plain sums and without privacy reaches, the server's round first."""
ROUNDS = 3


@pytest.fixture(autouse=True)
def one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of a run and its keys are drawn: all that differs between two runs of one study."""
    monkeypatch.setattr(identity, "token_hex", lambda count: "0" * 2 * count)
    fixed = SimpleNamespace(**{**vars(os), "urandom": lambda count: bytes(range(count))})
    monkeypatch.setattr(noise, "os", fixed)


def files(folder: Path) -> dict[str, bytes]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.name not in TIMES)
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def played(failpoint: str) -> int:
    """Run the study in a process of its own, which a failpoint kills. How it ended."""
    child = os.fork()
    if child == 0:
        try:
            storage_files.reset_failpoints()
            os.environ[VARIABLE] = failpoint
            run_study("study.toml", "out")
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("at", first(6, [(p, t) for t in (3, 1, 7) for p in REACHED]), ids=str)
def test_a_killed_driver_is_told_as_dead_after_the_round_that_it_committed(
    here: Path, at: tuple[str, int]
) -> None:
    """And a run that goes on says so from then on."""
    point, time = at
    if point.startswith(("round", "log")) and point not in ("round.answered", "round.pulled"):
        time = min(time, ROUNDS)
    assert played(f"{point}:kill@{time}") == -signal.SIGKILL
    if not (here / "out" / STATUS).exists():  # before the run was begun
        return
    told = json.loads((here / "out" / STATUS).read_text())
    told["reason"] = "the SuperLink does not answer; trying again"
    (here / "out" / STATUS).write_text(json.dumps(told))
    found = run_snapshot("out")
    assert found.state == DEAD and not found.live and found.status.reason == ""
    assert found.round == read_run("out").round and found.status.round in (
        found.round,
        found.round - 1,
    )
    with pytest.raises(FedplanError, match="is not running"):
        stop_run("out")
    again = run_study("study.toml", "out", resume=True)
    found = run_snapshot("out")
    assert (found.state, found.round, found.status.round) == (RunState.DONE, ROUNDS, ROUNDS)
    assert again.round == ROUNDS
    assert len(read_log(Path("out"))) > 3


def once(state: str, round: int, do: Callable[[], None]) -> Subscriber:
    """Something that is done when a client has a state in a round, while the run goes on."""

    def listen(event: Event, status: RunStatus) -> None:
        if isinstance(event, ClientChanged) and (event.state, status.round + 1) == (state, round):
            do()

    return listen


WHEN = [(2, False), (1, True), (3, True), (1, False), (3, False), (2, True)]
"""In which round a run is asked to stop, and whether at once."""


@pytest.mark.parametrize("when", first(3, WHEN), ids=str)
def test_stopped_and_resumed_has_the_bits_of_a_run_that_was_never_stopped(
    here: Path, when: tuple[int, bool]
) -> None:
    number, at_once = when
    run_study("study.toml", "whole")
    state = SiteState.RESPONDED if at_once else SiteState.REQUESTED
    events = EventStream(Path("out"), [once(state, number, lambda: asked(at_once))])
    stopped = Simulation(read_study(Path("study.toml")), Path("out"), events=events).run()
    done = number - at_once
    assert stopped.federation.global_state.round == done
    found = run_snapshot("out")
    assert found.state == (RunState.STOPPED if done < ROUNDS else RunState.DONE)
    assert found.round == done and bool(stopped.stopped) == (done < ROUNDS)
    if done < ROUNDS:
        assert "an operator asked" in found.status.reason
    run_study("study.toml", "out", resume=done > 0)
    assert run_snapshot("out").state == RunState.DONE and not read_stop_request(Path("out"))
    (here / "out" / STOP_REQUEST).unlink(missing_ok=True)
    assert files(here / "out") == files(here / "whole")
    assert run("verify", "out")[0] == 0


def asked(at_once: bool) -> None:
    assert stop_run("out", at_once=at_once).live


def test_a_run_that_fails_says_so_by_a_code_alone(here: Path) -> None:
    def broken(_: object) -> str:
        raise FedplanError("a row says p-4711").with_code("data")

    with pytest.raises(FedplanError):
        run_study("study.toml", "out", callbacks=[broken])
    found = run_snapshot("out")
    assert (found.state, found.status.reason, found.round) == (RunState.FAILED, "failed: data", 1)
    told = (here / "out" / STATUS).read_text() + (here / "out/log.jsonl").read_text()
    assert "p-4711" not in told


def test_who_asks_for_no_more_rounds_has_stopped_the_run(here: Path) -> None:
    events = EventStream(Path("out"))
    rounds = Simulation(read_study(Path("study.toml")), Path("out"), events=events).rounds()
    next(rounds)
    assert run_snapshot("out").state == RunState.RUNNING
    rounds.close()
    assert run_snapshot("out").state == RunState.STOPPED


def test_a_run_that_nobody_told_of_is_known_by_its_folder(here: Path) -> None:
    Simulation(read_study(Path("study.toml")), Path("out")).run()
    assert not (here / "out" / STATUS).exists()
    assert (run_snapshot("out").state, run_snapshot("out").round) == (RunState.DONE, ROUNDS)
    assert run("status", "out")[0] == 0
    assert run("status", "nowhere")[0] == 2


def test_a_status_is_what_its_file_says(tmp_path: Path) -> None:
    sites = {
        "north": SiteStatus(SiteState.RESPONDED, "", "2026-01-01T00:00:00+00:00", 3, upload_bytes=4)
    }
    told = RunStatus(study="s", driver=current_process(), sites=sites, loss=0.5)
    (tmp_path / STATUS).write_text(json.dumps(told.json()))
    assert read_status(tmp_path) == told
    assert read_status(tmp_path / "nowhere") is None
    for broken in ("", "{}", "[]", '{"sites": {}, "driver": 3}', '{"sites": 1, "driver": {}}'):
        (tmp_path / STATUS).write_text(broken)
        with pytest.raises(FedplanError, match="cannot be read"):
            read_status(tmp_path)
    for words, said in ((b"", "round"), (b"\xff", "round"), (b'{"stop": "now"}', "now")):
        (tmp_path / STOP_REQUEST).write_bytes(words)
        assert read_stop_request(tmp_path) == said
    ask_to_stop(tmp_path)
    assert read_stop_request(tmp_path) == "round"


def test_every_code_of_a_site_makes_a_state_of_it() -> None:
    for kind, codes in KINDS.items():
        for code in codes:
            wanted = (
                SiteState.FAILED
                if kind == "failed"
                else SiteState.APPROVAL
                if code == "not-approved"
                else SiteState.REFUSED
            )
            assert site_state_from_reason(describe_code(kind, code)) == wanted, code


# What a person sees --------------------------------------------------------------------------


def shown(told: RunStatus, state: str, number: int, width: int = 100) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(RunSnapshot(Path("RUN"), told, state, number))
    return console.export_text()


def test_a_screen_says_who_is_in_trouble_first_and_what_to_do() -> None:
    when = "2026-01-01T00:00:00+00:00"
    sites = {
        "east": SiteStatus(
            SiteState.RESPONDED, "", when, 12, upload_bytes=12_100_000, download_bytes=80_000_000
        ),
        "south": SiteStatus(SiteState.APPROVAL, "refused: not-approved", when),
        "north": SiteStatus(
            SiteState.FAILED, "failed: disk [x]", when, 11, "failed: disk [x]", when
        ),
        "west": SiteStatus(SiteState.AWAY, "", when, 3),
    }
    told = RunStatus(
        "heart", "0" * 16, Process(1), when, when, RunState.RUNNING, round=12, rounds=40
    )
    told = RunStatus(
        **{
            **told.__dict__,
            "sites": sites,
            "loss": 0.5,
            "round_seconds": 41.0,
            "seconds_left": 1148.0,
        }
    )
    text = shown(told, RunState.RUNNING, 12)
    for words in (
        "round 12 of 40",
        "loss 0.500",
        "41 s per round",
        "19 min left",
        "failed: disk [x]",
    ):
        assert words in text, text
    assert "4 sites: 1 failed, 1 away, 1 waits for approval, 1 responded" in text
    places = [text.index(f"\n{name}") for name in ("north", "west", "south", "east")]
    assert places == sorted(places)
    assert "south: waiting for `fedplan site approve`" in text and "fedplan stop RUN" in text
    assert "--resume" in shown(told, DEAD, 12) and "verify RUN" in shown(told, RunState.DONE, 40)
    many = {f"s{n:03d}": SiteStatus() for n in range(500)}
    assert "and 460 more" in shown(RunStatus(sites=many), RunState.RUNNING, 0)


def test_the_commands_tell_of_a_run(here: Path) -> None:
    Path("study.toml").write_text(STUDY.replace("attention = 4", "personal = true"))
    code, out = run("run", "study.toml", "--output", "out")
    assert code == 0, out
    rounds = [line.split()[:2] for line in out.splitlines() if line[:5].strip().isdigit()]
    code, told = run("attach", "out")
    assert code == 0 and "The run is done, after round 3." in told
    assert [line.split()[:2] for line in told.splitlines() if line[:5].strip().isdigit()] == rounds
    assert len(rounds) == 3
    code, told = run("status", "out")
    assert code == 0 and "round 3 of 3" in told and "3 sites" in told, told
    found = json.loads(run("status", "out", "--json")[1])
    assert (found["state"], found["round"], len(found["sites"])) == (RunState.DONE, 3, 3)
    assert run("status", "out", "--watch")[0] == 0
    code, told = run("logs", "out", "--site", "client-01")
    assert code == 0 and "client-01" in told and "client-02" not in told
    lines = run("logs", "out", "--since", "1h", "--json")[1].splitlines()
    assert [json.loads(line) for line in lines][-1]["event"] == "run done"
    assert run("logs", "out", "--since", "3d")[0] == 0
    assert run("logs", "out", "--since", "soon")[0] == 2
    code, told = run("stop", "out")
    assert code == 2 and "not running" in told


def test_it_is_watched_until_it_ends(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedplan.reports.status.POLL_SECONDS", 0.0)
    events = EventStream(Path("out"))
    rounds = Simulation(read_study(Path("study.toml")), Path("out"), events=events).rounds()
    next(rounds)
    seen, told = list[int](), list[str]()
    for found in watch("out"):
        seen.append(found.round)
        next(rounds, None)
    assert seen == [1, 2, 3, 3]
    assert follow_run("out", told.append).state == RunState.DONE and len(told) == 4
