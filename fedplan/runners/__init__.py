# SPDX-License-Identifier: Apache-2.0
"""Runners of a federation: a simulation on one machine, and sites connected by Flower."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
