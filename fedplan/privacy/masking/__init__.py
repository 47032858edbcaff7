# SPDX-License-Identifier: Apache-2.0
"""Sums that a server learns and nothing else: masks, shares, letters and both ends of a round."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.privacy.masking.ciphers import MaskingError
    from fedplan.privacy.masking.diary import Diary
    from fedplan.privacy.masking.server import MaskingServer, Opened
    from fedplan.privacy.masking.site import MaskingSite
    from fedplan.privacy.masking.terms import Slot, Terms

__all__ = ["Diary", "MaskingError", "MaskingServer", "MaskingSite", "Opened", "Slot", "Terms"]

__getattr__, __dir__ = face(
    __name__,
    {
        "ciphers": "MaskingError",
        "diary": "Diary",
        "server": "MaskingServer Opened",
        "site": "MaskingSite",
        "terms": "Slot Terms",
    },
)
