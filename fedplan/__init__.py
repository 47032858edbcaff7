# SPDX-License-Identifier: Apache-2.0
"""fedplan: federated fine-tuning of Transformers by plans of trained, shared and kept parts."""

from fedplan.lazy import attach_stub

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
