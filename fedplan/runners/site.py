# SPDX-License-Identifier: Apache-2.0
"""A site's configuration file, site.toml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from fedplan.storage.encryption import Encryption
from fedplan.storage.names import validate_client_names
from fedplan.studies.field_types import DeviceName
from fedplan.studies.schema import ConfigError
from fedplan.studies.sections import Section
from fedplan.studies.toml_values import parse_toml

SITE = "site.toml"
"""Name of the configuration file in a site's folder."""


def _validate_name(name: str) -> str:
    validate_client_names([name])
    return name


class ServerSection(Section):
    """The site's server, and the keys that authenticate both.

    Without `ca` and `node_key` the connection is unencrypted, for tests on one machine only.
    """

    address: str
    """Address of the server, as host:port."""
    ca: str = ""
    """File with the CA certificate that authenticates the server."""
    node_key: str = ""
    """File with the private node key that authenticates the site."""


class Site(Section):
    """A site: its name, data, folders, and the code that studies may import."""

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
    """Read a site from its folder or file; relative paths become relative to that folder.

    Raises ConfigError if the file is missing or invalid.
    """
    file = folder / SITE if folder.is_dir() else folder
    try:
        return _resolve_paths(parse_site(parse_toml(file.read_text(encoding="utf-8"))), file.parent)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} holds no {SITE}: name the site's folder by --site, as `fedplan new "
            "federation` has written it"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def parse_site(fields: Mapping[str, object]) -> Site:
    """Validate the fields of site.toml; ConfigError lists each invalid field."""
    try:
        return Site.model_validate(dict(fields))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError("invalid site file:\n  " + "\n  ".join(faults)) from error


def _resolve_paths(site: Site, base: Path) -> Site:
    """Return the site with its relative paths resolved against a folder."""

    def resolve(path: str) -> str:
        return str(base.resolve() / path) if path else ""

    server = site.server
    if server is not None:
        files = {"ca": resolve(server.ca), "node_key": resolve(server.node_key)}
        server = server.model_copy(update=files)
    names = ("data", "state", "encryption_key", "reader", "policy", "peer_keys")
    paths = {name: resolve(getattr(site, name)) for name in names}
    return site.model_copy(update={**paths, "server": server})
