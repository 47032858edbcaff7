# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .ledger import verify_ledger
from .movement import Movement
from .repair import repair_run
from .run import audit_run, verify_run
