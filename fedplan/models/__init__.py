# SPDX-License-Identifier: Apache-2.0
"""Params of a Transformer and their kinds, layer maps, and models that fedplan builds."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
