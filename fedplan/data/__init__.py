# SPDX-License-Identifier: Apache-2.0
"""Data of a client: tables, partitions, tasks, batches of examples, and metrics."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
