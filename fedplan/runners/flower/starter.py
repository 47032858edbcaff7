# SPDX-License-Identifier: Apache-2.0
"""Starters: folders with all that a federation and its sites are started from."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.runners.flower.keys import (
    HERE,
    address_of,
    make_keys,
    make_private,
    require_hosts,
    require_sites,
)
from fedplan.runners.site import SITE, read_site

TEMPLATES = Path(__file__).parent / "templates"
PROXY = ("server/proxy.sh", "server/nginx.conf")
STAYING = ("units/", "Containerfile", "compose.yaml", ".dockerignore")
"""What a site stays in service by: not on loopback, which is for trying."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BLANK = re.compile(r"\{\{(\w+)\}\}")


def new_federation(
    folder: Path,
    sites: Sequence[str],
    *,
    host: str = "localhost",
    port: int = 9100,
    inner: int = 0,
    insecure: bool = False,
    keys: bool = True,
) -> None:
    """Write the folder of a federation: what its server runs, and what each site is given.

    Sites reach `host` at `port`, where a proxy lets only their own requests through to `inner`
    (0 is the next port). `insecure` is for one machine alone: no proxy, no TLS, no keys. The keys
    of a site are made at the site.
    """
    folder, inner = folder.absolute(), port if insecure else inner or port + 1
    _require_folder(folder)
    _require_ports(port, inner, insecure=insecure)
    if not sites:
        raise FedplanError("a federation has sites: say --site NAME for each")
    require_sites(sites)
    require_hosts([host])
    if insecure and host not in HERE:
        raise FedplanError(f"--insecure is for this machine alone, as localhost, not as {host!r}")
    try:
        make_private(folder)
        if keys and not insecure:
            make_keys(folder, list(dict.fromkeys((host, *HERE))), [])
        said = _said(folder, sites, host, port, inner, insecure=insecure)
        for name, file in _files(insecure).items():
            _fill(file, folder / name, said)
        for site in sites:
            _add(folder, site, said["address"], insecure=insecure)
    except OSError as error:
        raise FedplanError(f"{folder} cannot be written: {error}") from error


def new_site(folder: Path, name: str) -> None:
    """Write the folder of one more site of a federation, below its `sites`."""
    folder = folder.absolute()
    require_sites([name])
    others = sorted(folder.glob(f"sites/*/{SITE}"))
    if not others:
        raise FedplanError(f"{folder} is no folder of a federation: it has no sites/*/{SITE}")
    place = folder / "sites" / name
    if place.exists():
        raise FedplanError(f"{place} is there already: name another site")
    server = read_site(others[0]).server
    if server is None:
        raise FedplanError(f"{others[0]} does not say its server")
    _add(folder, name, server.address, insecure=not server.ca)


def _add(folder: Path, name: str, address: str, *, insecure: bool) -> None:
    """Write what a site is given, but for its keys."""
    said = {
        "site": name,
        "address": address,
        "data": "data",
        "key": "" if insecure else 'key = "home.key" # seals the home',
        "keys": "" if insecure else 'ca = "ca.crt"\nnode = "node"',
        "system": PATH,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    stay = "" if insecure else _filled(TEMPLATES / "parts" / "stay.md", said)
    said = {**said, "stay": stay.rstrip("\n")}
    place = folder / "sites" / name
    for file, source in _below(TEMPLATES / "federation" / "site").items():
        if not (insecure and file.startswith(STAYING)):
            _fill(source, place / file, said)
    for file in ("keep.sh", "environment.sh"):
        _fill(TEMPLATES / "federation" / file, place / file, {})
    if (folder / "ca.crt").exists():
        shutil.copy(folder / "ca.crt", place / "ca.crt")


def _require_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedplanError(f"{folder} is not empty: name another folder")
    # the path stands in scripts, in units and in a TOML file, each with quotes of its own
    if not str(folder).isprintable() or set(str(folder)) & set("\"'\\%$`"):
        raise FedplanError(f"{str(folder)!r} has a quote or another sign of shells: name another")


def _require_ports(port: int, inner: int, *, insecure: bool) -> None:
    if (port == inner and not insecure) or not all(0 < each < 65536 for each in (port, inner)):
        raise FedplanError(f"the ports {port} and {inner} must differ, and be below 65536")


def _said(
    folder: Path, sites: Sequence[str], host: str, port: int, inner: int, *, insecure: bool
) -> Mapping[str, str]:
    """The words that fill the blanks."""
    host = "127.0.0.1" if insecure else host
    tls = 'ca = "../ca.crt"\ncertificate = "../server.crt"\nkey = "../server.key"'
    return {
        "folder": str(folder),
        "path": f"{Path(sys.executable).parent}:{PATH}",
        "host": host,
        "address": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "listen": _listened(host, port),
        "port": str(port),
        "inner": str(inner),
        "tls": "" if insecure else tls,
        "count": str(len(sites)),
        "first": sites[0],
        "names": ", ".join(f'"{name}"' for name in sites),
        "quorum": str(len(sites) - 1 if len(sites) > 2 else len(sites)),
        "registers": "\n".join(
            f"       fedplan server register {name} {name}.pub" for name in sites
        ),
        "starts": "\n".join(f"       ./keep.sh sites/{name}/serve.sh" for name in sites),
    }


def _listened(host: str, port: int) -> str:
    """Where the proxy listens: on all of the machine, unless the host is the machine itself."""
    own = address_of("127.0.0.1" if host == "localhost" else host)
    if own is None or own.version == 4:
        return f"{own}:{port}" if own and own.is_loopback else str(port)
    return f"[{own if own.is_loopback else '::'}]:{port}"


def _files(insecure: bool) -> dict[str, Path]:
    """The files of a federation by their places; on loopback, some are others and some are not."""
    found = _below(TEMPLATES / "federation")
    found = {name: file for name, file in found.items() if not name.startswith("site/")}
    if insecure:
        found = {n: f for n, f in found.items() if n not in PROXY and not n.startswith("units/")}
        found |= _below(TEMPLATES / "loopback")
    return found


def _below(folder: Path) -> dict[str, Path]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and "__pycache__" not in p.parts)
    return {file.relative_to(folder).as_posix(): file for file in files}


def _fill(file: Path, target: Path, said: Mapping[str, str]) -> None:
    make_private(target.parent)
    text = _filled(file, said)
    target.write_text(text, encoding="utf-8")
    target.chmod(0o755 if text.startswith("#!") else 0o644)


def _filled(file: Path, said: Mapping[str, str]) -> str:
    return BLANK.sub(lambda blank: said[blank[1]], file.read_text(encoding="utf-8"))
