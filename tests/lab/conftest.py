# SPDX-License-Identifier: Apache-2.0
"""The lab is no part of what is installed: it is found beside the tests, after all else."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
