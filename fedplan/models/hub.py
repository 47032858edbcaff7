# SPDX-License-Identifier: Apache-2.0
"""Access to the Hugging Face hub: only names that start with \"hub:\" may reach the network."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

HUB_PREFIX = "hub:"
"""Prefix of hub ids; without it a name is a local path, so a mistyped path is never fetched."""


def is_hub_id(name: str) -> bool:
    """Whether a name is a hub id, as in hub:org/name."""
    return name.startswith(HUB_PREFIX)


def strip_hub_prefix(name: str) -> str:
    """A hub id without its prefix, as Hugging Face libraries take it; other names unchanged."""
    return name.removeprefix(HUB_PREFIX)


def load_pretrained(
    loader: Any, name: str, *, local_files_only: bool = False, **settings: Any
) -> Any:
    """`loader.from_pretrained` for a folder or a hub id, without running remote code.

    Only a hub id is downloaded, and none with `local_files_only`. `settings` are passed on. The one
    place in fedplan that calls `from_pretrained`.
    """
    return loader.from_pretrained(
        strip_hub_prefix(name),
        local_files_only=local_files_only or not is_hub_id(name),
        trust_remote_code=False,
        **settings,
    )


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Context manager that disables the progress bars of transformers inside it."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
