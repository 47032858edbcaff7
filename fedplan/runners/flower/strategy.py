# SPDX-License-Identifier: Apache-2.0
"""Partial federated learning by a plan in your own Flower app: a strategy and a client mod.

`Partial` replaces `FedAvg`, `partial` is a mod of the ClientApp; the rest of the app stays as it
is, and sees a whole state dict.

This is a simple mode. All shared params are sent each round, and Flower collects all replies before
the first is aggregated. Plans with `best` or `phase` are refused, because there are no scores and
no phases. Changes of frozen params in your loop are discarded, and no computation is saved. Buffers
are never sent: each client keeps its own on disk. Flower has no bfloat16, so your app gets float32.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fedplan.errors import FedplanError, PlanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.faults import decode_reason
from fedplan.federation.messages import RequestRefused, UpdateRejected
from fedplan.language.parser import parse
from fedplan.language.plan import Best, By, Plan, Role, Roles, When
from fedplan.language.predicates import Condition, Phase, Trait, Turn
from fedplan.language.resolution import check_plan, resolve
from fedplan.methods.method import Method
from fedplan.models.description import describe
from fedplan.models.values import get_values, set_values
from fedplan.runners.flower import records
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.tensors.devices import fork_rng_state
from fedplan.tensors.named import Tensors, digests
from fedplan.tensors.serialization import JSON, pack_message, unpack_message
from fedplan.tensors.sums import ExactSum
from fedplan.training.fit import TrainArguments

Average = Callable[[list[RecordDict], str], MetricRecord]
"""Flower's function that averages metrics by a weight."""
Next = Callable[[FlowerMessage, Context], FlowerMessage]
"""The next mod, or the app itself."""

log = logging.getLogger("flwr.fedplan")


class Partial(FedAvg):
    """Strategy `FedAvg` by a plan: each param is the weighted mean over the clients that share it.

    A param that no client shares stays unchanged. `plan` is a Plan or a plan's text; `model` gives
    the names and shapes of params (initial values come from `start`). `settings` are the arguments
    of `FedAvg`. Use the mod `partial` at the clients. An update without exactly the params that the
    client is to share is left out, with a warning. Client names are not authenticated; weights must
    be integers. Raises PlanError for a plan that does not fit the model, or needs scores or phases.
    """

    def __init__(self, plan: Plan | str, model: nn.Module, **settings: Any) -> None:
        super().__init__(**settings)
        self._agreement, self._model = _make_agreement(plan, model), deepcopy(model).cpu()
        self._run = uuid.uuid4().hex

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """Return the training requests of a round, with all values that may be shared."""
        self._run = uuid.uuid4().hex if server_round == 1 else self._run
        request = self._request_records(server_round, arrays, config)
        return super().configure_train(server_round, *request, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """Return the evaluation requests of a round, with all values that may be shared."""
        request = self._request_records(server_round, arrays, config)
        return super().configure_evaluate(server_round, *request, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[FlowerMessage]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the whole new model, param by param of valid updates, and the mean metrics."""
        sums, counted = ExactSum(), dict[str, RecordDict]()
        for reply in replies:
            try:
                values, client = self._check_update(server_round, reply, counted)
                sums.add(values, int(self._weight(reply.content)))
                counted[client] = reply.content
            except FedplanError as error:
                log.warning("round %d: an update is left out: %s", server_round, str(error)[:200])
        set_values(self._model, sums.mean(), self._agreement.params)
        metrics = self._mean(list(counted.values()), self.train_metrics_aggr_fn)
        return _arrays(self._model), metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[FlowerMessage]
    ) -> MetricRecord | None:
        """Return the weighted mean of the metrics in `replies`, or None; errors are left out."""
        contents = [reply.content for reply in replies if not reply.has_error()]
        return self._mean(contents, self.evaluate_metrics_aggr_fn)

    def _request_records(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord, ConfigRecord]:
        """Load Flower's arrays; return the shared values and the config with the header."""
        self._model.load_state_dict(arrays.to_torch_state_dict())
        digests: dict[str, JSON] = {**_frozen_digests(self._agreement, self._model)}
        fields = {**self._request_fields(number), "round": number, "frozen_digests": digests}
        message = pack_message(get_values(self._model, self._agreement.exchanged), fields)
        return records.to_arrays(message.blobs), ConfigRecord(
            {**config, records.FIELD: message.header}
        )

    def _request_fields(self, number: int) -> dict[str, JSON]:
        return {"request": f"{self._run}/{number}", "agreement": self._agreement.fingerprint}

    def _check_update(
        self, number: int, reply: FlowerMessage, counted: Collection[str]
    ) -> tuple[dict[str, Tensor], str]:
        """Return a reply's values by param and its client; FedplanError if not as requested."""
        if reply.has_error():
            raise UpdateRejected(decode_reason(str(reply.error.reason)))
        values, fields = unpack_message(records.from_records(reply.content))
        client, traits = fields.get("client"), fields.get("traits")
        if not isinstance(client, str) or not isinstance(traits, dict) or client in counted:
            raise UpdateRejected(f"{client!r} is no client with traits, or has an update already")
        if any(fields.get(name) != value for name, value in self._request_fields(number).items()):
            raise UpdateRejected(f"{client} answers another request, or has agreed to another plan")
        if not self._weight(reply.content).is_integer():
            raise UpdateRejected(f"the {self.weighted_by_key} of {client} is not an integer")
        items = cast("dict[str, Any]", traits).items()
        turn = Turn(number, client, traits={name: str(value) for name, value in items})
        roles = resolve(self._agreement.method.plan, self._agreement.params, turn)
        shared = {p.key: (p.shape, p.dtype) for p in roles if roles[p] is Role.SHARE}
        received = {
            k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in values.items()
        }
        if wrong := sorted(shared.items() ^ received.items()):
            raise UpdateRejected(f"{wrong[0][0]!r} of {client} is not what it is to share")
        return values, client

    def _weight(self, content: RecordDict) -> float:
        """Return the weight in a reply's only metric record; NaN if there is none."""
        metrics = list(content.metric_records.values())
        weight = metrics[0].get(self.weighted_by_key) if len(metrics) == 1 else None
        return float(weight) if isinstance(weight, int | float) else nan

    def _mean(self, contents: list[RecordDict], average: Average) -> MetricRecord | None:
        """Return `average` of the metrics in replies' contents; None if no metrics are left.

        Left out are those without a positive finite weight, or with other names than most.
        """
        groups = dict[str, list[RecordDict]]()
        for content in filter(lambda c: 0 < self._weight(c) < inf, contents):
            (metrics,) = content.metric_records.values()
            names = sorted((k, len(v) if isinstance(v, list) else 0) for k, v in metrics.items())
            groups.setdefault(str(names), []).append(_metrics(content))
        largest = max(groups.values(), key=len, default=[])
        if len(largest) < len(contents):
            log.warning("the metrics of %d clients are left out", len(contents) - len(largest))
        return average(largest, self.weighted_by_key) if largest else None


def partial(
    plan: Plan | str, make_model: Callable[[], nn.Module], state_folder: Path | str
) -> Callable[[FlowerMessage, Context, Next], FlowerMessage]:
    """Return a mod for `ClientApp(mods=[...])`, the counterpart of the strategy `Partial`.

    `plan` must be the plan of `Partial`; `make_model` builds the model, with the server's frozen
    params. Your app gets and returns the whole model; only shared params and metrics are sent. The
    client's name is the node config's `name` or `partition-id`; other entries of the node config
    are the client's traits, of which the ones in the plan are sent. Personal params are stored in
    `state_folder` (best an absolute path), also for later runs; they start from the server's
    values, or as `make_model` builds them. A repeated request gets the stored reply. Exceptions of
    your app are sent as error codes.
    """
    return _Mod(plan, make_model, Path(state_folder))


@dataclass(frozen=True)
class _Mod:
    """The callable mod that `partial` returns; a class, because Flower's simulation pickles it."""

    plan: Plan | str
    make_model: Callable[[], nn.Module]
    state_folder: Path

    @cached_property
    def client(self) -> _Client:
        return _Client(self.plan, self.make_model)

    def __call__(self, envelope: FlowerMessage, context: Context, call_next: Next) -> FlowerMessage:
        kind = envelope.metadata.message_type.partition(".")[0]
        if kind not in ("train", "evaluate"):
            return call_next(envelope, context)
        try:
            return self._run_turn(envelope, context, call_next, kind)
        except Exception as error:
            return records.error_reply(envelope, error)

    def _run_turn(
        self, envelope: FlowerMessage, context: Context, call_next: Next, kind: str
    ) -> FlowerMessage:
        """Run the app on the client's model; only a train request commits the client's state."""
        sent = envelope.content
        (arrays,), (config,) = sent.array_records.values(), sent.config_records.values()
        message = RecordDict({records.ARRAYS: arrays, records.HEADER: config})
        received, fields = unpack_message(records.from_records(message))
        client, turn = self.client, self.client.turn(fields, context)
        journal = Journal(client_state_folder(self.state_folder, turn.client))
        request = fields["request"] if kind == "train" else ""
        result = journal.reply_for(request)
        if result is None:
            state, _ = journal.client_state(request)
            roles = client.start(turn, fields["frozen_digests"], received, state)
            # The app gets the whole model, and the config without fedplan's header.
            app_message, model_arrays = copy(envelope), _arrays(client.model)
            content = RecordDict({name: model_arrays for name in sent.array_records})
            for name, config in sent.config_records.items():
                own = {k: v for k, v in config.items() if k != records.FIELD}
                content[name] = ConfigRecord(own)
            app_message.content = content
            reply = call_next(app_message, context)
            if reply.has_error():
                return reply
            metrics = _metrics(reply.content)
            if kind == "evaluate":
                return FlowerMessage(metrics, reply_to=envelope)
            personal, shared = client.end(roles, reply.content)
            # As text, because a metric may be NaN, which the journal's JSON cannot hold.
            result = shared, {"metrics": json.dumps({k: {**m} for k, m in metrics.items()})}
            journal.commit(request, {**state, **personal}, {}, *result)
        return FlowerMessage(client.reply(turn, request, *result), reply_to=envelope)


class _Client:
    """A client's model and its agreement; call `turn`, `start`, the app, `end` and `reply`."""

    def __init__(self, plan: Plan | str, make_model: Callable[[], nn.Module]) -> None:
        with fork_rng_state():  # keep the random state of your loop
            self.model = deepcopy(make_model()).cpu()
        self.agreement = _make_agreement(plan, self.model)
        self.initial = deepcopy(self.model.state_dict())
        self.frozen_digests = _frozen_digests(self.agreement, self.model)
        params = {name for p in self.agreement.params for name in (p.name, *p.tied)}
        self.buffers = self.initial.keys() - params

    def turn(self, fields: Mapping[str, Any], context: Context) -> Turn:
        """Return the turn of a request; RequestRefused if the server's plan or model differs."""
        digest, node = self.agreement.fingerprint, context.node_config
        if fields.get("agreement") != digest:
            raise RequestRefused(
                f"plan or model differ ({digest} here, {fields.get('agreement')} at the server)"
            ).with_code("another-study")
        name = node.get("name", node.get("partition-id"))
        if name is None:
            raise FedplanError(
                "this node was started with neither a name nor a partition-id"
            ).with_code("settings")
        plan = self.agreement.method.plan
        names = {step.trait for step in plan.walk() if isinstance(step, By)}
        names |= {atom.name for atom in _conditions(plan) if isinstance(atom, Trait)}
        traits = {trait: str(node[trait]) for trait in names if trait in node}
        return Turn(fields["round"], str(name), traits=traits)

    def start(
        self, turn: Turn, server_digests: Mapping[str, str], received: Tensors, state: Tensors
    ) -> Roles:
        """Load all values into the model; return roles. RequestRefused for other frozen ones."""
        roles = resolve(self.agreement.method.plan, self.agreement.params, turn)
        for p, role in roles.items():
            if role is Role.FREEZE and self.frozen_digests.get(p.key) != server_digests.get(p.key):
                raise RequestRefused(
                    f"{p.key} is frozen and not the server's: start both from one model"
                ).with_code("model")
        personal = {p.key: state[p.key] for p in roles if roles[p].is_personal and p.key in state}
        buffers = {k: state[k] for k in self.buffers & state.keys()}
        self.model.load_state_dict(self.initial | buffers)
        set_values(self.model, {**received, **personal}, self.agreement.params)
        return roles

    def end(self, roles: Roles, content: RecordDict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return personal values with buffers, and those to share; FedplanError if not finite."""
        personal = get_values(self.model, [p for p in roles if roles[p].is_personal])
        (arrays,) = content.array_records.values()
        self.model.load_state_dict(arrays.to_torch_state_dict())
        trained = get_values(self.model, [p for p in roles if roles[p].is_trained])
        for key, value in trained.items():
            if not bool(value.isfinite().all()):
                raise FedplanError(
                    f"{key} is not finite after training: nothing is kept or sent"
                ).with_code("training")
        state = self.model.state_dict()
        own_values = {k: trained.get(k, v) for k, v in personal.items()}
        own_values |= {k: state[k] for k in self.buffers}
        return own_values, {k: v for k, v in trained.items() if k not in personal}

    def reply(
        self, turn: Turn, request: str, shared: Tensors, meta: Mapping[str, Any]
    ) -> RecordDict:
        fields = {
            "client": turn.client,
            "request": request,
            "agreement": self.agreement.fingerprint,
        }
        content = records.to_records(pack_message(shared, {**fields, "traits": {**turn.traits}}))
        for name, metrics in json.loads(meta["metrics"]).items():
            content[name] = MetricRecord(metrics)
        return content


def _make_agreement(plan: Plan | str, model: nn.Module) -> Agreement:
    """Return the agreement on a plan; PlanError if it does not fit or needs scores or phases."""
    plan, params = parse(plan) if isinstance(plan, str) else plan, describe(model)
    check_plan(plan, params)
    unsupported = [step.text for step in plan.walk() if isinstance(step, Best)]
    unsupported += [atom.text for atom in _conditions(plan) if isinstance(atom, Phase)]
    if unsupported:
        raise PlanError(
            f"{unsupported[0]} needs fedplan's own apps: Partial has no scores and no phases"
        )
    return Agreement("partial", params, Method(plan), TrainArguments())


def _conditions(plan: Plan) -> list[Condition]:
    return [a for step in plan.walk() if isinstance(step, When) for a in step.condition.atoms()]


def _frozen_digests(agreement: Agreement, model: nn.Module) -> dict[str, str]:
    return digests(get_values(model, set(agreement.params) - set(agreement.exchanged)))


def _arrays(model: nn.Module) -> ArrayRecord:
    """Return a model's state dict as Flower arrays, with bfloat16 as float32."""
    state = model.state_dict().items()
    return ArrayRecord({k: v.float() if v.dtype == torch.bfloat16 else v for k, v in state})


def _metrics(content: RecordDict) -> RecordDict:
    return RecordDict({k: MetricRecord({**m}) for k, m in content.metric_records.items()})
