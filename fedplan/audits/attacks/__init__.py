# SPDX-License-Identifier: Apache-2.0
"""Attacks on updates and releases, on tiny models, to show what privacy prevents."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.audits.attacks.report import run_attacks

__all__ = ["run_attacks"]

__getattr__, __dir__ = lazy_exports(__name__, {"report": "run_attacks"})
