# SPDX-License-Identifier: Apache-2.0
"""The list of offered studies, stored with a digest of the files that its verdicts depend on.

A verdict on a study needs torch and the outline of its model. While no file that it was computed
from has changed, the list is read in a tenth of the time. Decisions never use the stored list.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.runners.site import INBOX_FOLDER, Site
from fedplan.storage.files import write_atomic

ROWS_FILE = "inbox-rows.json"
"""File of the stored list, inside the site's state folder."""


def inbox_rows(site: Site) -> list[dict[str, str]]:
    """Return a row for each study that was offered to a site, as `Approvals.inbox_row` makes them.

    The rows are stored in the site's state folder, and read from there while the inbox, the
    approvals, the policy, the settings, the day, the versions of fedplan, torch and transformers
    and the local files of the studies' models stay the same. Rows are not stored if people sign,
    if studies may import code, or if a study cannot be read or checked.
    """
    file = Path(site.state, ROWS_FILE)
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["digest"] == _digest(site, stored["models"], stored["rows"]):
            return [dict(row) for row in stored["rows"]]
    before = _digest(site, (), ())
    from fedplan.sites.approvals import UNCHECKED, site_approvals  # imports torch

    approvals = site_approvals(site)
    rows = [approvals.inbox_row(digest) for digest in approvals.inbox.digests()]
    if approvals.policy.people or site.allow_packages:
        return rows
    with suppress(OSError, FedplanError):  # also of a user who may read there, but not write
        studies = [approvals.inbox.read_offer(row["study"]).study for row in rows]
        verdicts = [sentence for study in studies for sentence in approvals.violations(study)]
        is_checked = not any(sentence.startswith(UNCHECKED) for sentence in verdicts)
        if is_checked and before == _digest(site, (), ()):
            named = ((s.model.path, s.model.vision, s.model.text, s.model.bridge) for s in studies)
            models = sorted({str(Path(name).absolute()) for each in named for name in each if name})
            digest = _digest(site, models, rows)
            write_atomic(file, json.dumps({"digest": digest, "models": models, "rows": rows}))
    return rows


def _digest(site: Site, models: Iterable[str], rows: object) -> str:
    """Return the digest of rows, and of all that they depend on; `models`: files and folders."""
    state = Path(site.state)
    files = [state / INBOX_FOLDER, state / "approvals.jsonl", Path(site.policy), *map(Path, models)]
    facts = [
        *(rows, sys.version, *map(version, ("fedplan", "torch", "transformers"))),
        *(site.model_dump_json(), datetime.now(UTC).date().isoformat()),
        *(fact for file in files for fact in _facts(file)),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _facts(file: Path) -> Iterator[tuple[object, ...]]:
    """Yield name, size, times and inode of a file, or of each file in a folder; else its name."""
    for each in [file, *(sorted(file.iterdir()) if file.is_dir() else ())]:
        if not each.exists():
            yield (str(each),)
        elif each.is_file():
            s = os.stat(each)
            yield str(each), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev
