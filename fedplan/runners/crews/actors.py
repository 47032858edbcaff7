# SPDX-License-Identifier: Apache-2.0
"""Actors: workers that Ray starts, on this machine or on those of a cluster."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from safetensors.torch import load, save
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.partial import Sent
from fedplan.runners.crews.player import Hand, apart, read_words, worded
from fedplan.tensors.named import Tensors

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes as Ray keeps them: one object that all workers of a machine read in place."""


PENDING = 60.0
"""Seconds without an answer of a worker that was just asked for, after which one is told why."""
_LOG = logging.getLogger("fedplan")


class Actor:
    """What one actor does: bytes for bytes."""

    def __init__(self) -> None:
        self._hand = Hand()

    def answer(self, said: bytes, tensors: Bytes | None) -> tuple[bytes, Bytes | None]:
        """The answer to a message."""
        made, told = self._hand.answer(read_words(said), lambda: _tensors(tensors))
        return worded(told), _bytes(made) if made else None


class Actors:
    """Workers that are actors of Ray; what they are sent and answer is bytes, of our own making.

    Without an `address` Ray is started on this machine, with a core for each worker.
    """

    def __init__(self, count: int, *, gpus: float = 0.0, address: str = "") -> None:
        self.count, self._gpus, self._address = count, gpus, address
        self._actors: dict[int, Any] = {}
        self._asked: dict[Any, int] = {}
        self._began, self._pending = False, dict[int, float]()

    def start(self, number: int, said: Mapping[str, Any]) -> None:
        """Start a worker, or another one in its place."""
        self._connect()
        self._pending[number] = 0.0
        made: Any = ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0)(Actor)
        self._actors[number] = made.remote()
        self.send(number, said)

    def _connect(self) -> None:
        if ray.is_initialized():
            if self._address and not self._began:
                raise FedplanError(
                    f"ray_address is {self._address}, and this process has joined Ray already: "
                    "leave it out to go on there, or end what has, by ray.shutdown()"
                )
            return
        quiet: dict[str, Any] = {"log_to_driver": True, "include_dashboard": False}
        quiet = {"address": self._address} if self._address else quiet
        if not self._address:
            # Nothing is told to Ray's makers; who has no GPU of its own sees those that there are.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            quiet |= {"num_cpus": self.count, "configure_logging": False}
        try:
            ray.init(**quiet)
        except Exception as error:  # what Ray raises here has no class of its own
            raise FedplanError(
                f"Ray cannot be reached at {self._address or 'this machine'}: {error}; start it by "
                "`ray start`, or say the address of a cluster"
            ) from error
        self._began = True

    def share(self, tensors: Tensors) -> object:
        """Put tensors into Ray's store, once for all workers."""
        return ray.put(_bytes(tensors))

    def send(self, number: int, said: Mapping[str, Any], shared: object = None) -> None:
        """Send a worker a message."""
        answer = self._actors[number].answer.remote(worded(said), shared)
        self._asked[answer] = number

    def heard(self, seconds: float) -> list[tuple[int, Sent | None]]:
        """Who has answered what, or has died."""
        asked: list[Any] = list(self._asked)
        ready: list[Any] = cast("Any", ray).wait(asked, num_returns=1, timeout=seconds)[0]
        found = list[tuple[int, Sent | None]]()
        if not ready:
            self._look_for_room()
        for each in ready:
            number = self._asked.pop(each, None)
            if number is not None:
                found.append((number, self._got(number, each)))
        return found

    def _look_for_room(self) -> None:
        """Say so, once, if Ray has had no room for a worker for long: it waits for ever."""
        now, free = time.monotonic(), cast("dict[str, float]", ray.available_resources())
        for number, since in list(self._pending.items()):
            self._pending[number] = since or now
            if since and now - since > PENDING:
                del self._pending[number]
                _LOG.warning(
                    "worker %d of Ray has not answered for %g s: it wants 1 CPU and %g GPU, and "
                    "free are %g and %g",
                    *(number, PENDING, self._gpus, free.get("CPU", 0.0), free.get("GPU", 0.0)),
                )

    def _got(self, number: int, answer: Any) -> Sent | None:
        self._pending.pop(number, None)
        try:
            said, tensors = cast("tuple[bytes, Bytes | None]", ray.get(answer))
        except RayTaskError as error:
            raise FedplanError(f"a worker of Ray failed: {error}") from error
        except RayError:
            # It died, or its machine did, or what it said is lost. All that it was sent goes with
            # it, and is told of once.
            self._asked = {each: of for each, of in self._asked.items() if of != number}
            return None
        return _tensors(tensors), read_words(said)

    def close(self) -> None:
        """End all of them, and Ray if it was started here."""
        for actor in self._actors.values() if ray.is_initialized() else ():
            ray.kill(actor)
        self._actors, self._asked = {}, {}
        if self._began:
            ray.shutdown()
            self._began = False


def _bytes(tensors: Tensors) -> Bytes:
    return np.frombuffer(save(apart(tensors)), dtype=np.uint8)


def _tensors(data: Bytes | None) -> dict[str, Tensor]:
    return load(data.tobytes()) if data is not None else {}
