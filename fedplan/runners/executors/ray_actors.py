# SPDX-License-Identifier: Apache-2.0
"""WorkerTransport to Ray actors, on this machine or in a cluster."""

from __future__ import annotations

import json
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
from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.runners.executors.processes import worker_error
from fedplan.runners.executors.worker import Worker
from fedplan.storage.checkpoints import contiguous_tensors
from fedplan.tensors.named import Tensors

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes in Ray's object store, which all workers of a machine read without a copy."""
PENDING = 60.0
"""Seconds without a reply of a new worker after which a warning is logged."""
_LOG = logging.getLogger("fedplan")


class RayWorker:
    """The Ray actor of a worker: passes messages, sent as bytes, to a Worker."""

    def __init__(self) -> None:
        self._worker = Worker()

    def answer(self, message: bytes, data: Bytes | None) -> tuple[bytes, Bytes | None]:
        """Return the reply to a JSON message and safetensors bytes, in the same formats."""
        try:
            tensors, fields = self._worker.reply(json.loads(message), _from_bytes(data))
            return json.dumps(fields).encode(), _to_bytes(tensors) if tensors else None
        except Exception as error:
            return json.dumps(worker_error(error)).encode(), None


class RayTransport:
    """WorkerTransport to `count` Ray actors with one CPU and `gpus` GPUs each.

    Without the `address` of a cluster, the Ray that this process has joined is used, or Ray is
    started on this machine. Messages are bytes, so Ray pickles no objects of fedplan.
    """

    def __init__(self, count: int, *, gpus: float = 0.0, address: str = "") -> None:
        self.count, self._gpus, self._address = count, gpus, address
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}
        self._started_ray, self._starting = False, dict[int, float]()

    def start(self, number: int, message: Mapping[str, Any]) -> None:
        """Start the actor of a worker, in place of an earlier one; FedplanError without Ray."""
        self._connect()
        self._starting[number] = time.monotonic()
        actor: Any = ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0)(RayWorker)
        self._actors[number] = actor.remote()
        self.send(number, message)

    def _connect(self) -> None:
        if ray.is_initialized():
            if self._address and not self._started_ray:
                raise FedplanError(
                    f"ray_address is {self._address}, and this process has joined Ray already: "
                    "leave it out to use that, or call ray.shutdown() first"
                )
            return
        options: dict[str, Any] = {"address": self._address}
        if not self._address:
            # No usage statistics; a worker without GPUs of its own still sees those of the machine.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            options = {"num_cpus": self.count, "configure_logging": False}
            options |= {"log_to_driver": True, "include_dashboard": False}
        try:
            ray.init(**options)
        except Exception as error:  # Ray raises no specific class here
            raise FedplanError(
                f"Ray cannot be reached at {self._address or 'this machine'}: {error}; start it by "
                "`ray start`, or give the address of a cluster"
            ) from error
        self._started_ray = True

    def share(self, tensors: Tensors) -> object:
        """Put tensors into Ray's object store, once for all workers."""
        return ray.put(_to_bytes(tensors))

    def send(self, number: int, message: Mapping[str, Any], shared: object = None) -> None:
        reference = self._actors[number].answer.remote(json.dumps(message).encode(), shared)
        self._pending[reference] = number

    def receive(self, timeout: float) -> list[tuple[int, TensorsAndJson | None]]:
        """Wait until a reply arrives, at most `timeout` seconds; None marks a dead worker.

        Raises FedplanError if the actor itself raised. Logs a warning if a new worker has not
        replied for PENDING seconds: Ray waits for missing CPUs or GPUs for ever, without a message.
        """
        references: list[Any] = list(self._pending)
        ready: list[Any] = cast("Any", ray).wait(references, num_returns=1, timeout=timeout)[0]
        if not ready:
            for number, since in list(self._starting.items()):
                if time.monotonic() - since > PENDING:
                    del self._starting[number]
                    free = cast("dict[str, float]", ray.available_resources())
                    _LOG.warning(
                        "Ray worker %d has not answered for %g s: it needs 1 CPU and %g GPU, and "
                        "free are %g and %g",
                        *(number, PENDING, self._gpus, free.get("CPU", 0.0), free.get("GPU", 0.0)),
                    )
            return []
        number = self._pending.pop(ready[0])
        self._starting.pop(number, None)
        try:
            fields, tensors = cast("tuple[bytes, Bytes | None]", ray.get(ready[0]))
        except RayTaskError as error:
            raise FedplanError(f"a Ray worker failed: {error}") from error
        except RayError:  # the worker or its machine died, or the reply is lost
            self._pending = {ref: of for ref, of in self._pending.items() if of != number}
            return [(number, None)]
        return [(number, (_from_bytes(tensors), json.loads(fields)))]

    def close(self) -> None:
        """Kill all actors; if this object has started or joined Ray, call `ray.shutdown`."""
        for actor in self._actors.values() if ray.is_initialized() else ():
            ray.kill(actor)
        self._actors, self._pending, self._starting = {}, {}, {}
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False


def _to_bytes(tensors: Tensors) -> Bytes:
    return np.frombuffer(save(contiguous_tensors(tensors)), dtype=np.uint8)


def _from_bytes(data: Bytes | None) -> dict[str, Tensor]:
    return load(data.tobytes()) if data is not None else {}
