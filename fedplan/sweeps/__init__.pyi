# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .comparisons import compare
from .progress import sweep_with_progress
from .records import is_sweep
from .results import find_run_folders
from .sweeping import sweep
from .trials import read_base_study
