# SPDX-License-Identifier: Apache-2.0
"""What every test starts from: no network, one thread."""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("laws", max_examples=2000, deadline=None, derandomize=True)
settings.load_profile("laws")
