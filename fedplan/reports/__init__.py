# SPDX-License-Identifier: Apache-2.0
"""Explanations, progress, status and reports of runs for people."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
