# SPDX-License-Identifier: Apache-2.0
"""Disturb a federation of real processes, and compare its bits with those of an undisturbed run.

    python research/real_servers.py                      # all cases, about two hours, mostly waiting
    python research/real_servers.py "away for 2 minutes" # some cases

SuperLink, nginx with TLS, three sites with their SuperNodes and the driver are those of
`fedplan new federation`, kept running by its scripts, in real time. A case ends with the tensors and
the ledger of the same study by the local runner, and with the personal tensors of each site.
Writes research/results/real-servers.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runners"))

from commands import some_digits
from deployment import BIN, Deployment, free_ports
from study import FACTS, LAB
from test_deployment import (
    MORE,
    SITES,
    open_part,
    require_same_homes,
    rounds_in,
    rows_of,
    study_from_dict,
    until_round,
    whole,
)

from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.runners.local import Faults
from fedplan.storage.store import Store
from fedplan.tensors.named import digests

RESULT = LAB / "results" / "real-servers.json"
SITE = "client-01"
"""The site that is disturbed."""
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long offset(void) {
    char text[32] = {0};
    int file = open(getenv("CLOCK_FILE"), O_RDONLY);
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    if (!code && id == CLOCK_REALTIME) now->tv_sec += offset();
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int code = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return code;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""
"""A wall clock whose offset in seconds is read from a file, for LD_PRELOAD."""


@dataclass
class Play:
    """A run of a study on real servers: disturbed by a case, then finished.

    The driver is started as its systemd unit does, again and again until the run has ended; `notes`
    are what was seen meanwhile, with the seconds since the start.
    """

    fed: Deployment
    port: int = field(default_factory=lambda: free_ports(1)[0])
    notes: list[str] = field(default_factory=list[str])
    began: float = field(default_factory=time.monotonic)

    @property
    def ledger(self) -> Path:
        return self.fed.folder / "run" / "ledger.jsonl"

    def note(self, text: str) -> None:
        self.notes.append(
            f"{time.monotonic() - self.began:.0f} s, round {rounds_in(self.ledger)}: {text}"
        )
        print(self.fed.folder.parent.name, self.notes[-1], flush=True)

    def drive(self) -> None:
        """Start the driver, which is started again when it fails."""
        self.fed.keep("run", "server/run.sh")

    def status(self) -> dict[str, Any]:
        file = self.fed.folder / "run" / "status.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def note_status(self) -> None:
        """Note what `fedplan status` and /health say."""
        told = self.fed.command("fedplan", "status", "run", check=False)
        lines = [line.strip() for line in told.splitlines() if "SuperLink" in line or SITE in line]
        self.note(f"status: {' | '.join(lines) or told.splitlines()[0]}")
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as answer:
                self.note(f"/health: {answer.status} {answer.read().decode().strip()[:200]}")
        except HTTPError as error:
            self.note(f"/health: {error.code} {error.read().decode().strip()[:200]}")
        except OSError as error:
            self.note(f"/health: {error}")

    def require_away(self, seconds: float = 600.0) -> None:
        """Status and /health must say that the SuperLink does not answer, once the driver is up."""
        until = time.monotonic() + seconds
        away = re.compile("the SuperLink does not answer since [0-9:]+ UTC")
        while True:
            self.note_status()
            told = self.notes[-2:]
            if all(map(away.search, told)) and "/health: 503" in told[1]:
                return
            assert time.monotonic() < until, told
            del self.notes[-2:]
            time.sleep(5.0)

    def finish(self, seconds: float) -> None:
        """Wait until the run is done."""
        until = time.monotonic() + seconds
        while self.status().get("state") != "done":
            assert time.monotonic() < until, f"{self.status()}\n{self.fed.logs()}"
            time.sleep(0.5)
        self.note("done")
        self.fed.stop("run")


def away(seconds: float, *, driver: bool = False) -> Callable[[Play], None]:
    """The SuperLink is away; meanwhile a site is killed, and the driver if asked."""

    def disturb(play: Play) -> None:
        until_round(play.ledger, 2, seconds=1800)
        play.fed.stop("link")
        play.note(f"the SuperLink is killed, for {seconds:.0f} s")
        time.sleep(seconds / 3)
        play.note(f"{SITE} is killed ({play.fed.kill(SITE)} process)")
        time.sleep(seconds / 3)
        if driver:
            play.note(f"the driver is killed ({play.fed.kill('run')} process), and started again")
        time.sleep(seconds / 3)
        play.require_away()
        play.fed.keep("link", "server/link.sh")
        play.note("the SuperLink is started")

    return disturb


def before(play: Play) -> None:
    """The driver is first started while the SuperLink is down."""
    time.sleep(60)
    play.require_away()
    play.fed.keep("link", "server/link.sh")
    play.note("the SuperLink is started")


def full_disk(play: Play) -> None:
    """The site's state is on a small file system, which is filled and freed."""
    until_round(play.ledger, 2, seconds=1800)
    filler, block = play.fed.folder / "sites" / SITE / "state" / "filler", b"\0" * 4096
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(block):
            pass
    play.note("the site's disk is full")
    time.sleep(60)
    play.note_status()
    filler.unlink()
    play.note("the site's disk has room")


def skew(offset: int) -> Callable[[Play], None]:
    """The site's clock jumps, and is set right two minutes later."""

    def disturb(play: Play) -> None:
        until_round(play.ledger, 2, seconds=1800)
        clock = play.fed.folder / "clock"
        clock.write_text(str(offset))
        play.note(f"the site's clock is {offset:+} s")
        time.sleep(120)
        play.note_status()
        words = [str(BIN / "fedplan"), "site", "doctor", "--site", f"sites/{SITE}"]
        env = {**play.fed.env, **preload(clock), "COLUMNS": "200"}
        told = subprocess.run(
            words, cwd=play.fed.folder, env=env, capture_output=True, text=True
        ).stdout
        play.note(
            "doctor: "
            + " | ".join(line.strip(" │|") for line in told.splitlines() if "clock" in line)
        )
        clock.write_text("0")
        play.note("the site's clock is right")

    return disturb


def preload(clock: Path) -> dict[str, str]:
    """Variables by which a process adds the seconds in the file `clock` to its wall clock."""
    library = clock.with_suffix(".so")
    if not library.exists():
        words = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(words, input=CLOCK, text=True, check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_FILE": str(clock)}


def gone(play: Play) -> None:
    """The site is away, and returns after ten rounds."""
    until_round(play.ledger, 2, seconds=1800)
    play.fed.stop(SITE)
    play.note(f"{SITE} is gone")
    until_round(play.ledger, 13, seconds=1800)
    play.note_status()
    play.fed.start_site(SITE)
    play.note(f"{SITE} is started")


def slow(play: Play) -> None:
    """Each answer of the site is late; one by longer than Flower's lease of a task."""
    for number in range(1, 7):
        until_round(play.ledger, number, seconds=1800)
        pids, seconds = play.fed.pids(SITE), 90 if number == 4 else 10
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        play.note(f"{SITE} stood still for {seconds} s")


@dataclass(frozen=True)
class Case:
    """What is done to a run of so many rounds of a plan; `more` are further lines of the study."""

    disturb: Callable[[Play], None]
    plan: str = "fedper"
    rounds: int = 8
    clients: str = ""
    more: str = ""


NEEDS_ALL = "min_updates = 3"
CASES = {
    "away for 2 minutes": Case(away(120)),
    "away for 2 minutes, driver killed": Case(away(120, driver=True)),
    "away for 10 minutes": Case(away(600)),
    "away for 60 minutes, driver killed": Case(away(3600, driver=True)),
    "away at the first start": Case(before, rounds=3),
    "full disk": Case(full_disk, clients=NEEDS_ALL),
    "clock an hour ahead": Case(skew(3600), clients=NEEDS_ALL),
    "clock an hour behind": Case(skew(-3600), clients=NEEDS_ALL),
    "gone for ten rounds": Case(
        gone,
        plan="fedavg",
        rounds=45,
        clients="min_updates = 2",
        more="\n[timeouts]\nupdates = 600.0\nreconnect = 5.0\n",
    ),
    "slow": Case(slow),
}


def mount(folder: Path, megabytes: int = 0) -> None:
    """Mount a tmpfs of so many megabytes on a folder; 0 unmounts it."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(parents=True, exist_ok=True)
    code = (
        libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={megabytes}m".encode())
        if megabytes
        else libc.umount2(bytes(folder), 2)
    )
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))


def absences(ledger: list[dict[str, Any]]) -> dict[int, list[str]]:
    """The clients whose update a round lacks, by round."""
    rounds = (line for line in ledger if line.get("kind") == "round")
    return {line["round"]: sorted(line["rejected"]) for line in rounds if line["rejected"]}


def reference(here: Path, study: str, absent: Mapping[int, list[str]]) -> Path:
    """The same study by the local runner, without the updates of absent clients."""
    apply = Faults.apply

    def drop(self: Faults, server: Server, round_state: RoundState) -> set[str]:
        for name in absent.get(server.global_state.round + 1, ()):
            del round_state.cohort[name]
            round_state.rejected[name] = "dropped"
        return set()

    try:
        Faults.apply = drop
        return whole(here, study, "fedper")
    finally:
        Faults.apply = apply


def comparable(folder: Path) -> list[dict[str, Any]]:
    """The ledger without the words for an absence, and what was sent to the absent."""
    lines = open_part(folder)
    for line in lines:
        if line.get("kind") == "round" and line["rejected"]:
            line |= {"rejected": sorted(line["rejected"]), "download_bytes": None}
    return lines


def played(name: str, folder: Path) -> dict[str, Any]:
    """Play a case in a folder: what was seen, and whether its bits are those of the reference."""
    case = CASES[name]
    some_digits(folder)
    rows = rows_of(folder)
    study = study_from_dict(folder, case.plan, rounds=case.rounds, more=case.clients) + case.more
    fed = Deployment(folder / "fed", SITES, rows, more=MORE)
    state = fed.folder / "sites" / SITE / "state"
    if name == "full disk":
        mount(state, 8)
    (fed.folder / "study.toml").write_text(study)
    play = Play(fed)
    run = fed.folder / "server" / "run.sh"
    run.write_text(run.read_text().replace("--resume", f"--resume --metrics-port {play.port}"))
    began = time.monotonic()
    try:
        with fed:
            if name.startswith("clock"):
                fed.stop(SITE)
                (fed.folder / "clock").write_text("0")
                fed.keep(SITE, f"sites/{SITE}/serve.sh", **preload(fed.folder / "clock"))
            if case.disturb is before:
                fed.stop("link")
            play.drive()
            case.disturb(play)
            play.finish(1800)
            log = (fed.folder / "run" / "log.jsonl").read_text()
            out = comparable(fed.folder / "run")
            absent = absences(out)
            assert case.rounds not in absent, "the site did not come back"
            expected = reference(folder, study, absent)
            one, other = (
                Store(each / "global").read_newest() for each in (fed.folder / "run", expected)
            )
            assert one is not None and other is not None
            assert digests(one.tensors) == digests(other.tensors), "the tensors differ"
            assert out == comparable(expected), "the ledgers differ"
            require_same_homes(fed.folder, folder, "fedper")
            verified = fed.command("fedplan", "verify", "run").strip().splitlines()[-1]
    finally:
        if name == "full disk":
            mount(state)
    return {
        "rounds": case.rounds,
        "seconds": round(time.monotonic() - began),
        "same bits": True,
        "rounds without a site's update": absent,
        "Flower runs": 1 + log.count("Flower has ended its run"),
        "starts of the driver": log.count('"run started"'),
        "seen": play.notes,
        "verify": verified,
    }


def disturb(names: list[str], folder: Path) -> None:
    """Play cases, and add each to the result file when it has ended."""
    for name in names:
        here = folder / re.sub("[^a-z0-9]+", "-", name)
        here.mkdir(parents=True)
        os.chdir(here)
        row = {**FACTS, **played(name, here)}
        known = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
        text = json.dumps(
            {
                "command": "python research/real_servers.py",
                "seed": 0,
                "cases": {**known, name: row},
            },
            indent=1,
        )
        RESULT.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="; ".join(CASES))
    parser.add_argument("--folder", type=Path, help="where to work")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp())).absolute()
    disturb(args.cases or list(CASES), folder)


if __name__ == "__main__":
    main()
