# SPDX-License-Identifier: Apache-2.0
"""Peers: the node keys of all sites, as files that went from hand to hand and not by the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedplan.federation.messages import Refused
from fedplan.storage.names import folder_named

SUFFIX = ".pub"


def read_peers(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The directory of some sites: the public node key of each, from its file."""
    found = dict[str, bytes]()
    for name in names:
        file = folder / f"{folder_named(name)}{SUFFIX}"
        try:
            key = load_ssh_public_key(file.read_bytes())
        except (OSError, ValueError) as error:
            raise Refused(
                f"{file} is no node key of {name}: {error}; take its node.pub from its own people, "
                "and not from the server"
            ).coded("peers") from error
        found[name] = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    _require_apart(folder, found)
    return found


def _require_apart(folder: Path, found: Mapping[str, bytes]) -> None:
    """Refuse one key under two names: who has it would be two of the sites that open a sum."""
    by_key = dict[bytes, str]()
    for name, key in found.items():
        if (other := by_key.setdefault(key, name)) != name:
            raise Refused(
                f"{folder} has one key for {other} and {name}: each site has its own, and whoever "
                "has both names could open a sum of one site"
            ).coded("peers")


def node_key(file: Path) -> EllipticCurvePrivateKey:
    """A site's own node key."""
    try:
        found = load_ssh_private_key(file.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise Refused(f"{file} is no node key: {error}").coded("peers") from error
    if not isinstance(found, EllipticCurvePrivateKey):
        raise Refused(f"{file} is no key of a node: make one by `fedplan site keys`").coded("peers")
    return found
