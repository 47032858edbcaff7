# SPDX-License-Identifier: Apache-2.0
"""What a Transformer is made of, and the models that fedplan builds."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.models.architectures import teach
    from fedplan.models.behaviour.judging import verdicts
    from fedplan.models.behaviour.proposal import propose
    from fedplan.models.buffers import stilled
    from fedplan.models.catalog import params_of
    from fedplan.models.description import describe
    from fedplan.models.dual import Dual, load_dual
    from fedplan.models.folder import load_folder, predict, save_folder
    from fedplan.models.params import Block, Kind, Param, Params
    from fedplan.models.values import put, take

__all__ = [
    "Block",
    "Dual",
    "Kind",
    "Param",
    "Params",
    "describe",
    "load_dual",
    "load_folder",
    "params_of",
    "predict",
    "propose",
    "put",
    "save_folder",
    "stilled",
    "take",
    "teach",
    "verdicts",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "architectures": "teach",
        "behaviour.judging": "verdicts",
        "behaviour.proposal": "propose",
        "buffers": "stilled",
        "catalog": "params_of",
        "description": "describe",
        "dual": "Dual load_dual",
        "folder": "load_folder predict save_folder",
        "params": "Block Kind Param Params",
        "values": "put take",
    },
)
