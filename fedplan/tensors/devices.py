# SPDX-License-Identifier: Apache-2.0
"""Devices: where a model computes, and how it is left as it was found."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def at_rest(model: nn.Module) -> Generator[None]:
    """A model in evaluation; then each module's mode, and the random numbers, are as before."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(devices=[]):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
