# SPDX-License-Identifier: Apache-2.0
"""Write the generated table of versions.md: direct dependencies, lowest versions and licences.

Names and versions are those of pyproject.toml; licences are what the packages installed here say.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "versions.md"
START = "<!-- made by docs/versions.py: all that follows -->"
"""The page above this line is written by hand."""


def dependencies() -> dict[str, tuple[str, str]]:
    """Each direct dependency, with its versions and the extra that needs it first."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    found = dict[str, tuple[str, str]]()
    for extra, requirements in groups.items():
        for text in requirements if extra != "dev" else ():
            name, versions = re.fullmatch(r"([\w-]+)(.*)", text).groups()
            found.setdefault(name, (versions.replace(",", ", "), extra))
    return found


def licence(name: str) -> str:
    """What a package says of its licence: an SPDX expression, a classifier, or one line."""
    said = metadata(name)
    classifiers = [
        line.split(" :: ")[-1]
        for line in said.get_all("Classifier") or []
        if line.startswith("License :: ")
    ]
    text = said["License-Expression"] or ", ".join(classifiers) or said["License"]
    return str(text).splitlines()[0]


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "| package | versions | extra | licence |"
    yield "|---|---|---|---|"
    for name, (versions, extra) in dependencies().items():
        yield f"| {name} | {versions} | {extra} | {licence(name)} |"


if __name__ == "__main__":
    head = PAGE.read_text(encoding="utf-8").partition(START)[0]
    PAGE.write_text(head + START + "\n\n" + "\n".join(table()) + "\n", encoding="utf-8")
