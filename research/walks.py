# SPDX-License-Identifier: Apache-2.0
"""Trace and draw four walks through the package: two updates, and the ways of `lr` and epsilon.

    python research/walks.py

An update is traced from the begin of the second round to its commit, for the first client alone.
A setting is followed by its value, which no other thing has: a function counts if an argument or a
local variable is the value, or an object with the value in a field. Writes
research/results/walks.json and research/pages/walks.svg.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import matplotlib
from study import LAB, facts

ROOT = LAB.parent
sys.path[:0] = [str(ROOT / "tests" / "golden"), str(ROOT / "tests" / "kit")]
import runs  # noqa: E402

PACKAGE = str(ROOT / "fedplan") + os.sep
LR, EPSILON = 0.0123456789, 203.456789
Step = tuple[str, str]
"""A module and a function in it."""


def place_of(code: CodeType) -> Step | None:
    """Return the module and the function of a piece of code; None outside of the package."""
    if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
        return None
    module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py")
    return module, code.co_qualname.replace(".<locals>", "")


@dataclass
class Walk:
    """The steps of one walk in their order, the same one not twice in a row."""

    title: str
    steps: list[Step] = field(default_factory=list[Step])

    def add(self, step: Step) -> None:
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)

    def rooms(self) -> list[str]:
        """The modules in the order of the first entry."""
        return list(dict.fromkeys(module for module, _ in self.steps))

    def json(self) -> dict[str, Any]:
        functions = list(dict.fromkeys(self.steps))
        return {
            "modules": len(self.rooms()),
            "functions": len(functions),
            "steps": [f"{module}: {function}" for module, function in functions],
        }


class Update(Walk):
    """The update of the first client in the second round: all calls from its begin to its commit."""

    window: str = "before"
    """before, in (the client's turn is traced), others (those of the others are not), after."""
    rounds: int = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        step = place_of(frame.f_code)
        if step is None or event not in ("call", "return"):
            return
        function = step[1]
        if event == "call":
            if function == "Server.begin_round":
                self.rounds += 1
                self.window = "in" if self.rounds == 2 else self.window
            elif function == "Server.close_round" and self.window == "others":
                self.window = "in"
            if self.window == "in":
                self.add(step)
        elif self.window == "in" and function == "Server.take":
            self.window = "others"
        elif self.window == "in" and function == "Server.commit":
            self.window = "after"


class Setting(Walk):
    """The functions with a local variable that is a value, or an object with it in a field."""

    value: float = 0.0

    def _is_value(self, each: Any) -> bool:
        return type(each) is float and each == self.value

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "return" or (step := place_of(frame.f_code)) is None:
            return
        values = frame.f_locals.values()
        fields = (field for each in values for field in getattr(each, "__dict__", {}).values())
        if any(map(self._is_value, values)) or any(map(self._is_value, fields)):
            self.add(step)


@contextmanager
def traced(*walks: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Let walks see each call and return of all threads."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        for walk in walks:
            walk(frame, event, argument)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def play() -> list[Walk]:
    """Run the studies in an empty folder, and return their walks."""
    local, secure = Update("an update in a local run"), Update("an update over Flower, secure sums")
    lr, epsilon = (
        Setting("lr, from the study to the step"),
        Setting("epsilon, from study to report"),
    )
    lr.value, epsilon.value = LR, EPSILON
    for name, study in runs.STUDIES.items():
        runs.STUDIES[name] = study.replace("lr = 1e-2", f"lr = {LR}").replace(
            "epsilon = 200.0", f"epsilon = {EPSILON}"
        )
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        runs.some_digits(Path(folder))
        with traced(local, lr):
            runs.command_line("local", Path("local"), [])
        with traced(epsilon):
            runs.command_line("dp-client", Path("private"), [])
            runs.typed(Path("report.txt"), "report", "private/run")
        (Path(folder) / "kept" / "sites").mkdir(parents=True)
        with traced(secure):
            runs.over_flower("secure", Path(folder), Path(folder) / "kept")
        os.chdir(ROOT)
    return [local, secure, lr, epsilon]


def draw(walks: list[Walk], file: Path) -> None:
    """Draw each walk as a line over the packages, with a name at each module's first entry."""
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "walks", "font.size": 8, "svg.fonttype": "none"}
    from matplotlib import pyplot

    heights = [1.4 + 0.22 * len({room.split("/")[0] for room in walk.rooms()}) for walk in walks]
    figure, axes = pyplot.subplots(
        len(walks),
        figsize=(13, 1.9 * sum(heights) / 2),
        height_ratios=heights,
        layout="constrained",
    )
    for axis, walk in zip(axes, walks, strict=True):
        rooms = walk.rooms()
        packages = sorted({room.split("/")[0] for room in rooms}, key=ORDER.index)
        row = {package: place for place, package in enumerate(packages)}
        entries = [
            room for i, (room, _) in enumerate(walk.steps) if i == 0 or walk.steps[i - 1][0] != room
        ]
        first = {room: entries.index(room) for room in rooms}
        # Entries beyond the first take no width of their own: the axis counts new modules.
        new = [sum(start <= i for start in first.values()) - 1 for i in range(len(entries))]
        at = [
            i + 0.6 * sum(new[j] == i for j in range(k)) / new.count(i) for k, i in enumerate(new)
        ]
        axis.plot(at, [row[room.split("/")[0]] for room in entries], color="#9db4cf", linewidth=0.7)
        axis.scatter(
            range(len(rooms)),
            [row[room.split("/")[0]] for room in rooms],
            s=14,
            color="#0072b2",
            zorder=3,
        )
        axis.set_yticks(range(len(packages)), packages)
        axis.set_xticks(range(len(rooms)), [room.split("/", 1)[-1] for room in rooms], rotation=90)
        functions = len({*walk.steps})
        axis.set_title(
            f"{walk.title}: {len(rooms)} modules, {functions} functions", loc="left", fontsize=10
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#eceff3", linewidth=0.6)
        axis.set_axisbelow(True)
    figure.savefig(file, metadata={"Date": None})


ORDER = (
    *("lazy", "errors", "reader", "seeds", "naming", "tensors", "storage", "models", "language"),
    *("data", "training", "methods", "privacy", "secagg", "federation", "studies", "audits"),
    *("runners", "reports", "sites", "sweeps", "run", "parts", "testing", "__init__", "cli"),
)


def main() -> None:
    """Trace, write and draw."""
    walks = play()
    result = {
        "command": "python research/walks.py",
        **facts(),
        "walks": {w.title: w.json() for w in walks},
    }
    (LAB / "results" / "walks.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(walks, LAB / "pages" / "walks.svg")
    for walk in walks:
        sys.stdout.write(
            f"{walk.title}: {len(walk.rooms())} modules, {len({*walk.steps})} functions\n"
        )


if __name__ == "__main__":
    main()
