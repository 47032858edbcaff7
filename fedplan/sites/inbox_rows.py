# SPDX-License-Identifier: Apache-2.0
"""The list of offered studies, stored with a digest of everything that its verdicts depend on.

A verdict on a study needs torch and the outline of its model. While no file that it was computed
from has changed, the list is read in a tenth of the time. Decisions never use the stored list.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from fedplan.errors import FedplanError
from fedplan.naming import allow_imports
from fedplan.runners.site import INBOX_FOLDER, Site
from fedplan.storage.files import write_atomic

if TYPE_CHECKING:
    from fedplan.sites.approvals import Approvals

ROWS_FILE = "inbox-rows.json"
"""File of the stored list, inside the site's state folder."""
ENVIRONMENT = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "FEDPLAN_", "PYTHON", "XDG_", "HOME")
"""Beginnings of the environment variables that the list depends on."""
VIRTUAL = ("/proc/", "/sys/", "/dev/")
"""Files that describe the machine, and change all the time."""
RECENT_NANOSECONDS = 2 * 10**9
"""A file that changed so shortly before its use may change again without another time."""
MAX_FILES = 50_000
"""With more files than this the list is not stored."""

UNCHECKED = "the study cannot be checked"
"""Begins the violation of a study that cannot be built here."""

_recordings: list[set[str]] = []


def inbox_rows(site: Site) -> list[dict[str, str]]:
    """Return a row for each study that was offered to a site, as `Approvals.inbox_row` makes them.

    The rows are stored in the site's state folder, and read from there while nothing has changed.
    Never stored are rows of a site whose policy has people, who sign their approvals, and rows with
    a study that cannot be read or checked.
    """
    file = Path(site.state, ROWS_FILE)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["digest"] == _digest(site, stored["files"], stored["rows"]):
            return [dict(row) for row in stored["rows"]]
    start = time.time_ns()
    with _record_opened_files() as opened, allow_imports(site.allow_packages):
        from fedplan.sites.approvals import site_approvals  # imports torch

        approvals = site_approvals(site)
        rows = [approvals.inbox_row(digest) for digest in approvals.inbox.digests()]
        files = _files_used(site, opened)
        if not (approvals.policy.people or _is_any_unchecked(approvals, rows)):
            digest = _digest(site, files, rows)
            latest = max((_times(path) for path in files), default=0)
            if len(files) <= MAX_FILES and latest < start - RECENT_NANOSECONDS:
                # Another user may list the studies, who cannot write there.
                with suppress(OSError, FedplanError):
                    value = {"digest": digest, "files": files, "rows": rows}
                    write_atomic(file, json.dumps(value))
    return rows


def _is_any_unchecked(approvals: Approvals, rows: Iterable[dict[str, str]]) -> bool:
    """Return whether the study of a row cannot be read, or cannot be checked by the policy."""
    try:
        studies = [approvals.inbox.read_offer(row["study"]).study for row in rows]
    except FedplanError:
        return True
    verdicts = chain.from_iterable(map(approvals.violations, studies))
    return any(sentence.startswith(UNCHECKED) for sentence in verdicts)


def _files_used(site: Site, opened: Iterable[str]) -> list[str]:
    """Return the files and folders that rows depend on, sorted.

    These are the opened files, each with all others in its folder, imported modules and the folders
    to import from, and the site's own files.
    """
    state, files = Path(site.state), set[str]()
    for name in opened:
        path = Path(os.path.realpath(name))
        if path.suffix == ".pyc" or str(path).startswith(VIRTUAL) or not path.is_file():
            continue
        files.add(str(path))
        files.add(os.path.abspath(name))
        if state not in path.parents:
            for parent in {path.parent, Path(os.path.abspath(name)).parent}:
                files.update(str(each) for each in parent.iterdir())
    modules = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    files.update(os.path.abspath(name) for name in modules if name)
    files.update(os.path.abspath(name or ".") for name in sys.path)
    files.update(str(each) for each in (state / INBOX_FOLDER).iterdir())
    files |= {site.policy, str(state / "approvals.jsonl"), str(site.file)}
    files -= {str(state), str(state / ROWS_FILE)}
    return sorted(files)


def _times(path: str) -> int:
    """Return when a file's content or status last changed, in nanoseconds; 0 for a folder."""
    try:
        stat = os.stat(path)
    except OSError:
        return 0
    return 0 if os.path.isdir(path) else max(stat.st_mtime_ns, stat.st_ctime_ns)


def _digest(site: Site, files: Iterable[str], rows: Iterable[object]) -> str:
    """Return the digest of rows, and of the state of everything that they depend on."""
    facts: list[object] = [rows, sys.version, sys.path, os.getcwd(), site.model_dump_json()]
    facts += [
        datetime.now(UTC).date().isoformat(),
        sorted(os.listdir(Path(site.state, INBOX_FOLDER))),
    ]
    facts += [(k, v) for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)]
    for name in files:
        try:
            stat = os.stat(name)
        except OSError:
            facts.append((name, None))
            continue
        changed = stat.st_mtime_ns, stat.st_ctime_ns
        facts.append((name, stat.st_size, *changed, stat.st_ino, stat.st_dev))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@contextmanager
def _record_opened_files() -> Generator[set[str]]:
    """Context manager that gives the names of files that Python code opens in its body."""
    _add_hook()
    opened = set[str]()
    _recordings.append(opened)
    try:
        yield opened
    finally:
        _recordings.remove(opened)


@cache  # Python has no way to remove a hook
def _add_hook() -> None:
    sys.addaudithook(_note_opened_file)


def _note_opened_file(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _recordings:
        name = arguments[0]
        if isinstance(name, str | bytes | os.PathLike):
            for opened in _recordings:
                opened.add(os.fsdecode(name))
