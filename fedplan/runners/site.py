# SPDX-License-Identifier: Apache-2.0
"""Sites: what a site says of itself, in a file that nobody else writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from fedplan.storage.encryption import Encryption
from fedplan.storage.names import client_names
from fedplan.studies.plain import read_toml
from fedplan.studies.schema import ConfigError
from fedplan.studies.sections import Section
from fedplan.studies.words import DeviceName

SITE = "site.toml"
"""In a site's folder: what it says of itself."""


def _a_name(said: str) -> str:
    client_names([said])
    return said


class ServerSection(Section):
    """The server that a site is of, and the keys by which each knows the other.

    Without `ca` and `node` the line is open, which is for one machine alone.
    """

    address: str
    """Where the server is reached, as host:port."""
    ca: str = ""
    """The certificate by which the server is known."""
    node: str = ""
    """The key by which the server knows the site."""


class Site(Section):
    """A site: its name, its rows, where it keeps things, and what it lets a study do."""

    name: Annotated[str, AfterValidator(_a_name)]
    """The name that the site's key was registered with."""
    data: str = ""
    """The file or folder with its rows, or what its own reader is given."""
    home: str = "home"
    """The folder of what it keeps."""
    dataset: str = "rows"
    """The name of the rows that its limits are of, over all studies."""
    key: str = ""
    """The file that seals its home; without it nothing is sealed."""
    rows: str = ""
    """A reader of the site's own, as file.py:function."""
    device: DeviceName | Literal[""] = ""
    """Where models compute; it goes before the study's word."""
    allow: list[str] = Field(default_factory=list[str])
    """Packages that a study may name code of."""
    traits: dict[str, str] = Field(default_factory=dict[str, str])
    """What the site says of itself, for by(...) and trait(...) in a plan."""
    peers: str = ""
    """The folder with the node key of every site, as NAME.pub, for masked sums."""
    policy: str = "policy.toml"
    """The file of its policy."""
    server: ServerSection | None = None
    """The server that it is of, and the keys by which each knows the other."""

    @property
    def seal(self) -> Encryption | None:
        """What seals all that tells of the site's rows, if it has a key."""
        return Encryption.from_file(Path(self.key)) if self.key else None


def read_site(folder: Path) -> Site:
    """The site of a folder; relative paths in its file start there."""
    file = folder / SITE if folder.is_dir() else folder
    try:
        return _placed(site_of(read_toml(file.read_text(encoding="utf-8"))), file.parent)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} holds no {SITE}: name the site's folder by --site, as `fedplan new "
            "federation` has written it"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def site_of(said: Mapping[str, object]) -> Site:
    """A site from plain values; each fault is named by its field."""
    try:
        return Site.model_validate(dict(said))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError("the site's words do not fit:\n  " + "\n  ".join(faults)) from error


def _placed(site: Site, base: Path) -> Site:
    def placed(said: str) -> str:
        return str(base.resolve() / said) if said else ""

    server = site.server
    if server is not None:
        found = {"ca": placed(server.ca), "node": placed(server.node)}
        server = server.model_copy(update=found)
    names = ("data", "home", "key", "rows", "policy", "peers")
    change = {name: placed(getattr(site, name)) for name in names}
    return site.model_copy(update={**change, "server": server})
