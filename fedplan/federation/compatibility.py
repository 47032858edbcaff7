# SPDX-License-Identifier: Apache-2.0
"""Compatibility of server and sites: message protocol and package versions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

PROTOCOL_VERSION = "2"
"""Version of the messages between server and sites; raised on an incompatible change."""
PACKAGES = ("fedplan", "torch", "transformers", "flwr")
"""Packages whose versions server and sites compare."""


@cache
def local_versions() -> Mapping[str, str]:
    """Return protocol version (key "protocol") and package versions of this process.

    A package that is not installed has the version "".
    """
    versions = {"protocol": PROTOCOL_VERSION}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions


def protocol_mismatch(versions: Mapping[str, str]) -> str:
    """Return a message if the other end's protocol version differs from this process's; else "".

    `versions`: `local_versions` of the other end; empty in a simulation, which is compatible.
    """
    if versions and versions.get("protocol") != PROTOCOL_VERSION:
        theirs = versions.get("protocol", "?")[:20]
        return f"messages of version {theirs}, and here they are {PROTOCOL_VERSION}"
    return ""


def package_differences(versions: Mapping[str, str]) -> str:
    """Return a text that lists packages with another version at the other end; "" if none.

    `versions`: `local_versions` of the other end. A difference is no error: the site may take part,
    but may train to slightly different bits.
    """
    local = local_versions()
    names = [name for name in PACKAGES if versions.get(name, local[name]) != local[name]]
    return ", ".join(f"{name} {versions[name][:20]}, and here {local[name]}" for name in names)
