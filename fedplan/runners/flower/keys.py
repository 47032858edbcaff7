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

from fedplan.errors import FedplanError
from fedplan.storage.files import write_atomic

try:
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
except ImportError as error:
    raise FedplanError("keys need cryptography: pip install 'fedplan[flower]'") from error

HERE = ("localhost", "127.0.0.1")
"""Names of this machine."""
SITE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def make_keys(
    folder: Path, hosts: Sequence[str], sites: Sequence[str], days: int = 365
) -> list[Path]:
    """Write the missing keys and certificates of a federation, and return the new files.

    `hosts` are names or addresses of the server, `days` the validity of its certificate; that of
    the authority is ten times longer. Existing files are not overwritten. Raises FedplanError for
    invalid arguments, inconsistent files, or if a file cannot be written.
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
    """Raise FedplanError for a name that is not a valid folder name, or occurs twice."""
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
    """Write a self-signed CA certificate and its key, unless there is one; return the files.

    The key may be stored elsewhere later.
    """
    certificate_file, key_file = folder / "ca.crt", folder / "ca.key"
    if certificate_file.exists():
        return []
    for other in (key_file, folder / "server.crt"):
        if other.exists():
            raise FedplanError(f"{other} is without its ca.crt: restore that, or remove {other}")
    key, name = _new_key(), _common_name("fedplan authority")
    certificate = (
        _certificate_builder(key, key.public_key(), name, name, days=10 * days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, SHA384())
    )
    return [
        _write(key_file, _pem(key), private=True),
        _write(certificate_file, certificate.public_bytes(Encoding.PEM)),
    ]


def _make_server_keys(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Write the server's certificate, signed by the authority, and its key; return the files.

    An existing certificate is kept if it names all hosts; else FedplanError is raised.
    """
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
    subject = _common_name("fedplan server")
    certificate = (
        _certificate_builder(key, authority_key.public_key(), subject, authority.subject, days=days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(alternative_names, critical=False)
        .sign(authority_key, SHA384())
    )
    return [
        _write(key_file, _pem(key), private=True),
        _write(certificate_file, certificate.public_bytes(Encoding.PEM)),
    ]


def make_site_keys(folder: Path) -> list[Path]:
    """Write a site's missing keys, and return the new files.

    These are the node key pair, which authenticates the site, and the key that encrypts its state.
    Raises FedplanError if there is a public key without its private key.
    """
    private, public, state_key = folder / "node", folder / "node.pub", folder / "state.key"
    if public.exists() and not private.exists():
        raise FedplanError(f"{public} is without its node: restore that, or remove {public}")
    files = list[Path]()
    if not private.exists():
        secret = _new_key().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        files.append(_write(private, secret, private=True))
    if not public.exists():
        files.append(_write(public, _public_key(private)))
    if not state_key.exists():
        files.append(_write(state_key, os.urandom(32).hex().encode(), private=True))
    return files


def _write(path: Path, content: bytes, *, private: bool = False) -> Path:
    """Write a new file, with mode 600 if private; return its path. FedplanError if it exists."""
    make_private(path.parent)
    if path.exists():
        raise FedplanError(f"{path} exists already: keys are not overwritten")
    write_atomic(path, content, mode=0o600 if private else 0o644)
    return path


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _public_key(private: Path) -> bytes:
    """Return the OpenSSH public key of a private key file; FedplanError if it is invalid."""
    try:
        key = load_ssh_private_key(private.read_bytes(), None).public_key()
    except ValueError as error:
        raise FedplanError(f"{private} is not an OpenSSH key: {error}; remove it") from error
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def _read_authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return the authority's private key and certificate.

    Raises FedplanError if one is missing or invalid, or they do not belong together.
    """
    if not (folder / "ca.key").exists():
        raise FedplanError(f"{folder} has no ca.key, which signs server.crt: restore it")
    try:
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    except (ValueError, TypeError) as error:
        raise FedplanError(f"the authority of {folder} cannot be read: {error}") from error
    if (
        not isinstance(key, ec.EllipticCurvePrivateKey)
        or key.public_key() != authority.public_key()
    ):
        raise FedplanError(
            f"{folder} has a ca.key that does not belong to its ca.crt: restore that"
        )
    return key, authority


def _certificate_builder(
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    issuer: x509.Name,
    *,
    days: int,
) -> x509.CertificateBuilder:
    """Return a builder with subject, issuer, validity from now on, and key identifiers.

    `key` is the subject's key, `signer` the issuer's public key.
    """
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ between sites
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
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


def _general_name(host: str) -> x509.GeneralName:
    address = address_of(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _require_hosts_named(certificate: Path, hosts: Sequence[str]) -> None:
    """Raise FedplanError if an existing server certificate does not name all hosts."""
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
