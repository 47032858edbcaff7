# SPDX-License-Identifier: Apache-2.0
"""Hub: which names of models and tables may reach the network, and no other ones do."""

from __future__ import annotations

SIGN = "hub:"
"""Stands before a name of the hub: a mistyped path is never looked up there."""


def is_hub_id(name: str) -> bool:
    """Whether a name is said to be one of the hub, as in hub:org/name."""
    return name.startswith(SIGN)


def bare(name: str) -> str:
    """A name as the libraries of the hub take it; a path as it is."""
    return name.removeprefix(SIGN)
