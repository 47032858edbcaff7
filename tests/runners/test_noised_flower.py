# SPDX-License-Identifier: Apache-2.0
"""Noise in shares over Flower's messages: charged at each site before its words leave, and once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from masked import directory, node
from masked_runs import NAMES, MaskedRun
from often import first
from torch import Tensor

from fedplan.errors import PrivacyError
from fedplan.federation.aggregation.secure_input import VALUE_PREFIX
from fedplan.federation.ledger.egress import Limits
from fedplan.federation.ledger.records import WHOLE_SUM
from fedplan.federation.messages import RequestRefused
from fedplan.federation.secure_client import SecAggClient
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.methods.method import Method
from fedplan.privacy.accounting.budget import Budget
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.secagg import config as secagg_config
from fedplan.secagg.client import ProtocolClient
from fedplan.secagg.round import ROUND_CHECKPOINT
from fedplan.sites.egress import DatasetAccount
from fedplan.tensors.accumulator import GRID
from fedplan.tensors.message import Message
from fedplan.tensors.named import same_bits

HIDDEN = Guarantee("client", 60.0, 1e-5, 0.5, 1.0)
PARTS = Method(
    parse('chain(freeze(), by("site", {"a": share(blocks(0))}, share(blocks(0) | blocks(1))))')
)


@dataclass
class Watched:
    """A run of hidden clients, and all that its sites mask, as it is before their masks."""

    run: MaskedRun
    sent: list[tuple[str, dict[str, Any], int]]
    start: dict[str, Tensor]

    def charges(self, name: str) -> list[str]:
        """The names of what a site was charged for."""
        assert self.run.accounts is not None
        file = self.run.accounts / name / CHARGES_FILE
        return [each.name for each in Budget(file, delta=1e-5).charges] if file.exists() else []


@contextmanager
def watched(folder: Path, **said: Any) -> Generator[Watched]:
    mask = ProtocolClient.mask_input
    folder.mkdir(exist_ok=True)
    said = {"guarantee": HIDDEN, "accounts": folder / "accounts", **said}
    run = MaskedRun(PARTS, folder, **said)
    found = Watched(run, [], dict(run.server.global_state.values))

    def noted(self: ProtocolClient, delivery: Any, numbers: Any, weight: int) -> Any:
        found.sent.append((self.name, dict(numbers), weight))
        return mask(self, delivery, numbers, weight)

    with patch.object(ProtocolClient, "mask_input", noted):
        yield found


@pytest.fixture
def one(tmp_path: Path) -> Generator[Watched]:
    with watched(tmp_path / "run", rounds=1) as found:
        yield found


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Generator[Watched]:
    """Two rounds, of which the sites' own limits pay for one."""
    limits = Limits(epsilon=HIDDEN.forecast_epsilon(1) * 1.01)
    with watched(tmp_path_factory.mktemp("limited"), limits=limits) as found:
        calm = found.run.answer

        def answer(site: str, kind: str, asked: Message) -> Message:
            assert kind != secagg_config.MASKED_INPUT_STEP or not found.charges(site)
            said = calm(site, kind, asked)
            assert kind != secagg_config.MASKED_INPUT_STEP or len(found.charges(site)) == 1
            return said

        found.run.answer = answer
        found.run.carry()
        yield found


def test_every_site_is_charged_before_its_words_leave_and_stops_at_its_own_limit(
    limited: Watched,
) -> None:
    run = limited.run
    first, second = run.rounds()
    assert first["aggregated"] == list(NAMES) and not second["aggregated"] and not second["changed"]
    about = [run.server.agreement.request_name(1, name) for name in NAMES]
    assert [limited.charges(name) for name in NAMES] == [[each] for each in about]
    assert "epsilon would be" in (run.folder / "sites/client-0/faults.log").read_text()
    assert len(limited.sent) == 3 and run.faults() == []
    guard = run.server.aggregation.guard
    assert guard is not None and guard.epsilon_spent == pytest.approx(HIDDEN.forecast_epsilon(1))


def test_every_site_sends_all_that_any_may_share_with_noise_on_every_number(
    limited: Watched,
) -> None:
    """client-1 trains one block of the two that the others train."""
    run, public = limited.run, limited.run.server.agreement.public_params(Turn(1))
    assert len(public) > 20
    for _, numbers, weight in limited.sent:
        assert (
            numbers.keys() == {WHOLE_SUM, *(VALUE_PREFIX + p.key for p in public)} and weight == 1
        )
        assert all(np.asarray(numbers[VALUE_PREFIX + p.key]).all() for p in public)
    turns = [line for line in run.lines() if line["kind"] == "turn"]
    told = {(line["weight"], line["loss"], line["steps"], line["upload_bytes"]) for line in turns}
    assert told == {(1, None, 2, sum(run.server.agreement.upload_bytes(p) for p in public))}


def test_the_world_moves_by_the_sum_of_words_over_the_public_number_of_sites(
    limited: Watched,
) -> None:
    start = limited.start
    for param in limited.run.server.agreement.public_params(Turn(1)):
        key = param.key
        words = np.sum([numbers[VALUE_PREFIX + key] for _, numbers, _ in limited.sent], axis=0)
        total = torch.from_numpy(words.view(np.int64)).double() * GRID
        mean = (total / len(NAMES)).view(param.shape).to(start[key].dtype)
        assert same_bits(limited.run.server.global_state.values[key], start[key] + mean)


def test_an_account_counts_by_one_unit_alone(limited: Watched) -> None:
    assert limited.run.accounts is not None
    with pytest.raises(PrivacyError, match="is not spent by the other"):
        Budget(limited.run.accounts / "client-0" / CHARGES_FILE, delta=1e-5, unit="example")


def test_a_site_that_nothing_gives_noise_takes_no_part(limited: Watched, tmp_path: Path) -> None:
    run, name = limited.run, "client-0"
    site = run.endpoints[name].site
    alone = replace(site, privacy=replace(site.privacy, noise_guard=None))
    with pytest.raises(RequestRefused, match="cannot add its noise share"):
        SecAggClient(
            *(run.server.agreement, alone, node(name), directory(NAMES), tmp_path),
            cohort=lambda number: NAMES,
        )


@pytest.mark.parametrize("when", first(1, ["after", "before"]))
def test_a_site_killed_around_its_words_says_the_same_again_and_pays_once(
    when: str, one: Watched
) -> None:
    run, answers, calm = one.run, list[bytes](), one.run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        if site != "client-1" or kind != secagg_config.MASKED_INPUT_STEP or len(answers) > 1:
            return calm(site, kind, asked)
        found = calm(site, kind, asked) if when == "after" or answers else None
        answers.append(b"".join(found.blobs) if found else b"")
        if len(answers) == 1:
            run.restart(site)
            raise RuntimeError("killed")
        assert found is not None
        return found

    run.answer = answer
    run.carry()
    assert len(answers) == 2 and len(one.charges("client-1")) == 1
    assert when == "before" or answers[0] == answers[1] != b""
    assert run.rounds()[0]["aggregated"] == list(NAMES) and run.faults() == []


def test_a_round_that_is_begun_anew_is_paid_once_and_its_noise_is_another(one: Watched) -> None:
    """Words of the first attempt have left, and a sum of the second is opened."""
    run, calm = one.run, one.run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        if (
            kind == secagg_config.SIGNATURE_STEP
            and '"attempt": 1' in (run.folder / ROUND_CHECKPOINT).read_text()
        ):
            raise RuntimeError("nobody signs the first list")
        return calm(site, kind, asked)

    run.answer = answer
    run.carry()
    assert run.rounds()[0]["aggregated"] == list(NAMES) and run.faults() == []
    for name in NAMES:
        first, second = (numbers for site, numbers, _ in one.sent if site == name)
        assert all((first[key] != second[key]).all() for key in first if key != WHOLE_SUM)
        assert len(one.charges(name)) == 1


def test_a_round_is_opened_by_one_attempt_though_the_folders_of_its_run_are_gone(
    one: Watched,
) -> None:
    """The noise of another attempt is another, and the round was paid once: they would average."""
    run, folder = one.run, one.run.folder.parent / "again"
    run.carry()
    folder.mkdir()
    shutil.copy(run.folder / "run.json", folder)
    lie = {"round": 1, "attempt": 2, "adverts": {}, "encrypted_shares": {}, "survivors": []}
    (folder / ROUND_CHECKPOINT).write_text(json.dumps(lie))
    said = {"guarantee": HIDDEN, "accounts": run.accounts, "rounds": 1}
    again = MaskedRun(PARTS, folder, **said)
    assert again.server.identity.id == run.server.identity.id
    again.carry()
    assert not again.rounds()[0]["aggregated"] and not again.rounds()[0]["changed"]
    assert "unmasked in another attempt" in (folder / "sites/client-0/faults.log").read_text()
    assert [len(one.charges(name)) for name in NAMES] == [1, 1, 1]


def test_a_site_that_has_lost_a_charge_goes_no_further(tmp_path: Path) -> None:
    with watched(tmp_path / "run") as found:
        run, calm, lost = found.run, found.run.answer, list[str]()

        def answer(site: str, kind: str, asked: Message) -> Message:
            if site == "client-0" and found.charges(site) and kind == "train" and not lost:
                lost.extend(found.charges(site))
                for file in (tmp_path / "run" / "accounts" / site).glob(f"{CHARGES_FILE}*"):
                    file.unlink()
                run.restart(site)
            return calm(site, kind, asked)

        run.answer = answer
        run.carry()
        assert lost and [each["aggregated"] for each in run.rounds()] == [
            list(NAMES),
            list(NAMES[1:]),
        ]
        assert "has no charge of" in (run.folder / "sites/client-0/faults.log").read_text()


def test_a_site_can_read_what_it_has_spent(limited: Watched) -> None:
    assert limited.run.accounts is not None
    told = DatasetAccount(limited.run.accounts / "client-0").json()
    assert told["charges"] == 1
    assert told["epsilon_spent"] == pytest.approx(HIDDEN.forecast_epsilon(1))
