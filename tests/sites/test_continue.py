# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from what was kept in an earlier one says so, and does so, here and there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from sites import NAME, PRIVATE, RUN, desk_of, hello, study_text, world_of, write_rows
from typer.testing import CliRunner

from fedplan.cli import app
from fedplan.federation.endpoint import HELLO, TRAIN, journal_in
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import push
from fedplan.runners.worker import folder_of
from fedplan.sites.desk import Desk
from fedplan.storage.encryption import new_key_file
from fedplan.studies.plain import read_toml
from fedplan.studies.run import open_run
from fedplan.studies.schema import ConfigError, study_of
from fedplan.tensors.serialization import unpacked

METHOD = 'plan = "chain(share(), keep(head))"'
LATER = "1" * 16


def turned(desk: Desk, text: str, run: str, number: int = 1) -> dict[str, torch.Tensor]:
    """What a site keeps after a turn of a run of a study."""
    study = study_of(read_toml(text))
    said = unpacked(desk.answer(HELLO, hello(text, run)))[1]
    assert "client" in said, said
    endpoint = desk._worker_of(study).endpoint(run)  # pyright: ignore[reportPrivateUsage]
    down = push(endpoint.agreement, world_of(endpoint, round=number), NAME, {}, anew=True)
    assert unpacked(desk.answer(TRAIN, request_message(down)))[0]
    return journal_in(folder_of(desk.site.home, study, NAME) / run, desk.site.seal).home()[0]


def test_a_site_goes_on_from_what_it_kept(tmp_path: Path) -> None:
    new_key_file(tmp_path / "home.key")
    desk = desk_of(tmp_path, key=str(tmp_path / "home.key"))
    text = study_text(method=METHOD, privacy="")
    kept = turned(desk, text, RUN)
    still = study_text(method=METHOD, privacy="", train="rate = 1e-30", name="again")
    fresh = turned(desk, still, "2" * 16)
    assert any(not torch.equal(fresh[key], kept[key]) for key in kept)
    after = turned(desk, f'continues = "{RUN}"\n{still}', LATER)
    assert after.keys() == kept.keys() and all(torch.equal(after[k], kept[k]) for k in kept)


def test_a_site_that_has_lost_what_it_kept_says_so(tmp_path: Path) -> None:
    desk = desk_of(tmp_path)
    text = study_text(method=METHOD, privacy="")
    turned(desk, text, RUN)
    shutil.rmtree(folder_of(desk.site.home, study_of(read_toml(text)), NAME))
    again = f'continues = "{RUN}"\n{text}'
    assert unpacked(desk.answer(HELLO, hello(again, LATER)))[1]["refused"] == "restored"


def test_what_was_kept_is_not_covered_by_a_promise() -> None:
    with pytest.raises(ConfigError, match="continues"):
        study_of(read_toml(f'continues = "{RUN}"\n{study_text(privacy=PRIVATE)}'))


def test_a_run_here_goes_on_from_what_its_clients_kept(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.npz")
    text = study_text(method=METHOD, privacy="", data='path = "rows.npz"\nclients = 2', rounds=2)
    file = tmp_path / "study.toml"
    file.write_text(text.replace(f'names = ["{NAME}"]', ""))
    one, two = tmp_path / "one", tmp_path / "two"
    cli = CliRunner()
    assert cli.invoke(app, ["run", str(file), "--output", str(one)]).exit_code == 0
    first, run = open_run(one), ["run", str(file), "--output", str(two)]
    said = ["--set", "train.rate=1e-30", "--continue-from", str(one)]
    assert cli.invoke(app, [*run, *said]).exit_code == 0
    second = open_run(two)
    assert second.study.continues == first.identity.id
    for name in first.clients:
        before, after = first.home(name)[0], second.home(name)[0]
        assert before and all(torch.equal(after[key], before[key]) for key in before)
    assert cli.invoke(app, ["verify", str(two)]).exit_code == 0
    other = [*run[:-1], str(tmp_path / "three"), "--set", f'continues="{LATER}"']
    assert "--continue-from" in cli.invoke(app, other).output
