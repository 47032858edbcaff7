# SPDX-License-Identifier: Apache-2.0
"""Params of a Transformer and their kinds, layer maps, and models that fedplan builds."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.models.architectures import register_layer_map
    from fedplan.models.catalog import params_of
    from fedplan.models.description import describe
    from fedplan.models.dual_encoder import DualEncoder, load_dual_encoder
    from fedplan.models.folder import load_folder, predict_classes, save_folder
    from fedplan.models.params import Block, Kind, Param, Params
    from fedplan.models.proposal import propose_layer_map
    from fedplan.models.validate import check_params
    from fedplan.models.values import freeze_batch_norms, get_values, set_values

__all__ = [
    "Block",
    "DualEncoder",
    "Kind",
    "Param",
    "Params",
    "describe",
    "load_dual_encoder",
    "load_folder",
    "params_of",
    "predict_classes",
    "propose_layer_map",
    "set_values",
    "save_folder",
    "freeze_batch_norms",
    "get_values",
    "register_layer_map",
    "check_params",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "architectures": "register_layer_map",
        "catalog": "params_of",
        "description": "describe",
        "dual_encoder": "DualEncoder load_dual_encoder",
        "folder": "load_folder predict_classes save_folder",
        "params": "Block Kind Param Params",
        "proposal": "propose_layer_map",
        "validate": "check_params",
        "values": "freeze_batch_norms get_values set_values",
    },
)
