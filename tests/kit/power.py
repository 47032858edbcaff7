# SPDX-License-Identifier: Apache-2.0
"""A disk that loses power: of each file and folder it knows the content that was synced."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from random import Random
from types import FrameType
from typing import ClassVar

_open = open
"""What opens files, also while a test watches `open`."""


class PowerDisk:
    """What would be on disk if the power failed now, by the calls of `os.fsync` so far.

    `contents`: synced bytes of files by inode. `names`: synced entries of folders by inode, each
    with its inode. `cut` rewrites a folder as a power cut leaves it. `seen`: the lines of code that
    have synced, of all disks; those in `removed` do not sync.
    """

    seen: ClassVar[set[str]] = set()
    removed: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        self.contents = dict[int, bytes]()
        self.names = dict[int, dict[str, int]]()

    def settle(self, folder: Path) -> None:
        """Take all that is in a folder as synced."""
        for path in (folder, *folder.rglob("*")):
            if path.is_dir():
                self.names[path.stat().st_ino] = _entries(path)
            else:
                self.contents[path.stat().st_ino] = path.read_bytes()
        parent = folder.parent.stat().st_ino
        self.names.setdefault(parent, {})[folder.name] = folder.stat().st_ino

    def fsync(self, descriptor: int) -> None:
        """Take the content of an open file, or the names in an open folder, as synced."""
        frame = sys._getframe(1)
        if frame.f_code.co_name == "sync_folder" and frame.f_back is not None:
            frame = frame.f_back
        if not self._is_removed(frame):
            self.sync(descriptor)

    def syncfs(self, descriptor: int) -> int:
        """Take all files as synced that are in the folder of an open descriptor."""
        frame = sys._getframe(2)
        if not self._is_removed(frame):
            self.settle(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        return 0

    def _is_removed(self, frame: FrameType) -> bool:
        line = f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}:{frame.f_lineno}"
        self.seen.add(line)
        return line in self.removed

    def sync(self, descriptor: int) -> None:
        """Do what `fsync` does, whoever calls."""
        state = os.fstat(descriptor)
        if stat.S_ISDIR(state.st_mode):
            self.names[state.st_ino] = {each.name: each.inode() for each in os.scandir(descriptor)}
        else:
            with _open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as file:
                self.contents[state.st_ino] = file.read()

    def copied(self, folder: Path, before: dict[str, int]) -> None:
        """Take a copy of a folder, put in its place, for the folder with the inodes `before`."""
        new = {inode: (folder / name).stat().st_ino for name, inode in before.items()}
        synced = {new[i]: self.contents[i] for i in new if i in self.contents}
        stale = new.keys() | set(new.values())
        self.contents = {i: c for i, c in self.contents.items() if i not in stale} | synced
        self.names = {
            new.get(folder, folder): {name: new.get(i, i) for name, i in entries.items()}
            for folder, entries in self.names.items()
            if folder in new or folder not in stale
        }

    def cut(self, folder: Path, rng: Random) -> str:
        """Leave of a folder what a power cut leaves; return the kind of loss.

        "strict": only what was synced. "names": all names, and of files what was synced. "mixed":
        of each name, and of each file, the old or the new state, or a part of the new.
        """
        kind = rng.choice(("strict", "names", "mixed", "mixed"))
        tree = list(self._survivors(folder, folder.stat().st_ino, kind, rng))
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        for path, content in tree:
            if content is None:
                path.mkdir(mode=0o700)
            else:
                path.write_bytes(content)
                path.chmod(0o600)
        self.settle(folder)
        return kind

    def _survivors(
        self, folder: Path, number: int, kind: str, rng: Random
    ) -> Iterator[tuple[Path, bytes | None]]:
        """Yield (path, content or None for a folder) of all that survives, folders first.

        `number`: the inode of the folder that survives there.
        """
        is_present = folder.is_dir() and folder.stat().st_ino == number
        now, synced = _entries(folder) if is_present else {}, self.names.get(number, {})
        for name in sorted(now.keys() | synced.keys()):
            keeps_new = kind == "names" or (kind == "mixed" and rng.random() < 0.5)
            inode, path = (now if keeps_new else synced).get(name), folder / name
            if inode is None:
                continue
            if inode in self.names or (now.get(name) == inode and path.is_dir()):
                yield path, None
                yield from self._survivors(path, inode, kind, rng)
                continue
            content = self.contents.get(inode, b"")
            present = path.read_bytes() if now.get(name) == inode else content
            if kind == "mixed" and present != content:
                same = (a == b for a, b in zip(content, present, strict=False))
                unchanged = sum(takewhile(bool, same))
                torn = rng.randint(unchanged, len(present))
                zeros = bytes(len(present) - torn)
                hole = present[:unchanged] + bytes(torn - unchanged) + present[torn:]
                states = (content, present, present[:torn] + zeros, present[:torn], hole)
                content = rng.choice(states)
            yield path, content


def flipped(content: bytes, rng: Random) -> bytes:
    """Return a content with one bit flipped; an empty one as it is."""
    if not content:
        return content
    bits = bytearray(content)
    bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(8)
    return bytes(bits)


def inodes(folder: Path) -> dict[str, int]:
    """Return the inodes of a folder and all that is in it, by relative path."""
    paths = (folder, *folder.rglob("*"))
    return {str(path.relative_to(folder)): path.stat().st_ino for path in paths}


def _entries(folder: Path) -> dict[str, int]:
    if not folder.is_dir():
        return {}
    return {entry.name: entry.inode() for entry in os.scandir(folder)}
