# SPDX-License-Identifier: Apache-2.0
"""Many runs of one study: sweeps over settings and seeds, and comparisons."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
