# SPDX-License-Identifier: Apache-2.0
"""The worker of a pool: its own copy of a study, and the clients' turns that it runs.

A worker builds the study from its files, as a site does. The updates of its turns go into a partial
sum.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedplan.data.examples import first_examples
from fedplan.errors import FedplanError
from fedplan.federation.aggregation.factory import open_partial_sum
from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.federation.client import Client, load_client_state
from fedplan.federation.client_round import keep_rejected_turn, score_layers, train_round
from fedplan.federation.evaluation import evaluate_client
from fedplan.federation.global_state import GlobalState, personal_values
from fedplan.federation.identity import changed_examples, read_identity
from fedplan.federation.messages import (
    ClientStateMissing,
    Request,
    RequestRefused,
    block_scores_to_json,
    read_request,
)
from fedplan.federation.rounds import RoundState, accept_update
from fedplan.language.predicates import Turn
from fedplan.models.values import set_values
from fedplan.runners.executors.processes import JsonObject
from fedplan.runners.local import Clients, make_train_setup
from fedplan.studies.experiment import build_experiment, make_eval_set
from fedplan.studies.schema import study_from_dict
from fedplan.tensors.devices import move_model, worker_device
from fedplan.tensors.named import DigestCache, Tensors
from fedplan.tensors.serialization import pack_message


class Worker:
    """Handler of a pool's messages: a copy of a study, built by the first message.

    `round_state` collects the updates of the open partial sum, which `sum_description` describes.
    """

    def _begin(self, message: JsonObject) -> None:
        self.study = study = study_from_dict(message["study"])
        self.folder = Path(message["folder"])
        self.experiment = experiment = build_experiment(self.study)
        move_model(experiment.model.eval(), worker_device(study.device, message["number"]))
        self.agreement, self.digests = experiment.pinned_agreement, DigestCache()
        self.global_state = GlobalState.initial(self.agreement, experiment.initial_values)
        self.round_state: RoundState | None = None
        self.sum_description: JsonObject = {}
        is_example_dp = study.privacy is not None and study.privacy.unit == "example"
        uses_digests = is_example_dp or study.train.cache_activations
        trial = first_examples(experiment.data.train.values())
        sites = experiment.data.train if study.evaluate.on_clients else ()
        self.clients = Clients(
            agreement=self.agreement,
            setup=replace(make_train_setup(study, experiment, trial), digests=self.digests),
            examples=experiment.data.train,
            folder=self.folder,
            synced=message["synced"],
            global_state=lambda: self.global_state,
            traits=study.clients.traits,
            eval_sets={name: make_eval_set(study, experiment.data, name) for name in sites},
            examples_digests=experiment.data.digests if uses_digests else {},
        )

    def reply(self, message: JsonObject, tensors: Tensors) -> TensorsAndJson:
        """Carry out the action `message["do"]`, and return the reply's tensors and fields.

        Before, the worker takes the global state in `message["state"]`, whose changed values are
        `tensors`, and opens the partial sum in `message["open"]`. A FedplanError becomes a reply
        with "error", with "refused" (a client's RequestRefused), or with "missing" (the client lost
        state, and needs a full request).
        """
        client = ""
        try:
            if "state" in message:
                self._update_global_state(message["state"], tensors)
            if "open" in message:
                self.sum_description = message["open"]
                self.round_state = self._empty_round({})
            client = message.get("client", "")
            match message["do"]:
                case "begin":
                    self._begin(message)
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
                    return {}, {"scores": self._personal_scores(message)}
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
            return {}, {"error": str(error), "code": error.code, "client": client}

    def _update_global_state(self, message: JsonObject, tensors: Tensors) -> None:
        """Take over changed global values; FedplanError if the worker's run is another."""
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

    def _empty_round(self, cohort: dict[str, Request]) -> RoundState:
        total = open_partial_sum(self.agreement, self.global_state, self.sum_description)
        digests = self.experiment.param_digests
        return RoundState(cohort, total, start_digests=digests, digests=self.digests)

    def _make_client(self, message: JsonObject) -> Client:
        keys, state = message["received"], self.global_state
        values = {key: state.values[key] for key in keys}
        versions = {key: state.versions[key] for key in keys}
        return self.clients.make_client(message["client"], values, versions)

    def _make_request(self, message: JsonObject) -> Request:
        request = read_request(pack_message({}, message["request"]))
        return replace(request, values={k: self.global_state.values[k] for k in request.versions})

    def _run_turn(self, message: JsonObject) -> JsonObject:
        """Train the message's client, and add a valid update that is not late to the partial sum.

        The reply's "ledger_line" is None if the update is invalid, or valid and too large for this
        partial sum ("overflow"), which then stays as it was.
        """
        name, request = message["client"], self._make_request(message)
        round_state = self.round_state
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
            if not fits_alone:
                keep_rejected_turn(self.clients.journal(name), update)
        return {
            "aggregated": name in round_state.aggregated,
            "ledger_line": line.json() if line else None,
            "rejected": rejected,
            "overflow": fits_alone,
        }

    def _personal_scores(self, message: JsonObject) -> dict[str, dict[str, float]]:
        """Return metrics of the client's stored personal model on its held-out examples."""
        experiment, state, name = self.experiment, self.global_state, message["client"]
        journal = self.clients.journal(name)
        client_state, _ = load_client_state(journal, name, message["answered_round"])
        turn = Turn(state.round, name, state.phase, self.study.clients.traits.get(name, {}))
        start = experiment.initial_values
        values = personal_values(self.agreement, state, start, turn, client_state)
        set_values(experiment.model, values, self.agreement.trainable)
        data, size = experiment.data, self.study.evaluate.batch_size
        return {
            kind: dict(data.task.score(experiment.model, examples, batch_size=size))
            for kind, examples in data.held_out(name).items()
        }
