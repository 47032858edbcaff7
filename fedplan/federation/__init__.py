# SPDX-License-Identifier: Apache-2.0
"""One round of server and clients, independent of the transport."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
