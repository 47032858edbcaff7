# SPDX-License-Identifier: Apache-2.0
"""A site's log says what it was asked and how that ended, and nothing of its rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from sites import NAME, RUN, hello, make_gateway, study_text, write_rows

from fedplan.federation.endpoint import HELLO, TRAIN
from fedplan.federation.ledger.faults import FaultLog, read_faults
from fedplan.storage.logs import LOG, read_log
from fedplan.tensors.serialization import pack_message

STUDY = study_text(privacy="")


def test_what_was_asked_and_how_it_ended_is_in_the_log(tmp_path: Path) -> None:
    """A label that the study does not know is in the site's error, and not in its log."""
    write_rows(tmp_path / "rows.npz", digit=np.full(24, 4711))
    desk = make_gateway(tmp_path)
    desk.answer(HELLO, hello(STUDY))
    desk.answer(TRAIN, pack_message({}, {"run": "1" * 16, "round": 7}))
    desk.answer("rm -rf", pack_message({}, {"run": RUN, "round": "4711"}))
    found = read_log(tmp_path / "state")
    assert [entry.event for entry in found] == ["hello error", "train error", "request error"]
    assert [entry.text for entry in found][:2] == ["failed: data", "refused: unknown-run"]
    assert [(entry.run, entry.round) for entry in found][1] == ("1" * 16, 7)
    assert {entry.site for entry in found} == {NAME}
    text = (tmp_path / "state" / LOG).read_text()
    assert "4711" not in text and "rm" not in text
    assert (tmp_path / "state" / LOG).stat().st_mode & 0o077 == 0


def test_an_answer_is_in_the_log(tmp_path: Path) -> None:
    desk = make_gateway(tmp_path)
    desk.answer(HELLO, hello(STUDY))
    (entry,) = read_log(tmp_path / "state")
    assert (entry.event, entry.text, entry.run, entry.level) == ("hello answered", "", RUN, "info")


def test_the_record_names_the_certificate_that_the_server_shows_at_each_request(
    tmp_path: Path,
) -> None:
    """A server whose certificate was made anew does not greet its sites again."""
    desk, shown = make_gateway(tmp_path), iter(("aa" * 32, "bb" * 32, "", "cc" * 32))
    desk.read_certificate_digest = lambda: next(shown)
    desk.answer(HELLO, hello(STUDY))
    for number in "123":
        desk.answer(TRAIN, pack_message({}, {"run": number * 16, "round": 1}))
    text = (tmp_path / "state/egress.jsonl").read_text()
    lines = map(json.loads, text.splitlines())
    # where the line did not open just then, the last one stands
    assert [line["server"][:2] for line in lines] == ["aa", "bb", "bb", "cc"]


def test_a_fault_that_a_full_disk_has_cut_is_removed_by_the_next(tmp_path: Path) -> None:
    log = FaultLog(tmp_path)
    log.append(OSError("first"))
    file = tmp_path / "faults.log"
    file.write_bytes(file.read_bytes()[:-9])
    log.append(OSError("second"))
    found = read_faults(tmp_path)
    assert len(found) == 1 and "second" in found[0]
