# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: what is charged, the noise that pays for it, and audits of both.

A `promise` says whom a run hides and what that costs; a `guard` keeps it, at the server by a noisy
sum (`aggregate`), at a site by noisy steps (`dpsgd`), and for the choice of layers by a `vote`.
Noise and draws follow from a `secret`; every charge is on disk before anything leaves (`budget`).
`accountant` says what it all costs, `statement` what was promised, and `auditing` tries to prove
it wrong.
"""

from __future__ import annotations

from fedplan.privacy.errors import PrivacyError as PrivacyError
