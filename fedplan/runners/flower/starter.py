# SPDX-License-Identifier: Apache-2.0
"""Creation of the folders of a new federation and its sites, from templates."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

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
from fedplan.studies.section import SCHEMA_LINE

TEMPLATES = Path(__file__).parent / "templates"
PROXY = ("server/proxy.sh", "server/nginx.conf")
"""Files of the proxy; left out on loopback."""
SERVICE_FILES = ("units/", "Containerfile", "compose.yaml", ".dockerignore")
"""Files that keep a site in service; left out on loopback, which is for trials."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BLANK = re.compile(r"\{\{(\w+)\}\}")
"""A placeholder in a template, such as {{host}}."""


def new_federation(
    folder: Path,
    sites: Sequence[str],
    *,
    host: str = "localhost",
    port: int = 0,
    inner: int = 0,
    insecure: bool = False,
    keys: bool = True,
) -> None:
    """Write the folder of a new federation: files of the server, and of each site in FOLDER/sites.

    Sites reach `host` at `port`, where a proxy passes only their requests on to the port `inner`
    (0: the next port). `port` 0 follows from the name of the folder, between 9100 and 9998, so that
    two federations seldom have the same. `insecure` is for one machine only: no proxy, TLS or keys.
    A site's keys are made at the site. Raises FedplanError for invalid arguments, or if the folder
    is not empty or cannot be written.
    """
    folder = folder.absolute()
    port = port or 9100 + 2 * (crc32(_service_name(folder).encode()) % 450)
    inner = port if insecure else inner or port + 1
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedplanError(f"{folder} is not empty: name another folder")
    if (port == inner and not insecure) or not all(0 < each < 65536 for each in (port, inner)):
        raise FedplanError(
            f"the ports {port} and {inner} must differ and be below 65536: change --port or --inner"
        )
    if not sites:
        raise FedplanError("a federation needs sites: give --site NAME for each")
    require_sites(sites)
    require_hosts([host])
    if insecure and host not in HERE:
        raise FedplanError(f"--insecure is for this machine alone, as localhost, not as {host!r}")
    try:
        make_private(folder)
        if keys and not insecure:
            make_keys(folder, list(dict.fromkeys((host, *HERE))), [])
        values = _template_values(folder, sites, host, port, inner, insecure=insecure)
        files = _files_below(TEMPLATES / "federation")
        files |= _files_below(TEMPLATES / "loopback") if insecure else {}
        for name, template in files.items():
            is_left_out = insecure and (name in PROXY or name.startswith("units/"))
            if not name.startswith("site/") and not is_left_out:
                target = folder / name.replace("units/", f"units/{values['service']}-")
                _write_template(template, target, values)
        for site in sites:
            _write_site(folder, site, values["address"], insecure=insecure)
    except OSError as error:
        raise FedplanError(f"{folder} cannot be written: {error}") from error


def new_site(folder: Path, name: str) -> None:
    """Write the folder of another site of a federation, without keys; FedplanError if there."""
    folder = folder.absolute()
    require_sites([name])
    others = sorted(folder.glob(f"sites/*/{SITE}"))
    if not others:
        raise FedplanError(f"{folder} is not a federation's folder: it has no sites/*/{SITE}")
    site_folder = folder / "sites" / name
    if site_folder.exists():
        raise FedplanError(f"{site_folder} exists already: give another name")
    server = read_site(others[0]).server
    if server is None:
        raise FedplanError(f"{others[0]} has no server")
    _write_site(folder, name, server.address, insecure=not server.ca)


def _write_site(folder: Path, name: str, address: str, *, insecure: bool) -> None:
    """Write the folder FOLDER/sites/NAME of a site, with the federation's CA certificate."""
    values = {
        "site": name,
        "service": _service_name(folder, name),
        "address": address,
        "data": "data",
        "key": "" if insecure else 'encryption_key = "state.key" # encrypts the state folder',
        "keys": "" if insecure else 'ca = "ca.crt"\nnode_key = "node"',
        "system": PATH,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    stay = "" if insecure else _fill_template(TEMPLATES / "parts" / "stay.md", values)
    values |= {"stay": stay.rstrip("\n")}
    site_folder = folder / "sites" / name
    for file, template in _files_below(TEMPLATES / "federation" / "site").items():
        if not (insecure and file.startswith(SERVICE_FILES)):
            target = site_folder / file.replace("units/site", f"units/{values['service']}")
            _write_template(template, target, values)
    for file in ("keep.sh", "environment.sh"):
        _write_template(TEMPLATES / "federation" / file, site_folder / file, {})
    if (folder / "ca.crt").exists():
        shutil.copy(folder / "ca.crt", site_folder / "ca.crt")


def _service_name(folder: Path, site: str = "") -> str:
    """Return the name of the folder of a federation or site in /srv; its units begin with it."""
    name = "-".join(filter(None, (folder.name.lower().removeprefix("fedplan-"), site.lower())))
    return f"fedplan-{re.sub('[^a-z0-9_-]', '-', name)}"


def _template_values(
    folder: Path, sites: Sequence[str], host: str, port: int, inner: int, *, insecure: bool
) -> Mapping[str, str]:
    """Return the texts for the placeholders in the server's templates, by placeholder."""
    host = "127.0.0.1" if insecure else host
    # The proxy listens on all interfaces, or on loopback if that is the host.
    address = address_of("127.0.0.1" if host == "localhost" else host)
    if address is None or address.version == 4:
        listen = f"{address}:{port}" if address and address.is_loopback else str(port)
    else:
        listen = f"[{address if address.is_loopback else '::'}]:{port}"
    tls = 'ca = "../ca.crt"\ncertificate = "../server.crt"\nkey = "../server.key"'
    return {
        "service": _service_name(folder),
        "system": PATH,
        "host": host,
        "address": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "listen": listen,
        "port": str(port),
        "inner": str(inner),
        "tls": "" if insecure else tls,
        "count": str(len(sites)),
        "first": sites[0],
        "names": ", ".join(f'"{name}"' for name in sites),
        "min_updates": str(len(sites) - 1 if len(sites) > 2 else len(sites)),
        "registers": "\n".join(
            f"       fedplan server register {name} {name}.pub" for name in sites
        ),
        "starts": "\n".join(f"       ./keep.sh sites/{name}/serve.sh" for name in sites),
    }


def _files_below(folder: Path) -> dict[str, Path]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and "__pycache__" not in p.parts)
    return {file.relative_to(folder).as_posix(): file for file in files}


def _write_template(template: Path, target: Path, values: Mapping[str, str]) -> None:
    """Write a template over `target`, in folders for this user; a script is executable."""
    make_private(target.parent)
    text = _fill_template(template, values)
    target.write_text(text, encoding="utf-8")
    target.chmod(0o755 if text.startswith("#!") else 0o644)


def _fill_template(template: Path, values: Mapping[str, str]) -> str:
    values = {**values, "schema": SCHEMA_LINE.format(template.stem)}
    return BLANK.sub(lambda blank: values[blank[1]], template.read_text(encoding="utf-8"))
