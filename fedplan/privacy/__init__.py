# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: what is charged, the noise that pays for it, and audits of both.

A server clips, adds noise and divides by public numbers (`aggregate`), draws noise and cohorts
from a secret (`noise`, `sampling`), lets clients vote (`vote`), and writes every charge down before
anything leaves (`budget`). `accountant` says what it all costs, `auditing` tries to prove it wrong.
"""

from __future__ import annotations

from fedplan.privacy.errors import PrivacyError as PrivacyError
