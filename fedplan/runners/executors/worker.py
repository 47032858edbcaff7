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
from fedplan.federation.client import Client
from fedplan.federation.client_round import train_round
from fedplan.federation.evaluation import evaluate_client
from fedplan.federation.global_state import GlobalState, personal_values
from fedplan.federation.identity import changed_examples, read_identity
from fedplan.federation.layer_scoring import score_layers
from fedplan.federation.messages import (
    ClientStateMissing,
    Request,
    RequestRefused,
    Update,
    block_scores_from_json,
    block_scores_to_json,
)
from fedplan.federation.partial_sums import TensorsAndJson, export_partial_sum, open_partial_sum
from fedplan.federation.rounds import RoundState, accept_update
from fedplan.language.turn import Turn
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
    """A worker's copy of a study: model, data, global state, clients, and the open partial sum.

    `round_state` collects the updates of the open sum; `sum_description` describes that sum.
    `tables` holds values that many messages share; see `_look_up`.
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        """Build the study of a BEGIN message, on its device."""
        self.study = study_from_dict(dict(message["study"]))
        self.folder = Path(message["folder"])
        self.experiment = experiment = build_experiment(self.study)
        move_model(experiment.model.eval(), resolve_device(self.study.device))
        self.agreement, self.digests = experiment.pinned_agreement, DigestCache()
        self.global_state = GlobalState.initial(self.agreement, experiment.initial_values)
        self.round_state: RoundState | None = None
        self.sum_description: JsonObject = {}
        self.tables: dict[str, list[Any]] = {}
        self.clients = self._make_clients()

    def _make_clients(self) -> Clients:
        study, experiment = self.study, self.experiment
        is_example_dp = study.privacy is not None and study.privacy.unit == "example"
        sites = experiment.data.train if study.evaluate.on_clients else ()
        return Clients(
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
            examples_digests=experiment.data.digests
            if is_example_dp or study.train.cache_activations
            else {},
            deterministic=study.deterministic,
            initial_model=experiment.initial_model.with_checksums(
                experiment.model, self.agreement.frozen
            ),
            activation_cache=study.train.activation_cache,
        )

    def reply(self, message: Mapping[str, Any], tensors: Tensors) -> TensorsAndJson:
        """Carry out a message's action, and return the reply's tensors and fields.

        A FedplanError is returned as reply with "error", "refused" or "lacking", not raised.
        """
        try:
            return self._actions[message["do"]](message, tensors)
        except ClientStateMissing:
            return {}, {"lacking": True}
        except RequestRefused as error:
            return {}, {"refused": error.code, "error": str(error)}
        except FedplanError as error:
            return {}, {"error": str(error), "code": error.code}

    @property
    def _actions(self) -> dict[str, Callable[[Mapping[str, Any], Tensors], TensorsAndJson]]:
        return {
            "world": self._update_global_state,
            "open": self._open_sum,
            "turn": self._run_turn,
            "poll": self._poll_layer_scores,
            "scores": self._evaluate,
            "own": self._personal_scores,
            "sum": self._close_sum,
        }

    def _update_global_state(self, message: Mapping[str, Any], tensors: Tensors) -> TensorsAndJson:
        """Apply the changed values of the global state; join the run with the first message."""
        if message["run"] != self.agreement.run:
            self._join_run(message["run"], message["agreed"])
        self.global_state = replace(
            self.global_state,
            values={**self.global_state.values, **tensors},
            versions={**self.global_state.versions, **message["versions"]},
            round=message["round"],
            phase=message["phase"],
        )
        self.digests.keep_only(self.global_state.values.values())
        self.tables = {"versions": [], "held": []}
        return {}, {}

    def _join_run(self, run: str, agreement_digest: str) -> None:
        """Set the run of this worker's agreement.

        Raises FedplanError if its folder, its agreement or its data differ from the server's.
        """
        identity = read_identity(self.folder)
        if identity.id != run:
            raise FedplanError(
                f"{self.folder} holds another run on this worker's machine: workers need the run's "
                "folder, so put it on a disk that all of them see at the same place"
            )
        if self.agreement.fingerprint != agreement_digest:
            raise FedplanError(
                f"a worker built {self.agreement.fingerprint} of the study, and the server "
                f"{agreement_digest}: the study's files differ between machines, or were changed"
            )
        if changed := changed_examples(identity.rows, self.experiment.data.digests):
            raise FedplanError(
                f"a worker read other examples of {', '.join(changed[:5])} than the run started "
                "with: the table differs between machines, or was changed"
            )
        self.agreement = self.clients.agreement = replace(self.agreement, run=run)

    def _open_sum(self, message: Mapping[str, Any], tensors: Tensors) -> TensorsAndJson:
        """Start an empty partial sum for the turns that follow."""
        self.sum_description = dict(message["total"])
        total = open_partial_sum(self.agreement, self.global_state, self.sum_description)
        self.round_state = RoundState(
            {}, total, start_digests=self.experiment.param_digests, digests=self.digests
        )
        return {}, {}

    def _make_client(self, message: Mapping[str, Any]) -> Client:
        """Make the client of a message, with the global values that it already has."""
        keys = self._look_up("held", message)
        values, versions = self.global_state.values, self.global_state.versions
        seen = {key: values[key] for key in keys}
        return self.clients.make_client(
            message["client"], seen, {key: versions[key] for key in keys}
        )

    def _look_up(self, name: str, message: Mapping[str, Any]) -> Any:
        """Return a message's field that is sent once per worker and then by number.

        The field is `[number, value]` the first time, later `[number]`.
        """
        number, *value = message[name]
        if value:
            self.tables[name][number:] = value
        return self.tables[name][number]

    def _make_request(self, message: Mapping[str, Any]) -> Request:
        """Rebuild a client's request; its values come from this worker's global state."""
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
            agreement_digest=message["agreed"],
            turn=turn,
            values={key: self.global_state.values[key] for key in versions},
            versions=versions,
            versions_digest=message["basis"],
            last_update_round=message["heard"],
            full=message["full"],
            run=message["run"],
        )

    def _run_turn(self, message: Mapping[str, Any], tensors: Tensors) -> TensorsAndJson:
        """Train a client and add its update to the partial sum, after the server's checks.

        The reply says whether the update counts, its ledger line, why it is rejected, whether the
        sum overflowed ("crowded"), and the seconds taken.
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
        return {}, {
            "counted": name in round_state.aggregated,
            "line": line.json() if line else None,
            "rejected": rejected,
            "crowded": line is None and self._fits_alone(request, update),
            "seconds": time.perf_counter() - began,
        }

    def _fits_alone(self, request: Request, update: Update) -> bool:
        """Whether a rejected update is accepted by an empty sum.

        It then overflowed this partial sum, and the round must run in the order of its clients.
        """
        total = open_partial_sum(self.agreement, self.global_state, self.sum_description)
        empty = RoundState(
            {update.client: request},
            total,
            start_digests=self.experiment.param_digests,
            digests=self.digests,
        )
        accept_update(self.agreement, self.global_state, empty, update)
        return bool(empty.records)

    def _poll_layer_scores(self, message: Mapping[str, Any], tensors: Tensors) -> TensorsAndJson:
        request = self._make_request(message)
        return {}, {
            "scores": block_scores_to_json(
                score_layers(self.agreement, self._make_client(message), request)
            )
        }

    def _evaluate(self, message: Mapping[str, Any], tensors: Tensors) -> TensorsAndJson:
        request = self._make_request(message)
        return {}, {"scores": evaluate_client(self.agreement, self._make_client(message), request)}

    def _personal_scores(self, message: Mapping[str, Any], tensors: Tensors) -> TensorsAndJson:
        """Evaluate a client's personal model of this round on its own test examples."""
        name, data = message["client"], self.experiment.data
        client_state, _ = self.clients.journal(name).client_state()
        traits = self.study.clients.traits.get(name, {})
        turn = Turn(self.global_state.round, name, self.global_state.phase, traits)
        values = personal_values(
            self.agreement, self.global_state, self.experiment.initial_values, turn, client_state
        )
        set_values(self.experiment.model, values, self.agreement.trainable)
        score = data.task.score(
            self.experiment.model,
            data.client_tests[name],
            batch_size=self.study.evaluate.batch_size,
        )
        return {}, {"scores": dict(score)}

    def _close_sum(self, message: Mapping[str, Any], tensors: Tensors) -> TensorsAndJson:
        """Return the partial sum, and drop it here."""
        assert self.round_state is not None
        partial_sum, self.round_state = export_partial_sum(self.round_state.aggregator), None
        return partial_sum


class MessageHandler:
    """Builds a Worker from a BEGIN message, and passes the other messages to it."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def reply(self, message: Mapping[str, Any], load: Callable[[], Tensors]) -> TensorsAndJson:
        """Return the reply to a message; `load` returns the message's tensors.

        Any exception is printed to stderr and returned as a reply with "error".
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
    """Return contiguous tensors of which no two share memory, as safetensors needs them."""
    owners = dict[int, str]()
    return {
        name: tensor.detach().contiguous()
        if owners.setdefault(tensor.untyped_storage().data_ptr(), name) == name
        else tensor.detach().clone()
        for name, tensor in tensors.items()
    }
