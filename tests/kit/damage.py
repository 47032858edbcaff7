# SPDX-License-Identifier: Apache-2.0
"""Folders of runs with one damaged file, and what becomes of them when they are resumed."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from commands import STUDY
from power import flipped

from fedplan.audits.repair import repair_run
from fedplan.errors import FedplanError
from fedplan.runners.simulation import Simulation
from fedplan.storage.append_log import head_file
from fedplan.studies.resume import open_study
from fedplan.studies.schema import read_study

PRIVATE = ("epsilon=900.0", "delta=1e-5", "clipping_norm=1.0", "noise_multiplier=1.0")
KINDS: dict[str, list[str]] = {
    "personal": [],
    "best": ["evaluate.keep_best=personal", "data.validation_fraction=0.2"],
    "client": [f"privacy.{each}" for each in ("unit=client", *PRIVATE)],
    "example": [f"privacy.{each}" for each in ("unit=example", "examples_per_site=15", *PRIVATE)]
    + ["train.steps=2"],
    "secure": ["aggregation.kind=secure"],
    "adam": ["method.server_optimizer=adam"],
    "scaffold": ["method.name=scaffold"],
}
"""Further settings of a study, by kind of run."""
FREE = ("environment.jsonl", "environment.jsonl.head", "log.jsonl", "status.json", ".lock")
"""Files with times, or without content: no result follows from them."""
UNTRUSTED = {
    "log.jsonl": "events for people",
    "status.json": "progress for people",
    "faults.log": "error texts for people",
    "environment.jsonl": "sessions for people; verify names the damage",
    "environment.jsonl.head": "sessions for people; verify names the damage",
}
"""Files from which nothing follows, each with its purpose."""
DONE, LEFT = 3, 2
"""Rounds of a folder before it is damaged, and those that a resume adds."""


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run that a repetition writes with the same bytes, by name."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in FREE and not file.name.endswith(".tmp")
    }


def relative_files(folder: Path) -> list[Path]:
    """All files in a folder, by their paths in it."""
    return [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]


def damaged_files(folder: Path, name: Path, how: str) -> list[Path]:
    """The files that a damage is of: one, or a log "deleted with its head"."""
    file = folder / name
    return [file, head_file(file)] if how == "deleted with its head" else [file]


def damage_file(folder: Path, name: Path, how: str, rng: random.Random) -> None:
    """Flip a bit of a file, or delete it (an empty one too), alone or with the head of the log."""
    for file in damaged_files(folder, name, how):
        content = flipped(file.read_bytes(), rng) if how == "flipped" else b""
        if content:
            file.write_bytes(content)
        else:
            file.unlink()


def harmless(name: Path) -> str:
    """The outcome of a damaged file that nothing trusts; "" for another file."""
    purpose = UNTRUSTED.get(name.name)
    return f"harmless: {purpose}" if purpose else ""


@dataclass
class Workshop:
    """A folder that stopped after DONE rounds, and the contents that an undisturbed run ends with."""

    folder: Path
    expected: dict[str, bytes]

    @staticmethod
    def build(kind: str, place: Path) -> Workshop:
        """Run a study of a kind in a folder, and go on with a copy of it."""
        place.mkdir(parents=True)
        rng = np.random.default_rng(0)
        images, labels = rng.integers(0, 255, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
        tables = {"image_train": images[:45], "digit_train": labels[:45]}
        tables |= {"image_test": images[45:], "digit_test": labels[45:]}
        np.savez(place / "digits.npz", **tables)
        text = STUDY.replace('"digits.npz"', f'"{place}/digits.npz"')
        text = text.replace("dropout_fraction = 0.1", "")
        text = text.replace('partition = "dirichlet"\nalpha = 0.5', 'partition = "iid"')
        if kind == "scaffold":
            text = "\n".join(x for x in text.splitlines() if not x.startswith("plan ="))
        (place / "study.toml").write_text(text)
        rounds = f"train.rounds={DONE + LEFT}"
        study = read_study(place / "study.toml", [rounds, *KINDS[kind]])
        folder = place / "run"
        rounds = Simulation(study, folder).rounds()
        for committed in rounds:
            if committed.round == DONE:
                break
        rounds.close()
        del rounds, committed
        shutil.copytree(folder, place / "whole")
        resume(place / "whole")
        return Workshop(folder, contents(place / "whole"))

    def files(self) -> list[Path]:
        """All files of the folder, relative to it."""
        return [name for name in relative_files(self.folder) if name.name != ".lock"]

    def damage(
        self,
        name: Path,
        how: str,
        rng: random.Random,
        repair: Callable[[Path], object] = repair_run,
    ) -> str:
        """Damage one file of a copy, and resume the copy; return the outcome.

        "same": the run ends with the bytes of the undisturbed one. "repaired": the resume was
        refused, and after a repair the run ended so. "refused": it cannot be repaired either.
        "harmless": as "same", of a file that nothing
        trusts. "SILENT": it ended with other bytes.
        """
        copy = self.folder.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy)
        damage_file(copy, name, how, rng)
        try:
            resume(copy)
        except FedplanError as error:
            reason = str(error).splitlines()[0]
            try:
                repair(copy)
                resume(copy)
            except FedplanError as second:
                return f"refused: {reason} | {second}"
            return (
                f"repaired: {reason}" if not self.differences(copy) else f"SILENT repair: {reason}"
            )
        different = self.differences(copy)
        if different:
            return f"SILENT: {', '.join(different[:5])}"
        return harmless(name) or "same"

    def repair(self, pattern: str, how: str, rng: random.Random) -> dict[str, object]:
        """Damage all files of a pattern in a copy, and repair it; return what came of it.

        Raises AssertionError if the repaired run ends with other bytes than the undisturbed one.
        """
        copy = self.folder.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy)
        names = [file.relative_to(copy) for file in sorted(copy.glob(pattern)) if file.is_file()]
        for name in names:
            damage_file(copy, name, how, rng)
        began, result = time.process_time(), {"files": len(names)}
        try:
            restored: object = repair_run(copy)
        except FedplanError as error:
            return result | {"not": str(error).replace(str(copy), "run")}
        seconds = round(time.process_time() - began, 1)
        resume(copy)
        assert not self.differences(copy), self.differences(copy)
        return result | {"restored": restored, "seconds": seconds}

    def differences(self, copy: Path) -> list[str]:
        """Names of files that are not as in the undisturbed run."""
        ended = contents(copy)
        names = self.expected.keys() | ended.keys()
        return sorted(n for n in names if self.expected.get(n) != ended.get(n))


def resume(folder: Path) -> None:
    """Go on with the run in a folder to its end."""
    study, _ = open_study(folder, [], None, resume=True)
    Simulation(study, folder).run()
