# SPDX-License-Identifier: Apache-2.0
"""Public node keys of a federation's sites, from files that the sites exchanged themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedplan.federation.messages import RequestRefused
from fedplan.storage.files import safe_folder_name

SUFFIX = ".pub"
"""Suffix of a site's key file."""


def read_peer_keys(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return the public node key (DER bytes) of each named site, from FOLDER/NAME.pub (OpenSSH).

    Raises RequestRefused if a key file is missing or invalid, or two sites have the same key.
    """
    keys, owners = dict[str, bytes](), dict[bytes, str]()
    for name in names:
        file = folder / f"{safe_folder_name(name)}{SUFFIX}"
        try:
            key = load_ssh_public_key(file.read_bytes())
        except (OSError, ValueError) as error:
            raise RequestRefused(
                f"{file} is not a node key of {name}: {error}; get node.pub from the site itself, "
                "not from the server"
            ).with_code("peer-keys") from error
        keys[name] = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for name, key in keys.items():
        if (other := owners.setdefault(key, name)) != name:
            raise RequestRefused(
                f"{folder} has one key for {other} and {name}: each site needs its own, or "
                "its owner could unmask the update of a single site"
            ).with_code("peer-keys")
    return keys


def read_node_key(file: Path) -> EllipticCurvePrivateKey:
    """Read a site's private node key; RequestRefused if the file is not an elliptic-curve key."""
    try:
        key = load_ssh_private_key(file.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise RequestRefused(f"{file} is not a node key: {error}").with_code("peer-keys") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise RequestRefused(
            f"{file} is not a node key: make one by `fedplan site keys`"
        ).with_code("peer-keys")
    return key
