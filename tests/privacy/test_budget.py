# SPDX-License-Identifier: Apache-2.0
"""Laws of the budget: charged before released, whatever is killed, torn or flipped."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often

from fedplan.errors import FedplanError, PrivacyError
from fedplan.privacy.accounting.accountant import Charge, DPSGDSteps, Event, Release, epsilon
from fedplan.privacy.accounting.budget import Budget, EpsilonCap
from fedplan.storage.append_log import head_file
from fedplan.storage.files import POINTS, VARIABLE, reset_failpoints

LOG_POINTS = [name for name in POINTS if name.startswith("log.")]
SUM = Release(4.0)
LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    reset_failpoints()


def budget(folder: Path, limit: float | None = None, **more: Any) -> Budget:
    return Budget(folder / "budget.jsonl", delta=1e-5, limit=limit, **more)


def filled(folder: Path, rounds: int) -> Path:
    found = budget(folder)
    for i in range(1, rounds + 1):
        found.charge(SUM, f"round {i}", digest=f"{i:032x}")
    return found.file


def test_charges_are_read_back(tmp_path: Path) -> None:
    events: list[Event] = [SUM, Release(1.0, 0.05), DPSGDSteps(1.1, 0.04, 25), Release(4.0)]
    first = budget(tmp_path, limit=20.0)
    for i, event in enumerate(events):
        first.charge(event, f"round {i}")
    again = budget(tmp_path, limit=20.0)
    assert (
        again.charges
        == first.charges
        == tuple(Charge(event, f"round {i}") for i, event in enumerate(events))
    )
    assert again.epsilon_spent() == first.epsilon_spent() == epsilon(events, 1e-5)
    assert first.file.stat().st_mode & 0o777 == 0o600


def test_an_empty_budget_has_spent_nothing_and_writes_nothing(tmp_path: Path) -> None:
    assert budget(tmp_path).epsilon_spent() == 0
    assert not list(tmp_path.iterdir())


def test_what_would_pass_the_limit_is_refused_and_not_written(tmp_path: Path) -> None:
    rounds = 25
    limit = epsilon([SUM] * rounds, 1e-5)
    found = budget(tmp_path, limit)
    for i in range(rounds):
        found.charge(SUM, f"round {i}")
    before = found.file.read_bytes()
    assert found.epsilon_spent() == limit
    for each in (found, budget(tmp_path, limit)):
        with pytest.raises(PrivacyError, match="may be"):
            each.charge(SUM, f"round {rounds}")
        each.charge(SUM, "round 3")  # what was paid may go out again
    assert found.file.read_bytes() == before
    budget(tmp_path, limit + 1).charge(SUM, f"round {rounds}")


def test_a_cap_is_at_its_own_delta_and_the_limit_at_the_files(tmp_path: Path) -> None:
    cap = EpsilonCap(epsilon([SUM] * 2, 1e-3), 1e-3, "run/")
    found = budget(tmp_path, cap=cap)
    for name in ("run/1", "run/2"):  # at the delta of the file, two would cost more than the cap
        found.charge(SUM, name)
    assert found.epsilon_spent_under(cap) == cap.epsilon < found.epsilon_spent()
    with pytest.raises(PrivacyError, match="was promised"):
        found.charge(SUM, "run/3")


def test_the_same_again_is_free_another_event_an_error_another_content_a_charge(
    tmp_path: Path,
) -> None:
    found = budget(tmp_path)
    for _ in range(3):
        found.charge(SUM, "round 1", digest="aa")
    assert len(found.charges) == 1
    with pytest.raises(PrivacyError, match=r"round 1 was charged as .*4\.0.*, not as .*5\.0"):
        found.charge(Release(5.0), "round 1", digest="aa")
    found.charge(SUM, "round 1", digest="bb")
    found.charge(SUM, "round 1", digest="aa")
    assert [charge.digest for charge in budget(tmp_path).charges] == ["aa", "bb"]


def test_two_at_one_file_see_each_other(tmp_path: Path) -> None:
    one, other = budget(tmp_path), budget(tmp_path)
    one.charge(SUM, "round 1")
    other.charge(SUM, "round 2")
    one.charge(SUM, "round 1")
    one.charge(SUM, "round 3")
    assert [charge.name for charge in one.charges] == ["round 1", "round 2", "round 3"]
    one.file.unlink()
    with pytest.raises(PrivacyError, match="does not hold line 4"):
        one.charge(SUM, "round 4")
    head_file(one.file).unlink()
    with pytest.raises(PrivacyError, match="no longer holds all 3 charges"):
        one.charge(SUM, "round 4")


def test_units_are_not_mixed(tmp_path: Path) -> None:
    budget(tmp_path).charge(SUM, "round 1")
    with pytest.raises(PrivacyError, match="example"):
        budget(tmp_path, unit="example")


@pytest.mark.parametrize("wrong", [{"limit": 0.0}, {"unit": "hospital"}, {"delta": 0.0}])
def test_wrong_settings_are_told(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match=f"{next(iter(wrong.values()))}"):
        Budget(tmp_path / "budget.jsonl", **{"delta": 1e-5, **wrong})


def test_of_a_torn_last_line_nothing_whole_is_lost(tmp_path: Path) -> None:
    file = filled(tmp_path, 2)
    before, head = file.read_bytes(), head_file(file).read_bytes()
    budget(tmp_path).charge(SUM, "round 3", digest=f"{3:032x}")
    content = file.read_bytes()
    for cut in range(len(before), len(content) + 1):
        file.write_bytes(content[:cut])
        head_file(file).write_bytes(head)  # as a kill leaves both
        found = budget(tmp_path)
        assert len(found.charges) == (3 if cut == len(content) else 2)
        found.charge(SUM, "round 3", digest=f"{3:032x}")
        assert file.read_bytes() == content


@pytest.mark.parametrize("rubbish", [b"\0" * 50, b'{"seal": "', b"\xff", b'{"seal": "0"}}'])
def test_rubbish_after_the_last_line_is_cut_off(tmp_path: Path, rubbish: bytes) -> None:
    file = filled(tmp_path, 2)
    content = file.read_bytes()
    file.write_bytes(content + rubbish)
    found = budget(tmp_path)
    assert len(found.charges) == 2
    found.charge(SUM, "round 1", digest=f"{1:032x}")
    assert file.read_bytes() == content


def test_no_flipped_bit_hides_a_charge(tmp_path: Path) -> None:
    file = filled(tmp_path, 3)
    content, charges, missed = file.read_bytes(), budget(tmp_path).charges, set[int]()
    for bit in {*range(0, 8 * len(content), 5), *range(8 * len(content) - 20, 8 * len(content))}:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            assert budget(tmp_path).charges == charges
            missed.add(bit // 8)
        except PrivacyError:
            pass
    assert not missed


def test_no_lost_or_moved_line_is_overlooked(tmp_path: Path) -> None:
    file = filled(tmp_path, 4)
    lines = file.read_bytes().splitlines(keepends=True)
    for i in range(len(lines) - 1):
        for doctored in (
            lines[:i] + lines[i + 1 :],
            [*lines[:i], *lines[i : i + 2][::-1], *lines[i + 2 :]],
        ):
            file.write_bytes(b"".join(doctored))
            with pytest.raises(PrivacyError):
                budget(tmp_path)


@given(st.binary(max_size=60), st.integers(0, 700), st.integers(0, 700))
@settings(max_examples=often(500))
def test_whatever_a_file_holds_only_a_privacy_error_comes(
    tmp_path_factory: pytest.TempPathFactory, new: bytes, start: int, stop: int
) -> None:
    folder = tmp_path_factory.mktemp("doctored")
    file = filled(folder, 2)
    content = file.read_bytes()
    file.write_bytes(content[:start] + new + content[stop:])
    with suppress(PrivacyError):
        assert len(budget(folder).charges) <= 2


@pytest.mark.parametrize("action,reason", [("raise", errno.EIO), ("enospc", errno.ENOSPC)])
@pytest.mark.parametrize("point", LOG_POINTS)
@pytest.mark.parametrize("time", [1, 2, 3])
def test_a_failing_disk_is_told_and_nothing_is_forgotten(
    tmp_path: Path, point: str, action: str, reason: int, time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{point}:{action}@{time}")
    found, released = budget(tmp_path), 0
    for i in range(5):
        for attempt in range(2):
            try:
                found.charge(SUM, f"round {i}")
            except PrivacyError as error:
                assert attempt == 0 and os.strerror(reason) in str(error)
                assert len(found.charges) >= released and found.epsilon_spent() >= 0
            else:
                released += 1
                break
    abouts = [charge.name for charge in budget(tmp_path).charges]
    assert abouts == [f"round {i}" for i in range(5)]


def test_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(FedplanError, match="nowhere"):
        budget(tmp_path / "nowhere").charge(SUM, "round 1")


# Killed again and again around the release: a process for each life, all of one run.

LIVES = """
import os, sys, json, torch
from pathlib import Path
from fedplan.storage.files import VARIABLE
from fedplan.privacy.mechanisms.gaussian import GaussianMechanism
from fedplan.privacy.accounting.budget import Budget
from fedplan.privacy.mechanisms.noise import load_or_create_secret
from fedplan.tensors.sums import ExactSum

folder, lives = Path(sys.argv[1]), json.loads(sys.argv[2])
mechanism = GaussianMechanism({"x": ((4,), torch.float32)}, 1.0, 4.0, 10.0)


def live():
    released = folder / "released.txt"
    done = len(set(released.read_text().split("\\n")[:-1])) if released.exists() else 0
    secret = load_or_create_secret(folder / "secret")
    budget = Budget(folder / "budget.jsonl", delta=1e-5)
    for number in range(max(done, 1), done + 6):  # the last one once more: it may not have got out
        about, total = f"round {number}", ExactSum()
        mechanism.add(total, {"x": torch.full((4,), number / 1000)})
        budget.charge(mechanism.event, about, digest=mechanism.digest(total, secret, about))
        value = mechanism.release(total, secret, about)["x"]
        with released.open("a") as out:
            out.write(about + " " + value.numpy().tobytes().hex() + "\\n")


for armed in lives:
    if not (child := os.fork()):
        os.environ[VARIABLE] = armed
        live()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    charged = [c.name for c in Budget(folder / "budget.jsonl", delta=1e-5).charges]
    out = (folder / "released.txt")
    lines = out.read_text().splitlines() if out.exists() else []
    print(json.dumps([armed, status, charged, lines]))
"""


def lives(folder: Path, count: int) -> list[tuple[str, int, list[str], list[str]]]:
    armed = [f"{LOG_POINTS[i % 4]}:kill@{1 + i // 4 % 4}" for i in range(count)]
    command = [sys.executable, "-c", LIVES, str(folder), json.dumps(armed)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("count", [60, pytest.param(201, marks=pytest.mark.nightly)])
def test_no_kill_leaves_a_release_that_was_not_charged(tmp_path: Path, count: int) -> None:
    history = lives(tmp_path, count)
    killed = 0
    for _, status, charged, lines in history:
        released = {line.rpartition(" ")[0] for line in lines}
        assert released <= set(charged)  # recovered charges hold every true release
        assert len(charged) == len(set(charged)) <= len(released) + 1  # and none is charged twice
        assert len({line.rpartition(" ")[0] for line in set(lines)}) == len(set(lines))  # same bits
        killed += os.WIFSIGNALED(status)
    assert killed == count == len(history)
    LOG.info("kills %s", killed)
    LOG.info("charges %s", len(history[-1][2]))
    LOG.info("releases %s", len(set(history[-1][3])))
