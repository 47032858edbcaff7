# SPDX-License-Identifier: Apache-2.0
"""The Flower runner, for real federations. Only this package imports flwr."""

from fedplan.errors import require_extra
from fedplan.lazy import attach_stub

require_extra("flwr", "a federation over Flower")

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
