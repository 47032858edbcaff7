# SPDX-License-Identifier: Apache-2.0
"""A client's local training: settings, loops, client hooks, freezing and probes."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
