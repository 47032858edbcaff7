# SPDX-License-Identifier: Apache-2.0
"""Checks after the fact: ledgers, lower bounds of epsilon, attacks."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.audits.attacks.leaks import attack
    from fedplan.audits.bounds import lower_bound
    from fedplan.audits.ledger import verify_lines
    from fedplan.audits.run import verify_run

__all__ = ["attack", "lower_bound", "verify_lines", "verify_run"]

__getattr__, __dir__ = face(
    __name__,
    {
        "attacks.leaks": "attack",
        "bounds": "lower_bound",
        "ledger": "verify_lines",
        "run": "verify_run",
    },
)
