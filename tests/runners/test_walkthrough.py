# SPDX-License-Identifier: Apache-2.0
"""The walk-through for three hospitals, typed as printed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from deployment import BIN

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/tutorials/three-sites.md"
INSTALLS = ("python -m venv", "pip install")


@pytest.mark.nightly
def test_the_walk_through_works_as_printed(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```bash\n(.*?)```", PAGE.read_text().partition("## What the files are")[0], re.S
    )
    lines = [x for block in blocks for x in block.splitlines() if not x.startswith(INSTALLS)]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = "\n".join(["set -e", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT", *lines])
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1500
    )
    (tmp_path / "output.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    words = " ".join(done.stdout.split())  # lines are as long as a terminal
    assert "no personal param was uploaded" in words
    assert "north in federation/0" in words and "limits of this site: none" in words
    assert (tmp_path / "global/model.safetensors").exists()
    assert (tmp_path / "north/model.safetensors").exists()
