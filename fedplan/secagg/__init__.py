# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation (Bonawitz et al., 2017): the server learns only the sum of inputs."""

from fedplan.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
