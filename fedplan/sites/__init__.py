# SPDX-License-Identifier: Apache-2.0
"""The site's side of a federation: its policy, its approvals of studies, and its gateway."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
