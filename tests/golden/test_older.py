# SPDX-License-Identifier: Apache-2.0
"""Run folders that older versions wrote are opened, verified, exported and continued.

`older/*.zip` has the folder of the golden run `local` after two of its three rounds, as the commit
in its name wrote it: `fedplan run study.toml --set train.rounds=2`. Add one before each change of a
file format.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import runs

OLDER = sorted((Path(__file__).parent / "older").glob("*.zip"))


def python(folder: Path, code: str, *arguments: str) -> str:
    """Run code in the environment of golden runs; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, **runs.STEADY, "PYTHONPATH": f"{runs.ROOT}:{runs.HERE}"},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def fedplan(folder: Path, *arguments: str) -> None:
    python(folder, "from fedplan.cli import main; main()", *arguments)


def tensor_files(folder: Path) -> dict[str, str]:
    """SHA-256 of the newest tensor file of each store, by the store's folder."""
    newest = dict[str, str]()
    for file in sorted(folder.rglob("3.*.safetensors")):
        store = str(file.parent.relative_to(folder))
        newest[store] = hashlib.sha256(file.read_bytes()).hexdigest()
    return newest


@pytest.mark.parametrize("older", OLDER, ids=lambda file: file.stem)
def test_a_folder_of_an_older_version_is_verified_exported_and_continued(
    tmp_path: Path, older: Path
) -> None:
    with zipfile.ZipFile(older) as archive:
        archive.extractall(tmp_path)
    for key in tmp_path.rglob("key"):
        key.chmod(0o600)
    runs.some_digits(tmp_path)
    (tmp_path / "study.toml").write_text(runs.STUDIES["local"])
    fedplan(tmp_path, "verify", "run")
    fedplan(tmp_path, "export", "run", "exported", "--client", "client-00")
    assert (tmp_path / "exported" / "model.safetensors").exists()
    fedplan(tmp_path, "run", "study.toml", "--output", "run", "--resume")
    fedplan(tmp_path, "verify", "run")
    # Continued, it ends with the bits of the run that was never interrupted.
    stored = json.loads((runs.STORED / "local" / "files.json").read_text())
    expected = {
        str(Path(name).parent.relative_to("run")): text.split()[2]
        for name, text in stored.items()
        if Path(name).name.startswith("3.") and name.endswith(".safetensors")
    }
    found = tensor_files(tmp_path / "run")
    assert found.keys() == expected.keys() and len(found) == 4
    probe = json.loads(python(tmp_path, "import json, runs; print(json.dumps(runs.probe()))"))
    if probe == json.loads((runs.STORED / "probe.json").read_text()):
        assert found == expected
