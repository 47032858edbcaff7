# SPDX-License-Identifier: Apache-2.0
"""A store of numbered checkpoints on disk that survives kills, full disks and flipped bits.

A checkpoint is a tensor file and a manifest such as `7.json`, which holds the digest of the tensor
file and its own. The manifest is renamed into place last, so a checkpoint exists whole or not at
all. The tensor file's name contains part of its digest: writing a number again never overwrites the
tensors of the present manifest. With encryption the tensor file and the meta are encrypted.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from safetensors.torch import save, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from fedplan.errors import StoreError
from fedplan.storage.checkpoints import (
    MAX_MANIFEST_BYTES,
    Checkpoint,
    InvalidCheckpoint,
    Manifest,
    NameFilter,
    SkippedCheckpoint,
    all_tensors,
    contiguous_tensors,
    lost_as_invalid,
    no_tensors,
    parse_manifest,
    read_bounded,
    read_verified_tensors,
    require_file_size,
    require_json_meta,
    saved_tensors_digest,
)
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import (
    PRIVATE,
    checkpoint_numbers,
    failpoint,
    make_folder,
    open_private,
    wrap_disk_errors,
)
from fedplan.storage.locks import acquire_folder_lock, locked_folder, sync_folder
from fedplan.tensors.named import Tensors

Meta = Mapping[str, Any]
"""JSON object stored with the tensors of a checkpoint."""
TensorsAndMeta = tuple[dict[str, Tensor], dict[str, Any]]
MetaFilter = Callable[[dict[str, Any]], bool]
"""Whether to accept the checkpoint with this meta."""

_TENSORS = re.compile(r"[0-9]+\.[0-9a-f]{16}\.safetensors", re.ASCII)
_TEMPORARY = re.compile(r"[0-9]+\.(json|safetensors)\.tmp|\.tmp\w{6}", re.ASCII)
"""Temporary files of this module, and of safetensors."""


class Store:
    """Numbered checkpoints (tensors and a JSON meta) in `folder`; the newest `keep` are kept.

    `write` saves a checkpoint atomically and durably, `read_newest` or `find` loads one, skipping
    damaged ones. The folder is created by the first write. One process writes at a time, any may
    read; `lock` reserves the folder for this process. With `encryption` only numbers, sizes and
    digests of encrypted files are readable on disk. With `read_only` nothing on disk is changed and
    `write` raises StoreError. `keep` below 1 is a StoreError.

    With `synced=False` a write is durable only after a later `sync_file_system`. A power cut before
    that may leave the last checkpoint damaged, so that a folder of damaged ones alone is empty.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        encryption: Encryption | None = None,
        read_only: bool = False,
        synced: bool = True,
    ) -> None:
        """Raise StoreError if `keep` is less than 1. Nothing is read or written yet."""
        if keep < 1:
            raise StoreError(f"keep is {keep}: a store keeps at least 1 checkpoint")
        self._invalid: dict[int, str] = {}
        self._folder, self._keep = folder, keep
        self._encryption, self._read_only, self._synced = encryption, read_only, synced

    def make_folder(self) -> Path:
        """Create the folder if it is missing, and return its path; StoreError if that fails."""
        make_folder(self._folder)
        return self._folder

    def lock(self) -> None:
        """Lock the folder against writes of other processes as long as this Store object exists.

        Does not wait. Creates the folder if it is missing. Raises StoreError if another process has
        locked the folder.
        """
        self.make_folder()
        with wrap_disk_errors(f"{self._folder} cannot be locked", "make it readable to this user"):
            self._lock = acquire_folder_lock(self._folder)

    def write(self, tensors: Tensors, meta: Meta, *, number: int) -> None:
        """Write a checkpoint and sync it to disk; then remove the checkpoints beyond `keep`.

        The checkpoint `number` is replaced if it exists. Raises StoreError if `number` is less than
        that of the newest valid checkpoint, the meta is not JSON, a tensor cannot be saved, the
        folder has checkpoints of another format or key, another process writes, or the disk fails.
        After a disk error the newest valid checkpoint is either the old or the new one.
        """
        self._require_writable(meta)
        self.make_folder()
        with self._writing(f"checkpoint {number} was not finished in {self._folder}"):
            self._require_next(number)
            try:
                # A file that is encrypted is read whole, and encryption takes longer than SHA-256.
                hash_name = "sha256" if self._encryption else "blake3"
                manifest = Manifest(number, dict(meta), hash_name, "", 0, self._folder_origin())
                contiguous = contiguous_tensors(tensors)
                failpoint("store.begun")
                for other in self.numbers():  # StoreError for another format: never overwrite it
                    with suppress(InvalidCheckpoint):
                        self._read_manifest(other)
                self._remove_leftovers()
                self._write_manifest(self._write_tensors(manifest, contiguous))
                self._invalid.pop(number, None)
                kept_numbers = self.valid_numbers()[: self._keep]
                for other in self.numbers():
                    if other not in kept_numbers:
                        (self._folder / f"{other}.json").unlink()
                self._remove_leftovers()
                failpoint("store.pruned")
            finally:
                with suppress(OSError):
                    self._remove(_TEMPORARY)

    def replace_meta(self, meta: Meta, *, number: int) -> None:
        """Replace the meta of checkpoint `number` atomically, without reading or writing tensors.

        Raises StoreError if the checkpoint is missing or its manifest is invalid, `meta` is not
        JSON, the store is read-only, or the disk fails.
        """
        self._require_writable(meta)
        with self._writing(f"the meta of checkpoint {number} was not finished in {self._folder}"):
            try:
                manifest = self._read_manifest(number)
            except InvalidCheckpoint as error:
                raise StoreError(f"checkpoint {number} of {self._folder}: {error}") from error
            self._remove(_TEMPORARY)
            try:
                self._write_manifest(replace(manifest, meta=dict(meta)))
            finally:
                with suppress(OSError):
                    self._remove(_TEMPORARY)

    def read_newest(self) -> Checkpoint | None:
        """Load the newest valid checkpoint with all tensors; None if the folder has no checkpoint.

        Damaged ones are skipped and listed in `skipped`. Raises StoreError if all are damaged, or
        of another format or key.
        """
        return self.find(lambda _: True)

    def peek(self) -> Checkpoint | None:
        """Like `read_newest`, but load no tensors; of the tensor file only the size is checked."""
        return self.find(lambda _: True, None)

    def find(
        self, meta_filter: MetaFilter, name_filter: NameFilter | None = all_tensors
    ) -> Checkpoint | None:
        """Load the newest valid checkpoint whose meta passes `meta_filter`; None if none passes.

        Only tensors whose names pass `name_filter` are loaded, but the digest of the whole file is
        checked; with None, only its size. Raises StoreError if the folder cannot be read, all its
        checkpoints are invalid, or one that is read has another format or key.
        """
        with wrap_disk_errors(f"{self._folder} cannot be read", "make it readable to this user"):
            if self._synced and not self._read_only and self._folder.exists():
                # Renames by a killed writer may not be on disk yet: sync before relying on them.
                sync_folder(self._folder)
            while True:
                numbers, checkpoint = self.numbers(), None
                self._invalid = {n: reason for n, reason in self._invalid.items() if n in numbers}
                for number in numbers:
                    try:
                        manifest = self._read_manifest(number)
                        if not meta_filter(manifest.meta):
                            continue
                        checkpoint = Checkpoint(
                            number, self._load_tensors(manifest, name_filter), manifest.meta
                        )
                    except InvalidCheckpoint as error:
                        self._invalid[number] = str(error)
                    else:
                        self._invalid.pop(number, None)
                        break
                # A writer may have removed old checkpoints while they were read: try again.
                if checkpoint or not self._read_only or numbers == self.numbers():
                    break
                self._invalid = {}
            self._folder_origin()
        if self._synced and numbers and len(self._invalid) == len(numbers):
            raise StoreError(
                f"{self._folder} has no valid checkpoint ({'; '.join(map(str, self.skipped))}): "
                "restore the folder from a backup, or remove it to begin anew"
            )
        return checkpoint

    def find_damage(self) -> list[str]:
        """Return a text for each damaged checkpoint, and if the second newest is missing.

        Empty if all are intact. Reads all files, changes nothing. Raises StoreError if the folder
        cannot be read.
        """
        with wrap_disk_errors(f"{self._folder} cannot be read", "make it readable to this user"):
            numbers, damage = self.numbers(), list[str]()
            for number in numbers:
                try:
                    self._load_tensors(self._read_manifest(number), no_tensors)
                except InvalidCheckpoint as error:
                    damage.append(f"checkpoint {number}: {error}")
        newest = max(numbers, default=0)
        if self._keep > 1 and newest > 1 and newest - 1 not in numbers:
            damage.append(f"checkpoint {newest - 1} is lost, or a newer one than {newest}")
        return damage

    @property
    def skipped(self) -> list[SkippedCheckpoint]:
        """Damaged checkpoints found by reads so far, newest first; the next write removes them."""
        return [SkippedCheckpoint(*each) for each in sorted(self._invalid.items(), reverse=True)]

    def numbers(self) -> list[int]:
        """Return the numbers of all manifests in the folder, valid or not, newest first."""
        return checkpoint_numbers(self._folder)

    def valid_numbers(self) -> list[int]:
        """Return the numbers in the folder that no read found damaged so far, newest first.

        Only lists the folder: a damaged checkpoint that was not read yet is included.
        """
        with wrap_disk_errors(f"{self._folder} cannot be read", "make it readable to this user"):
            return [number for number in self.numbers() if number not in self._invalid]

    def _read_manifest(self, number: int) -> Manifest:
        """Read and check the manifest of checkpoint `number`.

        Raises InvalidCheckpoint if it is missing or damaged, StoreError if of another format or
        key.
        """
        file = self._folder / f"{number}.json"
        try:
            return parse_manifest(read_bounded(file, MAX_MANIFEST_BYTES), number, self._encryption)
        except StoreError as error:
            raise StoreError(f"{file} {error}") from error

    def _folder_origin(self) -> str:
        """Return the random folder id (`origin`) in the manifests, or a new one if there are none.

        Empty without encryption. Raises StoreError if the checkpoints have several ids: some were
        copied from another folder. Raises OSError if the disk fails to read the only manifest.
        """
        if self._encryption is None:
            return ""
        origins, problem = dict[str, int](), None
        for number in self.valid_numbers():
            try:
                origins[self._read_manifest(number).origin] = number
            except InvalidCheckpoint as error:
                problem = error.__cause__ or problem
        if not origins and isinstance(problem, OSError):
            raise problem  # it may be there at the next try: with another id it would be refused
        if len(origins) > 1:
            mixed = " and ".join(map(str, origins.values()))
            raise StoreError(
                f"checkpoints {mixed} in {self._folder} were not written in one folder: restore "
                "the folder from a backup, or remove those that are from elsewhere"
            )
        return next(iter(origins), token_hex(16))

    def _load_tensors(
        self, manifest: Manifest, name_filter: NameFilter | None
    ) -> dict[str, Tensor]:
        file = self._folder / manifest.file
        if name_filter is None:
            with lost_as_invalid(file):
                require_file_size(file, manifest)
            return {}
        return read_verified_tensors(file, manifest, self._encryption, name_filter)

    def _require_writable(self, meta: Meta) -> None:
        """Raise StoreError if the meta is not JSON or the store is read-only."""
        require_json_meta(meta, self._encryption)
        if self._read_only:
            raise StoreError(f"{self._folder} was opened for reading: nothing is written")

    @contextmanager
    def _writing(self, problem: str) -> Generator[None]:
        """Lock the folder for the body; disk errors become StoreError, beginning with `problem`."""
        remedy = "the last valid one is unchanged; free space or mend the disk, then write it again"
        with wrap_disk_errors(problem, remedy), locked_folder(self._folder):
            yield

    def _require_next(self, number: int) -> None:
        """Raise StoreError if `number` is no integer in range, or below the newest valid number."""
        if type(number) is not int or not 0 <= number < 10**18:
            raise StoreError(f"checkpoint {number!r}: a number is an integer from 0 to 10^18 - 1")
        newest = max(self.valid_numbers(), default=0)
        if number < newest:
            raise StoreError(
                f"checkpoint {number} is older than checkpoint {newest} in {self._folder}: go on "
                "from what read_newest() returns, or begin anew in another folder"
            )

    def _write_tensors(self, manifest: Manifest, tensors: dict[str, Tensor]) -> Manifest:
        """Write and sync the tensor file; return the manifest with digest and size of the file.

        The name of the file contains the digest: the file of an earlier write of the same number is
        not overwritten.
        """
        temporary = self._folder / f"{manifest.number}.safetensors.tmp"
        if self._encryption is None:
            save_file(tensors, temporary)
            temporary.chmod(PRIVATE)
        else:
            with open(temporary, "xb", opener=open_private) as file:
                chunks = self._encryption.encrypt_chunks(save(tensors), manifest.tensors_label)
                file.writelines(chunks)
        failpoint("store.tensors_written")
        with temporary.open("rb") as file:
            if self._synced:
                os.fsync(file.fileno())
            failpoint("store.tensors_synced")
            if self._encryption is None:
                digest = saved_tensors_digest(file, tensors, manifest.hash)
            else:
                digest = hashlib.file_digest(file, manifest.hash).hexdigest()
            size = os.fstat(file.fileno()).st_size
        manifest = replace(manifest, digest=digest, size=size)
        temporary.rename(self._folder / manifest.file)
        failpoint("store.tensors_renamed")
        if self._synced:
            sync_folder(self._folder)
        return manifest

    def _write_manifest(self, manifest: Manifest) -> None:
        """Write, sync and rename the manifest file; from the rename on the checkpoint exists."""
        temporary = self._folder / f"{manifest.number}.json.tmp"
        with open(temporary, "xb", opener=open_private) as file:
            file.write(manifest.to_bytes(self._encryption))
            file.flush()
            failpoint("store.manifest_written")
            if self._synced:
                os.fsync(file.fileno())
        temporary.rename(self._folder / f"{manifest.number}.json")
        failpoint("store.manifest_renamed")
        if self._synced:
            sync_folder(self._folder)
        failpoint("store.folder_synced")

    def _remove_leftovers(self) -> None:
        """Remove temporary files, and tensor files of no manifest, left by failed writes.

        Keeps all tensor files of a number whose manifest is invalid.
        """
        names = os.listdir(self._folder)
        files = [name for name in names if _TENSORS.fullmatch(name)]
        used = set[str]()
        for number in self.numbers():
            candidates = [name for name in files if name.startswith(f"{number}.")]
            if len(candidates) > 1:
                with suppress(InvalidCheckpoint):
                    candidates = [self._read_manifest(number).file]
            used.update(candidates)
        if any(map(_TEMPORARY.fullmatch, names)) or set(files) - used:
            if self._synced:
                sync_folder(self._folder)
            self._remove(_TEMPORARY)
            self._remove(_TENSORS, used)

    def _remove(self, pattern: re.Pattern[str], exceptions: Collection[str] = ()) -> None:
        """Delete the folder's files whose names match `pattern`, but for the `exceptions`."""
        for name in os.listdir(self._folder):
            if pattern.fullmatch(name) and name not in exceptions:
                (self._folder / name).unlink()
