# SPDX-License-Identifier: Apache-2.0
"""Whether params do what their kinds say, seen by changing them and listening."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.models.behaviour.judging import verdicts
    from fedplan.models.behaviour.proposal import propose

__all__ = ["propose", "verdicts"]

__getattr__, __dir__ = face(__name__, {"judging": "verdicts", "proposal": "propose"})
