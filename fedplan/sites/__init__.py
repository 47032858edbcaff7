# SPDX-License-Identifier: Apache-2.0
"""What a site decides: its policy, what it approves, and what it answers."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.sites.approvals import Approval, Approvals
    from fedplan.sites.inbox import Inbox
    from fedplan.sites.notice import Notice, shown
    from fedplan.sites.policy import Policy, judged, read_policy

__all__ = [
    "Approval",
    "Approvals",
    "Inbox",
    "Notice",
    "Policy",
    "judged",
    "read_policy",
    "shown",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "approvals": "Approval Approvals",
        "inbox": "Inbox",
        "notice": "Notice shown",
        "policy": "Policy judged read_policy",
    },
)
