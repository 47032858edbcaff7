# SPDX-License-Identifier: Apache-2.0
"""Places: words such as DATA that a path of a question begins with, and the folders they are here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from research.decide.question import QuestionError

SEED = "SEED"
"""In such a path: the number of the seed, where each seed has a file of its own."""


def places_of(words: Sequence[str]) -> dict[str, str]:
    """Places as a command line says them: `DATA=folder`."""
    found = dict[str, str]()
    for word in words:
        name, there, folder = word.partition("=")
        if not (there and folder and name.isidentifier() and name.isupper()):
            raise QuestionError(f"--place is {word!r}: say a word and a folder, as DATA=/my/data")
        found[name] = folder
    return found


def placed(said: Any, places: Mapping[str, str], seed: int) -> Any:
    """Values with their paths as they are here. Nothing but the first word of a path is a place."""
    if isinstance(said, dict):
        named = cast("dict[str, Any]", said)
        return {key: placed(each, places, seed) for key, each in named.items()}
    if isinstance(said, list):
        return [placed(each, places, seed) for each in cast("list[Any]", said)]
    return here(said, places, seed) if isinstance(said, str) else said


def here(text: str, places: Mapping[str, str], seed: int) -> str:
    """A path as it is here; what begins with no place stays as it is."""
    first, *rest = text.split("/")
    if first not in places:
        return text
    return "/".join([places[first], *(each.replace(SEED, str(seed)) for each in rest)])


def first_of(text: str) -> str:
    """The first word of a path."""
    return text.partition("/")[0]


def texts_in(said: Any) -> Iterator[str]:
    """All texts of some values."""
    if isinstance(said, str):
        yield said
    held = list(cast("dict[str, Any]", said).values()) if isinstance(said, dict) else said
    if isinstance(held, list):
        for each in cast("list[Any]", held):
            yield from texts_in(each)


def digest_of_path(path: Path) -> str:
    """The digest of a file, or of all files below a folder with their names."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(each for each in path.rglob("*") if each.is_file())
    lines = [f"{each.relative_to(path).as_posix()} {digest_of_path(each)}" for each in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
