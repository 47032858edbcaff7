# SPDX-License-Identifier: Apache-2.0
"""Attacks on what leaves a client: tried on tiny models, so that a user sees what privacy buys."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.audits.attacks.leaks import attack

__all__ = ["attack"]

__getattr__, __dir__ = face(__name__, {"leaks": "attack"})
