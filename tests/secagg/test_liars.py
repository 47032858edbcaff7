# SPDX-License-Identifier: Apache-2.0
"""One site of several lies: it is named, and the round is opened from what the others send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import masked_liars
import pytest
from masked_liars import LEFT_OUT, STILL_SUMMED, Liars
from masked_runs import NAMES, MaskedRun
from often import AT_NIGHT

from fedplan.federation.ledger.records import RecordError, read_round
from fedplan.methods.registry import method_by_name
from fedplan.secagg.messages import EncryptedShares, UnmaskShares, decode, encode
from fedplan.tensors.message import Message

COUNTS = (5, 10, 30) if AT_NIGHT else (5, 10)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", STILL_SUMMED)
def test_a_liar_in_the_sum_is_named_and_honest_shares_open_it(name: str, count: int) -> None:
    step, lie, said = STILL_SUMMED[name]
    liars = Liars(count, step, lie)
    drive = liars.play()
    assert drive.unmasked is not None and drive.attempt == 1, drive.failure
    assert said in drive.dropouts.pop(liars.liar)
    # A dispute is recorded of both sides: nobody can tell who lies.
    complaint = f"it complains of the shares of {liars.liar}"
    assert set(drive.dropouts.values()) <= {complaint}
    assert int(drive.unmasked.numbers["body"][0]) == liars.expected(liars.names)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_liar_is_named_and_the_round_is_opened_without_it(name: str, count: int) -> None:
    step, lie, said = LEFT_OUT[name]
    liars = Liars(count, step, lie)
    drive = liars.play()
    assert drive.unmasked is not None, drive.failure
    assert said in drive.dropouts.pop(liars.liar)
    # A dispute is recorded of both sides: nobody can tell who lies.
    complaint = f"it complains of the shares of {liars.liar}"
    assert set(drive.dropouts.values()) <= {complaint}
    assert int(drive.unmasked.numbers["body"][0]) == liars.expected(liars.honest)


@pytest.mark.parametrize("count", COUNTS)
def test_false_complaints_stop_nothing_and_are_recorded(count: int) -> None:
    """One site complains of all others: each of them still has enough holders."""
    liars = Liars(count, "masked_input", masked_liars.false_complaints)
    drive = liars.play()
    assert drive.unmasked is not None and drive.attempt == 1
    assert int(drive.unmasked.numbers["body"][0]) == liars.expected(liars.names)
    assert set(drive.dropouts) == set(liars.names)
    assert drive.dropouts.pop(liars.liar).startswith("it complains of the shares of")
    assert all(f"say {liars.liar}" in reason for reason in drive.dropouts.values())


@pytest.mark.parametrize("secrets", [False, True])
def test_shares_of_no_secret_name_their_dealer(secrets: bool) -> None:
    """They match their commitments, so that only the reconstruction shows the lie."""
    liars = Liars(
        5, "share_keys", lambda own, said: masked_liars.recommitted(own, said, secrets=secrets)
    )
    drive = liars.play()
    assert drive.unmasked is None
    assert drive.failure.startswith(f"{liars.liar} has dealt shares that do not fit together")
    faults = drive.earlier_faults | drive.dropouts
    assert faults[liars.liar] == "it has dealt shares that do not fit together"


def test_a_wrong_count_opens_nothing() -> None:
    """Who sent it nobody can tell: the server sees no single input."""
    liars = Liars(5, "masked_input", masked_liars.wrong_count)
    drive = liars.play()
    assert drive.unmasked is None and "has sent wrong masked input" in drive.failure
    assert all(name in drive.failure for name in liars.names)


def test_more_liars_than_may_be_missing_open_nothing() -> None:
    """Two of five, with a threshold of four, give wrong shares: too few right ones are left."""
    liars = Liars(5, "unmask", masked_liars.wrong_seeds)
    ask, other = liars.ask, liars.names[2]

    def with_two(step: str, messages):  # type: ignore[no-untyped-def]
        for name, reply in ask(step, messages):
            if not (name == other and step == "unmask"):
                yield name, reply

    liars.ask = with_two  # type: ignore[method-assign]
    drive = liars.play()
    assert drive.unmasked is None and "3 clients have revealed unmask shares" in drive.failure


def test_the_ledger_of_a_run_names_the_liar(tmp_path: Path) -> None:
    """In round 1 a site gives wrong shares to the server, in round 2 to the other sites."""
    run = MaskedRun(method_by_name("fedavg"), tmp_path, rounds=2)
    calm, liar = run.answer, NAMES[1]

    def answer(site: str, kind: str, asked: Message) -> Message:
        said, number = calm(site, kind, asked), run.server.global_state.round + 1
        lies: dict[tuple[str, str, int], tuple[type, Any]] = {
            (liar, "unmask", 1): (UnmaskShares, masked_liars.wrong_seeds),
            (liar, "share_keys", 2): (EncryptedShares, masked_liars.garbage_boxes),
        }
        if (lie := lies.get((site, kind, number))) is None:
            return said
        return encode(run.server.agreement.run, lie[1](None, decode(lie[0], said)))

    run.answer = answer
    run.carry()
    first, second = run.rounds()
    assert first["aggregated"] == list(NAMES) and not first["secagg"]["not_unmasked"]
    assert first["secagg"]["faults"] == {liar: f"{liar} has given a wrong share of {NAMES[0]}"}
    assert second["aggregated"] == [NAMES[0], NAMES[2]]
    assert second["secagg"]["faults"].keys() == {liar}
    assert second["rejected"] == {liar: f"it dealt wrong shares, say {NAMES[0]}, {NAMES[2]}"}
    assert run.faults() == []
    with pytest.raises(RecordError, match="faults is empty"):
        read_round(second | {"secagg": second["secagg"] | {"faults": {}}})
