# SPDX-License-Identifier: Apache-2.0
"""Crews: who plays the clients of a run: this process, a pool of processes, or Ray."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.runners.crews.workers import Workers, workers_of

__all__ = ["Workers", "workers_of"]

__getattr__, __dir__ = face(__name__, {"workers": "Workers workers_of"})
