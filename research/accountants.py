# SPDX-License-Identifier: Apache-2.0
"""The epsilon of random guarantees by fedplan, by dp-accounting and by Opacus, side by side.

python research/accountants.py --settings 100 --output research/results/accountants.json
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))

from accountants import opacus_epsilon, random_setting, reference_epsilon

SEED = 31


def main() -> None:
    """Compare, print a line for each setting, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=100)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    dice, began, rows = random.Random(SEED), time.process_time(), list[dict[str, object]]()
    below, above = 0.0, 0.0
    prv_range = [float("inf"), -float("inf")]
    for number in range(arguments.settings):
        setting = random_setting(dice)
        ours, reference = (
            setting.guarantee.forecast_epsilon(setting.rounds),
            reference_epsilon(setting),
        )
        prv, rdp = (opacus_epsilon(setting, accountant) for accountant in ("prv", "rdp"))
        below, above = max(below, reference - ours), max(above, ours / reference - 1)
        prv_range = [min(prv_range[0], prv - ours), max(prv_range[1], prv - ours)]
        rows.append(
            {
                "rounds": setting.rounds,
                "guarantee": asdict(setting.guarantee),
                "fedplan": ours,
                "dp-accounting": reference,
                "Opacus PRV": prv,
                "Opacus RDP": rdp,
            }
        )
        print(number, setting.guarantee.unit, f"{ours:.6f} {reference:.6f} {prv:.4f} {rdp:.4f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    result = {
        "command": " ".join(("python", *sys.argv)),
        "commit": commit.stdout.strip(),
        "hardware": f"{platform.machine()}, one thread, {time.process_time() - began:.0f} s of CPU",
        "versions": {name: version(name) for name in ("dp-accounting", "opacus", "torch")},
        "seed": SEED,
        "settings": len(rows),
        "largest amount below dp-accounting": below,
        "largest amount above dp-accounting, relative": above,
        "Opacus PRV minus fedplan, smallest and largest": prv_range,
        "rows": rows,
    }
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
