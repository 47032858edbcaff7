# SPDX-License-Identifier: Apache-2.0
"""Poisson sampling of the clients that take part in a round."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from fedplan.privacy.accounting.events import SAMPLING_RATES
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.mechanisms.secret import derive_key


def sample_cohort(roster: Iterable[str], rate: float, secret: bytes, round: int) -> list[str]:
    """Sample the clients of a round: each of the roster with probability `rate`; may be empty.

    secret: 32 bytes; the same arguments give the same clients, in the order of the roster. Raises a
    PrivacyError for a rate out of SAMPLING_RATES and for a client that is named twice.
    """
    # Sampling amplifies privacy only against those who cannot tell who was sampled: so it follows
    # from the server's secret. An empty cohort is released too: sampling again would reveal it.
    if not SAMPLING_RATES[0] <= rate <= SAMPLING_RATES[1]:
        raise PrivacyError(f"the rate is {rate!r}: give a number above 0 and at most 1")
    clients = list(roster)
    if len(set(clients)) < len(clients):
        raise PrivacyError("the roster holds a client twice: name each once")
    threshold = int(Fraction(rate) * 2**64)
    keys = {client: derive_key(secret, "cohort", round, client) for client in clients}
    return [client for client in clients if int.from_bytes(keys[client][:8]) < threshold]
