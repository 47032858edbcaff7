# SPDX-License-Identifier: Apache-2.0
"""Store: generations of tensors on disk that outlive a kill, a full disk and a flipped bit.

A generation is a tensor file and a manifest, `7.json`, that holds the tensor file's digest and its
own. The manifest is renamed into place last, so a generation is there whole or not at all. Part of
the digest stands in the tensor file's name: to write a number again never touches the tensors that
its present manifest speaks of.

With a seal the tensor file is sealed, and so is the meta in the manifest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from safetensors.torch import save, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from fedplan.errors import StoreError
from fedplan.storage.encryption import Encryption
from fedplan.storage.errors import explained
from fedplan.storage.failpoints import reach
from fedplan.storage.files import make_folder
from fedplan.storage.generations import (
    LARGEST_MANIFEST,
    Generation,
    Manifest,
    Skipped,
    Unfit,
    apart,
    digest_of,
    read_manifest,
    require_same,
)
from fedplan.storage.locks import alone, claimed, synced
from fedplan.storage.tensor_file import (
    ALL,
    NONE,
    Names,
    about,
    checked_tensors,
    content_of,
    not_lost,
    require_size,
    size_of,
)

Tensors = Mapping[str, Tensor]

Meta = Mapping[str, Any]

Read = tuple[dict[str, Tensor], dict[str, Any]]

Wanted = Callable[[dict[str, Any]], bool]

Loader = Callable[[Manifest], dict[str, Tensor]]

_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})\.json", re.ASCII)

_TENSORS = re.compile(r"[0-9]+\.[0-9a-f]{16}\.safetensors", re.ASCII)

_TEMPORARY = re.compile(r"[0-9]+\.(json|safetensors)\.tmp|\.tmp\w{6}", re.ASCII)
"""Ours, and those that safetensors writes to before it renames."""


class Store:
    """A folder of generations, of which the newest `keep` good ones stay.

    One process writes at a time; any may read. `claim` keeps the others from it for longer. With a
    `seal` nothing but numbers and sizes can be read from the disk. Its folder is made when
    something is first put into it. Who is only `reading` changes nothing on the disk.
    """

    def __init__(
        self, folder: Path, *, keep: int = 2, seal: Encryption | None = None, reading: bool = False
    ) -> None:
        if keep < 1:
            raise StoreError(f"keep is {keep}: a store keeps at least 1 generation")
        self._unfit: dict[int, str] = {}
        self._folder, self._keep, self._seal, self._reading = folder, keep, seal, reading

    def made(self) -> Path:
        """Its folder, which is made when something is first put into it."""
        with explained(f"{self._folder} cannot be made", "name a folder that you may write to"):
            make_folder(self._folder)
        return self._folder

    def claim(self) -> None:
        """Let no other process write here while this Store lives, however its process ends."""
        self.made()
        with explained(f"{self._folder} cannot be claimed", "make it readable to this user"):
            self._claim = claimed(self._folder)

    def write(self, tensors: Tensors, meta: Meta, *, number: int) -> None:
        """Write a generation: when this returns it is on disk; until then the last one is.

        A number that exists is replaced. After a StoreError either generation may be the newest.
        """
        require_same(meta, self._seal)
        if self._reading:
            raise StoreError(f"{self._folder} was opened for reading: nothing is written")
        self.made()
        with (
            explained(
                f"generation {number} was not finished in {self._folder}",
                "the last good one is untouched; free space or mend the disk, then write it again",
            ),
            alone(self._folder),
        ):
            self._require_next(number)
            try:
                begun = Manifest(number, dict(meta), "", 0, self._one_origin())
                self._commit(begun, apart(tensors))
            finally:
                with suppress(OSError):
                    self._remove(_TEMPORARY)

    def amend(self, meta: Meta, *, number: int) -> None:
        """Give the generation of a number another meta, at once or not at all.

        Its tensors stay as they are, and are not read: so it takes no longer than the meta does.
        """
        require_same(meta, self._seal)
        if self._reading:
            raise StoreError(f"{self._folder} was opened for reading: nothing is written")
        with (
            explained(
                f"the meta of generation {number} was not finished in {self._folder}",
                "the last good one is untouched; free space or mend the disk, then write it again",
            ),
            alone(self._folder),
        ):
            try:
                manifest = self._manifest(number)
            except Unfit as error:
                raise StoreError(f"generation {number} of {self._folder}: {error}") from error
            self._remove(_TEMPORARY)
            try:
                self._write_manifest(replace(manifest, meta=dict(meta)))
            finally:
                with suppress(OSError):
                    self._remove(_TEMPORARY)

    def read(self) -> Generation | None:
        """The newest good generation, None if there never was one; `skipped` has the others."""
        return self.find(lambda _: True)

    def newest(self) -> Generation | None:
        """The newest generation whose files are there, cheaply: its tensors are not read."""
        return self._found(lambda _: True, self._unread)

    def find(self, wanted: Wanted, names: Names = ALL) -> Generation | None:
        """The newest good generation with such a meta; tensors of others are not read.

        It holds the tensors of these `names`: the others are checked and let go.
        """
        return self._found(wanted, lambda manifest: self._tensors(manifest, names))

    def _found(self, wanted: Wanted, load: Loader) -> Generation | None:
        with explained(f"{self._folder} cannot be read", "make it readable to this user"):
            if not self._reading and self._folder.exists():
                # What a killed writer renamed may not be on disk yet: nobody acts on it before.
                synced(self._folder)
            numbers, found = self._look(wanted, load)
            self._one_origin()
        if numbers and len(self._unfit) == len(numbers):
            raise StoreError(
                f"{self._folder} holds no good generation ({'; '.join(map(str, self.skipped))}): "
                "put a copy of the folder back, or remove it to begin anew"
            )
        return found

    def faults(self) -> list[str]:
        """All generations that are damaged, and the one before the newest if it is not there."""
        with explained(f"{self._folder} cannot be read", "make it readable to this user"):
            numbers, faults = self.numbers(), list[str]()
            for number in numbers:
                try:
                    self._tensors(self._manifest(number), NONE)
                except Unfit as error:
                    faults.append(f"generation {number}: {error}")
        newest = max(numbers, default=0)
        if self._keep > 1 and newest > 1 and newest - 1 not in numbers:
            faults.append(f"generation {newest - 1} is lost, or a newer one than {newest}")
        return faults

    def _look(self, wanted: Wanted, load: Loader) -> tuple[list[int], Generation | None]:
        """The numbers that were there, and the newest good one that is wanted."""
        while True:
            numbers = self.numbers()
            self._unfit = {n: reason for n, reason in self._unfit.items() if n in numbers}
            found = self._newest(numbers, wanted, load)
            # A writer may have removed what it no longer needs while this was reading it.
            if found or not self._reading or numbers == self.numbers():
                return numbers, found
            self._unfit = {}

    @property
    def skipped(self) -> list[Skipped]:
        """The generations that were passed over, the newest first; the next write removes them."""
        return [Skipped(*each) for each in sorted(self._unfit.items(), reverse=True)]

    def numbers(self) -> list[int]:
        """The numbers of all generations, good or not, the newest first."""
        if not self._folder.exists():
            return []
        names = (_NUMBER.fullmatch(name) for name in os.listdir(self._folder))
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def standing(self) -> list[int]:
        """The generations that were not passed over, the newest first."""
        with explained(f"{self._folder} cannot be read", "make it readable to this user"):
            return [number for number in self.numbers() if number not in self._unfit]

    def _newest(self, numbers: list[int], wanted: Wanted, load: Loader) -> Generation | None:
        for number in numbers:
            try:
                manifest = self._manifest(number)
                if wanted(manifest.meta):
                    found = Generation(number, load(manifest), manifest.meta)
                    self._unfit.pop(number, None)
                    return found
            except Unfit as error:
                self._unfit[number] = str(error)
        return None

    def _manifest(self, number: int) -> Manifest:
        file = self._folder / f"{number}.json"
        try:
            return read_manifest(content_of(file, LARGEST_MANIFEST), number, self._seal)
        except StoreError as error:
            raise StoreError(f"{file} {error}") from error

    def _one_origin(self) -> str:
        """The origin that all generations here must share; a new one if there are none."""
        if self._seal is None:
            return ""
        origins: dict[str, int] = {}
        for number in self.standing():
            with suppress(Unfit):
                origins[self._manifest(number).origin] = number
        if len(origins) > 1:
            mixed = " and ".join(map(str, origins.values()))
            raise StoreError(
                f"generations {mixed} in {self._folder} were not written in one folder: put a "
                "copy of the folder back, or remove those that are from elsewhere"
            )
        return next(iter(origins), token_hex(16))

    def _unread(self, manifest: Manifest) -> dict[str, Tensor]:
        """No tensors, if a file of their size is there."""
        file = self._folder / manifest.file
        with not_lost(file):
            require_size(manifest, size_of(file, manifest.size))
        return {}

    def _tensors(self, manifest: Manifest, names: Names = ALL) -> dict[str, Tensor]:
        return checked_tensors(self._folder / manifest.file, manifest, self._seal, names)

    def _require_next(self, number: int) -> None:
        if type(number) is not int or not 0 <= number < 10**18:
            raise StoreError(f"generation {number!r}: a number is a whole one from 0 to 10^18 - 1")
        newest = max(self.standing(), default=0)
        if number < newest:
            raise StoreError(
                f"generation {number} is older than generation {newest} in {self._folder}: go on "
                "from what read() returns, or begin anew in another folder"
            )

    def _commit(self, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        reach("store.begun")
        for number in self.numbers():  # what is of another format is not written over
            with suppress(Unfit):
                self._manifest(number)
        self._sweep()
        manifest = self._write_tensors(manifest, tensors)
        self._write_manifest(manifest)
        self._unfit.pop(manifest.number, None)
        self._prune()
        reach("store.pruned")

    def _write_tensors(self, manifest: Manifest, tensors: dict[str, Tensor]) -> Manifest:
        temporary = self._folder / f"{manifest.number}.safetensors.tmp"
        if self._seal is None:
            save_file(tensors, temporary)
            temporary.chmod(0o600)
        else:
            with open(temporary, "xb", opener=_private) as file:
                file.writelines(self._seal.pieces(save(tensors), about(manifest)))
        reach("store.tensors_written")
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
            reach("store.tensors_synced")
            digest = digest_of(file, {} if self._seal else tensors)
            size = os.fstat(file.fileno()).st_size
        manifest = replace(manifest, sha256=digest, size=size)
        temporary.rename(self._folder / manifest.file)
        reach("store.tensors_renamed")
        synced(self._folder)
        return manifest

    def _write_manifest(self, manifest: Manifest) -> None:
        temporary = self._folder / f"{manifest.number}.json.tmp"
        with open(temporary, "xb", opener=_private) as file:
            file.write(manifest.written(self._seal))
            file.flush()
            reach("store.manifest_written")
            os.fsync(file.fileno())
        temporary.rename(self._folder / f"{manifest.number}.json")
        reach("store.manifest_renamed")
        synced(self._folder)
        reach("store.folder_synced")

    def _sweep(self) -> None:
        """Remove what no manifest speaks of: the leftovers of writes that failed."""
        names = os.listdir(self._folder)
        files = [name for name in names if _TENSORS.fullmatch(name)]
        spoken = {name for number in self.numbers() for name in self._spoken(number, files)}
        if any(map(_TEMPORARY.fullmatch, names)) or set(files) - spoken:
            synced(self._folder)
            self._remove(_TEMPORARY)
            self._remove(_TENSORS, spoken)

    def _spoken(self, number: int, files: list[str]) -> list[str]:
        """The files that the manifest of a number speaks of; it is read if there are several."""
        found = [name for name in files if name.startswith(f"{number}.")]
        try:
            return [self._manifest(number).file] if len(found) > 1 else found
        except Unfit:
            return found  # it may speak of any of them

    def _prune(self) -> None:
        stay = self.standing()[: self._keep]
        for number in self.numbers():
            if number not in stay:
                (self._folder / f"{number}.json").unlink()
        self._sweep()

    def _remove(self, names: re.Pattern[str], but: Collection[str] = ()) -> None:
        for name in os.listdir(self._folder):
            if names.fullmatch(name) and name not in but:
                (self._folder / name).unlink()


def _private(file: str, flags: int) -> int:
    return os.open(file, flags, 0o600)
