# SPDX-License-Identifier: Apache-2.0
"""Keys of a federation: its certificate authority, the server's certificate, and sites' keys."""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedplan.errors import FedplanError, needs_extra
from fedplan.storage.files import write_atomic

with needs_extra("making keys"):
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
        load_ssh_private_key,
    )

HERE = ("localhost", "127.0.0.1")
"""Names of this machine."""
SITE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def make_keys(
    folder: Path, hosts: Sequence[str], sites: Sequence[str], days: int = 365
) -> list[Path]:
    """Write the missing keys and certificates of a federation, and return the new files.

    `folder` gets ca.crt, ca.key, server.crt and server.key; FOLDER/sites/NAME gets the keys of each
    site. `hosts` are names or addresses of the server. The server's certificate is valid for
    `days`, the authority's for ten times as long. Raises FedplanError for invalid arguments, files
    that do not belong together, or a failed write.
    """
    require_sites(sites)
    require_hosts(hosts)
    if not 0 < days <= 3650:
        raise FedplanError(f"a certificate lasts from 1 day to 3650, not {days}")
    try:
        files = _make_authority(folder, days) + _make_server_keys(folder, hosts, days)
        return files + [path for name in sites for path in make_site_keys(folder / "sites" / name)]
    except OSError as error:
        raise FedplanError(f"keys cannot be written: {error}; name another folder") from error


def require_sites(sites: Sequence[str]) -> None:
    """Raise FedplanError for a site that is no valid folder name, or is there twice in any case."""
    for name in sites:
        if not SITE.fullmatch(name):
            raise FedplanError(
                f"a site cannot be called {name!r}: take letters, digits, '-', '_' and '.', "
                "64 at most, and no dot at the start"
            )
    for name, times in Counter(name.lower() for name in sites).items():
        if times > 1:
            raise FedplanError(f"the site {name!r} is there {times} times: name each once")


def require_hosts(hosts: Sequence[str]) -> None:
    """Raise FedplanError for a host that is neither a valid name nor an IP address."""
    for host in hosts:
        if address_of(host) is None and not HOST.fullmatch(host):
            raise FedplanError(
                f"{host!r} is not a host: give a name or an address, without https:// and port"
            )


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an IP address; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents with mode 700."""
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            part.mkdir(mode=0o700)


def _make_authority(folder: Path, days: int) -> list[Path]:
    """Write a self-signed CA certificate and key; nothing if `folder` has ca.crt already."""
    if (folder / "ca.crt").exists():
        return []
    for other in (folder / "ca.key", folder / "server.crt"):
        if other.exists():
            raise FedplanError(f"{other} is without its ca.crt: restore that, or remove {other}")
    key = _new_key()
    builder = _certificate_builder(key, "fedplan authority", key.public_key(), days=10 * days)
    return _write_pair(folder / "ca", key, builder.sign(key, SHA384()))


def _make_server_keys(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Write the server's key and certificate, unless there; FedplanError if not for `hosts`."""
    certificate_file, key_file = folder / "server.crt", folder / "server.key"
    if certificate_file.exists() != key_file.exists():
        pair = (certificate_file, key_file)
        present, missing = pair if certificate_file.exists() else pair[::-1]
        raise FedplanError(
            f"{present} is without its {missing.name}: restore that, or remove {present}"
        )
    if certificate_file.exists():
        _require_hosts_named(certificate_file, hosts)
        return []
    authority_key, authority = _read_authority(folder)
    key = _new_key()
    # The proxy and the operator reach the server from its own machine.
    names = dict.fromkeys((*hosts, *HERE))
    alternative_names = x509.SubjectAlternativeName([_general_name(host) for host in names])
    usage = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    signer, issuer = authority_key.public_key(), authority.subject
    certificate = (
        _certificate_builder(key, "fedplan server", signer, issuer, days=days)
        .add_extension(usage, critical=False)
        .add_extension(alternative_names, critical=False)
        .sign(authority_key, SHA384())
    )
    return _write_pair(folder / "server", key, certificate)


def make_site_keys(folder: Path) -> list[Path]:
    """Write a site's missing keys to `folder`, and return the new files.

    These are node and node.pub, which authenticate the site, and state.key, which encrypts the
    site's state. Raises FedplanError if node is missing or no key, and node.pub needs it.
    """
    private, public, state_key = folder / "node", folder / "node.pub", folder / "state.key"
    if public.exists() and not private.exists():
        raise FedplanError(f"{public} is without its node: restore that, or remove {public}")
    files = list[Path]()
    if not private.exists():
        secret = _new_key().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        files.append(_write(private, secret, private=True))
    if not public.exists():
        try:
            key = load_ssh_private_key(private.read_bytes(), None).public_key()
        except ValueError as error:
            raise FedplanError(f"{private} is not an OpenSSH key: {error}; remove it") from error
        content = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
        files.append(_write(public, content))
    if not state_key.exists():
        files.append(_write(state_key, os.urandom(32).hex().encode(), private=True))
    return files


def replace_node_key(folder: Path) -> list[Path]:
    """Replace a site's node key, as old-node; return the new files. FedplanError without one."""
    if not (folder / "node").exists():
        raise FedplanError(f"{folder} has no node key to replace: run `fedplan site keys`")
    for name in ("node", "node.pub"):
        if (folder / name).exists():
            (folder / name).replace(folder / f"old-{name}")
    return make_site_keys(folder)


def _write(path: Path, content: bytes, *, private: bool = False) -> Path:
    """Write a new file, with mode 600 if private; return its path. FedplanError if it exists."""
    make_private(path.parent)
    if path.exists():
        raise FedplanError(f"{path} exists already: keys are not overwritten")
    write_atomic(path, content, mode=0o600 if private else 0o644)
    return path


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _write_pair(
    stem: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> list[Path]:
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key_file = _write(stem.with_suffix(".key"), content, private=True)
    return [key_file, _write(stem.with_suffix(".crt"), certificate.public_bytes(Encoding.PEM))]


def _read_authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return the authority's key and certificate; FedplanError if they are no pair."""
    if not (folder / "ca.key").exists():
        raise FedplanError(f"{folder} has no ca.key, which signs server.crt: restore it")
    try:
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    except (ValueError, TypeError) as error:
        raise FedplanError(f"the authority of {folder} cannot be read: {error}") from error
    is_key = isinstance(key, ec.EllipticCurvePrivateKey)
    if not is_key or key.public_key() != authority.public_key():
        raise FedplanError(
            f"{folder} has a ca.key that does not belong to its ca.crt: restore that"
        )
    return key, authority


def _certificate_builder(
    key: ec.EllipticCurvePrivateKey,
    subject: str,
    signer: ec.EllipticCurvePublicKey,
    issuer: x509.Name | None = None,
    *,
    days: int,
) -> x509.CertificateBuilder:
    """A certificate for `key`'s public part by `signer`; an authority's without an `issuer`."""
    now, signs = datetime.now(UTC), issuer is None
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, subject)])
    usage = x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=signs, path_length=0 if signs else None)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if issuer is None else issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ between sites
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )


def _general_name(host: str) -> x509.GeneralName:
    address = address_of(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _require_hosts_named(certificate: Path, hosts: Sequence[str]) -> None:
    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise FedplanError(
            f"{certificate} is not a server certificate: remove it and server.key to have new ones "
            "made"
        ) from error
    if missing := [host for host in hosts if _general_name(host) not in list(names)]:
        raise FedplanError(
            f"{certificate} does not name {missing[0]}: remove it and server.key to have one made "
            "for all hosts"
        )
