# SPDX-License-Identifier: Apache-2.0
"""A site's configuration file, site.toml, and the public keys of the other sites."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from fedplan.errors import needs_extra
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import safe_folder_name, validate_client_names
from fedplan.studies.section import ConfigError, DeviceName, Section, parse_section

with needs_extra("a site"):
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_der_public_key,
        load_ssh_private_key,
        load_ssh_public_key,
    )

SITE, INBOX_FOLDER = "site.toml", "inbox"
"""The configuration file in a site's folder; the folder of offered studies in its state folder."""


class ServerSection(Section):
    """The section [server] of site.toml: address of the server, and keys of server and site.

    Without `ca` the connection is unencrypted: for tests on one machine only.
    """

    address: str
    """Address of the server, as host:port."""
    ca: str = ""
    """File with the CA certificate that authenticates the server."""
    node_key: str = ""
    """File with the private node key that authenticates the site."""


class Site(Section):
    """The fields of site.toml, by which a site's operator sets up the site; see `read_site`."""

    name: Annotated[str, AfterValidator(lambda name: validate_client_names([name])[0])]
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
    devices_per_client: int = Field(default=1, ge=1)
    """Number of CUDA cards that train the model together, each on its share of every step."""
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
    _file: Path | None = PrivateAttr(default=None)

    @property
    def file(self) -> Path | None:
        """The site.toml that the site was read from."""
        return self._file

    def of_file(self, file: Path) -> Site:
        """Return the site as read from this site.toml."""
        site = self.model_copy()
        site._file = file
        return site

    @property
    def has_offers(self) -> bool:
        """Whether a study was offered to the site, or may have been where that cannot be read."""
        try:
            return any(f.suffix == ".json" for f in Path(self.state, INBOX_FOLDER).iterdir())
        except FileNotFoundError:
            return False
        except OSError:
            return True

    @property
    def encryption(self) -> Encryption | None:
        """Encryption of everything derived from the site's examples; None without a key."""
        return Encryption.from_file(Path(self.encryption_key)) if self.encryption_key else None


def read_site(folder: Path) -> Site:
    """Read a site.toml, or that in a folder; paths become absolute. ConfigError if invalid."""
    file = folder / SITE if folder.is_dir() else folder
    try:
        site, base = parse_section(Site, file.read_text(encoding="utf-8")), file.parent.resolve()
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
    return site.model_copy(update={**paths, "server": server}).of_file(file.resolve())


SUFFIX = ".pub"
"""Suffix of a site's key file."""


def read_peer_keys(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return each site's public node key (DER), of FOLDER/NAME.pub; RequestRefused if invalid."""
    from fedplan.federation.messages import RequestRefused  # loads torch

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


@dataclass(frozen=True)
class PeerKeys:
    """Fingerprints of the node keys that a site knows, as `ssh-keygen -lf NAME.pub` prints them.

    `own`: of the site's node key. `peers`: by name, of the keys in its folder. `together`: 60
    digits for all names and keys there; sites with the same keys have the same digits. `problem`:
    why the site's own key there is not its node key; "" if it is.
    """

    own: str
    peers: dict[str, str]
    together: str
    problem: str = ""


def read_peer_fingerprints(site: Site) -> PeerKeys:
    """Return the fingerprints of a site's keys; ConfigError if it has no keys to compare."""
    if site.server is None or not site.server.node_key or not site.peer_keys:
        raise ConfigError(
            f"{site.name} has no keys to compare: set peer_keys and server.node_key in its "
            "site.toml"
        )
    folder, own = Path(site.peer_keys), read_node_key(Path(site.server.node_key)).public_key()
    names = sorted(file.stem for file in folder.glob(f"*{SUFFIX}"))
    keys = read_peer_keys(folder, names)
    problem = ""
    if keys.get(site.name) != own.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo):
        problem = f"{folder / site.name}{SUFFIX} is not this site's node.pub: copy that there"
    words = (word for name in names for word in (name.encode(), keys[name]))
    frames = b"".join(len(word).to_bytes(4) + word for word in words)
    number = f"{int.from_bytes(hashlib.sha256(frames).digest()) % 10**60:060}"
    together = " ".join(number[at : at + 5] for at in range(0, 60, 5))
    peers = {name: _fingerprint(load_der_public_key(keys[name])) for name in names}
    return PeerKeys(_fingerprint(own), peers, together, problem)


def _fingerprint(key: Any) -> str:
    """SHA-256 of a public key as OpenSSH prints it."""
    line: bytes = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def read_node_key(file: Path) -> EllipticCurvePrivateKey:
    """Read a site's private node key; RequestRefused if the file is not an elliptic-curve key."""
    from fedplan.federation.messages import RequestRefused  # loads torch

    try:
        key = load_ssh_private_key(file.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise RequestRefused(f"{file} is not a node key: {error}").with_code("peer-keys") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise RequestRefused(
            f"{file} is not a node key: make one by `fedplan site keys`"
        ).with_code("peer-keys")
    return key
