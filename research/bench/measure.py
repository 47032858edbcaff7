# SPDX-License-Identifier: Apache-2.0
"""Measuring: engines that stand side by side and play in turn, by wall and by CPU time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.bench.rows import ENGINES

HERE = Path(__file__).parent
TICK = os.sysconf("SC_CLK_TCK")
PATIENCE = 900.0
"""Seconds that the bench waits for one answer of an engine."""


class EngineFault(Exception):
    """An engine that ended, or that said nothing for too long: with the end of its log."""


@dataclass(frozen=True)
class Places:
    """Where things are: the trees of fedplan, the peers' environments, the workloads."""

    tree: Path
    before: Path | None
    environments: Path
    work: Path


class Running:
    """An engine's process, and the line to it."""

    def __init__(self, name: str, rounds: int, folder: Path, places: Places) -> None:
        engine, self.name = ENGINES[name], name
        desk = places.work / "desks" / name.replace(" ", "")
        desk.mkdir(parents=True, exist_ok=True)
        self.log, place = desk / "log", desk / "line"
        place.unlink(missing_ok=True)
        asked = {"folder": str(folder), "rounds": rounds, "line": str(place), "engine": name}
        (desk / "asked.json").write_text(json.dumps(asked | {"workers": engine.workers}))
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(place))
        listening.listen(1)
        tree = places.before if engine.before and places.before else places.tree
        home = places.environments / engine.environment / "bin" / "python"
        python = str(home) if engine.environment else sys.executable
        crew = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={engine.workers}"]
        many = engine.program == "stock_pfl" and engine.workers > 1
        words = [python, *(crew if many else []), HERE / "engines" / f"{engine.program}.py"]
        self.begun = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, words), str(desk / "asked.json")],
                env=surroundings(tree),
                cwd=desk,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        listening.settimeout(1.0)
        self.file = self._met(listening).makefile("rw", encoding="utf-8")
        listening.close()
        self._heard("ready")
        self.startup = time.monotonic() - self.begun

    def _met(self, listening: socket.socket) -> socket.socket:
        while time.monotonic() - self.begun < PATIENCE:
            try:
                line, _ = listening.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    raise self._fault("ended before it began") from None
                continue
            line.settimeout(PATIENCE)
            return line
        raise self._fault("does not begin")

    def play(self, rounds: int) -> dict[str, float]:
        """Seconds of so many rounds: by the wall, and of all its processes' CPUs."""
        cpu, wall = spent(self.process.pid), time.perf_counter()
        self.file.write(json.dumps({"go": rounds}) + "\n")
        self.file.flush()
        self._heard("done")
        wall = time.perf_counter() - wall
        return {"wall": wall / rounds, "cpu": (spent(self.process.pid) - cpu) / rounds}

    def told(self) -> dict[str, float]:
        """How far its model went, and what else it tells, once its last round is over."""
        return self._heard("told")

    def end(self) -> None:
        """Give it time to end, and end what is left of it."""
        self.file.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                time.sleep(1)
            except ProcessLookupError:
                break
        self.process.wait()

    def _heard(self, word: str) -> Any:
        try:
            line = self.file.readline()
        except TimeoutError:
            line = ""
        if not line:
            raise self._fault(f"said no {word!r}")
        return json.loads(line)[word]

    def _fault(self, what: str) -> EngineFault:
        end = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        return EngineFault(f"{self.name} {what}; the end of {self.log}:\n{end}")


def surroundings(tree: Path) -> dict[str, str]:
    """The same for every engine: one thread, no network, and the tree of fedplan that is asked for."""
    quiet = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    ones = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *quiet)
    told = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    path = f"{tree}:{HERE / 'engines'}"
    return {**os.environ, **dict.fromkeys(ones, "1"), **told, "PYTHONPATH": path}


def spent(root: int) -> float:
    """CPU seconds of a process and of all that it started, as far as they live."""
    parents, used = dict[int, int](), dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(words[1])
            used[int(entry.name)] = sum(map(int, words[11:15]))
    return sum(used[pid] for pid in used if _under(pid, root, parents)) / TICK


def _under(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    while pid > 1 and pid != root:
        pid = parents.get(pid, 0)
    return pid == root
