# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .ledger import Movement, verify_ledger
from .repair import repair_run
from .run import audit_run, verify_run
