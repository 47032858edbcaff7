# SPDX-License-Identifier: Apache-2.0
"""The worker of a pool: its own copy of a study, and the clients' turns that it runs.

A worker builds the study from its files, as a site does. Messages contain only JSON and tensors, no
code and no pickled objects. The updates of its turns go into a partial sum.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.factory import open_partial_sum
from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.federation.client import Client
from fedplan.federation.client_round import score_layers, train_round
from fedplan.federation.evaluation import evaluate_client
from fedplan.federation.global_state import GlobalState, personal_values
from fedplan.federation.identity import changed_examples, read_identity
from fedplan.federation.messages import (
    ClientStateMissing,
    Request,
    RequestRefused,
    block_scores_from_json,
    block_scores_to_json,
)
from fedplan.federation.rounds import RoundState, accept_update
from fedplan.language.predicates import Turn
from fedplan.models.values import set_values
from fedplan.runners.clients import Clients
from fedplan.studies.experiment import build_experiment, make_eval_set
from fedplan.studies.schema import study_from_dict
from fedplan.tensors.devices import move_model, resolve_device
from fedplan.tensors.named import DigestCache, Tensors

BEGIN = "begin"
"""Action of the first message, which has the study and its run folder; it resets a worker."""
JsonObject = dict[str, Any]
"""A message or reply without its tensors, as JSON."""


class Worker:
    """A worker's own copy of a study, which carries out the pool's messages by `reply`.

    `message` is the pool's BEGIN message; the constructor builds the study in `message["study"]` on
    the study's device, for the run folder `message["folder"]`. `global_state` follows the server's,
    `round_state` collects the updates of the open partial sum (None if no sum is open), and
    `sum_description` describes the sum. `tables` has values that many messages share.
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.study = study = study_from_dict(dict(message["study"]))
        self.folder = Path(message["folder"])
        self.experiment = experiment = build_experiment(self.study)
        move_model(experiment.model.eval(), resolve_device(study.device))
        self.agreement, self.digests = experiment.pinned_agreement, DigestCache()
        self.global_state = GlobalState.initial(self.agreement, experiment.initial_values)
        self.round_state: RoundState | None = None
        self.sum_description: JsonObject = {}
        self.tables: dict[str, list[Any]] = {}
        is_example_dp = study.privacy is not None and study.privacy.unit == "example"
        uses_digests = is_example_dp or study.train.cache_activations
        initial = experiment.initial_model
        sites = experiment.data.train if study.evaluate.on_clients else ()
        self.clients = Clients(
            agreement=self.agreement,
            model=experiment.model,
            examples=experiment.data.train,
            loss=experiment.data.task.loss,
            folder=self.folder,
            start=experiment.initial_values,
            model_digests=experiment.param_digests,
            digests=self.digests,
            global_state=lambda: self.global_state,
            traits=study.clients.traits,
            eval_sets={name: make_eval_set(study, experiment.data, name) for name in sites},
            examples_digests=experiment.data.digests if uses_digests else {},
            deterministic=study.deterministic,
            initial_model=initial.with_checksums(experiment.model, self.agreement.frozen),
            activation_cache=study.train.activation_cache,
        )

    def reply(self, message: Mapping[str, Any], tensors: Tensors) -> TensorsAndJson:
        """Carry out the action `message["do"]`, and return the reply's tensors and fields.

        `tensors` belong to the message. A FedplanError is not raised, but returned as a reply with
        "error" and "code", with "refused" (a client's RequestRefused), or with "missing" (the
        client lost state, and needs a full request). Other exceptions are raised.
        """
        try:
            match message["do"]:
                case "global_state":
                    self._update_global_state(message, tensors)
                    return {}, {}
                case "open":  # an empty partial sum for the turns that follow
                    self.sum_description = dict(message["sum"])
                    self.round_state = self._empty_round({})
                    return {}, {}
                case "turn":
                    return {}, self._run_turn(message)
                case "poll":
                    request, client = self._make_request(message), self._make_client(message)
                    layer_scores = score_layers(self.agreement, client, request)
                    return {}, {"scores": block_scores_to_json(layer_scores)}
                case "scores":
                    request, client = self._make_request(message), self._make_client(message)
                    return {}, {"scores": evaluate_client(self.agreement, client, request)}
                case "personal_scores":
                    return {}, {"scores": self._personal_scores(message["client"])}
                case "sum":
                    assert self.round_state is not None
                    partial_sum = self.round_state.aggregator.state()
                    self.round_state = None
                    return partial_sum
                case action:
                    raise KeyError(action)
        except ClientStateMissing:
            return {}, {"missing": True}
        except RequestRefused as error:
            return {}, {"refused": error.code, "error": str(error)}
        except FedplanError as error:
            return {}, {"error": str(error), "code": error.code}

    def _update_global_state(self, message: Mapping[str, Any], tensors: Tensors) -> None:
        """Put `tensors`, the changed global values, and their versions into the global state.

        The first message of a run makes this worker join the run, and raises FedplanError if the
        run folder, the agreement or the examples differ from the server's. Clears `tables`.
        """
        if (run := message["run"]) != self.agreement.run:
            identity, fingerprint = read_identity(self.folder), self.agreement.fingerprint
            if identity.id != run:
                raise FedplanError(
                    f"{self.folder} holds another run on this worker's machine: workers need the "
                    "run's folder, so put it on a disk that all of them see at the same place"
                )
            if fingerprint != message["agreement"]:
                raise FedplanError(
                    f"a worker built {fingerprint} of the study, and the server "
                    f"{message['agreement']}: the study's files differ between machines, or were "
                    "changed"
                )
            if changed := changed_examples(identity.examples, self.experiment.data.digests):
                raise FedplanError(
                    f"a worker read other examples of {', '.join(changed[:5])} than the run "
                    "started with: the table differs between machines, or was changed"
                )
            self.agreement = self.clients.agreement = replace(self.agreement, run=run)
        self.global_state = replace(
            self.global_state,
            values={**self.global_state.values, **tensors},
            versions={**self.global_state.versions, **message["versions"]},
            round=message["round"],
            phase=message["phase"],
        )
        self.digests.keep_only(self.global_state.values.values())
        self.tables = {"versions": [], "received": []}

    def _empty_round(self, cohort: dict[str, Request]) -> RoundState:
        """Return a round with an empty partial sum for the requests of `cohort`, by client."""
        total = open_partial_sum(self.agreement, self.global_state, self.sum_description)
        digests = self.experiment.param_digests
        return RoundState(cohort, total, start_digests=digests, digests=self.digests)

    def _make_client(self, message: Mapping[str, Any]) -> Client:
        """Make the client of a message, with the global values that the client has received."""
        keys, state = self._look_up("received", message), self.global_state
        values = {key: state.values[key] for key in keys}
        versions = {key: state.versions[key] for key in keys}
        return self.clients.make_client(message["client"], values, versions)

    def _look_up(self, field: str, message: Mapping[str, Any]) -> Any:
        """Return the value of `message[field]`, which is `[number, value]` or only `[number]`.

        A value that comes with a number is stored in `tables`, for later messages with the number.
        """
        number, *value = message[field]
        if value:
            self.tables[field][number:] = value
        return self.tables[field][number]

    def _make_request(self, message: Mapping[str, Any]) -> Request:
        """Return the request in a message, with the values of this worker's global state."""
        versions: dict[str, int] = self._look_up("versions", message)
        scores = message["scores"]
        turn = Turn(
            round=message["round"],
            client=message["client"],
            phase=message["phase"],
            traits=message["traits"],
            scores=block_scores_from_json(scores) if scores is not None else None,
        )
        return Request(
            name=message["request"],
            agreement_digest=message["agreement"],
            turn=turn,
            values={key: self.global_state.values[key] for key in versions},
            versions=versions,
            versions_digest=message["versions_digest"],
            last_update_round=message["last_update_round"],
            full=message["full"],
            run=message["run"],
        )

    def _run_turn(self, message: Mapping[str, Any]) -> JsonObject:
        """Train the message's client, and add a valid update that is not late to the partial sum.

        Returns the fields "aggregated" (whether the update is in the sum), "ledger_line" (the
        turn's record for the ledger; None if the update is invalid or overflows), "rejected" (why
        the update is not in the sum, or None), "overflow" (whether the update is valid, but too
        large for this partial sum, which then stays as it was) and "seconds". A valid update with
        `message["late"]` has a "ledger_line", and "rejected" is "late". Raises as `train_round`.
        """
        name, request = message["client"], self._make_request(message)
        round_state, began = self.round_state, time.perf_counter()
        assert round_state is not None
        round_state.cohort = {name: request}
        update = train_round(self.agreement, self._make_client(message), request, copy=False)
        accept_update(
            self.agreement, self.global_state, round_state, update, is_late=message["late"]
        )
        line, rejected = round_state.records.pop(name, None), round_state.rejected.pop(name, None)
        fits_alone = False
        if line is None:
            # An update that fits an empty sum overflowed this one: the round must run in order.
            alone = self._empty_round({update.client: request})
            accept_update(self.agreement, self.global_state, alone, update)
            fits_alone = bool(alone.records)
        return {
            "aggregated": name in round_state.aggregated,
            "ledger_line": line.json() if line else None,
            "rejected": rejected,
            "overflow": fits_alone,
            "seconds": time.perf_counter() - began,
        }

    def _personal_scores(self, name: str) -> dict[str, float]:
        """Return the metrics of the personal model of the client `name` on the client's test set.

        The model has the client's stored personal values over the present global values.
        """
        experiment, state = self.experiment, self.global_state
        client_state, _ = self.clients.journal(name).client_state()
        turn = Turn(state.round, name, state.phase, self.study.clients.traits.get(name, {}))
        start = experiment.initial_values
        values = personal_values(self.agreement, state, start, turn, client_state)
        set_values(experiment.model, values, self.agreement.trainable)
        test, size = experiment.data.client_tests[name], self.study.evaluate.batch_size
        return dict(experiment.data.task.score(experiment.model, test, batch_size=size))


class MessageHandler:
    """A worker's entry point: `reply` builds a Worker by a BEGIN message, and passes on the others.

    The first message is taken for a BEGIN message; a later BEGIN replaces the Worker.
    """

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def reply(self, message: Mapping[str, Any], load: Callable[[], Tensors]) -> TensorsAndJson:
        """Return the reply's tensors and fields; `load` loads the tensors of `message`.

        An Exception is never raised, but printed to stderr and returned as a reply with "error".
        """
        try:
            if self._worker is None or message["do"] == BEGIN:
                self._worker = None  # free the old model before the new one is built
                self._worker = Worker(message)
                return {}, {}
            return self._worker.reply(message, load())
        except Exception as error:
            traceback.print_exc()
            return {}, {"error": f"{type(error).__name__}: {error}", "code": ""}


def encode_json(fields: Mapping[str, Any]) -> bytes:
    """Encode a message or reply as JSON bytes; integers may have any length."""
    return json.dumps(fields).encode()


def decode_json(data: bytes) -> JsonObject:
    """Decode the bytes of `encode_json`."""
    fields: JsonObject = json.loads(data)
    return fields


def unshared_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached tensors of which no two share memory, as safetensors demands.

    A tensor that shares memory with an earlier tensor is cloned; any other is made contiguous, by a
    copy only if needed.
    """
    owners = dict[int, str]()
    return {
        name: tensor.detach().contiguous()
        if owners.setdefault(tensor.untyped_storage().data_ptr(), name) == name
        else tensor.detach().clone()
        for name, tensor in tensors.items()
    }
