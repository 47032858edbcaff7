# SPDX-License-Identifier: Apache-2.0
"""Laws of noise, of the secret behind it, and of cohorts drawn from it."""

from __future__ import annotations

import ast
import hashlib
import logging
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.signal import fftconvolve
from scipy.special import ndtr
from scipy.stats import chisquare, kstest, poisson

import fedplan.privacy
from fedplan.errors import PrivacyError
from fedplan.privacy.mechanisms import rounded_gaussian
from fedplan.privacy.mechanisms.noise import (
    NoiseStream,
    derive_key,
    load_or_create_secret,
    sample_cohort,
)

SECRET, STEP = bytes(range(32)), 2.0**-26
LOG = logging.getLogger(__name__)
FILES = sorted(Path(fedplan.privacy.__file__).parent.rglob("*.py"))


def noise(about: str = "round 1") -> NoiseStream:
    return NoiseStream.for_release(SECRET, about)


def test_a_million_numbers_are_gaussian() -> None:
    values = noise().rounded_gaussian((1000, 1000), 3.0, STEP)
    assert values.shape == (1000, 1000) and values.dtype is torch.float64
    found = kstest(values.flatten().numpy() / 3, "norm")
    LOG.info("p %s", float(found.pvalue))
    assert found.pvalue > 1e-3
    assert (
        kstest(values.flatten().numpy()[::2] / 3, values.flatten().numpy()[1::2] / 3).pvalue > 1e-3
    )


def test_neighbours_and_halves_are_independent() -> None:
    flat = noise().rounded_gaussian((2**18,), 1.0, STEP).numpy()
    for lag in (1, 2, 2**15, 2**16, 2**17):
        assert abs(np.corrcoef(flat[:-lag], flat[lag:])[0, 1]) < 5 / math.sqrt(len(flat) - lag)
        squares = np.corrcoef(flat[:-lag] ** 2, flat[lag:] ** 2)[0, 1]
        assert abs(squares) < 5 / math.sqrt(len(flat) - lag)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 0), (5, 7), (2**17 + 1,)])
def test_every_shape_is_filled(shape: tuple[int, ...]) -> None:
    values = noise().rounded_gaussian(shape, 1.0, STEP)
    assert values.shape == shape and bool(values.isfinite().all()) and bool((values != 0).all())
    assert torch.equal(values, (values / STEP).round() * STEP)


def test_uniform_numbers_are_uniform_up_to_one() -> None:
    values = noise().uniform(10**5).numpy()
    assert kstest(values, "uniform").pvalue > 1e-3
    assert values.min() > 0 and values.max() <= 1 and values.dtype == np.float64


def test_words_use_all_of_their_bits() -> None:
    octets = np.frombuffer(noise().words(10**5).tobytes(), dtype=np.uint8)
    assert chisquare(np.bincount(octets, minlength=256)).pvalue > 1e-3


def test_seeds_do_not_make_noise_repeat() -> None:
    seen = list[bytes]()
    for _ in range(3):
        np.random.seed(0)
        torch.manual_seed(0)
        seen.append(NoiseStream(os.urandom(32)).rounded_gaussian((4,), 1.0, STEP).numpy().tobytes())
    assert len(set(seen)) == 3


def test_a_release_has_one_noise_and_no_other_has_it() -> None:
    again = [noise().rounded_gaussian((9,), 1.0, STEP) for _ in range(2)]
    assert torch.equal(*again)
    keys = [(SECRET, "round 1"), (SECRET, "round 2"), (bytes(32), "round 1")]
    keys += [(SECRET, "round 1", b"x"), (SECRET, "round 1", "x"), (SECRET, "round 1", "x", 1)]
    keys += [(SECRET, "round 1", "x1"), (SECRET, "round 1", "x", "1")]
    found = {
        NoiseStream.for_release(*key).rounded_gaussian((2,), 1.0, STEP).numpy().tobytes()
        for key in keys
    }
    assert len(found) == len(keys)


def test_one_draw_goes_on_after_another() -> None:
    source = noise()
    first, second = (
        source.rounded_gaussian((5,), 1.0, STEP),
        source.rounded_gaussian((5,), 1.0, STEP),
    )
    assert not set(first.tolist()) & set(second.tolist())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_generator_with_a_seed_is_imported(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        assert not any("random" in name.split(".") or "seeds" in name for name in names), names
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("np", "random"), ("numpy", "random")}


@pytest.mark.parametrize("name", ["noise", "vote", "clipping", "gaussian", "rounded_gaussian"])
def test_where_noise_is_made_no_other_source_is_called(name: str) -> None:
    seeded = {"random", "Generator", "manual_seed", "randn", "rand", "randint", "normal_", "normal"}
    for node in ast.walk(ast.parse((FILES[0].parent / "mechanisms" / f"{name}.py").read_text())):
        assert not (isinstance(node, ast.Attribute) and node.attr in seeded), node.lineno


# Exactness. The integers are round(G): each has its own exact probability.


def words(draws: int, sigma: float, about: str) -> np.ndarray:
    source = NoiseStream.for_release(SECRET, about, draws)
    return source.rounded_gaussian((draws,), sigma, 1.0).numpy().astype(int)


def probabilities(numbers: np.ndarray, sigma: float) -> np.ndarray:
    size = np.abs(numbers)
    return ndtr(-(size - 0.5) / sigma) - ndtr(-(size + 0.5) / sigma)


SIGMAS = [0.25, 0.3, 0.5, 0.9, 1.0, 1.7, 2.0, 3.999, 4.0, 5.3, 8.0, 31.9, 100.0]
DRAWS = [100_000, pytest.param(10_000_000, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("sigma", SIGMAS)
def test_each_integer_has_the_probability_of_a_rounded_gaussian(sigma: float, draws: int) -> None:
    drawn = words(draws, sigma, "integers")
    edge = int(np.abs(drawn).max())
    numbers = np.arange(-edge, edge + 1)
    expected = probabilities(numbers, sigma) * draws
    counts = np.bincount(drawn + edge, minlength=len(numbers))
    often = expected > 20
    seen = np.array([*counts[often], counts[~often].sum()])
    wanted = np.array([*expected[often], draws - expected[often].sum()])
    keep = wanted > 5
    assert chisquare(seen[keep], wanted[keep] * seen[keep].sum() / wanted[keep].sum()).pvalue > 1e-4


@pytest.mark.parametrize("draws", DRAWS)
def test_tails_are_as_heavy_as_they_should_be(draws: int) -> None:
    for sigma in (1.0, 6.5, 2.0**26 * 1.3):
        sizes = np.abs(words(draws, sigma, "tails"))
        for edge in (2, 3, 4):
            least = math.ceil(edge * sigma + 0.5)
            expected = draws * 2 * ndtr(-(least - 0.5) / sigma)
            count = int((sizes >= least).sum())
            assert poisson.cdf(count, expected) > 1e-4 and poisson.sf(count - 1, expected) > 1e-4


@pytest.mark.parametrize("draws", DRAWS)
def test_low_bits_and_pairs_of_numbers_are_all_possible(draws: int) -> None:
    """Where Box-Muller left gaps: pairs close to the origin, on a grid much finer than sigma."""
    drawn = words(draws, 2.0**26 * 1.7, "pairs")
    for bits in (1, 4, 8):
        assert chisquare(np.bincount(drawn % 2**bits, minlength=2**bits)).pvalue > 1e-4
    small = words(draws, 3.0, "pairs")
    pairs = np.stack([small[: draws // 2], small[draws // 2 :]])
    near = pairs[:, (np.abs(pairs) <= 4).all(0)] + 4
    counts = np.bincount(near[0] * 9 + near[1], minlength=81)
    one = probabilities(np.arange(-4, 5), 3.0)
    expected = np.outer(one, one).ravel()
    assert chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > 1e-4


@pytest.mark.parametrize("sigma", [0.5, 4.5, 2.0**26 * 1.5])
def test_comparisons_settled_by_decimals_give_the_integers_of_the_quick_ones(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Floats decide nothing: the same words, each comparison settled exactly, same integers."""
    quick = words(300, sigma, "settled")
    monkeypatch.setattr(rounded_gaussian, "_SLACK", 0.999)
    assert np.array_equal(words(300, sigma, "settled"), quick)


VECTORS = {0.5: "51497e9c8a4b405f", 4.5: "d6b220ec9f82ffd3", 2.0**26 * 1.5: "994c4a75bd445124"}


@pytest.mark.parametrize("sigma", VECTORS)
def test_one_key_has_the_same_integers_on_every_machine(sigma: float) -> None:
    drawn = words(20_000, sigma, "vector")
    assert hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest()[:16] == VECTORS[sigma]


def test_a_tail_beyond_the_steps_and_ties_are_settled_with_more_bits() -> None:
    """Both are too rare to be drawn, so the function is called as if they were."""
    staircase, asked = rounded_gaussian._staircase(6.0), list[int]()

    def bits(_: int, index: int) -> int:
        asked.append(index)
        return [0, 2**61][index % 2] if index < 2 else 2**63

    tail = rounded_gaussian._STEPS
    # 64 zeros and two more: the step is the tail's 67th, where a density of e**-590 rejects 1/2.
    assert rounded_gaussian._settle(staircase, tail, 0, 2**62, 0, bits) is None
    assert asked == [0, 1]
    assert (
        rounded_gaussian._settle(staircase, tail, 0, 0, 0, lambda _, i: 2**63 if i == 0 else 0)
        == tail
    )
    # A number equal to the limit's first 63 bits needs more.
    limit = int(math.exp(staircase.log_scales[3] - (3 / staircase.ratio) ** 2 / 2) * 2**63)
    results = set[int | None]()
    for nearby in range(limit - 2**14, limit + 2**14, 2**8):
        asked.clear()
        results.add(rounded_gaussian._settle(staircase, 3, 0, nearby, 0, bits))
    assert results == {3, None}


@pytest.mark.parametrize(("share", "shares"), [(1.0, 2), (1.0, 3), (2.0, 2), (1.5, 5)])
def test_rounded_shares_add_up_to_a_rounding_of_one_gaussian(share: float, shares: int) -> None:
    """The proof of docs/explanation/privacy.md, at a sigma so small that its bound can be seen.

    The sum of rounded shares is the rounding of their Gaussian sum minus shares - 1 uniform numbers
    of [-1/2, 1/2), up to a total variation distance of exp(-(pi share)**2 / 2).
    """
    numbers, span = np.arange(-60, 61), 60
    one = probabilities(numbers, share)
    sums = one
    for _ in range(shares - 1):
        sums = np.convolve(sums, one)[span:-span]
    # The density of one Gaussian plus `shares` uniform numbers (the last is the rounding), at integers.
    fine = 2**7
    grid = np.arange(-span * fine, span * fine + 1) / fine
    uniform = np.where(np.abs(grid) < 0.5, 1.0, np.where(np.abs(grid) == 0.5, 0.5, 0.0)) / fine
    sigma = share * math.sqrt(shares)
    density = np.exp(-0.5 * (grid / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    for _ in range(shares):
        density = fftconvolve(density, uniform, mode="same")
    whole = density[::fine]
    distance = np.abs(sums - whole).sum() / 2
    assert distance < math.exp(-((math.pi * share) ** 2) / 2) + 1e-4


# The secret


def test_a_secret_is_drawn_once_and_kept_from_others(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    first = load_or_create_secret(file)
    assert len(first) == 32 and load_or_create_secret(file) == first != load_or_create_secret(
        tmp_path / "other"
    )
    assert file.stat().st_mode & 0o777 == 0o600
    assert {each.name for each in tmp_path.iterdir()} == {"secret", "other"}


def test_a_secret_that_others_may_read_or_of_another_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    load_or_create_secret(file)
    file.chmod(0o640)
    with pytest.raises(PrivacyError, match="chmod 600"):
        load_or_create_secret(file)
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(PrivacyError, match="is damaged"):
        load_or_create_secret(file)
    with pytest.raises(PrivacyError, match="cannot be used"):
        load_or_create_secret(tmp_path / "nowhere" / "secret")
    with pytest.raises(PrivacyError, match="32 bytes"):
        NoiseStream.for_release(b"password", "round 1")


def test_a_secret_that_was_not_finished_is_drawn_anew(tmp_path: Path) -> None:
    (tmp_path / "secret.tmp").write_bytes(b"half")
    assert len(load_or_create_secret(tmp_path / "secret")) == 32


def test_keys_of_two_purposes_or_words_differ() -> None:
    words = [(), ("a",), ("a", "b"), ("ab",), ("a", 1), ("a", "1"), (b"a",), ("a", b"1")]
    found = {
        derive_key(SECRET, purpose, *each) for purpose in ("noise", "cohort") for each in words
    }
    assert len(found) == 2 * len(words)


# Cohorts


def counts(draws: int, roster: list[str], rate: float) -> np.ndarray:
    """Who was drawn, a row for each round."""
    place = {client: i for i, client in enumerate(roster)}
    rows = np.zeros((draws, len(roster)))
    for number in range(draws):
        rows[number, [place[client] for client in sample_cohort(roster, rate, SECRET, number)]] = 1
    return rows


@pytest.mark.parametrize("draws", [2000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_each_client_is_drawn_apart_at_the_rate(draws: int) -> None:
    roster, rate = [f"hospital {i}" for i in range(12)], 0.3
    rows = counts(draws, roster, rate)
    error = math.sqrt(rate * (1 - rate) / draws)
    inclusion = rows.mean(0)
    assert np.abs(inclusion - rate).max() < max(0.01, 3.5 * error)
    covariance = np.cov(rows.T)
    pairs = covariance[np.triu_indices(12, 1)] / (rate * (1 - rate) / math.sqrt(draws))
    LOG.info("inclusion %s", round(float(np.abs(inclusion - rate).max()), 4))
    LOG.info("pairs %s", round(float(np.abs(pairs).max()), 2))
    assert np.abs(pairs).max() < 3.5
    sizes = Counter(rows.sum(1).astype(int).tolist())
    binomial = [math.comb(12, k) * rate**k * (1 - rate) ** (12 - k) for k in range(13)]
    seen = np.array([sizes[k] for k in range(9)] + [sum(sizes[k] for k in range(9, 13))])
    wanted = np.array([*binomial[:9], sum(binomial[9:])]) * draws
    assert chisquare(seen, wanted).pvalue > 1e-3


def test_an_empty_cohort_is_a_cohort() -> None:
    roster = ["a", "b", "c"]
    empty = sum(not sample_cohort(roster, 0.1, SECRET, number) for number in range(1000))
    assert abs(empty / 1000 - 0.9**3) < 0.05
    assert (
        sample_cohort([], 0.5, SECRET, 1) == [] and sample_cohort(roster, 1.0, SECRET, 1) == roster
    )


def test_a_draw_follows_from_secret_round_and_client_alone() -> None:
    roster = [f"client {i}" for i in range(200)]
    drawn = sample_cohort(roster, 0.5, SECRET, 7)
    assert drawn == sample_cohort(roster, 0.5, SECRET, 7)
    assert set(drawn) == set(sample_cohort(roster[::-1], 0.5, SECRET, 7))
    assert set(drawn) & set(roster[:50]) == set(sample_cohort(roster[:50], 0.5, SECRET, 7))
    assert set(sample_cohort(roster, 0.2, SECRET, 7)) < set(drawn)
    for other in (sample_cohort(roster, 0.5, bytes(32), 7), sample_cohort(roster, 0.5, SECRET, 8)):
        assert 60 < len(set(drawn) ^ set(other)) < 140


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_wrong_rosters_and_rates_are_told(rate: float) -> None:
    with pytest.raises(PrivacyError, match="rate"):
        sample_cohort(["a"], rate, SECRET, 1)
    with pytest.raises(PrivacyError, match="twice"):
        sample_cohort(["a", "a"], 0.5, SECRET, 1)
