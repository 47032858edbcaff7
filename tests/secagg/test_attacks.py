# SPDX-License-Identifier: Apache-2.0
"""Attacks of a server that lies, alone or with sites: all are refused, whatever is drawn.

Each attack is played with ten random federations: other sites, thresholds, victims and numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import masked
import numpy as np
import pytest
import torch
from masked import MemoryProgressStore, Round, directory, node, refusal, terms
from masked_runs import NAMES, MaskedRun

from fedplan.federation.aggregation.protocol import AggregationResult
from fedplan.federation.aggregation.secure import SecureAggregator
from fedplan.methods.registry import method_by_name
from fedplan.secagg.client import ProtocolClient
from fedplan.secagg.crypto import SecAggError, sign, x25519_public_key
from fedplan.secagg.masks import GroupVector
from fedplan.secagg.messages import (
    ForwardedShares,
    KeyAdvert,
    KeyRoster,
    SignatureList,
    SurvivorList,
    SurvivorSignature,
    survivors_digest,
)
from fedplan.secagg.progress import RevealLog
from fedplan.secagg.terms import Slot, SlotGroup
from fedplan.tensors.message import Message
from fedplan.tensors.named import full_digest, number_digest

TRIALS = 10


class Attack:
    """A random federation of four to seven sites, with a victim, another site and a slot."""

    def __init__(self, seed: int, logs: Path | None = None, **said: object) -> None:
        self.dice = random.Random(seed)
        count = self.dice.randint(4, 7)
        self.names = [f"site {n}" for n in range(count)]
        self.threshold = self.dice.randint(count // 2 + 1, count - 1)
        self.victim, self.other = self.dice.sample(self.names, 2)
        self.logs, self.said = logs, said
        numbers = {n: {"w": masked.drawn(self.dice, Slot("w", 4))} for n in self.names}
        agreed = terms([Slot("w", 4)], threshold=self.threshold, floor=3, **said)
        self.round = Round(agreed, numbers, dict.fromkeys(self.names, 1))
        self.renew(self.round)

    def renew(self, made: Round) -> None:
        """Sites that have lost their progress, and have their reveal logs."""
        if self.logs is not None:
            known = directory(self.names)
            made.sites = {
                n: ProtocolClient(
                    n, node(n), known, MemoryProgressStore(), RevealLog(self.logs / n / "log")
                )
                for n in self.names
            }

    def key(self) -> bytes:
        return x25519_public_key(self.dice.randbytes(32))

    def roster(self, advert: KeyAdvert) -> Callable[[], object]:
        """The victim gets a roster in which an advert is replaced, or added."""
        true = {each.client: each for each in self.round.server.roster().adverts}
        told = sorted((true | {advert.client: advert}).values(), key=lambda each: each.client)
        lie = KeyRoster(self.round.terms.digest, tuple(told))
        return lambda: self.round.sites[self.victim].share_secrets(lie)


def signed_by(signer: str, advert: KeyAdvert) -> KeyAdvert:
    return replace(advert, signature=sign(node(signer), advert.body))


@pytest.mark.parametrize("seed", range(TRIALS))
def test_keys_that_are_not_those_of_the_sites(seed: int) -> None:
    attack = Attack(seed)
    attack.round.advertise()
    true = attack.round.server._adverts[attack.other]
    own = replace(true, masking_key=attack.key())
    for advert, reason in (
        (signed_by("mallory", own), "not signed"),
        (replace(own, signature=true.signature), "not signed"),
        (signed_by("zed", replace(own, client="zed", encryption_key=attack.key())), "directory"),
        (
            signed_by(
                attack.other,
                replace(true, masking_key=attack.round.server._adverts[attack.victim].masking_key),
            ),
            "one key",
        ),
        (signed_by(attack.other, replace(true, masking_key=bytes(32))), "is invalid"),
    ):
        said = refusal(attack.roster(advert))
        assert reason in said or "lets two halves" in said, said
    again = Round(replace(attack.round.terms, attempt=2), attack.round.numbers, {})
    again.sites = attack.round.sites
    again.advertise()
    attack.round = again
    assert "other terms" in refusal(attack.roster(true)), "keys of an older attempt"


@pytest.mark.parametrize("seed", range(4 * TRIALS))
def test_two_survivor_lists_are_not_both_opened_by_few_colluders(seed: int) -> None:
    """Colluders sign both lists; honest sites sign one each, as the server likes best."""
    attack = Attack(seed)
    made, dice, names = attack.round, attack.dice, attack.names
    most = 2 * attack.threshold - len(names) - 1
    colluders = dice.sample([n for n in names if n != attack.victim], dice.randint(0, most))
    made.play(until=3)
    lists = tuple(names), tuple(n for n in names if n != attack.victim)
    honest = [n for n in names if n not in colluders]
    dice.shuffle(honest)
    cut = dice.randint(0, len(honest))
    opened = list[bool]()
    for told, group in zip(lists, (honest[:cut], honest[cut:]), strict=True):
        signers, context = list[SurvivorSignature](), made.server._context
        for name in group:
            asked = SurvivorList(made.terms.digest, told, made.server._input_signatures)
            if not refusal(lambda asked=asked, name=name: made.sites[name].sign_survivors(asked)):
                signers.append(made.sites[name].sign_survivors(asked))
        for name in set(colluders) & set(told):
            body = sign(node(name), survivors_digest(context, told))
            signers.append(SurvivorSignature(made.terms.digest, name, body))
        proof = SignatureList(made.terms.digest, tuple(signers))
        answers = [
            name
            for name in group
            if not refusal(lambda name=name, proof=proof: made.sites[name].reveal_shares(proof))
        ]
        opened.append(len(answers) + len(colluders) >= attack.threshold and bool(answers))
    assert not all(opened)


@pytest.mark.parametrize("seed", range(TRIALS))
def test_the_same_masks_never_cover_other_numbers_or_other_sites(seed: int) -> None:
    attack = Attack(seed)
    made, victim = attack.round, attack.victim
    made.play(until=2)
    given, numbers = made.server.shares_for(victim), made.numbers[victim]
    first = made.sites[victim].mask_input(given, numbers, 1)
    other = {"w": numbers["w"] + np.uint64(1)}
    assert "other numbers" in refusal(lambda: made.sites[victim].mask_input(given, other, 1))
    less = {n: box for n, box in given.ciphertexts.items() if n != attack.other}
    told = ForwardedShares(given.terms_digest, less, given.share_hashes)
    assert "differs" in refusal(lambda: made.sites[victim].mask_input(told, numbers, 1))
    assert made.sites[victim].mask_input(given, numbers, 1) == first
    without = SurvivorList(made.terms.digest, tuple(n for n in attack.names if n != victim), {})
    assert "not among the survivors" in refusal(lambda: made.sites[victim].sign_survivors(without))


@pytest.mark.parametrize("seed", range(TRIALS))
def test_a_round_is_not_opened_again_after_all_progress_is_lost(seed: int, tmp_path: Path) -> None:
    attack = Attack(seed, tmp_path)
    attack.round.play()
    again = Round(replace(attack.round.terms, attempt=2), attack.round.numbers, {})
    again.weights, again.gone = attack.round.weights, {attack.victim: 2}
    attack.renew(again)
    assert "another attempt" in refusal(again.play)


@pytest.mark.parametrize("seed", range(TRIALS))
def test_models_that_are_equal_as_numbers_are_one_model_for_the_log(
    seed: int, tmp_path: Path
) -> None:
    """From the same values with one 0.0 as -0.0, no sum without the victim is opened."""
    dice = random.Random(seed)
    values = torch.tensor([0.0, 0.5, dice.random(), 0.0])
    lie = values.clone()
    lie[dice.choice((0, 3))] = -0.0
    assert torch.equal(values, lie) and full_digest(values) != full_digest(lie)
    for number, (value, gone) in enumerate(((values, {}), (lie, None)), start=1):
        attack = Attack(seed, tmp_path, round=number)
        made, digest = attack.round, number_digest(value)
        made.gone = gone if gone is not None else {attack.victim: 2}

        def advertise(made: Round = made, digest: str = digest) -> None:
            for name in made.there(0):
                made.server.accept_advert(
                    made.sites[name].advertise_keys(made.terms, ["w"], digest)
                )

        made.advertise = advertise  # type: ignore[method-assign]
        if number == 1:
            made.play()
        else:
            assert "from the same values" in refusal(made.play)


def test_a_digest_of_numbers_is_the_plain_one_but_for_zeros_and_nan() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert len({full_digest(nan) for nan in nans}) == 3
    assert len({number_digest(nan) for nan in nans}) == 1
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        some = torch.linspace(-1, 1, 7, dtype=dtype)
        assert number_digest(some) == full_digest(some)
        zeros = torch.zeros(3, dtype=dtype)
        assert number_digest(-zeros) == number_digest(zeros) == full_digest(zeros)
        assert torch.signbit(-zeros).all()
    whole = torch.arange(3)
    assert number_digest(whole) == full_digest(whole)
    assert len({number_digest(torch.tensor(x)) for x in (0.0, 1.0, float("nan"))}) == 3


def test_a_run_that_goes_on_from_other_zeros_is_not_summed_without_one_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server commits the old model with the signs of its zeros changed, and leaves out a site."""
    close = SecureAggregator.close

    def flipped(total: SecureAggregator) -> AggregationResult:
        if total.round_number > 1:
            return close(total)
        values = {k: torch.where(v == 0, -v, v) for k, v in total.base.items()}
        assert any(full_digest(v) != full_digest(total.base[k]) for k, v in values.items())
        return AggregationResult(values, secagg=close(total).secagg)

    monkeypatch.setattr(SecureAggregator, "close", flipped)
    run = MaskedRun(method_by_name("fedavg"), tmp_path, rounds=2)
    calm = run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        if (site, kind, run.server.global_state.round) == ("client-1", "train", 1):
            raise RuntimeError("left out")
        return calm(site, kind, asked)

    run.answer = answer
    run.carry()
    first, second = run.rounds()
    assert first["aggregated"] == list(NAMES) and not second["aggregated"]
    assert "from the same values" in (tmp_path / "sites/client-0/faults.log").read_text()


def test_a_number_at_its_share_of_the_word_is_refused() -> None:
    group = SlotGroup((Slot("w", 1),), tuple(f"site {n}" for n in range(5)))
    GroupVector.of(group, {"w": np.array([2**63 // 5 - 1], np.uint64)}, 1, 5)
    with pytest.raises(SecAggError, match="too large"):
        GroupVector.of(group, {"w": np.array([2**63 // 5], np.uint64)}, 1, 5)


@pytest.mark.parametrize("seed", range(TRIALS))
def test_a_site_that_masks_with_fewer_others_is_in_no_list(seed: int) -> None:
    """The victim gets shares of some sites only; a list without these would open its input alone.

    A part that few sites send is enough: the others reveal its secrets, and are not asked to send.
    """
    dice, names = random.Random(seed), [f"site-{i:02}" for i in range(10)]
    senders = names[:5]
    numbers = {
        name: {"w": np.arange(4, dtype=np.uint64)}
        | ({"part": np.array([dice.getrandbits(40)] * 3, np.uint64)} if name in senders else {})
        for name in names
    }
    slots = Slot("w", 4), Slot("part", 3)
    made = Round(terms(slots, threshold=7, floor=3), numbers, dict.fromkeys(names, 1))
    made.play(until=2)
    victim, dropped = senders[0], set(senders[1:3])
    given = made.server.shares_for(victim)
    some = {n: given.ciphertexts[n] for n in (*senders[1:3], *names[5:9])}
    lie = ForwardedShares(given.terms_digest, some, {n: given.share_hashes[n] for n in some})
    masked = {victim: made.sites[victim].mask_input(lie, numbers[victim], 1)}
    for name in names[1:]:
        masked[name] = made.sites[name].mask_input(made.server.shares_for(name), numbers[name], 1)
    assert "not signed" in refusal(lambda: made.server.add_masked_input(masked[victim]))
    told = tuple(name for name in names if name not in dropped)
    signatures = {name: masked[name].signature for name in told}
    asked = SurvivorList(made.terms.digest, told, signatures)
    for name in set(told) - {victim}:
        reason = refusal(lambda name=name: made.sites[name].sign_survivors(asked))
        assert "not masked with the same clients" in reason
