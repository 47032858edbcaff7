# SPDX-License-Identifier: Apache-2.0
"""A site's configuration file, site.toml, and the public keys of the other sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from pydantic import AfterValidator, Field, ValidationError

from fedplan.federation.messages import RequestRefused
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import safe_folder_name, validate_client_names
from fedplan.studies.field_types import DeviceName
from fedplan.studies.schema import ConfigError, parse_toml
from fedplan.studies.sections import Section

SITE = "site.toml"
"""Name of the configuration file in a site's folder."""


def _validate_name(name: str) -> str:
    validate_client_names([name])
    return name


class ServerSection(Section):
    """The section [server] of site.toml: address of the server, and keys of server and site.

    `address` is host:port. `ca` is the file of the CA certificate that authenticates the server,
    `node_key` the file of the private key that authenticates the site. Without `ca` the connection
    is unencrypted: for tests on one machine only.
    """

    address: str
    """Address of the server, as host:port."""
    ca: str = ""
    """File with the CA certificate that authenticates the server."""
    node_key: str = ""
    """File with the private node key that authenticates the site."""


class Site(Section):
    """The fields of site.toml, by which a site's operator sets up the site; see `read_site`.

    `name` is registered at the server. `data` is a file or folder of examples, or the argument of
    the site's own `reader` ("file.py:function"). `state` is the folder of client state, logs and
    privacy ledger, encrypted by the file `encryption_key`; privacy limits hold for the `dataset`
    over all studies. `device` overrides the study's device, `traits` the study's traits of this
    client. `allow_packages` are the packages from which a study may import code. `peer_keys` is the
    folder of all sites' public keys for secure aggregation, `policy` the file of the site's policy,
    `server` the connection, None for a site without a server.
    """

    name: Annotated[str, AfterValidator(_validate_name)]
    """The name under which the site's node key is registered."""
    data: str = ""
    """File or folder of its examples, or the argument of its own reader."""
    state: str = "state"
    """Folder of its client state, logs and privacy account."""
    dataset: str = "examples"
    """Name of the data set whose privacy limits hold over all studies."""
    encryption_key: str = ""
    """Key file that encrypts its state folder; without it nothing is encrypted."""
    reader: str = ""
    """The site's own reader of its data, as file.py:function."""
    device: DeviceName | Literal[""] = ""
    """Device of the models, in place of the study's device."""
    allow_packages: list[str] = Field(default_factory=list[str])
    """Packages from which a study may import code."""
    traits: dict[str, str] = Field(default_factory=dict[str, str])
    """Traits of the site, for by(...) and trait(...) in a plan."""
    peer_keys: str = ""
    """Folder with the public node key of every site, as NAME.pub, for secure aggregation."""
    policy: str = "policy.toml"
    """File of its policy."""
    server: ServerSection | None = None
    """Its server, and the keys that authenticate both."""

    @property
    def encryption(self) -> Encryption | None:
        """Encryption of everything derived from the site's examples; None without a key."""
        return Encryption.from_file(Path(self.encryption_key)) if self.encryption_key else None


def read_site(folder: Path) -> Site:
    """Read a site from site.toml in `folder`; `folder` may also be the file.

    Relative paths in the file become absolute, below the file's folder; no other file is read.
    Raises ConfigError if the file is missing or invalid.
    """
    file = folder / SITE if folder.is_dir() else folder
    try:
        site, base = parse_site(parse_toml(file.read_text(encoding="utf-8"))), file.parent.resolve()
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} holds no {SITE}: name the site's folder by --site, as `fedplan new "
            "federation` has written it"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error

    def resolve(section: Section, *names: str) -> dict[str, str]:
        paths: dict[str, str] = {name: getattr(section, name) for name in names}
        return {name: str(base / path) if path else "" for name, path in paths.items()}

    server = site.server and site.server.model_copy(update=resolve(site.server, "ca", "node_key"))
    paths = resolve(site, "data", "state", "encryption_key", "reader", "policy", "peer_keys")
    return site.model_copy(update={**paths, "server": server})


def parse_site(fields: Mapping[str, object]) -> Site:
    """Return the Site of the fields of site.toml, with paths unchanged.

    Raises ConfigError with a line for each invalid field.
    """
    try:
        return Site.model_validate(dict(fields))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError("invalid site file:\n  " + "\n  ".join(faults)) from error


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
