# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .ledger import verify_ledger
from .run import verify_run
