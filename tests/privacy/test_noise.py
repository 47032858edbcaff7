# SPDX-License-Identifier: Apache-2.0
"""Laws of noise, of the secret behind it, and of cohorts drawn from it."""

from __future__ import annotations

import ast
import logging
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

import fedplan.privacy
from fedplan.errors import PrivacyError
from fedplan.privacy.mechanisms.noise import (
    NoiseStream,
    derive_key,
    load_or_create_secret,
    sample_cohort,
)

SECRET = bytes(range(32))
LOG = logging.getLogger(__name__)
FILES = sorted(Path(fedplan.privacy.__file__).parent.rglob("*.py"))


def noise(about: str = "round 1") -> NoiseStream:
    return NoiseStream.for_release(SECRET, about)


def test_a_million_numbers_are_gaussian() -> None:
    values = noise().gaussian((1000, 1000), 3.0)
    assert values.shape == (1000, 1000) and values.dtype is torch.float64
    found = kstest(values.flatten().numpy() / 3, "norm")
    LOG.info("p %s", float(found.pvalue))
    assert found.pvalue > 1e-3
    assert (
        kstest(values.flatten().numpy()[::2] / 3, values.flatten().numpy()[1::2] / 3).pvalue > 1e-3
    )


def test_neighbours_and_halves_are_independent() -> None:
    flat = noise().gaussian((2**18,), 1.0).numpy()
    for lag in (1, 2, 2**15, 2**16, 2**17):
        assert abs(np.corrcoef(flat[:-lag], flat[lag:])[0, 1]) < 5 / math.sqrt(len(flat) - lag)
        squares = np.corrcoef(flat[:-lag] ** 2, flat[lag:] ** 2)[0, 1]
        assert abs(squares) < 5 / math.sqrt(len(flat) - lag)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 0), (5, 7), (2**17 + 1,)])
def test_every_shape_is_filled(shape: tuple[int, ...]) -> None:
    values = noise().gaussian(shape, 1.0)
    assert values.shape == shape and bool(values.isfinite().all()) and bool((values != 0).all())


def test_uniform_numbers_are_uniform_below_one() -> None:
    values = noise().uniform(10**5).numpy()
    assert kstest(values, "uniform").pvalue > 1e-3
    assert values.min() >= 0 and values.max() < 1 and values.dtype == np.float64


def test_words_use_all_of_their_bits() -> None:
    octets = np.frombuffer(noise().words(10**5).tobytes(), dtype=np.uint8)
    assert chisquare(np.bincount(octets, minlength=256)).pvalue > 1e-3


def test_seeds_do_not_make_noise_repeat() -> None:
    seen = list[bytes]()
    for _ in range(3):
        np.random.seed(0)
        torch.manual_seed(0)
        seen.append(NoiseStream.fresh().gaussian((4,), 1.0).numpy().tobytes())
    assert len(set(seen)) == 3


def test_a_release_has_one_noise_and_no_other_has_it() -> None:
    again = [noise().gaussian((9,), 1.0) for _ in range(2)]
    assert torch.equal(*again)
    keys = [(SECRET, "round 1"), (SECRET, "round 2"), (bytes(32), "round 1")]
    keys += [(SECRET, "round 1", b"x"), (SECRET, "round 1", "x"), (SECRET, "round 1", "x", 1)]
    keys += [(SECRET, "round 1", "x1"), (SECRET, "round 1", "x", "1")]
    found = {NoiseStream.for_release(*key).gaussian((2,), 1.0).numpy().tobytes() for key in keys}
    assert len(found) == len(keys)


def test_one_draw_goes_on_after_another() -> None:
    source = noise()
    first, second = source.gaussian((5,), 1.0), source.gaussian((5,), 1.0)
    assert not set(first.tolist()) & set(second.tolist())


def test_noise_is_fast() -> None:
    NoiseStream.fresh().gaussian((10**5,), 1.0)
    start = time.process_time()
    NoiseStream.fresh().gaussian((10**6,), 1.0)
    took = time.process_time() - start
    LOG.info("seconds %s", round(took, 2))
    assert took < 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_generator_with_a_seed_is_imported(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        assert not any("random" in name.split(".") or "seeds" in name for name in names), names
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("np", "random"), ("numpy", "random")}


@pytest.mark.parametrize("name", ["noise", "vote", "clipping", "gaussian"])
def test_where_noise_is_made_no_other_source_is_called(name: str) -> None:
    seeded = {"random", "Generator", "manual_seed", "randn", "rand", "randint", "normal_", "normal"}
    for node in ast.walk(ast.parse((FILES[0].parent / "mechanisms" / f"{name}.py").read_text())):
        assert not (isinstance(node, ast.Attribute) and node.attr in seeded), node.lineno


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
    with pytest.raises(PrivacyError, match="32 bytes, not 5"):
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
