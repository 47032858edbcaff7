# SPDX-License-Identifier: Apache-2.0
"""Files of runs and sites are for their owner alone whatever the umask; exports are for all."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import run
from flwr.app import Context, RecordDict
from grids import InProcess

from fedplan.errors import StoreError
from fedplan.storage.files import make_folder
from fedplan.sweeps.sweeping import sweep

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import runs

UMASKS = (0o000, 0o022, 0o077)
SECURE = '[aggregation]\nkind = "secure"\nthreshold = 2\nmin_contributors = 2\n'
HIDING = '[privacy]\nunit = "client"\nepsilon = 900.0\nnoise_multiplier = 1.0\n'
PLAIN = runs.STUDIES["local"]
"""A study with keep_best, test sets and compression."""


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    runs.some_digits(tmp_path)
    return tmp_path


def open_to_others(*folders: Path) -> dict[str, str]:
    """Files and folders, in and with these, that others may open, with their modes."""
    paths = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    assert len(paths) > 10
    modes = {str(path): stat.S_IMODE(path.lstat().st_mode) for path in paths}
    return {path: oct(mode) for path, mode in modes.items() if mode & 0o077}


def play(kind: str, here: Path) -> list[Path]:
    """Play a run of a kind by its command, or over a Flower grid; all folders that it has left."""
    if kind in ("flower", "secure"):
        Path("study.toml").write_text(runs.STUDIES[kind])
        for client in runs.CLIENTS:
            runs.make_site(here, client)
        server, client = runs.sites_of(here)
        context = Context(
            run_id=1,
            node_id=1,
            node_config={},
            state=RecordDict(),
            run_config={"folder": str(here / "runs" / "one")},
        )
        server(InProcess(client, [{"name": name} for name in runs.CLIENTS]), context)
        return [here / "runs", *(here / "sites" / name / "state" for name in runs.CLIENTS)]
    texts = {"client": runs.STUDIES["dp-client"], "example": runs.STUDIES["dp-example"]}
    Path("study.toml").write_text(texts.get(kind, PLAIN))
    if kind == "sweep":
        sweep("study.toml", ["train.rounds=1"], folder="runs", seeds=2, parallel=2)
        return [here / "runs"]
    pool = ("--runner", "pool", "--workers", "2") if kind == "pool" else ()
    code, told = run("run", "study.toml", "--output", "runs/one", *pool)
    assert code == 0, told
    return [here / "runs"]


KINDS = ("local", "client", "example", "secure", "flower", "pool", "sweep")


def require_private(kind: str, here: Path, mask: int) -> None:
    with umask(mask):
        assert open_to_others(*play(kind, here)) == {}


def test_a_run_is_for_its_owner_alone(here: Path) -> None:
    require_private("client", here, 0)


def test_a_secure_run_and_its_sites_are_for_their_owners_alone(here: Path) -> None:
    require_private("secure", here, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("mask", UMASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_for_its_owner_alone_under_every_umask(
    kind: str, mask: int, here: Path
) -> None:
    require_private(kind, here, mask)


@pytest.mark.parametrize("hiding", [HIDING, SECURE, ""])
def test_a_folder_left_open_is_closed_where_clients_are_hidden(hiding: str, here: Path) -> None:
    text = PLAIN.replace("compression", "# compression").replace("rounds = 3", "rounds = 1")
    Path("study.toml").write_text(text + hiding)
    folder = here / "run"
    folder.mkdir(mode=0o755)
    with umask(0o022):
        assert run("run", "study.toml", "--output", "run")[0] == 0
        for path in (folder, *folder.iterdir()):  # as an older version has left them
            path.chmod(0o755 if path.is_dir() else 0o644)
        assert run("run", "--resume", "run")[0] == 0
    assert bool(open_to_others(folder)) == (not hiding)


def test_a_folder_of_somebody_else_is_refused_to_a_run_that_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError("not yours")

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", denied)
    make_folder(tmp_path)
    with pytest.raises(StoreError, match=r"others may read .* name a folder of your own"):
        make_folder(tmp_path, private=True)


def test_what_is_made_to_be_shared_can_be_read_by_all(here: Path) -> None:
    with umask(0o022):
        play("client", here)
        assert run("export", "runs/one", "model", "--global")[0] == 0
        assert run("report", "runs/one", "-o", "report.html")[0] == 0
        assert run("compare", "runs/one", "--html", "compare.html")[0] == 0
    shared = [here / "report.html", here / "compare.html", *(here / "model").iterdir()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in shared} == {0o644}
    assert stat.S_IMODE((here / "model").stat().st_mode) == 0o755
