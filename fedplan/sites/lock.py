# SPDX-License-Identifier: Apache-2.0
"""Locks of an installation: the wheels of what is installed here, each with its hash.

Of an installed package the hash of its wheel is not kept: the wheel is had again by its version,
from the index that pip is set to, or from `wheels/` if it lies there already.
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

LOCK, WHEELS = "requirements.lock", "wheels"
"""In a site's folder: what is installed, and the wheels of it."""
WHOLE = "fedplan[flower,privacy]"
"""What a site needs: what it takes part by, and what hides its rows."""
HEAD = """# What fedplan ran with on Python {python}, by hashes, for machines of this kind.
# Install it: pip install --no-index --find-links wheels --require-hashes -r {lock}
"""


def write_lock(folder: Path, asked: str = WHOLE) -> Path:
    """Write the lock of what a requirement has installed here, with the wheels beside it."""
    wheels = folder / WHEELS
    wheels.mkdir(exist_ok=True)
    versions = installed_for(asked)
    _gather(wheels, versions)
    if lacking := _lacking(wheels, versions):
        raise FedplanError(
            f"pip finds no wheel of {', '.join(lacking)} for this machine: put it into {wheels}, "
            "or set pip to an index that has it, and call this again"
        )
    head = HEAD.format(python=".".join(map(str, sys.version_info[:2])), lock=LOCK)
    lines = [_line(wheels, name, version) for name, version in versions.items()]
    (folder / LOCK).write_text(head + "".join(lines), encoding="utf-8")
    return folder / LOCK


def installed_for(asked: str) -> dict[str, str]:
    """The versions of a requirement, and of all that it requires here, by name."""
    from packaging.requirements import Requirement

    found, seen = dict[str, str](), set[tuple[str, str]]()
    left = [Requirement(asked)]
    while left:
        each = left.pop()
        for extra in ("", *sorted(each.extras)):
            if (key := (_plain(each.name), extra)) in seen:
                continue
            seen.add(key)
            held = _distribution(each.name)
            found[key[0]] = held.version
            said = [Requirement(text) for text in held.requires or ()]
            left += [r for r in said if r.marker is None or r.marker.evaluate({"extra": extra})]
    return dict(sorted(found.items()))


def _distribution(name: str) -> Distribution:
    try:
        return Distribution.from_name(name)
    except PackageNotFoundError as error:
        raise FedplanError(f"{name} is not installed here: pip install {name}") from error


def _gather(wheels: Path, versions: Mapping[str, str]) -> None:
    """Have pip fetch what is lacking: all at once, and by themselves if one of them is nowhere."""
    if lacking := _lacking(wheels, versions):
        _download(wheels, lacking)
    for each in _lacking(wheels, versions):
        _download(wheels, [each])


def _download(wheels: Path, asked: Sequence[str]) -> None:
    words = ["download", "--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(wheels)]
    command = [sys.executable, "-m", "pip", *words, *asked]
    subprocess.run(command, check=False, capture_output=True)  # noqa: S603


def _lacking(wheels: Path, versions: Mapping[str, str]) -> list[str]:
    return [f"{n}=={version}" for n, version in versions.items() if not _wheel(wheels, n, version)]


def _line(wheels: Path, name: str, version: str) -> str:
    file = _wheel(wheels, name, version)
    assert file is not None
    with file.open("rb") as opened:
        return (
            f"{name}=={version} --hash=sha256:{hashlib.file_digest(opened, 'sha256').hexdigest()}\n"
        )


def _wheel(wheels: Path, name: str, version: str) -> Path | None:
    """The wheel of a version in a folder."""
    for file in sorted(wheels.glob("*.whl")):
        held, _, rest = file.stem.partition("-")
        if _plain(held) == name and rest.startswith(f"{version}-"):
            return file
    return None


def _plain(name: str) -> str:
    """A package's name as an index knows it."""
    return re.sub(r"[-_.]+", "-", name).lower()
