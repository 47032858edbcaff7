# SPDX-License-Identifier: Apache-2.0
"""Several devices that train each client's model together: a process per device, and their turns.

The process that holds the client is rank 0. The other ranks build the study themselves, train the
same turn on their share of the examples, write nothing, and charge nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.federation.identity import changed_examples
from fedplan.language.plan import Role
from fedplan.models.values import get_values, is_quantized, set_values
from fedplan.naming import allow_imports
from fedplan.runners.executors.processes import JsonObject, ProcessTransport, worker_error
from fedplan.studies.experiment import Experiment, build_experiment
from fedplan.studies.schema import ConfigError, Study, resolve_paths, study_from_dict
from fedplan.tensors.devices import deterministic, model_device, move_model, rank_device
from fedplan.tensors.named import Tensors, digests
from fedplan.training.fit import Fit, FitResult, Job, plain_fit
from fedplan.training.ranks import RankLost, Ranks, require_mean_loss, tensor_specs

if TYPE_CHECKING:
    from fedplan.runners.site import Site

START, WAIT, GRACE = 3600.0, 600.0, 20.0
"""Seconds: how long a rank may take to start and for a step, and how long rank 0 looks for the
rank that ended a failed turn."""
JOB_FIELDS = ("client", "seed", "round", "traits")
"""Fields of a job that all ranks get as they are."""


class RankWorker:
    """Handler of a rank other than 0: a copy of a study, built by the first message."""

    at_site = False

    def reply(self, message: JsonObject, tensors: Tensors) -> TensorsAndJson:
        """Build the study, or train a turn; return the digests of the trained values.

        An error is returned as "error"; "lost" says that another rank caused it. After an error the
        process leaves its group.
        """
        try:
            if message["do"] == "begin":
                self._begin(message)
                return {}, {}
            return {}, {"digests": self._fit(message)}
        except Exception as error:
            with suppress(Exception):
                Ranks.leave()
            # At a site the text may contain examples: rank 0 has it for the site's fault log.
            text = {"error": f"{type(error).__name__}: {error}"}
            fields = text if self.at_site else worker_error(error)
            return {}, {**fields, "lost": isinstance(error, RankLost)}

    def _begin(self, message: JsonObject) -> None:
        """Build the study, or a site's part of it; FedplanError if it differs from rank 0's."""
        self.ranks, self.has_joined = Ranks(**message["ranks"]), False
        self.at_site = message["site"] is not None
        if message["site"] is None:
            self.study = study_from_dict(message["study"])
            self.experiment = build_experiment(self.study)
        else:
            from fedplan.runners.site import Site  # optional dependency
            from fedplan.runners.site_runtime import load_site_table

            site = Site.model_validate(message["site"])
            with allow_imports(site.allow_packages):
                self.study = study = study_from_dict(message["study"])
                table = None if study.data.path else (site.name, load_site_table(site, study))
                self.experiment = build_experiment(study, table)
        experiment = self.experiment
        if experiment.pinned_agreement.fingerprint != message["agreement"]:
            raise FedplanError("the study's files have changed since the run was started")
        if changed := changed_examples(message["examples"], experiment.data.digests):
            raise FedplanError(f"the examples of {', '.join(changed[:5])} differ from rank 0's")
        device = rank_device(message["device"], self.ranks.rank, self.ranks.count)
        move_model(experiment.model.eval(), device)

    def _fit(self, message: JsonObject) -> dict[str, str]:
        """Train the turn of a message with the other ranks; return the trained values' digests."""
        experiment, ranks = self.experiment, self.ranks
        model, agreement = experiment.model, experiment.agreement
        if not self.has_joined:
            ranks.join(Path(message["file"]), model_device(model))
            self.has_joined = True
        start, aux, memory = (
            ranks.broadcast(specs, {}, model_device(model)) for specs in message["tensors"]
        )
        set_values(model, start, agreement.trainable)
        job = Job(
            model=model,
            roles={param: Role(message["roles"][param.key]) for param in agreement.params},
            examples=experiment.data.train[message["client"]],
            loss=experiment.data.task.loss,
            train_arguments=agreement.train_arguments,
            start=start,
            aux=aux,
            memory=memory,
            ranks=ranks,
            **{name: message[name] for name in JOB_FIELDS},
        )
        with deterministic(self.study.deterministic):
            agreement.method.fit(job)
        return _trained_digests(job)


def _trained_digests(job: Job) -> dict[str, str]:
    trained = [param for param, role in job.roles.items() if role.is_trained]
    return digests(get_values(job.model, trained, copy=False))


class ClientDevices:
    """Client hook that trains each turn on `count` devices, of which this process has the first.

    `start`, or else the first turn, starts a process for each other device, which builds `study`
    (at a site, with the data of `site`). Raises ConfigError if the study of `experiment` cannot be
    trained so, and DeviceError if the machine lacks the devices. A turn raises FedplanError that
    names the rank which failed, died, was silent or has other values; then all processes are ended,
    and the next turn starts them again. `close` ends them.
    """

    def __init__(
        self, study: Study, experiment: Experiment, count: int, site: Site | None = None
    ) -> None:
        device = site.device if site and site.device else study.device
        _require_divisible(study, experiment, count)
        rank_device(device, count - 1, count)
        self._transport, self._ranks = ProcessTransport(count, RankWorker), Ranks(0, count, WAIT)
        self._begin: JsonObject = {
            "do": "begin",
            "study": resolve_paths(study, Path.cwd()).model_dump(mode="json"),
            "site": site.model_dump(mode="json") if site else None,
            "agreement": experiment.pinned_agreement.fingerprint,
            "examples": experiment.data.digests,
            "device": device,
        }
        self._ends, self._is_checked = list[Callable[[], Any]](), False

    def start(self) -> None:
        """Start the other ranks, which build the study in the background."""
        self._folder, self._has_joined = Path(mkdtemp(prefix="fedplan-ranks-")), False
        self._ends.append(weakref.finalize(self, rmtree, self._folder, ignore_errors=True))
        for rank in range(1, self._ranks.count):
            place = asdict(replace(self._ranks, rank=rank))
            self._transport.start(rank, {**self._begin, "ranks": place})

    def close(self) -> None:
        """End the other ranks; the next turn starts them again."""
        self._transport.close()
        while self._ends:
            self._ends.pop()()

    def __call__(self, fit: Fit) -> Fit:
        """Return a fit that trains together with the other ranks."""

        def fit_together(job: Job) -> FitResult:
            try:
                return self._fit(fit, job)
            except BaseException:
                self.close()
                raise

        return fit_together

    def _fit(self, fit: Fit, job: Job) -> FitResult:
        ranks, device = self._ranks, model_device(job.model)
        tensors = job.start, job.aux, job.memory
        if not self._ends:
            self.start()
        if not self._is_checked:
            self._is_checked = require_mean_loss(job.model, job.loss, job.examples)
        if not self._has_joined:
            self._receive(START, "while it started")
        message: JsonObject = {
            "do": "fit",
            "file": str(self._folder / "group"),
            "tensors": [tensor_specs(each) for each in tensors],
            "roles": {param.key: role.value for param, role in job.roles.items()},
            **{name: getattr(job, name) for name in JOB_FIELDS},
        }
        for rank in range(1, ranks.count):
            self._transport.send(rank, message)
        when = f"while it trained client {job.client!r}"
        try:
            if not self._has_joined:
                ranks.join(self._folder / "group", device)
                self._ends.append(weakref.finalize(self, Ranks.leave))
                self._has_joined = True
            for each in tensors:
                ranks.broadcast(tensor_specs(each), each, device)
            result = fit(replace(job, ranks=ranks))
        except RankLost:
            self._receive(GRACE, when)
            raise
        expected = _trained_digests(job)
        for rank, reply in self._receive(WAIT, when).items():
            if reply["digests"] != expected:
                raise FedplanError(
                    f"{self._name(rank)} ended the turn of {job.client!r} with other values than "
                    "rank 0: a client hook that draws random numbers does so at each rank, and "
                    "cards of two kinds round differently; set devices_per_client = 1"
                )
        return result

    def _name(self, rank: int) -> str:
        return f"rank {rank} of the {self._ranks.count} of devices_per_client"

    def _receive(self, seconds: float, when: str) -> dict[int, JsonObject]:
        """Return the reply of each other rank.

        Raises FedplanError, with `when`, that names a rank which failed, died, or is silent for
        `seconds`; a rank that lost another is named last.
        """
        replies, deadline = dict[int, JsonObject](), time.monotonic() + seconds
        silent = set(range(1, self._ranks.count))
        while silent and time.monotonic() < deadline:
            for rank, reply in self._transport.receive(1.0):
                silent.discard(rank)
                if reply is None:
                    raise FedplanError(
                        f"{self._name(rank)} died {when}, with exit code "
                        f"{self._transport.exit_codes[rank]}: see what it wrote to stderr; if "
                        "memory ran out, use smaller batches"
                    )
                replies[rank] = reply[1]
                if "error" in reply[1] and not reply[1].get("lost"):
                    raise FedplanError(f"{self._name(rank)} failed {when}: {reply[1]['error']}")
        if silent:
            raise FedplanError(f"{self._name(min(silent))} was silent for {seconds:.0f} s {when}")
        for rank, reply in replies.items():
            if "error" in reply:
                raise FedplanError(f"{self._name(rank)} failed {when}: {reply['error']}")
        return replies


def _require_divisible(study: Study, experiment: Experiment, count: int) -> None:
    """Raise ConfigError if ranks cannot share the examples of a step of the study."""
    model, privacy = experiment.model, study.privacy
    problems = {
        "data from Python, which only this process has: write a study file": study.data.from_python,
        'privacy.unit = "example", which clips the gradient of each example': (
            privacy is not None and privacy.unit == "example"
        ),
        "train.cache_activations, a cache of one process": study.train.cache_activations,
        "a training loop of your own, which takes its own batches": (
            experiment.agreement.method.loop is not plain_fit
        ),
        "model.quantization, which nobody has tested with it": is_quantized(model),
        "batch norms, which mix the examples of a batch: set model.freeze_batch_norm = true": any(
            isinstance(module, _BatchNorm) and type(module).train is nn.Module.train
            for module in model.modules()
        ),
    }
    for problem in (problem for problem, present in problems.items() if present):
        raise ConfigError(
            f"devices_per_client = {count} does not go with {problem}; or set it to 1"
        )
