# SPDX-License-Identifier: Apache-2.0
"""Timeouts of a server with remote sites."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds of a server with remote sites, and the number of attempts.

    `sites`: wait for sites to connect, and for an unreachable SuperLink.
    `updates`: wait for the updates of a round.
    `reconnect`: time after which a site that disappeared is no longer waited for.
    `poll_interval`: interval between two checks for replies.
    `tries`: attempts per request to a site that fails.
    `evaluations`: wait for the evaluation scores of a round; later ones are left out.
    """

    sites: float = 600.0
    updates: float = 3600.0
    reconnect: float = 300.0
    poll_interval: float = 0.5
    tries: int = 5
    evaluations: float = 600.0
