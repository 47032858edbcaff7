# SPDX-License-Identifier: Apache-2.0
"""Charts from plain numbers, drawn by matplotlib, each as SVG, PNG, PDF and CSV."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
