# SPDX-License-Identifier: Apache-2.0
"""Wall and CPU time of engines that run side by side and take turns."""

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
"""Seconds to wait for one answer of an engine."""


class EngineFault(Exception):
    """An engine ended, or did not answer in time; the text has the end of its log."""


@dataclass(frozen=True)
class Places:
    """Folders of fedplan, of the environments of other engines, and of the workloads."""

    tree: Path
    before: Path | None
    environments: Path
    work: Path


class Running:
    """The process of an engine, and the connection to it."""

    def __init__(self, name: str, rounds: int, folder: Path, places: Places) -> None:
        engine, self.name = ENGINES[name], name
        own_folder = places.work / "engines" / name.replace(" ", "")
        own_folder.mkdir(parents=True, exist_ok=True)
        self.log, place = own_folder / "log", own_folder / "line"
        place.unlink(missing_ok=True)
        request = {"folder": str(folder), "rounds": rounds, "line": str(place), "engine": name}
        (own_folder / "request.json").write_text(json.dumps(request | {"workers": engine.workers}))
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(place))
        listening.listen(1)
        tree = places.before if engine.before and places.before else places.tree
        home = places.environments / engine.environment / "bin" / "python"
        python = str(home) if engine.environment else sys.executable
        count = f"--nproc-per-node={engine.workers}"
        torchrun = ["-m", "torch.distributed.run", "--standalone", count]
        many = engine.program == "stock_pfl" and engine.workers > 1
        words = [python, *(torchrun if many else []), HERE / "engines" / f"{engine.program}.py"]
        self.begun = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, words), str(own_folder / "request.json")],
                env=environment_of(tree),
                cwd=own_folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        listening.settimeout(1.0)
        self.file = self._accept(listening).makefile("rw", encoding="utf-8")
        listening.close()
        self._receive("ready")
        self.startup = time.monotonic() - self.begun

    def _accept(self, listening: socket.socket) -> socket.socket:
        while time.monotonic() - self.begun < PATIENCE:
            try:
                line, _ = listening.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    raise self._fault("ended before it was ready") from None
                continue
            line.settimeout(PATIENCE)
            return line
        raise self._fault("is not ready in time")

    def run_rounds(self, rounds: int) -> dict[str, float]:
        """Run rounds, and return wall and CPU seconds of a round, of all processes."""
        cpu, wall = spent(self.process.pid), time.perf_counter()
        self.file.write(json.dumps({"go": rounds}) + "\n")
        self.file.flush()
        self._receive("done")
        wall = time.perf_counter() - wall
        return {"wall": wall / rounds, "cpu": (spent(self.process.pid) - cpu) / rounds}

    def final_state(self) -> dict[str, float]:
        """After the last round: how far the model moved, and other measurements of the engine."""
        return self._receive("told")

    def end(self) -> None:
        """Wait for the engine to end, and kill the rest of its processes."""
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

    def _receive(self, word: str) -> Any:
        try:
            line = self.file.readline()
        except TimeoutError:
            line = ""
        if not line:
            raise self._fault(f"did not answer {word!r}")
        return json.loads(line)[word]

    def _fault(self, what: str) -> EngineFault:
        end = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        return EngineFault(f"{self.name} {what}; the end of {self.log}:\n{end}")


def environment_of(tree: Path) -> dict[str, str]:
    """The environment of an engine: one thread, no network, and a tree of fedplan."""
    quiet = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    ones = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *quiet)
    off = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    path = f"{tree}:{HERE / 'engines'}"
    return {**os.environ, **dict.fromkeys(ones, "1"), **off, "PYTHONPATH": path}


def spent(root: int) -> float:
    """CPU seconds of a process and of its living descendants."""
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
