# SPDX-License-Identifier: Apache-2.0
"""The Ray runner: workers on one machine, or on a cluster. Only this folder imports ray."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.runners.ray.actors import Actors

__all__ = ["Actors"]

__getattr__, __dir__ = face(__name__, {"actors": "Actors"})
