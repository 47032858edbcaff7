# SPDX-License-Identifier: Apache-2.0
"""What a disk refuses, told as an error that names the remedy."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from safetensors import SafetensorError

from fedplan.errors import StoreError


@contextmanager
def explained(what: str, remedy: str) -> Generator[None]:
    """Tell a failure of the disk as a StoreError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{what}: {error}; {remedy}") from error
