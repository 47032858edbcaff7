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
    """Call `loader.from_pretrained` for a folder or hub id (hub:org/name); no remote code runs.

    A hub id may be downloaded; with `local_files_only` only the local cache is used. `settings`
    are passed on. The loader's exceptions pass, as OSError for a missing folder.
    """
    return loader.from_pretrained(
        strip_hub_prefix(name),
        local_files_only=local_files_only or not is_hub_id(name),
        trust_remote_code=False,
        **settings,
    )


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Context manager that disables the progress bars of transformers until exit."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
