# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from what was kept in an earlier one says so, and does so, here and there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from sites import NAME, PRIVATE, RUN, hello, make_gateway, study_text, world_of, write_rows
from typer.testing import CliRunner

from fedplan.cli import app
from fedplan.federation.endpoint import HELLO, TRAIN, open_journal
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.runners.site_runtime import site_study_folder
from fedplan.sites.gateway import SiteGateway
from fedplan.storage.encryption import new_key_file
from fedplan.studies.run import read_run
from fedplan.studies.schema import ConfigError, parse_toml, study_from_dict
from fedplan.tensors.serialization import unpack_message

METHOD = 'plan = "chain(share(), keep(head))"'
LATER = "1" * 16


def turned(desk: SiteGateway, text: str, run: str, number: int = 1) -> dict[str, torch.Tensor]:
    """What a site keeps after a turn of a run of a study."""
    study = study_from_dict(parse_toml(text))
    said = unpack_message(desk.answer(HELLO, hello(text, run)))[1]
    assert "client" in said, said
    endpoint = desk._runtime_for(study).endpoint(run)  # pyright: ignore[reportPrivateUsage]
    down = make_request(endpoint.agreement, world_of(endpoint, round=number), NAME, {}, full=True)
    assert unpack_message(desk.answer(TRAIN, request_message(down)))[0]
    return open_journal(
        site_study_folder(desk.site.state, study, NAME) / run, desk.site.encryption
    ).client_state()[0]


def test_a_site_goes_on_from_what_it_kept(tmp_path: Path) -> None:
    new_key_file(tmp_path / "state.key")
    desk = make_gateway(tmp_path, encryption_key=str(tmp_path / "state.key"))
    text = study_text(method=METHOD, privacy="")
    kept = turned(desk, text, RUN)
    still = study_text(method=METHOD, privacy="", train="lr = 1e-30", name="again")
    fresh = turned(desk, still, "2" * 16)
    assert any(not torch.equal(fresh[key], kept[key]) for key in kept)
    after = turned(desk, f'continue_from = "{RUN}"\n{still}', LATER)
    assert after.keys() == kept.keys() and all(torch.equal(after[k], kept[k]) for k in kept)


def test_a_site_that_has_lost_what_it_kept_says_so(tmp_path: Path) -> None:
    desk = make_gateway(tmp_path)
    text = study_text(method=METHOD, privacy="")
    turned(desk, text, RUN)
    shutil.rmtree(site_study_folder(desk.site.state, study_from_dict(parse_toml(text)), NAME))
    again = f'continue_from = "{RUN}"\n{text}'
    assert unpack_message(desk.answer(HELLO, hello(again, LATER)))[1]["refused"] == "outdated-state"


def test_what_was_kept_is_not_covered_by_a_promise() -> None:
    with pytest.raises(ConfigError, match="continue_from"):
        study_from_dict(parse_toml(f'continue_from = "{RUN}"\n{study_text(privacy=PRIVATE)}'))


def test_a_run_here_goes_on_from_what_its_clients_kept(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.npz")
    text = study_text(
        method=METHOD, privacy="", data='path = "rows.npz"\nnum_clients = 2', rounds=2
    )
    file = tmp_path / "study.toml"
    file.write_text(text.replace(f'names = ["{NAME}"]', ""))
    one, two = tmp_path / "one", tmp_path / "two"
    cli = CliRunner()
    assert cli.invoke(app, ["run", str(file), "--output", str(one)]).exit_code == 0
    first, run = read_run(one), ["run", str(file), "--output", str(two)]
    said = ["--set", "train.lr=1e-30", "--continue-from", str(one)]
    assert cli.invoke(app, [*run, *said]).exit_code == 0
    second = read_run(two)
    assert second.study.continue_from == first.identity.id
    for name in first.clients:
        before, after = first.client_state(name)[0], second.client_state(name)[0]
        assert before and all(torch.equal(after[key], before[key]) for key in before)
    assert cli.invoke(app, ["verify", str(two)]).exit_code == 0
    other = [*run[:-1], str(tmp_path / "three"), "--set", f'continue_from="{LATER}"']
    assert "--continue-from" in cli.invoke(app, other).output
