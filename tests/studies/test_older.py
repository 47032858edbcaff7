# SPDX-License-Identifier: Apache-2.0
"""Run folders of older versions: verified, exported and gone on with, or refused with the reason.

Each archive in `older` has the folder of a run as the commit in its name wrote it, and its data.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from commands import run

OLDER = Path(__file__).parent / "older"
ARCHIVES = sorted(file.name.removesuffix(".tar.gz") for file in OLDER.glob("*.tar.gz"))
REFUSED = "another version of fedplan"
UNREADABLE = ("5572176", "444bbba")
"""Commits before 0.1.0 whose folders have other fields; 0.1.0 is e650a73."""


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_older_folder_is_gone_on_with_or_refused_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(OLDER / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    resume = ("run", "--resume", "run", "--set", "train.rounds=3")
    acts = [("verify", "run"), ("export", "run", "model", "--global"), resume, ("verify", "run")]
    before = {file: file.read_bytes() for file in Path("run").rglob("*") if file.is_file()}
    for act in acts:
        code, screen = run(*act)
        text = " ".join(screen.split())
        assert "Traceback" not in text
        assert (code != 0 and REFUSED in text) if name in UNREADABLE else code == 0, (act, screen)
    if name in UNREADABLE:
        assert before == {file: file.read_bytes() for file in before}
