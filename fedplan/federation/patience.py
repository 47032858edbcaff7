# SPDX-License-Identifier: Apache-2.0
"""Patience: how long a server of real sites waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """Seconds that a server waits: for sites to come, answers, absentees, and between two looks.

    A site that fails to answer is asked `tries` times. `scores` is how long it waits for those of a
    round: who is slower than that is left out of them.
    """

    sites: float = 600.0
    answers: float = 3600.0
    absent: float = 300.0
    look: float = 0.5
    tries: int = 5
    scores: float = 600.0
