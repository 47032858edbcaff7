# SPDX-License-Identifier: Apache-2.0
"""Versions: what two ends of a run must have alike, and what each has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

WIRE = "2"
"""Of the messages between a server and its sites: raised when one would misread the other."""
PACKAGES = ("fedplan", "torch", "transformers", "flwr")


@cache
def own_versions() -> Mapping[str, str]:
    """What this end has."""
    return {"wire": WIRE, **{name: _version(name) for name in PACKAGES}}


def other_versions(said: Mapping[str, str]) -> str:
    """What another end has that does not go with ours, in words; nothing if all does.

    A site that says no versions is of a simulation, and so of this very process or its child.
    """
    if said and said.get("wire") != WIRE:
        return f"messages of version {said.get('wire', '?')[:20]}, and here they are {WIRE}"
    return ""


def unlike_versions(said: Mapping[str, str]) -> str:
    """Packages of another end that are of another version than ours, in words.

    It takes part all the same: what both must have alike is the wire, the study and the model. But
    the bits of its turns may be other ones.
    """
    ours = own_versions()
    odd = [name for name in PACKAGES if said.get(name, ours[name]) != ours[name]]
    return ", ".join(f"{name} {said[name][:20]}, and here {ours[name]}" for name in odd)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
