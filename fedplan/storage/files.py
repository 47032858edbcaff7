# SPDX-License-Identifier: Apache-2.0
"""Small files: atomic writes, synced folders, safe names, and failpoints that test crashes."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import signal
import time
import unicodedata
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from itertools import takewhile
from pathlib import Path
from secrets import token_hex
from urllib.parse import quote

from safetensors import SafetensorError

from fedplan.errors import FedplanError, StoreError
from fedplan.storage.locks import sync_folder


@contextmanager
def wrap_disk_errors(problem: str, remedy: str) -> Generator[None]:
    """Raise an OSError or SafetensorError of the body as StoreError "problem: error; remedy"."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{problem}: {error}; {remedy}") from error


STALE = 3600.0
"""Age in seconds after which a temporary file is a leftover of a killed process."""


MAX_UNSYNCED = 5
"""The most folders within one another that a run makes at a time."""


_CHECKPOINT = re.compile(r"(0|[1-9][0-9]{0,17})\.json", re.ASCII)


def checkpoint_numbers(folder: Path) -> list[int]:
    """Return the numbers of all manifests in the folder of a store, valid or not, newest first."""
    try:
        names = [_CHECKPOINT.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    return sorted((int(name[1]) for name in names if name), reverse=True)


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Create a folder and its missing parents with mode 0700, each synced to disk.

    An existing folder is not changed; with `private`, others lose access to it and to the files and
    folders directly in it, as an older version or its owner has left them. Raises StoreError if a
    folder cannot be created, or is not this user's to change.
    """
    with wrap_disk_errors(f"{folder} cannot be created", "name a folder that you may write to"):
        parents = (folder, *folder.parents)
        missing = list(takewhile(lambda path: not path.exists(), parents))
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
            sync_folder(path.parent)
        if not missing and not any(folder.iterdir()):
            # A process that was killed may have made it, and not have synced its names.
            for path in list(folder.parents)[:MAX_UNSYNCED]:
                with suppress(PermissionError):
                    sync_folder(path)
        folder.mkdir(exist_ok=True)
    if private:
        with wrap_disk_errors(f"others may read {folder}", "name a folder of your own"):
            for path in (folder, *folder.iterdir()):
                mode = path.lstat().st_mode
                if mode & 0o077 and not path.is_symlink():
                    path.chmod(mode & 0o700)


PRIVATE, SHARED = 0o600, 0o644
"""Modes of files: for their owner alone, as all files of runs and sites; for everybody to read."""


def write_atomic(file: Path, content: str | bytes, *, mode: int = PRIVATE) -> None:
    """Create or replace a file atomically: write a temporary file, sync it, rename it.

    `mode` is the permission of the new file, before the umask. The folder must exist. Also removes
    temporary files of this file that killed processes left over an hour ago. Raises StoreError if
    the path is not a regular file or cannot be written; the file is then the old one or, if only
    the folder could not be synced, the new one.
    """
    data = content.encode() if isinstance(content, str) else content
    if not file.name or (file.exists() and not file.is_file()):
        problem = "it is a folder" if file.is_dir() else "it is not a regular file"
        raise StoreError(f"{file} cannot be written: {problem}; name a file")
    # A random name, so that nobody can have put a symbolic link there.
    temporary = file.with_name(f".{file.name}.{token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(temporary, "wb", opener=lambda name, _: os.open(name, flags, mode)) as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
        for name in os.listdir(file.parent):
            if name.startswith(f".{file.name}.") and name.endswith(".tmp"):
                with suppress(OSError):
                    leftover = file.with_name(name)
                    if time.time() - leftover.lstat().st_mtime > STALE:
                        leftover.unlink()
        sync_folder(file.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        remedy = "free space, or check that you may write there, then start again"
        if not file.parent.is_dir():
            remedy = f"there is no folder {file.parent}: make it, or name another"
        raise StoreError(f"{file} cannot be written: {error}; {remedy}") from error


@contextmanager
def write_folder(folder: Path) -> Generator[Path]:
    """Yield a new folder for the body to fill, which then becomes `folder`, atomically.

    `folder` must be missing or empty. All files are synced before the rename; if the body raises,
    they are removed. Also removes what killed processes left over an hour ago. Raises StoreError if
    the folder cannot be written.
    """
    target = folder.resolve()
    temporary = target.with_name(f".{target.name}.{token_hex(8)}.tmp")
    problem, remedy = f"{folder} cannot be written", "name a new folder where you may write"
    with wrap_disk_errors(problem, remedy):
        temporary.mkdir(parents=True)
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        for leftover in target.parent.glob(f".{escape(target.name)}.*.tmp"):
            if time.time() - leftover.lstat().st_mtime > STALE:
                shutil.rmtree(leftover, ignore_errors=True)
    try:
        yield temporary
        with wrap_disk_errors(problem, remedy):
            for path in (*temporary.rglob("*"), temporary):
                sync_folder(path)
            temporary.replace(target)
            sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_if_changed(file: Path, content: str | bytes) -> None:
    """Call `write_atomic` if the file is missing or its content differs; else touch nothing."""
    data = content.encode() if isinstance(content, str) else content
    if not file.is_file() or file.read_bytes() != data:
        write_atomic(file, data)


def open_private(file: str, flags: int) -> int:
    """Opener for `open`: a file that it creates is readable by its owner alone."""
    return os.open(file, flags, PRIVATE)


def file_size_and_digest(file: Path) -> list[int | str]:
    """Return `[size in bytes, SHA-256 as hex]` of a file, as a list for JSON."""
    with file.open("rb") as stream:
        return [
            os.fstat(stream.fileno()).st_size,
            hashlib.file_digest(stream, "sha256").hexdigest(),
        ]


VARIABLE = "FEDPLAN_FAILPOINT"
POINTS = (
    *("store.begun", "store.tensors_written", "store.tensors_synced", "store.tensors_renamed"),
    *("store.manifest_written", "store.manifest_renamed", "store.folder_synced", "store.pruned"),
    *("journal.before_commit", "journal.after_commit"),
    *("log.begun", "log.written", "log.synced", "log.head_written"),
    *("secagg.roster", "secagg.encrypted_shares", "secagg.survivors", "secagg.signed"),
    "secagg.unmask_shares",
    "round.answered",
    "round.pulled",
    "round.before_close",
    "round.ledger_written",
    "round.before_commit",
    "round.committed",
)
"""Names of all failpoints."""

_FAULTS = {"raise": errno.EIO, "enospc": errno.ENOSPC}
_SYNTAX = re.compile(r"(?P<name>[a-z_.]+):(?P<action>kill|raise|enospc)@(?P<time>[1-9][0-9]{0,8})")
_reached = Counter[str]()


def failpoint(name: str) -> None:
    """Kill this process (SIGKILL) or raise OSError if FEDPLAN_FAILPOINT selects this point.

    Does nothing without the variable; with it, counts how often each point is reached. Raises
    FedplanError if `name` is not in POINTS, or if the variable is malformed.
    """
    if name not in POINTS:
        raise FedplanError(f"there is no failpoint {name!r}: add it to files.POINTS")
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    point, action, count = _parse_setting(setting)
    _reached[name] += 1
    if point == name and _reached[name] == count:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(_FAULTS[action], f"{os.strerror(_FAULTS[action])} (failpoint {name})")


def reset_failpoints() -> None:
    """Set all counts to zero, for tests that arm several points in one process."""
    _reached.clear()


@cache
def _parse_setting(setting: str) -> tuple[str, str, int]:
    """Return (point, action, count) of a setting like `store.begun:kill@1`.

    Raises FedplanError if the setting is malformed or its point is not in POINTS.
    """
    match = _SYNTAX.fullmatch(setting)
    if match is None or match["name"] not in POINTS:
        raise FedplanError(
            f"{VARIABLE} is {setting!r}: write a point, an action and a time, such as "
            f"{POINTS[0]}:kill@1; actions are kill, raise and enospc, points {', '.join(POINTS)}"
        )
    return match["name"], match["action"], int(match["time"])


STUDY = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?", re.ASCII)
"""Valid names of studies."""
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.ASCII | re.IGNORECASE)
"""Device names on Windows, which no folder may have."""
LONGEST = 200
"""Longest folder name in characters: file systems allow 255 bytes, and suffixes are added."""


def safe_folder_name(name: str) -> str:
    """Return a valid folder name for any text; different texts get different folder names.

    Special characters are percent-encoded. A result over 200 characters is cut and gets a digest.
    """
    quoted = quote(name, safe=" ", errors="surrogatepass") or "%"
    if quoted.startswith("."):
        quoted = quoted.replace(".", "%2E", 1)
    if len(quoted) > LONGEST:
        # no quoted name has "%~": after its "%" come two digits
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        quoted = f"{quoted[:100]}%~{digest[:40]}"
    return quoted


def validate_study_name(name: str) -> str:
    """Return `name` unchanged; ValueError if it is not a valid folder name on every system."""
    if not STUDY.fullmatch(name) or RESERVED.fullmatch(name):
        raise ValueError(
            f"a study cannot be called {name[:80]!r}: take letters, digits, '-', '_' and '.', at "
            "most 64, no dot or '-' at the start, no dot at the end, and no device such as 'nul'"
        )
    return name


def validate_client_names(names: list[str]) -> list[str]:
    """Return `names` unchanged; ValueError if one is invalid or two are equal.

    A name has 1 to 200 printable characters without space at the ends. Names are equal if they
    differ only in case or in compatible Unicode characters (NFKC).
    """
    for name in names:
        if not name or not name.isprintable() or len(name) > LONGEST or name != name.strip():
            raise ValueError(
                f"a client cannot be called {name[:80]!r}: take 1 to {LONGEST} printable "
                "characters, no space at its ends"
            )
    normalized_names = set[str]()
    for name in names:
        normalized = unicodedata.normalize("NFKC", name).casefold()
        if normalized in normalized_names:
            raise ValueError(f"a name is listed twice: {name!r}")
        normalized_names.add(normalized)
    return names
