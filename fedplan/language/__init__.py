# SPDX-License-Identifier: Apache-2.0
"""The plan language: parts, conditions and plans, their parser, and plans resolved to roles."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
