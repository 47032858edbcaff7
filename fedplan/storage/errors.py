# SPDX-License-Identifier: Apache-2.0
"""Disk errors as StoreError with a remedy."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from safetensors import SafetensorError

from fedplan.errors import StoreError


@contextmanager
def wrap_disk_errors(problem: str, remedy: str) -> Generator[None]:
    """Raise an OSError or SafetensorError of the body as StoreError "problem: error; remedy"."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{problem}: {error}; {remedy}") from error
