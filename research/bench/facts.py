# SPDX-License-Identifier: Apache-2.0
"""Facts: where a result comes from."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path


def facts_of(tree: Path) -> dict[str, object]:
    """The commit of a tree of fedplan, with its studies; the machine, and what it is measured with."""
    git = ("git", "-C", str(tree))
    commit = _said(*git, "rev-parse", "--short", "HEAD")
    changed = _said(*git, "status", "--porcelain", "fedplan", "research/studies")
    return {
        "commit": commit + ("+changes" if changed else ""),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "day": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 1),
    }


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
