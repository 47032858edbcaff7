# SPDX-License-Identifier: Apache-2.0
"""A site's log says what it was asked and how that ended, and nothing of its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sites import NAME, RUN, desk_of, hello, study_text, write_rows

from fedplan.federation.endpoint import HELLO, TRAIN
from fedplan.storage.logs import LOG, read_log
from fedplan.tensors.serialization import packed

STUDY = study_text(privacy="")


def test_what_was_asked_and_how_it_ended_is_in_the_log(tmp_path: Path) -> None:
    """A label that the study does not know is in the site's error, and not in its log."""
    write_rows(tmp_path / "rows.npz", digit=np.full(24, 4711))
    desk = desk_of(tmp_path)
    desk.answer(HELLO, hello(STUDY))
    desk.answer(TRAIN, packed({}, {"run": "1" * 16, "round": 7}))
    desk.answer("rm -rf", packed({}, {"run": RUN, "round": "4711"}))
    found = read_log(tmp_path / "home")
    assert [entry.event for entry in found] == ["hello ended", "train ended", "request ended"]
    assert [entry.text for entry in found][:2] == ["failed: data", "refused: unknown-run"]
    assert [(entry.run, entry.round) for entry in found][1] == ("1" * 16, 7)
    assert {entry.site for entry in found} == {NAME}
    text = (tmp_path / "home" / LOG).read_text()
    assert "4711" not in text and "rm" not in text
    assert (tmp_path / "home" / LOG).stat().st_mode & 0o077 == 0


def test_an_answer_is_in_the_log(tmp_path: Path) -> None:
    desk = desk_of(tmp_path)
    desk.answer(HELLO, hello(STUDY))
    (entry,) = read_log(tmp_path / "home")
    assert (entry.event, entry.text, entry.run, entry.level) == ("hello answered", "", RUN, "info")
