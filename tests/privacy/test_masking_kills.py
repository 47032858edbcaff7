# SPDX-License-Identifier: Apache-2.0
"""Masked rounds killed at every step: they close with the same bits, and no site answers twice."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import masked
import pytest
from masked import NEVER, Round, drawn, refusal, terms

from fedplan.errors import FedplanError
from fedplan.secagg.messages import SurvivorList
from fedplan.secagg.progress import DiskProgressStore
from fedplan.secagg.terms import Slot
from fedplan.storage import files
from fedplan.storage.files import POINTS, VARIABLE

SITES = ("ada", "bea", "cleo")
SLOTS = (Slot("body", 5), Slot("head", 3, wide=True))
STORE = [point for point in POINTS if point.startswith("store.")]
WRITES = len(SITES) * NEVER
"""How often a round writes: each site at each step."""
KILLS = [(point, time) for time in range(1, WRITES + 1) for point in STORE]
random.Random(0).shuffle(KILLS)  # so that the few of a day are of many kinds


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, where there is one: what is killed here are processes, not machines."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        (Path(made) / "said.jsonl").touch()
        yield Path(made)


def lasting(folder: Path, *, attempt: int = 1, gone: dict[str, int] | None = None) -> Round:
    """The round as any process sees it that begins it, or takes it up again."""
    dice = random.Random(2)
    agreed = terms(SLOTS, threshold=2, floor=2, round=4, attempt=attempt)
    numbers = {site: {slot.name: drawn(dice, slot) for slot in SLOTS} for site in SITES}
    diaries = {site: DiskProgressStore(folder / site) for site in SITES}
    made = Round(agreed, numbers, dict.fromkeys(SITES, 7), gone or {}, diaries)
    for name, site in made.sites.items():
        for step in masked.STEPS:
            setattr(site, step, noted(getattr(site, step), folder / "said.jsonl", name))
    return made


def noted(asked: Callable[..., Any], file: Path, site: str) -> Callable[..., Any]:
    """The same, that writes down on disk all that a site says, as it does."""

    def noting(*words: Any) -> Any:
        said = asked(*words)
        with file.open("a") as out:
            letter = {k: v for k, v in asdict(said).items() if k != "signature"}
            plain = json.dumps(letter, default=lambda each: each.hex(), sort_keys=True)
            out.write(json.dumps([site, asked.__name__, said.terms_digest.hex(), plain]) + "\n")
            out.flush()
            os.fsync(out.fileno())
        return said

    return noting


def said_in(folder: Path) -> list[tuple[str, str, str, str]]:
    file = folder / "said.jsonl"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def killed(folder: Path, failpoint: str) -> int:
    """Play the round in a process that is killed. How it ended."""
    child = os.fork()
    if child == 0:
        try:
            files.reset_failpoints()
            os.environ[VARIABLE] = failpoint
            lasting(folder).play()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("point", "time"), KILLS)
def test_a_round_that_was_killed_closes_with_the_same_bits(
    point: str, time: int, folder: Path
) -> None:
    assert killed(folder, f"{point}:kill@{time}") == -signal.SIGKILL
    made = lasting(folder)
    found = made.play()
    assert found is not None and masked.said(found, made) == masked.plain(made)
    said = said_in(folder)
    assert len(set(said)) == len({each[:3] for each in said}) == WRITES


@pytest.mark.parametrize(("point", "time"), KILLS)
def test_after_a_kill_no_other_sum_is_opened(point: str, time: int, folder: Path) -> None:
    """Whoever was killed where: the server tries without one, in this attempt and in the next."""
    assert killed(folder, f"{point}:kill@{time}") == -signal.SIGKILL
    for attempt in (1, 2):
        for gone in SITES:
            made = lasting(folder, attempt=attempt, gone={gone: 2})
            refusal(made.play)
    answers = [each for each in said_in(folder) if each[1] == "reveal_shares"]
    for site in SITES:
        assert len({each[2:] for each in answers if each[0] == site}) <= 1, "two answers"
    opened = Counter(terms for _, terms in {(each[0], each[2]) for each in answers})
    assert sum(count >= made.terms.threshold for count in opened.values()) <= 1, "two sums"


@pytest.mark.parametrize("step", range(NEVER))
@pytest.mark.parametrize("action", ["raise", "enospc"])
def test_what_cannot_be_noted_is_not_said(
    action: str, step: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.reset_failpoints()
    monkeypatch.setenv(VARIABLE, f"store.begun:{action}@{step * len(SITES) + 1}")
    with pytest.raises(FedplanError, match="checkpoint"):
        lasting(folder).play()
    assert [each[1] for each in said_in(folder)] == [
        name for name in masked.STEPS[:step] for _ in SITES
    ]
    monkeypatch.delenv(VARIABLE)
    made = lasting(folder)
    found = made.play()
    assert found is not None and masked.said(found, made) == masked.plain(made)


def test_a_round_that_broke_off_is_begun_anew_and_a_later_one_after_it(folder: Path) -> None:
    made = lasting(folder, gone={"ada": 3, "bea": 3})
    assert "threshold" in refusal(made.play)  # cleo has signed, and nobody has answered
    again = lasting(folder, attempt=2, gone={"ada": 0})
    found = again.play()
    assert found is not None and masked.said(found, again) == masked.plain(again)
    over = lasting(folder, attempt=3)
    assert "unmasked in attempt 2" in refusal(
        lambda: over.sites["bea"].advertise_keys(over.terms, ["body", "head"])
    )
    later = replace(over.terms, round=5, attempt=1)
    assert over.sites["bea"].advertise_keys(later, ["body", "head"]).terms_digest == later.digest
    assert "other terms" in refusal(
        lambda: over.sites["bea"].sign_survivors(
            SurvivorList(again.terms.digest, ("bea", "cleo"), {})
        )
    )


def test_a_damaged_diary_is_an_error_and_never_the_page_before(folder: Path) -> None:
    made = lasting(folder)
    made.play()
    newest = max((folder / "ada").glob("*.json"), key=lambda file: int(file.stem))
    newest.write_bytes(newest.read_bytes().replace(b"true", b"false"))
    with pytest.raises(FedplanError, match="reveal a round twice"):
        lasting(folder).sites["ada"].advertise_keys(made.terms, ["body", "head"])
