# SPDX-License-Identifier: Apache-2.0
"""What lies in a site's home is what the docs say, and without the key it tells of no row."""

from __future__ import annotations

import re
import stat
from pathlib import Path, PurePath

import numpy as np
import pytest
from canaries import hits
from sites import NAME, PRIVATE, RUN, hello, make_gateway, study_text, world_of, write_rows

from fedplan.errors import FedplanError
from fedplan.federation.endpoint import HELLO, TRAIN, open_journal
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.runners.site_runtime import site_study_folder
from fedplan.sites.gateway import allow_rejoin
from fedplan.storage.encryption import new_key_file
from fedplan.studies.schema import parse_toml, study_from_dict
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import unpack_message

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "approve.md"
METHOD = 'plan = "chain(share(), keep(head))"'


def rows_of_table() -> list[tuple[list[str], bool]]:
    """The patterns of the page's table, and whether these files are encrypted."""
    text = PAGE.read_text().partition("## Files of the state folder")[2]
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [
        (re.findall(r"`([^`]+)`", first), last.startswith("encrypted")) for first, _, last in lines
    ]


@pytest.mark.parametrize("privacy", ["", PRIVATE], ids=["", "hidden"])
def test_a_home_is_what_the_page_says_and_tells_nothing(privacy: str, tmp_path: Path) -> None:
    new_key_file(tmp_path / "state.key")
    write_rows(tmp_path / "rows.npz", count=24)
    text = study_text(method=METHOD, privacy=privacy, rounds=3)
    desk = make_gateway(tmp_path, encryption_key=str(tmp_path / "state.key"))
    assert "client" in unpack_message(desk.answer(HELLO, hello(text)))[1]
    study = study_from_dict(parse_toml(text))
    endpoint = desk._runtime_for(study).endpoint(RUN)  # pyright: ignore[reportPrivateUsage]
    for number in (1, 2):
        global_state = world_of(endpoint, round=number)
        down = make_request(endpoint.agreement, global_state, NAME, {}, full=True)
        assert unpack_message(desk.answer(TRAIN, request_message(down)))[0]
    desk.answer(TRAIN, Message(b""))
    allow_rejoin(desk.site, RUN)
    folder = site_study_folder(desk.site.state, study, NAME) / RUN
    kept = open_journal(folder, desk.site.encryption).client_state()[0]
    with np.load(tmp_path / "rows.npz") as rows:
        pictures = rows["image"]
    files = [file for file in desk.state_folder.rglob("*") if file.is_file()]
    own = {key: value for key, value in kept.items() if key.startswith("classifier")}
    assert own and [hit for hit in hits(own, files) if hit.form != "name"] == []
    for file in files:
        content, where = file.read_bytes(), PurePath(file.relative_to(desk.state_folder).as_posix())
        assert not any(picture.tobytes() in content for picture in pictures), file
        said = [sealed for names, sealed in rows_of_table() if any(map(where.match, names))]
        assert said, f"{where} is not in the table of docs/how-to/approve.md"
        is_sealed = b'"sealed 1 ' in content or content.startswith(b'{"encrypted": ')
        readable = b'{"' in content[:64] and not is_sealed
        assert not (said[0] and readable), f"{where} is not sealed"
    for place in (desk.state_folder, *desk.state_folder.rglob("*")):
        assert not stat.S_IMODE(place.stat().st_mode) & 0o077, place


def test_only_a_run_that_the_site_knows_is_rejoined(tmp_path: Path) -> None:
    desk = make_gateway(tmp_path)
    for run in ("typo", "../../x", "0" * 16):
        with pytest.raises(FedplanError, match="does not know run"):
            allow_rejoin(desk.site, run)
    assert not (tmp_path / "x").exists()
