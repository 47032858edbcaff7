# SPDX-License-Identifier: Apache-2.0
"""Secrets of a run, and random numbers drawn from them by a cryptographic stream."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from fractions import Fraction
from math import frexp, prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplan.errors import PrivacyError, import_extra
from fedplan.privacy.accounting.accountant import SAMPLING_RATES
from fedplan.privacy.mechanisms.rounded_gaussian import sample
from fedplan.storage.encryption import Encryption
from fedplan.storage.locks import sync_folder

SECRET_SIZE = 32
"""Bytes of a secret."""
_ABOUT = "secret"


def load_or_create_secret(
    file: Path,
    encryption: Encryption | None = None,
    *,
    used_by: Path | None = None,
    synced: bool = True,
) -> bytes:
    """Read the secret in a file; if there is no file, write a new random secret first.

    encryption: encrypts the file's content; None: plain bytes, with a checksum. used_by: a file
    whose content follows from the secret: if it exists, no new secret is written. Creation is
    atomic: of several processes, all get the same secret. With `synced=False` the name of a file
    that exists is not synced, as whoever relies on the secret syncs later. Raises a PrivacyError if
    the file cannot be written, is lost, and as `read_secret` does.
    """
    try:
        is_new = not file.exists()
        if is_new and used_by is not None and used_by.exists():
            raise PrivacyError(f"the secret {file} is lost: restore a copy of it")
        if is_new:
            secret = os.urandom(SECRET_SIZE)
            content = secret + hashlib.sha256(secret).digest()
            if encryption is not None:
                content = encryption.encrypt(secret, _ABOUT)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
            try:
                os.write(descriptor, content)
                os.fsync(descriptor)
                with suppress(FileExistsError):
                    os.link(temporary, file)
            finally:
                os.close(descriptor)
                os.unlink(temporary)
        if is_new or synced:
            sync_folder(file.parent)
    except OSError as error:
        raise PrivacyError(f"the secret {file} cannot be used: {error}") from error
    return read_secret(file, encryption)


def read_secret(file: Path, encryption: Encryption | None = None) -> bytes:
    """Read the secret in an existing file, decrypted if an encryption is given. Writes nothing.

    Raises a PrivacyError if the file is missing, open to other users, or of the wrong size, and
    StoreError if the content cannot be decrypted.
    """
    try:
        mode = file.stat().st_mode
        content = file.read_bytes()
    except OSError as error:
        raise PrivacyError(f"the secret {file} cannot be used: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise PrivacyError(f"others may read the secret {file}: chmod 600 it, or start a new run")
    if encryption is not None:
        content = encryption.decrypt(content, _ABOUT)
    secret, checksum = content[:SECRET_SIZE], content[SECRET_SIZE:]
    # An encrypted secret, and one of an older version, has no checksum.
    intact = checksum in (b"", hashlib.sha256(secret).digest())
    if len(secret) != SECRET_SIZE or not intact:
        raise PrivacyError(f"the secret {file} is damaged: restore a copy of it")
    return secret


def derive_key(secret: bytes, purpose: str, *words: str | int | bytes) -> bytes:
    """Derive a 32-byte key for one purpose: HMAC-SHA256 of framed words under the secret."""
    if len(secret) != SECRET_SIZE:
        raise PrivacyError(
            f"a secret has {SECRET_SIZE} bytes, not {len(secret)}: use load_or_create_secret()"
        )
    mac = hmac.new(secret, purpose.encode() + b"\0", hashlib.sha256)
    for word in words:
        content = word if isinstance(word, bytes) else str(word).encode()
        mac.update(f"{type(word).__name__} {len(content)}:".encode() + content)
    return mac.digest()


COUNT_GRID_STEP = 2.0**-30
"""Grid step to which noise on counts is rounded."""


def grid_step(stddev: float) -> float:
    """Grid step for noise of a stddev: the power of two of which stddev has 2**26 to 2**27."""
    return 2.0 ** (frexp(stddev)[1] - 27)


class NoiseStream:
    """A stream of cryptographically secure random numbers: AES-256 in counter mode under a key.

    key: 32 bytes; make a stream with `for_release`. Each call goes on where the last
    ended. Independent of the seeds of numpy and torch. Raises a PrivacyError if `cryptography` is
    not installed.
    """

    def __init__(self, key: bytes) -> None:
        ciphers = import_extra("cryptography.hazmat.primitives.ciphers", "cryptographic noise")
        counter = ciphers.modes.CTR(bytes(16))
        self._stream = ciphers.Cipher(ciphers.algorithms.AES(key), counter).encryptor()
        self._key, self._calls = key, 0

    @staticmethod
    def for_release(secret: bytes, name: str, *content: str | int | bytes) -> NoiseStream:
        """Stream for one release: the key follows from the secret, the name and the content.

        `content` must determine everything that is released. The same arguments give the same bits
        on every machine.
        """
        # After a restart the same sum gets the same noise: two noises on one sum would average out.
        # Another sum under the same name gets other noise: the same noise on both would reveal
        # their difference.
        return NoiseStream(derive_key(secret, "noise", name, *content))

    def rounded_gaussian(self, shape: tuple[int, ...], stddev: float, step: float) -> Tensor:
        """The next Gaussian numbers with mean 0, each rounded to the nearest multiple of `step`.

        step: a power of two. The probability of each multiple is exact. Returns float64 of a shape.
        To hide a value, round the value to multiples of `step` too and add: low bits of a value
        that noise does not cover would be released (Mironov 2012; Jin et al., arXiv 2112.05307).
        """
        self._calls += 1
        call = self._calls

        def more_bits(proposal: int, index: int) -> int:
            return int.from_bytes(derive_key(self._key, "more bits", call, proposal, index)[:8])

        integers = sample(prod(shape), stddev / step, self.words, more_bits)
        return torch.from_numpy(integers).double().mul_(step).view(shape)

    def uniform(self, count: int) -> Tensor:
        """The next `count` uniform float64 numbers of (0, 1], multiples of 2**-53.

        At most `rate` of them are up to `rate`: exactly its multiple of 2**-53 from below.
        """
        words = (self.words(count) >> np.uint64(11)).view(np.int64)
        return torch.from_numpy(words).double().add_(1).mul_(2.0**-53)

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` random 64-bit words."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")


def sample_cohort(roster: Iterable[str], rate: float, secret: bytes, round: int) -> list[str]:
    """Sample the clients of a round: each of the roster with probability `rate`; may be empty.

    secret: 32 bytes; the same arguments give the same clients, in the order of the roster. Raises a
    PrivacyError for a rate out of SAMPLING_RATES and for a client that is named twice.
    """
    # Sampling amplifies privacy only against those who cannot tell who was sampled: so it follows
    # from the server's secret. An empty cohort is released too: sampling again would reveal it.
    if not SAMPLING_RATES[0] <= rate <= SAMPLING_RATES[1]:
        raise PrivacyError(f"the rate is {rate!r}: give a number above 0 and at most 1")
    clients = list(roster)
    if len(set(clients)) < len(clients):
        raise PrivacyError("the roster holds a client twice: name each once")
    threshold = int(Fraction(rate) * 2**64)
    keys = {client: derive_key(secret, "cohort", round, client) for client in clients}
    return [client for client in clients if int.from_bytes(keys[client][:8]) < threshold]
