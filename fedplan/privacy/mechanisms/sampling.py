# SPDX-License-Identifier: Apache-2.0
"""Sampling: who takes part in a round, drawn apart for each client of a fixed roster."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from fedplan.privacy.accounting.events import RATES
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.mechanisms.secret import derived


def cohort(roster: Iterable[str], rate: float, secret: bytes, round: int) -> list[str]:
    """The clients of a round: each is in it with the chance `rate`, whoever else is (Poisson).

    A rate lowers the cost of a release only for those who cannot tell who was drawn. So the draw
    follows from the server's secret and the round, never from the experiment's public name; and a
    server that was killed asks the same clients again. Nobody drawn is a cohort too: it is released
    as any other, because to draw again would tell that it was empty.
    """
    if not RATES[0] <= rate <= RATES[1]:
        raise PrivacyError(f"the rate is {rate!r}: give a number above 0 and at most 1")
    clients = list(roster)
    if len(set(clients)) < len(clients):
        raise PrivacyError("the roster holds a client twice: name each once")
    below = int(Fraction(rate) * 2**64)
    return [client for client in clients if _drawn(secret, round, client) < below]


def _drawn(secret: bytes, round: int, client: str) -> int:
    return int.from_bytes(derived(secret, "cohort", round, client)[:8])
