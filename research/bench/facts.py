# SPDX-License-Identifier: Apache-2.0
"""Facts about a measurement: commit, versions and machine."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path


def facts_of(tree: Path) -> dict[str, object]:
    """Commit of a tree of fedplan and of its studies, versions of packages, and the machine."""
    git = ("git", "-C", str(tree))
    commit = _output(*git, "rev-parse", "--short", "HEAD")
    changed = _output(*git, "status", "--porcelain", "fedplan", "research/studies")
    return {
        "commit": commit + ("+changes" if changed else ""),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "day": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 1),
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
