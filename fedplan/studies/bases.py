# SPDX-License-Identifier: Apache-2.0
"""Bases that were digested before: a large frozen model on this disk is hashed once, not each time.

What is remembered of a folder counts for the very files that it was made from, by their numbers,
sizes and times, and for values in memory that still have the checksums that were then taken. A file
that was written since has another time of change, which nobody sets by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from torch import nn

from fedplan.errors import FedplanError
from fedplan.federation.origin import Base, base_of
from fedplan.models.params import Params
from fedplan.models.schema import written
from fedplan.storage.files import put_file
from fedplan.tensors.named import Tensors

LEAST = 2**28
"""Bytes that rest from which on it is worth a file."""
MADE_BY = ("fedplan", "torch", "transformers")


def base_in(folder: Path, model: nn.Module, params: Params, start: Tensors) -> Base:
    """The base that a model is, which was loaded from the files of a folder."""
    resting = sum(p.nbytes for p in params if p.key not in start)
    if resting < LEAST or not folder.is_dir():
        return base_of(model, params, start)
    file = _place() / f"{_named(folder, params)}.json"
    known = _known(file)
    base = base_of(model, params, start, known)
    made = {key: (total, base.digests[key]) for key, total in base.sums.items()}
    if made != known:
        # Who may not write there digests it again next time.
        with suppress(OSError, FedplanError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            put_file(file, json.dumps(made), mode=0o600)
    return base


def _place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedplan" / "bases"


def _named(folder: Path, params: Params) -> str:
    """A name for the files of a folder as they now are, and for what is made of them."""
    files = sorted(each for each in folder.resolve().rglob("*") if each.is_file())
    facts = [(str(each), *_facts(each.stat())) for each in files]
    said = [facts, written(params), [version(name) for name in MADE_BY]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _facts(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _known(file: Path) -> dict[str, tuple[int, str]]:
    """The checksum and the digest of each param; nothing, if they cannot be read."""
    try:
        said: Any = json.loads(file.read_text(encoding="utf-8"))
        held = cast("dict[Any, Any]", said)
        return {str(key): (int(total), str(whole)) for key, (total, whole) in held.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
