# SPDX-License-Identifier: Apache-2.0
"""A new user with a clock: from a wheel in an empty environment to a first report, and to one's own.

It types what the pages say, block by block, and nothing else: `python research/new_user.py`. Every line of
`research/results/new-user.json` is one command and its seconds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from study import FACTS

ROOT = Path(__file__).parents[1]
OUT = ROOT / "research" / "results" / "new-user.json"
PAGES = ("docs/tutorials/first-run.md", "docs/tutorials/own-csv.md")
LIMITS = {"docs/tutorials/first-run.md": 600, "docs/tutorials/own-csv.md": 900}
"""Seconds from the wheel to each page's report."""
BLOCK = re.compile(r"(<!-- not run[^>]*-->\n\n)?^```(\w+)\n(.*?)^```", re.M | re.S)
NAMED = re.compile(r"# ([\w-]+\.\w+)\n")
TORCH = "torch==2.13.0"
"""What a machine without a GPU takes first; here the registry's is small."""


def typed(page: str, folder: Path) -> list[str]:
    """The commands of a page, with the files saved that it says to save."""
    found = list[str]()
    for aside, kind, body in BLOCK.findall((ROOT / page).read_text()):
        if named := NAMED.match(body):
            (folder / named[1]).write_text(body)
        elif kind == "sh" and not aside:
            found += body.splitlines()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, lines = Path(name), list[dict[str, Any]]()
        wheel = folder / "wheel"
        subprocess.run([ROOT / ".ci" / "build", wheel], check=True, stdout=subprocess.DEVNULL)
        kept = ("HOME", "LANG", "TMPDIR")
        env = {each: os.environ[each] for each in kept if each in os.environ}
        env |= {"PATH": f"{folder / 'venv' / 'bin'}:/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
        env |= {"PIP_NO_CACHE_DIR": "1"}  # as a machine that has never seen any of it
        began = time.monotonic()

        def typing(command: str) -> None:
            start = time.monotonic()
            words, silent = shlex.split(command), subprocess.DEVNULL
            subprocess.run(words, check=True, cwd=folder, env=env, stdout=silent)
            now = time.monotonic()
            lines.append(
                {"command": command, "seconds": round(now - start, 1), "at": round(now - began, 1)}
            )
            print(f"{lines[-1]['at']:7.1f}  {command}", flush=True)

        typing(f"{sys.executable} -m venv venv")
        typing(f"pip install -q {TORCH}")
        typing(f"pip install -q {next(wheel.glob('*.whl'))}")
        ends = dict[str, float]()
        for page in PAGES:
            for command in typed(page, folder):
                typing(command)
                if command.startswith("fedplan report"):
                    ends[page] = lines[-1]["at"]
        said = {
            **FACTS,
            "command": "python research/new_user.py",
            "report_at": ends,
            "limits": LIMITS,
            "import": [_import(folder, env) for _ in range(5)],
            "megabytes": _size(folder / "venv") >> 20,
            "lines": lines,
        }
    OUT.write_text(json.dumps(said, indent=1) + "\n")
    print(json.dumps({key: said[key] for key in ("report_at", "import", "megabytes")}))
    assert all(ends[page] <= limit for page, limit in LIMITS.items()), "it took longer than it may"


def _import(folder: Path, env: dict[str, str]) -> float:
    start = time.monotonic()
    subprocess.run(["python", "-c", "import fedplan"], cwd=folder, env=env, check=True)
    return round(time.monotonic() - start, 3)


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


if __name__ == "__main__":
    main()
