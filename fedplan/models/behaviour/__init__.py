# SPDX-License-Identifier: Apache-2.0
"""Checks of a layer map by the behaviour of the model, and proposals of new layer maps."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.models.behaviour.proposal import propose_layer_map
    from fedplan.models.behaviour.validate import check_params

__all__ = ["propose_layer_map", "check_params"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"proposal": "propose_layer_map", "validate": "check_params"}
)
