# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .approvals import Approvals, site_approvals
from .compliance_report import compliance_page
from .doctor import check_site, doctor_table
from .egress import is_site_state, read_egress_report
from .gateway import allow_rejoin, serve_site
from .inbox import Inbox
from .inbox_rows import inbox_rows
from .policy import read_policy
from .review import review_study
from .signatures import sign_statement
from .statistics import site_statistics

__all__ = ["Approvals", "Inbox", "read_policy", "review_study"]
