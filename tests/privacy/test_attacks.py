# SPDX-License-Identifier: Apache-2.0
"""What an observer finds out, as laws: what report without privacy, and what privacy leaves of it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from attacks import victims
from attacks.block_choice import ChoiceLeak, attack_block_choices
from attacks.inference import (
    auc,
    distinguishing_auc,
    row_norms,
    span_scores,
    top_scores_recall,
)
from attacks.neighbors import MECHANISM, NEIGHBOR_PAIRS, EpsilonAudit, audit_epsilon
from attacks.token_recovery import (
    CHANCE_RECALL,
    EXAMPLES,
    LENGTH,
    METHODS,
    ONE_STEP_MASKED,
    VOCABULARY,
    CuriousServer,
    PartLeak,
    UpdateLeak,
    attack_updates,
    first_round_changes,
    make_text_model,
    masked_changes,
    training_setups,
)
from torch import Tensor

from fedplan.models.params import Kind
from fedplan.privacy.mechanisms.gaussian import GaussianMechanism
from fedplan.privacy.mechanisms.noise import NoiseStream

LOG = logging.getLogger(__name__)
SECRET = bytes(range(32))
BIG = pytest.mark.nightly


@cache
def worlds(draws: int) -> list[EpsilonAudit]:
    return audit_epsilon(draws, SECRET)


@cache
def choices(clients: int, trials: int) -> list[ChoiceLeak]:
    return attack_block_choices(clients, trials, SECRET)


@cache
def rows(clients: int) -> list[UpdateLeak]:
    return list(attack_updates(clients, epsilon=8.0))


def row(clients: int, method: str, way: str) -> dict[str, PartLeak]:
    (found,) = (r for r in rows(clients) if (r.method, r.setup) == (method, way))
    return {read.part: read for read in found.parts}


# The aggregate


@pytest.mark.parametrize("draws,share", [(20_000, 0.8), pytest.param(200_000, 0.9, marks=BIG)])
def test_no_world_is_told_apart_beyond_the_claim_and_one_nearly_as_well(
    draws: int, share: float
) -> None:
    found = {each.client: each for each in worlds(draws)}
    assert found.keys() == NEIGHBOR_PAIRS.keys() and all(each.sound for each in found.values())
    assert max(each.gaussian_lower_bound / each.claimed for each in found.values()) >= share
    assert found["zero"].gaussian_lower_bound < 0.2 and found["nothing"].gaussian_lower_bound < 0.2


def test_too_little_noise_is_not_sound() -> None:
    class Quiet(GaussianMechanism):
        def _sample_noise(self, source: NoiseStream) -> dict[str, Tensor]:
            return {name: each * 0.8 for name, each in super()._sample_noise(source).items()}

    quiet = Quiet(
        MECHANISM.public_shapes,
        MECHANISM.clipping_norm,
        MECHANISM.noise_multiplier,
        MECHANISM.divisor,
    )
    found = audit_epsilon(20_000, SECRET, quiet)
    assert not all(each.sound for each in found)


# The choice of blocks


@BIG
@pytest.mark.parametrize("clients,trials", [(12, 250), (64, 1000)])
def test_a_clients_own_choice_tells_who_it_is_and_no_other_choice_does(
    clients: int, trials: int
) -> None:
    found = choices(clients, trials)
    for each in found:
        LOG.info("%s", each)
        assert max(each.random, each.vote) <= 0.55 + (3 * each.error if trials < 1000 else 0)
        assert each.agreed > 0.8
    # Few clients teach the observer little: of two blocks it then makes less than there is.
    assert all(each.raw > 0.6 for each in found if each.k > 2 or clients > 12)
    assert max(each.cohort for each in found) > 0.8, "a vote hides no cohort, and we say so"


# The tokens of an update


SIZES = [1, pytest.param(16, marks=BIG)]


@pytest.mark.parametrize("clients", SIZES)
@pytest.mark.parametrize("method", ["fedavg", "fedfrozen, stage one", "fedfrozen A, stage two"])
def test_the_embedding_tells_every_token_however_one_trains(method: str, clients: int) -> None:
    for way in ("one step", "ten steps"):
        assert row(clients, method, way)["embed"].recovered == 1.0


@pytest.mark.parametrize("clients", SIZES)
@pytest.mark.parametrize("method", ["fedavg", "fedfrozen A, stage two", "fedfrozen B, stage two"])
def test_the_values_of_the_first_block_tell_every_token_of_one_step(
    method: str, clients: int
) -> None:
    value = row(clients, method, "one step")["value"]
    assert value.recovered and value.recovered > 0.95 and value.blocks == (0,)


@pytest.mark.parametrize("clients", SIZES)
def test_what_rests_or_stays_is_not_sent(clients: int) -> None:
    sent = {
        "fedavg": "embed query key value out mlp head",
        "fedfrozen, stage one": "embed query key value out mlp head",
        "fedfrozen A, stage two": "embed value out mlp head",
        "fedfrozen B, stage two": "value head",
        "safl, 2 of 4 blocks": "query key value out mlp head",
        "pfeddc": "prompt",
    }
    assert {each.method for each in rows(clients)} == sent.keys()
    for each in rows(clients):
        assert [read.part for read in each.parts if read.sent] == sent[each.method].split()
    assert row(clients, "pfeddc", "one step")["prompt"].recovered is None


@pytest.mark.parametrize("clients", SIZES)
def test_under_dp_sgd_nothing_is_read_that_chance_would_not_find(clients: int) -> None:
    private = [each for each in rows(clients) if each.setup == "DP-SGD"]
    found = [(each.method, read) for each in private for read in each.parts]
    shares = [read.beyond for _, read in found if read.beyond is not None]
    tokens, words = EXAMPLES * (LENGTH - 1), VOCABULARY - 4
    spread = CHANCE_RECALL * (1 - CHANCE_RECALL) * (words - tokens) / (words - 1) / tokens
    error = math.sqrt(spread / clients) / (1 - CHANCE_RECALL)
    LOG.info("%s", [f"{method} {read.part} {read.beyond}" for method, read in found])
    assert len(shares) == 27
    assert max(map(abs, shares)) < 4.5 * error
    assert abs(sum(shares) / len(shares)) < 0.02


@BIG
def test_of_masked_words_nothing_is_read_that_chance_would_not_find() -> None:
    clients = 16
    hidden = [each for each in rows(clients) if each.setup == ONE_STEP_MASKED]
    shares = [r.beyond for each in hidden for r in each.parts if r.beyond is not None]
    LOG.info("%s", [f"{share:.3f}" for share in shares])
    assert {each.method for each in hidden} >= {"fedavg", "fedfrozen, stage one"}
    assert len(shares) >= 14 and max(map(abs, shares)) < 4.5 * by_chance(clients)
    assert abs(sum(shares) / len(shares)) < 0.03


def test_an_update_that_tells_every_token_tells_none_under_masks() -> None:
    texts = [
        victims.random_texts(i, EXAMPLES, vocabulary=VOCABULARY, length=LENGTH) for i in range(2)
    ]
    held, way = [victims.distinct_words(each) for each in texts], training_setups(epsilon=8.0)[0]
    found = first_round_changes(METHODS["fedavg"], make_text_model(), texts, way.train_arguments)
    seen, server = masked_changes(found), CuriousServer(make_text_model())
    for part in (Kind.EMBED, Kind.VALUE):
        plain, hidden = (
            server.recover_tokens(part, found, held),
            server.recover_tokens(part, seen, held),
        )
        assert plain.beyond == 1.0
        assert hidden.beyond is not None and abs(hidden.beyond) < 4.5 * by_chance(2)


def by_chance(clients: int) -> float:
    """The standard error of what chance finds beyond chance."""
    tokens, words = EXAMPLES * (LENGTH - 1), VOCABULARY - 4
    spread = CHANCE_RECALL * (1 - CHANCE_RECALL) * (words - tokens) / (words - 1) / tokens
    return math.sqrt(spread / clients) / (1 - CHANCE_RECALL)


def test_dp_sgd_with_hardly_any_noise_hides_nothing() -> None:
    way = replace(training_setups(epsilon=8.0)[2], epsilon=1e5)
    held = [victims.random_texts(0, EXAMPLES, vocabulary=VOCABULARY, length=LENGTH)]
    change = first_round_changes(
        way.apply(METHODS["fedavg"]), make_text_model(), held, way.train_arguments
    )
    found = CuriousServer(make_text_model()).recover_tokens(
        Kind.EMBED, change, [victims.distinct_words(held[0])]
    )
    assert found.recovered and found.recovered > 4 * CHANCE_RECALL


# The attacks themselves


def test_an_auc_is_the_share_of_pairs_in_order() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randint(5, (n,), generator=draw).double() for n in (40, 30))
    pairs = one[:, None] - other
    assert auc(one, other) == pytest.approx(float(((pairs.sign() + 1) / 2).mean()))


def test_peoples_are_told_apart_if_they_differ_and_only_then() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.rand(4000, 6, generator=draw) < 0.3 for _ in range(2))
    assert distinguishing_auc(one, other) == pytest.approx(0.5, abs=0.03)
    other[:, 2] = True
    assert distinguishing_auc(one, other) > 0.8


def test_the_span_of_a_change_names_its_inputs() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.nn.functional.normalize(torch.randn(200, 32, generator=draw), dim=1)
    few, many = (torch.randn(32, n, generator=draw) @ inputs[:n] for n in (20, 100))
    assert top_scores_recall(span_scores(few, inputs), range(20)) == 1.0
    assert top_scores_recall(span_scores(many, inputs), range(100)) < 0.75, "half of them is chance"
    assert span_scores(torch.zeros(32, 32), inputs).isfinite().all()


def test_touched_rows_are_those_that_moved() -> None:
    change = torch.zeros(50, 4)
    change[[3, 7]] = 0.1
    assert top_scores_recall(row_norms(change), {3, 7}) == 1.0
