# SPDX-License-Identifier: Apache-2.0
"""Proof that a question came before its runs: what the log of the repository has of its files."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

from research.decide.question import QuestionError, QuestionFile, digest_of


def commit_of(asked: QuestionFile) -> str:
    """The commit that a question stands in as it is now; one that is in none is refused."""
    folder = asked.files[0].parent
    names = [str(each.resolve()) for each in asked.files]
    # A repository without any commit has no log, and that is an error to git.
    commit = (_said(folder, "log", "-1", "--format=%H", "--", *names) or b"").decode().strip()
    if not commit or digest_at(asked.files, commit) != asked.digest:
        raise QuestionError(
            f"{asked.files[0]} is not committed as it stands: commit it and its study, then run"
        )
    return commit


@cache
def digest_at(files: tuple[Path, ...], commit: str) -> str:
    """The digest of files as a commit has them; nothing if it lacks one, or is not in the log."""
    folder = files[0].parent
    if not _in_log(folder, commit):
        return ""
    contents = [_shown(folder, commit, each) for each in files]
    return digest_of([c for c in contents if c is not None]) if None not in contents else ""


@cache
def time_of(folder: Path, commit: str) -> int:
    """When a commit was made, in seconds; it is no older than anything that it stands upon."""
    return max(map(int, _git(folder, "log", "--format=%ct", commit).split()))


def _in_log(folder: Path, commit: str) -> bool:
    return _said(folder, "merge-base", "--is-ancestor", commit, "HEAD") is not None


def _shown(folder: Path, commit: str, file: Path) -> bytes | None:
    top = Path(_git(folder, "rev-parse", "--show-toplevel").decode().strip())
    name = file.resolve().relative_to(top.resolve()).as_posix()
    old = re.sub("^research/", "lab/", name)  # the folder's name before it was moved
    now = _said(folder, "show", f"{commit}:{name}")
    return now if now is not None or old == name else _said(folder, "show", f"{commit}:{old}")


def _git(folder: Path, *words: str) -> bytes:
    found = _said(folder, *words)
    if found is None:
        raise QuestionError(f"{folder} is in no repository: a question is shown by its log")
    return found


def _said(folder: Path, *words: str) -> bytes | None:
    """What git says; nothing if it refuses."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None
