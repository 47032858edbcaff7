# SPDX-License-Identifier: Apache-2.0
"""A lock of what is installed: the closure of a requirement, and hashes that pip holds it to."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from fedplan.errors import FedplanError
from fedplan.sites.lock import installed_versions, write_requirements_lock


def wheel(folder: Path, name: str, number: str, more: str = "") -> Path:
    """A wheel of a package with nothing in it."""
    folder.mkdir(exist_ok=True)
    file, held = folder / f"{name}-{number}-py3-none-any.whl", f"{name}-{number}.dist-info"
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr(
            f"{held}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        )
        opened.writestr(
            f"{held}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        opened.writestr(f"{held}/RECORD", more)
    return file


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_what_is_required_here_is_found_by_extras_and_markers() -> None:
    plain, whole = installed_versions("fedplan"), installed_versions("fedplan[flower]")
    assert whole["torch"] == version("torch") and whole["flwr"] == version("flwr")
    assert "flwr" not in plain and plain.items() < whole.items()
    assert not {"pytest", "hypothesis"} & whole.keys()
    with pytest.raises(FedplanError, match="nowhere is not installed"):
        installed_versions("nowhere")


@pytest.mark.usefixtures("offline")
def test_pip_installs_what_is_locked_and_nothing_that_was_changed(tmp_path: Path) -> None:
    file = wheel(tmp_path / "wheels", "mdurl", version("mdurl"))
    lock = write_requirements_lock(tmp_path, "mdurl")
    text = lock.read_text()
    assert (
        f"mdurl=={version('mdurl')} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"
        in text
    )
    words = ["install", "--no-index", "--find-links", str(file.parent), "--require-hashes"]
    command = [
        sys.executable,
        "-m",
        "pip",
        *words,
        "--target",
        str(tmp_path / "there"),
        "-r",
        str(lock),
    ]
    assert subprocess.run(command, capture_output=True).returncode == 0
    wheel(tmp_path / "wheels", "mdurl", version("mdurl"), more="another\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "DO NOT MATCH" in done.stderr.upper()


@pytest.mark.usefixtures("offline")
def test_what_has_no_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FedplanError, match=r"no wheel of mdurl==\S+ for this machine: put the wheel into"
    ):
        write_requirements_lock(tmp_path, "mdurl")
    assert not (tmp_path / "requirements.lock").exists()
