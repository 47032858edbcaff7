# SPDX-License-Identifier: Apache-2.0
"""Lock file of an installation: exact versions and wheel hashes of the installed packages.

pip does not keep the hash of an installed package's wheel, so each wheel is downloaded again from
the index that pip uses, unless it is in the folder `wheels/` already.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from fedplan.errors import FedplanError

LOCK_FILE, WHEELS_FOLDER = "requirements.lock", "wheels"
"""Inside a site's folder: the lock file, and the wheels that it lists."""
SITE_REQUIREMENT = "fedplan[flower,privacy]"
"""The requirement of a site: fedplan with its network and privacy extras."""
LOCK_HEADER = """# Packages that fedplan ran with on Python {python}, with hashes for this platform.
# Install: pip install --no-index --find-links wheels --require-hashes -r {lock}
"""


def write_requirements_lock(folder: Path, requirement: str = SITE_REQUIREMENT) -> Path:
    """Write `folder/requirements.lock` with versions and wheel hashes, and return the path.

    `folder` must exist. Covers the installed `requirement` and all its dependencies. Missing wheels
    are downloaded with pip into `folder/wheels`. Raises FedplanError if a package is not installed,
    or pip finds no wheel of the installed version. An existing lock file is overwritten.
    """
    wheels = folder / WHEELS_FOLDER
    wheels.mkdir(exist_ok=True)
    versions = installed_versions(requirement)
    if missing := _missing_wheels(wheels, versions):
        _download(wheels, missing)  # all at once, then one by one those still missing
    for missing_one in _missing_wheels(wheels, versions):
        _download(wheels, [missing_one])
    if missing := _missing_wheels(wheels, versions):
        raise FedplanError(
            f"pip finds no wheel of {', '.join(missing)} for this machine: put the wheel into "
            f"{wheels}, or set pip to an index that has it, and run this command again"
        )
    text = LOCK_HEADER.format(python=".".join(map(str, sys.version_info[:2])), lock=LOCK_FILE)
    for name, version in versions.items():
        file = _find_wheel(wheels, name, version)
        assert file is not None
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        text += f"{name}=={version} --hash=sha256:{digest}\n"
    (folder / LOCK_FILE).write_text(text, encoding="utf-8")
    return folder / LOCK_FILE


def installed_versions(requirement: str) -> dict[str, str]:
    """Return installed versions by package name: a requirement and all its dependencies, sorted.

    Extras and environment markers are followed. Raises FedplanError if a package is not installed.
    """
    from packaging.requirements import Requirement

    versions, visited = dict[str, str](), set[tuple[str, str]]()
    queue = [Requirement(requirement)]
    while queue:
        current = queue.pop()
        for extra in ("", *sorted(current.extras)):
            if (key := (_normalize_name(current.name), extra)) in visited:
                continue
            visited.add(key)
            try:
                distribution = Distribution.from_name(current.name)
            except PackageNotFoundError as error:
                raise FedplanError(
                    f"{current.name} is not installed: run `pip install {current.name}`"
                ) from error
            versions[key[0]] = distribution.version
            required = [Requirement(text) for text in distribution.requires or ()]
            queue += [
                r for r in required if r.marker is None or r.marker.evaluate({"extra": extra})
            ]
    return dict(sorted(versions.items()))


def _download(wheels: Path, requirements: Sequence[str]) -> None:
    """Download wheels of `name==version` requirements with pip into a folder, ignoring failures."""
    options = ["download", "--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(wheels)]
    command = [sys.executable, "-m", "pip", *options, *requirements]
    subprocess.run(command, check=False, capture_output=True)  # noqa: S603


def _missing_wheels(wheels: Path, versions: Mapping[str, str]) -> list[str]:
    """Return "name==version" for each package without a wheel in the folder `wheels`."""
    return [
        f"{name}=={version}"
        for name, version in versions.items()
        if not _find_wheel(wheels, name, version)
    ]


def _find_wheel(wheels: Path, name: str, version: str) -> Path | None:
    """Return the wheel file of a package version in the folder `wheels`; None if there is none."""
    for file in sorted(wheels.glob("*.whl")):
        package, _, tags = file.stem.partition("-")
        if _normalize_name(package) == name and tags.startswith(f"{version}-"):
            return file
    return None


def _normalize_name(name: str) -> str:
    """Return a package name as PyPI normalizes it: lower case with single dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()
