# SPDX-License-Identifier: Apache-2.0
"""Keys: the authority of a federation, its server's certificate, and the keys of each site."""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.storage.files import put_file

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
    raise FedplanError("keys take cryptography: pip install 'fedplan[flower]'") from error

HERE = ("localhost", "127.0.0.1")
SITE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def make_keys(
    folder: Path, hosts: Sequence[str], sites: Sequence[str], days: int = 365
) -> list[Path]:
    """Write what a federation lacks of its keys, and say which files are new.

    What is there is never overwritten: an authority signs again, and a site goes on with its keys.
    The authority lasts ten times the days of the server's certificate.
    """
    require_sites(sites)
    require_hosts(hosts)
    if not 0 < days <= 3650:
        raise FedplanError(f"a certificate lasts from 1 day to 3650, not {days}")
    try:
        made = _authority(folder, days) + _server(folder, hosts, days)
        return made + [path for name in sites for path in make_site_keys(folder / "sites" / name)]
    except OSError as error:
        raise FedplanError(f"keys cannot be written: {error}; name another folder") from error


def require_sites(sites: Sequence[str]) -> None:
    """Refuse a name that cannot be a folder everywhere, or is there twice."""
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
    """Refuse what is neither the name of a machine nor an address."""
    for host in hosts:
        if address_of(host) is None and not HOST.fullmatch(host):
            raise FedplanError(
                f"{host!r} is no host: say a name or an address, without https:// and port"
            )


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host as an IP address; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def make_private(folder: Path) -> None:
    """Make a folder and what is lacking above it, for its owner alone."""
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            part.mkdir(mode=0o700)


def _authority(folder: Path, days: int) -> list[Path]:
    """The certificate that all trust, signed by itself. Its key may be kept elsewhere."""
    own, key = folder / "ca.crt", folder / "ca.key"
    if own.exists():
        return []
    for other in (key, folder / "server.crt"):
        if other.exists():
            raise FedplanError(f"{other} is without its ca.crt: bring that back, or remove {other}")
    secret, name = _new_key(), _called("fedplan authority")
    made = (
        _begun(secret, secret.public_key(), name, name, days=10 * days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(secret, SHA384())
    )
    return [_write(key, _pem(secret), private=True), _write(own, made.public_bytes(Encoding.PEM))]


def _server(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """The certificate by which the sites know their server."""
    own, key = folder / "server.crt", folder / "server.key"
    if own.exists() != key.exists():
        there, other = (own, key.name) if own.exists() else (key, own.name)
        raise FedplanError(f"{there} is without its {other}: bring that back, or remove {there}")
    if own.exists():
        _require_named(own, hosts)
        return []
    signer, authority = _signer(folder)
    secret = _new_key()
    # The proxy and the operator reach the server from its own machine.
    names = dict.fromkeys((*hosts, *HERE))
    named = x509.SubjectAlternativeName([_named(host) for host in names])
    made = (
        _begun(secret, signer.public_key(), _called("fedplan server"), authority.subject, days=days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(named, critical=False)
        .sign(signer, SHA384())
    )
    return [_write(key, _pem(secret), private=True), _write(own, made.public_bytes(Encoding.PEM))]


def make_site_keys(folder: Path) -> list[Path]:
    """Make what a site lacks: the key by which the server knows it, and the key of its home."""
    own, public, home = folder / "node", folder / "node.pub", folder / "home.key"
    if public.exists() and not own.exists():
        raise FedplanError(f"{public} is without its node: bring that back, or remove {public}")
    made = list[Path]()
    if not own.exists():
        secret = _new_key().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        made.append(_write(own, secret, private=True))
    if not public.exists():
        made.append(_write(public, _public(own)))
    if not home.exists():
        made.append(_write(home, os.urandom(32).hex().encode(), private=True))
    return made


def _write(path: Path, content: bytes, *, private: bool = False) -> Path:
    """Write a file that is not there yet; what is private is so from the start."""
    make_private(path.parent)
    if path.exists():
        raise FedplanError(f"{path} is there already: nothing is written over a key")
    put_file(path, content, mode=0o600 if private else 0o644)
    return path


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _public(private: Path) -> bytes:
    try:
        key = load_ssh_private_key(private.read_bytes(), None).public_key()
    except ValueError as error:
        raise FedplanError(f"{private} is no OpenSSH key: {error}; remove it") from error
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def _signer(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The authority's key and certificate, if they belong together."""
    if not (folder / "ca.key").exists():
        raise FedplanError(f"{folder} lacks ca.key, which signs server.crt: bring it back")
    try:
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    except (ValueError, TypeError) as error:
        raise FedplanError(f"the authority of {folder} cannot be read: {error}") from error
    if (
        not isinstance(key, ec.EllipticCurvePrivateKey)
        or key.public_key() != authority.public_key()
    ):
        raise FedplanError(f"{folder} has a ca.key that is not that of its ca.crt: bring that back")
    return key, authority


def _begun(
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    issuer: x509.Name,
    *,
    days: int,
) -> x509.CertificateBuilder:
    """What every certificate says: whose it is, who signs it, from when to when."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # the clocks of sites differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _called(name: str) -> x509.Name:
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


def _named(host: str) -> x509.GeneralName:
    address = address_of(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _require_named(certificate: Path, hosts: Sequence[str]) -> None:
    """Refuse a host that a server's certificate, which is not made anew, does not name."""
    try:
        made = x509.load_pem_x509_certificate(certificate.read_bytes())
        found = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise FedplanError(
            f"{certificate} is no certificate of a server: remove it and server.key to have them "
            "made anew"
        ) from error
    if missing := [host for host in hosts if _named(host) not in list(found)]:
        raise FedplanError(
            f"{certificate} does not name {missing[0]}: remove it and server.key to have it made "
            "anew for all hosts"
        )
