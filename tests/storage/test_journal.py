# SPDX-License-Identifier: Apache-2.0
"""Laws of journals: home and reply are committed together, and no commit is lost in silence."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_store import COMMITTED, STORE_POINTS, files, flip, kill, same, tensors_of, unarmed

from fedplan.errors import StoreError
from fedplan.storage import files as storage_files
from fedplan.storage.files import POINTS, VARIABLE
from fedplan.storage.journal import Journal, client_state_folder

__all__ = ["unarmed"]  # a fixture of every test
JOURNAL_POINTS = [name for name in POINTS if name.startswith("journal.")]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kill(tmp_path_factory.mktemp("killed"), JOURNAL_POINTS)


@pytest.mark.parametrize("point", JOURNAL_POINTS)
def test_a_kill_leaves_home_and_reply_together(killed: Path, point: str) -> None:
    journal = Journal(killed / f"{point}-2")
    number = 2 if point == "journal.after_commit" else 1
    home, notes = journal.client_state()
    assert same(home, tensors_of(number)) and notes == {"round": number}
    assert (journal.reply_for("request 2") is not None) == (number == 2)


def test_the_same_request_has_the_same_answer_and_home_moves_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.reply_for("r1") is None and journal.client_state() == ({}, {})
    tensor = torch.randn(4)
    home, reply = {"x#control": tensor}, {"x#control": tensor, "state/a": torch.ones(())}
    journal.commit("r1", home, {"seen": 1}, reply, {"weight": 3})
    expected = {k: v.clone() for k, v in reply.items()}
    tensor.add_(1)  # the model trains on in the same memory
    for each in (journal, journal, Journal(tmp_path)):
        answer = each.reply_for("r1")
        assert answer is not None and same(answer[0], expected) and answer[1] == {"weight": 3}
        answer[0]["x#control"].zero_()
        assert same(each.client_state()[0], {"x#control": expected["x#control"]})
        assert each.client_state()[1] == {"seen": 1}
    with pytest.raises(StoreError, match="'r1' was answered"):
        journal.commit("r1", {}, {}, {}, {})
    journal.commit("r2", {}, {"seen": 2}, {}, {})
    assert journal.reply_for("r1") is not None and journal.client_state() == ({}, {"seen": 2})
    assert journal.reply_for("r3") is None


def test_a_damaged_journal_falls_back_whole_and_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in (1, 2):
        journal.commit(f"r{number}", tensors_of(number), {"n": number}, tensors_of(number), {})
    files(tmp_path, 2)[1].write_bytes(b"")
    assert journal.reply_for("r2") is None and same(journal.client_state()[0], tensors_of(1))
    assert [each.number for each in journal.skipped] == [2]
    journal.commit("r2", tensors_of(2), {"n": 2}, tensors_of(2), {})
    assert journal.reply_for("r2") is not None and journal.reply_for("r1") is not None
    assert journal.client_state()[1] == {"n": 2}


def test_a_home_that_was_lost_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    """The server asks again for round 2, and what stood before it is damaged."""
    journal = Journal(tmp_path, keep_replies=False)
    assert journal.client_state(before="r1") == ({}, {})
    journal.commit("r1", tensors_of(1), {"n": 1}, {}, {})
    assert journal.client_state(before="r1") == ({}, {}), (
        "before the first request there was nothing"
    )
    journal.commit("r2", tensors_of(2), {"n": 2}, {}, {})
    assert journal.client_state(before="r2")[1] == {"n": 1}
    files(tmp_path, 1)[1].write_bytes(b"")
    for each in (journal, Journal(tmp_path, keep_replies=False)):
        with pytest.raises(StoreError, match=r"before request 'r2'.*checkpoint 1.*0 bytes"):
            each.client_state(before="r2")
        assert each.client_state()[1] == {"n": 2}
    journal.commit("r2", tensors_of(2), {"n": 2}, {}, {})  # and this removes the damaged one
    with pytest.raises(StoreError, match="before request 'r2'"):
        journal.client_state(before="r2")


def test_a_request_is_replaced_where_it_stands_though_a_later_one_is_damaged(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path, keep_replies=False)
    for number in (1, 2):
        journal.commit(f"r{number}", tensors_of(number), {"n": number}, {}, {})
    files(tmp_path, 2)[1].write_bytes(b"")
    Journal(tmp_path, keep_replies=False).commit("r1", tensors_of(1), {"n": 1}, {}, {})
    journal = Journal(tmp_path, keep_replies=False)
    assert journal.client_state()[1] == {"n": 1} and journal.client_state(before="r1") == ({}, {})


@pytest.mark.parametrize("name", ["", "7.json", "%", " ", "a" * 60])
def test_no_home_is_the_folder_of_homes(tmp_path: Path, name: str) -> None:
    assert client_state_folder(tmp_path, name).parents[2] == tmp_path / "clients"


class JournalMachine(RuleBasedStateMachine):
    """A journal against a list of commits, with failures at any point of any commit."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.journal = Journal(self.folder)
        self.model: list[tuple[str, int]] = []
        self.count = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule()
    def restart(self) -> None:
        self.journal = Journal(self.folder)

    def commit(self, request: str, value: int) -> None:
        # Values differ, for to write the very same again may heal a damaged checkpoint.
        tensors = {"x#control": torch.tensor([value])}
        self.journal.commit(request, tensors, {"value": value}, tensors, {"value": value})

    requests = st.sampled_from("abcd")

    def next(self) -> int:
        self.count += 1
        return self.count

    @rule(request=requests)
    def work(self, request: str) -> None:
        value = self.next()
        if self.journal.reply_for(request) is None:
            self.commit(request, value)
            self.model.append((request, value))
        else:
            with pytest.raises(StoreError):
                self.commit(request, value)

    @rule(
        request=requests,
        point=st.sampled_from([*STORE_POINTS, *JOURNAL_POINTS]),
        action=st.sampled_from(["raise", "enospc"]),
    )
    def fail(self, request: str, point: str, action: str) -> None:
        value = self.next()
        if self.journal.reply_for(request) is not None:
            return
        os.environ[VARIABLE] = f"{point}:{action}@1"
        storage_files.reset_failpoints()
        try:
            with pytest.raises(StoreError):
                self.commit(request, value)
        finally:
            del os.environ[VARIABLE]
        if point in (*COMMITTED, "journal.after_commit"):
            self.model.append((request, value))

    @rule(place=st.integers(0, 10**6), manifest=st.booleans())
    def rot(self, place: int, manifest: bool) -> None:
        """The newest checkpoint loses a bit: the client is where it was one commit before."""
        kept = sorted(int(p.stem) for p in self.folder.glob("*.json"))
        if len(kept) == 2 and not self.journal.skipped:
            file = files(self.folder, kept[-1])[0 if manifest else 1]
            file.write_bytes(flip(place % (8 * file.stat().st_size))(file.read_bytes()))
            self.model = self.model[-2:-1]

    @invariant()
    def home_is_the_last_commit(self) -> None:
        home, notes = self.journal.client_state()
        if not self.model:
            assert (home, notes) == ({}, {})
            return
        value = self.model[-1][1]
        assert notes == {"value": value} and same(home, {"x#control": torch.tensor([value])})

    @invariant()
    def the_last_two_are_answered_and_every_answer_is_right(self) -> None:
        for request in "abcd":
            answer = self.journal.reply_for(request)
            if answer is not None:
                assert answer[1] == {"value": dict(self.model)[request]}
                assert same(answer[0], {"x#control": torch.tensor([answer[1]["value"]])})
            else:
                assert request not in dict(self.model[-2:])


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=40,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
