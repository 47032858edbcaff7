# SPDX-License-Identifier: Apache-2.0
"""An audit of noise in shares: what is left of a masked sum when colluders take theirs away."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from epsilon_bounds import Draws, gaussian_lower_bound, release_rows, sample_releases
from masked import Round, terms
from torch import Tensor

from fedplan.federation.aggregation.distributed_dp import DistributedDPAggregator, noised_words
from fedplan.federation.aggregation.secure_input import VALUE_PREFIX
from fedplan.federation.agreement import Agreement
from fedplan.language.plan import share
from fedplan.methods.method import Method
from fedplan.models.params import Kind, Param
from fedplan.privacy.accounting.accountant import epsilon
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import SECRET_FILE, ServerGuard
from fedplan.privacy.mechanisms.gaussian import Change, GaussianMechanism
from fedplan.privacy.mechanisms.noise import NoiseStream
from fedplan.secagg.config import SecAggConfig
from fedplan.secagg.terms import Slot
from fedplan.tensors.accumulator import GRID
from fedplan.testing import TRAIN_CONFIG

SITES, MASKING = 5, SecAggConfig("secure", threshold=4, colluders=1)
HIDDEN = Guarantee("client", 1e6, 1e-5, 1.0, 1.0)
SHAPES = {"a": (2,), "b": (1,)}
MECHANISM = GaussianMechanism(
    {name: (shape, torch.float64) for name, shape in SHAPES.items()},
    *(1.0, 1.0, 4.0, None, MASKING.honest_noise_shares(SITES)),
)
DELTA, SECRET = 1e-5, bytes(range(32))
CLAIMED = epsilon([MECHANISM.event], DELTA)
LOG = logging.getLogger(__name__)


class Faint(GaussianMechanism):
    """Each share has four fifths of the noise that it should have."""

    @property
    def share_stddev(self) -> float:
        return 0.8 * super().share_stddev


class Sparse(GaussianMechanism):
    """Noise is added to one param alone, as by a site that sends what it shares."""

    def _sample_noise(self, source: NoiseStream) -> dict[str, Tensor]:
        found = super()._sample_noise(source)
        return found | {"a": torch.zeros_like(found["a"])}


@dataclass(frozen=True)
class Server:
    """A server that has a colluder's numbers, and opens a sum of as few sites as it can."""

    kind: type[GaussianMechanism] = GaussianMechanism
    parts: int = MASKING.honest_noise_shares(SITES)

    def sees(self, mechanism: GaussianMechanism, changes: Sequence[Change]) -> dict[str, Tensor]:
        """The shipped sum of a threshold of sites, less what the colluder had put in."""
        held = replace(mechanism, noise_shares=self.parts)
        made = self.kind(**vars(held))
        params = tuple(Param(n, Kind.MLP, s, "float64") for n, (s, _) in made.public_shapes.items())
        told = Agreement("audit", params, Method(share()), TRAIN_CONFIG, HIDDEN, secagg=MASKING)
        base = {p.key: torch.zeros(p.shape, dtype=torch.float64) for p in params}
        with TemporaryDirectory() as folder:
            # A secret for each world, the same in every run: a bound of draws is now and then off.
            (Path(folder) / SECRET_FILE).touch(mode=0o600)
            (Path(folder) / SECRET_FILE).write_bytes(bytes([len(changes[0])]) * 32)
            guard = ServerGuard(HIDDEN, Path(folder))
            total = DistributedDPAggregator(
                told, base, SITES, 1, MASKING.resolve_threshold(SITES), guard=guard, mechanism=made
            )
            for number, change in enumerate(changes):
                values = {key: base[key] + each for key, each in change.items()}
                total.add(f"site {number}", values, {}, 1)
            found = total.close()
        assert found.secagg is not None and not found.secagg.not_unmasked
        own = total.contributions[f"site {len(changes) - 1}"].numbers
        return {
            key: mean - _floats(own[VALUE_PREFIX + key], mean) / made.divisor
            for key, mean in found.means.items()
        }


def _floats(words: np.ndarray[tuple[int], np.dtype[np.uint64]], like: Tensor) -> Tensor:
    return torch.from_numpy(words.view(np.int64)).double().mul(GRID).view(like.shape)


def audited(server: Server, count: int) -> float:
    """A lower bound on epsilon: in one world the first site adds nothing but its noise."""
    victim = {"a": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    other = {"a": torch.tensor([-0.3, 0.4]).double(), "b": torch.tensor([9.0]).double()}
    worlds = ([victim, other, other, other], [{}, other, other, other])
    one, two = (
        release_rows(sample_releases(MECHANISM, world, count, server.sees)) for world in worlds
    )
    moved = one[::2].mean(0) - two[::2].mean(0)

    def statistics(rows: Draws) -> Draws:
        return np.column_stack([rows, rows @ moved])

    return gaussian_lower_bound(statistics(one), statistics(two), delta=DELTA)


SIZES = [20_000, pytest.param(200_000, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("count", SIZES)
def test_the_shares_of_as_many_as_are_honest_hide_each_of_them_as_was_claimed(count: int) -> None:
    """4 of 5 sites open a sum, 1 of them colludes: what the 3 others have added is left."""
    found = audited(Server(), count)
    LOG.info("audited %s of %s", round(found, 3), round(CLAIMED, 3))
    assert 0.9 * CLAIMED < found <= CLAIMED


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(
    "server", [Server(Faint), Server(parts=SITES), Server(Sparse)], ids=["0.8", "all", "sparse"]
)
def test_shares_that_are_too_small_are_flagged(server: Server, count: int) -> None:
    """Four fifths of the noise; shares of all sites, as if none were lost; no noise on a param."""
    assert audited(server, count) > CLAIMED


@pytest.mark.parametrize("colluders", range(3))
@pytest.mark.parametrize("step", range(5))
def test_the_noise_is_large_enough_after_any_dropout(step: int, colluders: int) -> None:
    """As many sites as may be lost are lost at one step of the protocol, with colluders up to the limit.

    The colluders take the noise of their own shares away; zero changes, so that noise is all that
    is left. 40,000 numbers: the variance is known to 0.7 percent.
    """
    names, count = [f"site-{i}" for i in range(SITES)], 40_000
    config = SecAggConfig("secure", threshold=4, colluders=colluders)
    mechanism = GaussianMechanism(
        {"w": ((count,), torch.float64)},
        *(1.0, 1.0, 4.0, None, config.honest_noise_shares(SITES)),
    )
    inputs = {
        name: noised_words(
            mechanism.add_noise(mechanism.clipped_sum({}), SECRET, name, b""), wide=False
        )
        for name in names
    }
    slots = [Slot(key, len(words)) for key, words in inputs[names[0]].items()]
    lost = {names[0]: step}
    played = Round(terms(slots, threshold=4), inputs, dict.fromkeys(names, 1), lost)
    opened = played.play()
    assert opened is not None
    left = opened.numbers[VALUE_PREFIX + "w"].copy()
    for name in names[SITES - colluders :]:
        left -= inputs[name][VALUE_PREFIX + "w"]
    added = SITES - (step < 3) - colluders
    variance = float(np.var(left.view(np.int64) * GRID))
    assert variance == pytest.approx(added * mechanism.share_stddev**2, rel=0.035)
    assert variance > 0.965 * mechanism.stddev**2
