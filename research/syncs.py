# SPDX-License-Identifier: Apache-2.0
"""Remove each sync of a file or folder alone, and list which acts notice it after power cuts.

python research/syncs.py --minutes 10

Acts are those of tests/storage/test_power.py, and federations of tests/simulation/test_power_cuts.py
whose machines lose power at their failpoints, in turn until one notices or the time of a line is
over. Writes research/results/syncs.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "simulation"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "storage"))

import pytest
import torch
from power import PowerDisk
from study import FACTS, LAB
from test_power import ACTS, Killed, try_act
from test_power_cuts import SETTINGS, deaths, try_death


def federations(root: Path, seconds: float) -> dict[str, str]:
    """Return by kind of federation the first death that shows, within a time; "" if none does."""
    noticed, end = dict.fromkeys(SETTINGS, ""), time.process_time() + seconds
    for machine, death in deaths():
        for kind, setting in SETTINGS.items():
            if noticed[kind] or time.process_time() > end:
                continue
            try:
                try_death(setting, machine, death, root)
            except Exception as error:
                noticed[kind] = f"{machine} at {death.split(':')[0]}: {str(error)[:80]}"
    return {kind: text for kind, text in noticed.items() if text}


def die(*_: object) -> None:
    """Let the process of an act die."""
    raise Killed


def main() -> None:
    """Try each line of code that syncs, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of federations, over all lines"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "kill", die)
    for name in ACTS:
        assert try_act(name, root / "disk") == ""
    for setting in SETTINGS.values():
        try_death(setting, *deaths()[0], root)
    lines, rows = sorted(PowerDisk.seen), dict[str, dict[str, Any]]()
    for line in lines:
        PowerDisk.removed.add(line)
        acts = {name: text[:80] for name in ACTS if (text := try_act(name, root / "disk"))}
        rows[line] = {"acts": acts}
        rows[line]["federations"] = federations(root, 60 * options.minutes / len(lines))
        PowerDisk.removed.clear()
        print(line, "noticed by", *rows[line]["acts"], *rows[line]["federations"], flush=True)
    patch.undo()
    shutil.rmtree(root)
    unnoticed = [line for line, row in rows.items() if not any(row.values())]
    command = f"python research/syncs.py --minutes {options.minutes:g}"
    result = {"command": command, "facts": FACTS, "unnoticed": unnoticed, "lines": rows}
    (LAB / "results" / "syncs.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
