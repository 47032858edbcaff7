# SPDX-License-Identifier: Apache-2.0
"""The site's side of a federation: its policy, its approvals of studies, and its gateway."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.sites.approvals import Approval, Approvals, Inbox
    from fedplan.sites.policy import Policy, policy_violations, read_policy
    from fedplan.sites.review import StudyReview, review_study

__all__ = [
    "Approval",
    "Approvals",
    "Inbox",
    "Policy",
    "StudyReview",
    "policy_violations",
    "read_policy",
    "review_study",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "approvals": "Approval Approvals Inbox",
        "policy": "Policy policy_violations read_policy",
        "review": "StudyReview review_study",
    },
)
