# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise rounded to integers, sampled exactly: no float rounding alters a probability.

`sample` returns round(G) for a Gaussian G of standard deviation sigma, so P(n) is exactly the
integral of the density from n - 1/2 to n + 1/2. For an integer x, x + round(G) = round(x + G): what
is released is the rounding of a Gaussian mechanism, and every bound for the Gaussian mechanism
holds without a correction. docs/explanation/privacy.md has the proof, also for sums of shares.

The method is rejection from a staircase. The positive half of the density is covered by steps of
width 2**shift, between sigma / 8 and sigma / 4, each as high as the density at its left edge. A
proposal takes a step with a probability of exactly its integer weight / 2**64 (Walker's alias
table), then a uniform point Y of the step, and accepts Y with probability density(Y) / height. Y
and the number that decides are known to 63 bits first. Floats with an error bound settle
all but about one of 2**39 comparisons; these are settled by more bits and by decimal arithmetic,
to any precision. So the floats of a machine decide how quickly a comparison is settled, never how.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from math import frexp

import numpy as np
from numpy.typing import NDArray

Words = Callable[[int], NDArray[np.uint64]]
"""Returns that many uniform 64-bit words."""
MoreBits = Callable[[int, int], int]
"""Returns 64 further uniform bits for (index of a proposal, index of the bits)."""
SIGMAS = (2.0**-2, 2.0**50)
"""Smallest and largest standard deviation of `sample`."""
_STEPS = 127
"""Steps of the staircase: they end at 15.8 sigma or beyond; the alias table has one more column."""
_DIGITS = 60
"""Decimal digits of the staircase, and of the first attempt to settle a comparison."""
_SLACK = 2.0**-40
"""Relative error bound of an acceptance probability in float64: 2**-43, and some room."""


@dataclass(frozen=True)
class _Staircase:
    """Steps under which a Gaussian of one sigma lies.

    shift: log2 of the width of a step. ratio: sigma in widths, from 4 to 8.
    thresholds, aliases: alias table of 128 columns: column i stands for step i below the threshold,
    for its alias from there on. Index _STEPS stands for everything right of the last step.
    log_scales: logarithm of density(0) scale / weight, by step, so that a point is accepted with
    probability exp(log_scale - (Y / sigma)**2 / 2).
    weights: exact weights of the steps, of 2**64. scale: weight of a step of height 1.
    """

    shift: int
    ratio: float
    thresholds: NDArray[np.uint64]
    aliases: NDArray[np.int64]
    log_scales: NDArray[np.float64]
    weights: tuple[int, ...]
    scale: Decimal


@lru_cache(maxsize=64)
def _staircase(sigma: float) -> _Staircase:
    """Build the staircase of a sigma. Uses decimals only: equal on every machine."""
    shift = frexp(sigma)[1] - 3
    ratio = sigma * 2.0**-shift
    with localcontext(prec=_DIGITS):
        variance = Decimal(ratio) ** 2
        heights = [(-Decimal(step * step) / variance / 2).exp() for step in range(_STEPS)]
        scale = (2**64 - 3 * 128) / sum(heights, Decimal(0))
        # Rounded up, and one more for the error of the decimals.
        weights = [int(scale * height) + 2 for height in heights]
        # The tail gets the rest of 2**64, and needs far less than 1.
        weights.append(2**64 - sum(weights))
        log_scales = [float((scale / weight).ln()) for weight in weights]
    column = 2**57
    thresholds, aliases = [column] * 128, list(range(128))
    rest = dict(enumerate(weights))
    small = [step for step, weight in rest.items() if weight < column]
    large = [step for step, weight in rest.items() if weight >= column]
    while small:
        step, donor = small.pop(), large[-1]
        thresholds[step], aliases[step] = rest[step], donor
        rest[donor] -= column - rest[step]
        if rest[donor] < column:
            small.append(large.pop())
    return _Staircase(
        shift,
        ratio,
        np.array(thresholds, np.uint64),
        np.array(aliases, np.int64),
        np.array(log_scales),
        tuple(weights),
        scale,
    )


def sample(count: int, sigma: float, words: Words, more_bits: MoreBits) -> NDArray[np.int64]:
    """Sample `count` integers round(G), with G ~ N(0, sigma**2), exactly.

    words: source of random words; its calls depend on the results of comparisons alone, so equal
    words give equal integers on every machine. more_bits: source of further bits, independent of
    `words`. Raises ValueError for a sigma outside SIGMAS.
    """
    if not SIGMAS[0] <= sigma <= SIGMAS[1]:
        raise ValueError(f"sigma is {sigma!r}: give a number from {SIGMAS[0]} to {SIGMAS[1]}")
    staircase, samples = _staircase(sigma), np.empty(count, np.int64)
    filled = proposed = 0
    while filled < count:
        number = min(2**13, (count - filled) * 9 // 8 + 8)
        accepted = _accepted(staircase, number, proposed, words, more_bits)[: count - filled]
        samples[filled : filled + len(accepted)] = accepted
        filled, proposed = filled + len(accepted), proposed + number
    return samples


def _accepted(
    staircase: _Staircase, number: int, first: int, words: Words, more_bits: MoreBits
) -> NDArray[np.int64]:
    """Make `number` proposals, the first with index `first`; return the accepted, rounded."""
    choices, points, decisions = words(3 * number).reshape(3, number)
    columns = (choices >> np.uint64(57)).view(np.int64)
    is_own = (choices & np.uint64(2**57 - 1)) < staircase.thresholds[columns]
    steps = np.where(is_own, columns, staircase.aliases[columns])
    # The last bit of a point is the sign, the others are the binary digits of the place in a step.
    digits, numbers = (points >> np.uint64(1)).view(np.int64), decisions >> np.uint64(1)
    places = digits * 2.0**-63
    places += steps
    places *= places
    places *= -0.5 / (staircase.ratio * staircase.ratio)
    places += staircase.log_scales[steps]
    limits = np.exp(places, out=places)
    limits *= 2.0**63
    floats = numbers.view(np.int64).astype(np.float64)
    is_accepted = floats < limits * (1 - _SLACK) - 1
    unsettled = floats <= limits * (1 + _SLACK)
    unsettled &= ~is_accepted
    unsettled |= steps == _STEPS
    for i in np.flatnonzero(unsettled):
        step, index = int(steps[i]), first + int(i)
        settled = _settle(staircase, step, int(digits[i]), int(numbers[i]), index, more_bits)
        is_accepted[i] = settled is not None
        steps[i] = step if settled is None else settled
    # Rounding a binary number to an integer needs one digit after the point, and nothing else.
    if staircase.shift >= 0:
        digits >>= 62 - staircase.shift
        digits += 1
        digits >>= 1
        digits += steps << staircase.shift
    else:
        digits = (steps + (1 << (-staircase.shift - 1))) >> -staircase.shift
    signs = 1 - 2 * (points & np.uint64(1)).view(np.int64)
    return (digits * signs)[is_accepted]


def _settle(
    staircase: _Staircase, step: int, digits: int, decision: int, proposal: int, more_bits: MoreBits
) -> int | None:
    """Decide one proposal with as many bits as needed; return its step, or None if it is rejected.

    For the tail, index _STEPS, the step is drawn first: step _STEPS + j with probability 2**-(j+1).
    """
    bits, weight, ratio = 0, staircase.weights[step], Decimal(staircase.ratio)
    if step == _STEPS:
        while not (word := more_bits(proposal, bits)):
            step, bits = step + 64, bits + 1
        step, bits = step + 64 - word.bit_length(), bits + 1
    place, number, extra = digits, decision, 0
    while True:
        with localcontext(prec=_DIGITS + 20 * extra):
            scale = staircase.scale / weight * Decimal(2) ** max(0, step - _STEPS + 1)
            size = Decimal(2 ** (63 + 64 * extra))
            high, low = (
                scale * (-(((step + end / size) / ratio) ** 2) / 2).exp()
                for end in (place, place + 1)
            )
            slack = Decimal(10) ** (6 - _DIGITS - 20 * extra)
            if (number + 1) / size <= low * (1 - slack):
                return step
            if number / size >= high * (1 + slack):
                return None
        place = place << 64 | more_bits(proposal, bits)
        number = number << 64 | more_bits(proposal, bits + 1)
        bits, extra = bits + 2, extra + 1
