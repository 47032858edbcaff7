# SPDX-License-Identifier: Apache-2.0
"""Audits: verify ledgers and run folders, bound epsilon from below, and attack updates."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.audits.attacks.report import run_attacks
    from fedplan.audits.bounds import lower_bound
    from fedplan.audits.ledger import verify_ledger
    from fedplan.audits.run import verify_run

__all__ = ["run_attacks", "lower_bound", "verify_ledger", "verify_run"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "attacks.report": "run_attacks",
        "bounds": "lower_bound",
        "ledger": "verify_ledger",
        "run": "verify_run",
    },
)
