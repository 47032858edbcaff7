# SPDX-License-Identifier: Apache-2.0
"""Files that survive a kill, a full disk and a flipped bit: checkpoints, journals, logs."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
