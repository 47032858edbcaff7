# SPDX-License-Identifier: Apache-2.0
"""Hub: which names of models and tables may reach the network, and no other ones do."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

SIGN = "hub:"
"""Stands before a name of the hub: a mistyped path is never looked up there."""


def is_hub_id(name: str) -> bool:
    """Whether a name is said to be one of the hub, as in hub:org/name."""
    return name.startswith(SIGN)


def bare(name: str) -> str:
    """A name as the libraries of the hub take it; a path as it is."""
    return name.removeprefix(SIGN)


def fetched(loader: Any, name: str, *, here: bool = False, **settings: Any) -> Any:
    """What a class of transformers loads by a name: a folder, or hub:org/name.

    The one place that calls `from_pretrained`: nothing else is looked up, and no code that lies
    beside weights is run. What must be `here` is not looked up either.
    """
    near = here or not is_hub_id(name)
    return loader.from_pretrained(
        bare(name), local_files_only=near, trust_remote_code=False, **settings
    )


@contextmanager
def quiet() -> Generator[None]:
    """Without transformers' progress bars: a small model is loaded before one is drawn."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
