# SPDX-License-Identifier: Apache-2.0
"""Audits: verify the ledger and the folder of a run."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.audits.ledger import verify_ledger
    from fedplan.audits.run import verify_run

__all__ = ["verify_ledger", "verify_run"]

__getattr__, __dir__ = lazy_exports(__name__, {"ledger": "verify_ledger", "run": "verify_run"})
