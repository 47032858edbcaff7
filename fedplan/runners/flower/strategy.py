# SPDX-License-Identifier: Apache-2.0
"""Partial: a Flower app of your own, with a loop of its own, made to follow a plan.

`Partial` stands where `FedAvg` stood, `partial` is a mod of the client's app, and the rest stays as
it is: the app is handed a whole state dict and returns one.

It is a simple mode. All that may travel comes down each time, for no versions are kept, and Flower
collects the replies before any is counted. There are no scores and no phases, so plans with `best`
or `phase` are refused. A frozen part may move while your loop runs; what became of it there is let
go, and no computation is saved. Buffers never travel: each client has its own, on its disk. Flower
holds no bfloat16, so your app sees it as float32, which holds every value of it.
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
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    MetricRecord,
    RecordDict,
)
from flwr.app import (
    Message as FlowerMessage,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fedplan.errors import FedplanError, PlanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.codes import understood
from fedplan.federation.messages import Refused, Rejected
from fedplan.language.parser import parse
from fedplan.language.plan import Best, By, Plan, Role, Roles, When
from fedplan.language.resolution import check, resolve
from fedplan.language.turn import Condition, Phase, Trait, Turn
from fedplan.methods.method import Method
from fedplan.models.description import describe
from fedplan.models.values import put, take
from fedplan.runners.flower import records
from fedplan.runners.flower.executor import failed
from fedplan.storage.journal import Journal, home_of
from fedplan.tensors.devices import forked
from fedplan.tensors.message import Message
from fedplan.tensors.named import Tensors, digests
from fedplan.tensors.serialization import JSON, packed, unpacked
from fedplan.tensors.sums import ExactSum
from fedplan.training.fit import Pace

Average = Callable[[list[RecordDict], str], MetricRecord]
Next = Callable[[FlowerMessage, Context], FlowerMessage]

log = logging.getLogger("flwr.fedplan")


class Partial(FedAvg):
    """`FedAvg` by a plan: each param is the mean over its own senders, or stays as it was.

    An update that is not what its sender is to share is left out singly, with a warning. A client
    is who it says it is, and its weight is a whole number. `settings` are those of `FedAvg`.
    """

    def __init__(self, plan: Plan | str, model: nn.Module, **settings: Any) -> None:
        super().__init__(**settings)
        self._agreement, self._model = _agreed(plan, model), deepcopy(model).cpu()
        self._run = uuid.uuid4().hex

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """Ask for a round of training, with all of the world that may travel."""
        self._run = uuid.uuid4().hex if server_round == 1 else self._run
        down = self._down(server_round, arrays, config)
        return super().configure_train(server_round, *down, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """Ask for an evaluation, with the same."""
        down = self._down(server_round, arrays, config)
        return super().configure_evaluate(server_round, *down, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[FlowerMessage]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The whole world after a round, and the mean of what was measured."""
        sums, counted = ExactSum(), dict[str, RecordDict]()
        for reply in replies:
            try:
                values, client = self._checked(server_round, reply, counted)
                sums.add(values, int(self._weight(reply.content)))
                counted[client] = reply.content
            except FedplanError as error:
                log.warning("round %d: an update is left out: %s", server_round, str(error)[:200])
        put(self._model, sums.mean(), self._agreement.params)
        metrics = self._mean(list(counted.values()), self.train_metrics_aggr_fn)
        return _arrays(self._model), metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[FlowerMessage]
    ) -> MetricRecord | None:
        """The mean of what was measured."""
        came = [reply.content for reply in replies if not reply.has_error()]
        return self._mean(came, self.evaluate_metrics_aggr_fn)

    def _down(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord, ConfigRecord]:
        """Take up the world as Flower's loop hands it over; of it, what travels."""
        self._model.load_state_dict(arrays.to_torch_state_dict())
        resting: dict[str, JSON] = {**_resting(self._agreement, self._model)}
        said = {**self._asked(number), "round": number, "resting": resting}
        message = packed(take(self._model, self._agreement.movable), said)
        return records.arrays_of(message.blobs), ConfigRecord(
            {**config, records.FIELD: message.header}
        )

    def _asked(self, number: int) -> dict[str, JSON]:
        return {"request": f"{self._run}/{number}", "agreed": self._agreement.fingerprint}

    def _checked(
        self, number: int, reply: FlowerMessage, counted: Collection[str]
    ) -> tuple[dict[str, Tensor], str]:
        """The values of a reply and its sender, if they are all that the sender is to share."""
        if reply.has_error():
            raise Rejected(understood(str(reply.error.reason)))
        values, said = unpacked(records.message_in(reply.content))
        client, traits = said.get("client"), said.get("traits")
        if not isinstance(client, str) or not isinstance(traits, dict) or client in counted:
            raise Rejected(f"{client!r} is no client with traits, or was counted before")
        if any(said.get(name) != value for name, value in self._asked(number).items()):
            raise Rejected(f"{client} answers another request, or has agreed to another plan")
        if not self._weight(reply.content).is_integer():
            raise Rejected(f"the {self.weighted_by_key} of {client} is no whole number")
        told = cast("dict[str, Any]", traits)
        turn = Turn(number, client, traits={name: str(value) for name, value in told.items()})
        roles = resolve(self._agreement.method.plan, self._agreement.params, turn)
        shared = {p.key: (p.shape, p.dtype) for p in roles if roles[p] is Role.SHARE}
        came = {k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in values.items()}
        if wrong := sorted(shared.items() ^ came.items()):
            raise Rejected(f"{wrong[0][0]!r} of {client} is not what it is to share")
        return values, client

    def _weight(self, content: RecordDict) -> float:
        measured = list(content.metric_records.values())
        weight = measured[0].get(self.weighted_by_key) if len(measured) == 1 else None
        return float(weight) if isinstance(weight, int | float) else nan

    def _mean(self, contents: list[RecordDict], average: Average) -> MetricRecord | None:
        """The mean over the clients that measured the same, of which there are the most."""
        alike = dict[str, list[RecordDict]]()
        for content in filter(lambda each: 0 < self._weight(each) < inf, contents):
            (found,) = content.metric_records.values()
            names = sorted((k, len(v) if isinstance(v, list) else 0) for k, v in found.items())
            alike.setdefault(str(names), []).append(_metrics(content))
        most = max(alike.values(), key=len, default=[])
        if len(most) < len(contents):
            log.warning("what %d clients measured is left out", len(contents) - len(most))
        return average(most, self.weighted_by_key) if most else None


def partial(
    plan: Plan | str, model_of: Callable[[], nn.Module], home: Path | str
) -> Callable[[FlowerMessage, Context, Next], FlowerMessage]:
    """A mod for `ClientApp(mods=[...])`: your app sees the whole model, the server what is shared.

    A client is called what its node was started with as `name` or `partition-id`; other entries are
    its traits, of which those that the plan asks for are told. What it keeps lies in `home`, best
    an absolute path, and outlives the run: take another folder to begin anew. Its own parts start
    from what came down, or else as `model_of` builds them. Of the app's reply the metrics and the
    shared arrays go up. The same request twice gets the same answer.
    """
    return _Mod(plan, model_of, Path(home))


@dataclass(frozen=True)
class _Mod:
    """The mod: no closure, because Flower's simulation sends it to other processes."""

    plan: Plan | str
    model_of: Callable[[], nn.Module]
    home: Path

    @cached_property
    def client(self) -> _Client:
        return _Client(self.plan, self.model_of)

    def __call__(self, envelope: FlowerMessage, context: Context, call_next: Next) -> FlowerMessage:
        kind = envelope.metadata.message_type.partition(".")[0]
        if kind not in ("train", "evaluate"):
            return call_next(envelope, context)
        try:
            return self._turn(envelope, context, call_next, kind)
        except Exception as error:
            return failed(envelope, error)

    def _turn(
        self, envelope: FlowerMessage, context: Context, call_next: Next, kind: str
    ) -> FlowerMessage:
        came, said = unpacked(_message(envelope.content))
        turn = self.client.turn(said, context)
        journal = Journal(home_of(self.home, turn.client))
        request = said["request"] if kind == "train" else ""
        answer = journal.answered(request)
        if answer is None:
            kept, _ = journal.home(request)
            roles = self.client.start(turn, said["resting"], came, kept)
            reply = call_next(_asked(envelope, _arrays(self.client.model)), context)
            if reply.has_error():
                return reply
            metrics = _metrics(reply.content)
            if kind == "evaluate":
                return FlowerMessage(metrics, reply_to=envelope)
            own, shared = self.client.end(roles, reply.content)
            # As text, because a metric may be NaN, which a journal's JSON cannot say.
            answer = shared, {"metrics": json.dumps({k: {**m} for k, m in metrics.items()})}
            journal.commit(request, {**kept, **own}, {}, *answer)
        return FlowerMessage(self.client.answer(turn, request, *answer), reply_to=envelope)


class _Client:
    """A model as a client builds it, and the plan that it obeys."""

    def __init__(self, plan: Plan | str, model_of: Callable[[], nn.Module]) -> None:
        with forked():  # so that your loop draws what it always drew
            self.model = deepcopy(model_of()).cpu()
        self.agreement = _agreed(plan, self.model)
        self.fresh = deepcopy(self.model.state_dict())
        self.resting = _resting(self.agreement, self.model)
        named = {name for p in self.agreement.params for name in (p.name, *p.tied)}
        self.buffers = self.fresh.keys() - named

    def turn(self, said: Mapping[str, Any], context: Context) -> Turn:
        """The turn as the client itself sees it."""
        ours, node = self.agreement.fingerprint, context.node_config
        if said.get("agreed") != ours:
            raise Refused(
                f"plan or model differ ({ours} here, {said.get('agreed')} at the server)"
            ).coded("another-study")
        name = node.get("name", node.get("partition-id"))
        if name is None:
            raise FedplanError(
                "this node was started with neither a name nor a partition-id"
            ).coded("settings")
        traits = {t: str(node[t]) for t in _traits(self.agreement.method.plan) if t in node}
        return Turn(said["round"], str(name), traits=traits)

    def start(self, turn: Turn, resting: Mapping[str, str], came: Tensors, kept: Tensors) -> Roles:
        """Put what a turn starts from into the model."""
        roles = resolve(self.agreement.method.plan, self.agreement.params, turn)
        for p, role in roles.items():
            if role is Role.FREEZE and self.resting.get(p.key) != resting.get(p.key):
                raise Refused(
                    f"{p.key} is frozen and not the server's: start both from one model"
                ).coded("model")
        own = {p.key: kept[p.key] for p in roles if roles[p].own and p.key in kept}
        self.model.load_state_dict(self.fresh | {k: kept[k] for k in self.buffers & kept.keys()})
        put(self.model, {**came, **own}, self.agreement.params)
        return roles

    def end(self, roles: Roles, content: RecordDict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the client keeps of a turn, and what it shares; the rest is let go."""
        own = take(self.model, [p for p in roles if roles[p].own])
        (arrays,) = content.array_records.values()
        self.model.load_state_dict(arrays.to_torch_state_dict())
        moved = take(self.model, [p for p in roles if roles[p].trained])
        for key, value in moved.items():
            if not bool(value.isfinite().all()):
                raise FedplanError(
                    f"{key} is not finite after training: nothing is kept or sent"
                ).coded("training")
        state = self.model.state_dict()
        kept = {k: moved.get(k, v) for k, v in own.items()} | {k: state[k] for k in self.buffers}
        return kept, {k: v for k, v in moved.items() if k not in own}

    def answer(
        self, turn: Turn, request: str, shared: Tensors, meta: Mapping[str, Any]
    ) -> RecordDict:
        """What goes up."""
        said = {"client": turn.client, "request": request, "agreed": self.agreement.fingerprint}
        content = records.records_of(packed(shared, {**said, "traits": {**turn.traits}}))
        for name, metrics in json.loads(meta["metrics"]).items():
            content[name] = MetricRecord(metrics)
        return content


def _agreed(plan: Plan | str, model: nn.Module) -> Agreement:
    """What both ends agree on; a plan that needs more than this mode has is refused."""
    plan, params = parse(plan) if isinstance(plan, str) else plan, describe(model)
    check(plan, params)
    asked = [step.text for step in plan.within() if isinstance(step, Best)]
    asked += [atom.text for atom in _atoms(plan) if isinstance(atom, Phase)]
    if asked:
        raise PlanError(f"{asked[0]} takes fedplan's own apps: here are no scores and no phases")
    return Agreement("partial", params, Method(plan), Pace())


def _atoms(plan: Plan) -> list[Condition]:
    return [a for step in plan.within() if isinstance(step, When) for a in step.condition.atoms()]


def _traits(plan: Plan) -> set[str]:
    """The traits that a plan asks for."""
    named = {step.trait for step in plan.within() if isinstance(step, By)}
    return named | {atom.name for atom in _atoms(plan) if isinstance(atom, Trait)}


def _resting(agreement: Agreement, model: nn.Module) -> dict[str, str]:
    """The digests of what never travels: both ends must have the same of what is frozen."""
    return digests(take(model, set(agreement.params) - set(agreement.movable)))


def _arrays(model: nn.Module) -> ArrayRecord:
    """A model's state as an app knows it."""
    state = model.state_dict().items()
    return ArrayRecord({k: v.float() if v.dtype == torch.bfloat16 else v for k, v in state})


def _message(content: RecordDict) -> Message:
    """What came down, whatever the app calls its arrays and its configuration."""
    (arrays,), (config,) = content.array_records.values(), content.config_records.values()
    return records.message_in(RecordDict({records.ARRAYS: arrays, records.HEADER: config}))


def _asked(envelope: FlowerMessage, arrays: ArrayRecord) -> FlowerMessage:
    """A message as the app knows it: the arrays whole, no header."""
    content = RecordDict({name: arrays for name in envelope.content.array_records})
    for name, config in envelope.content.config_records.items():
        content[name] = ConfigRecord({k: v for k, v in config.items() if k != records.FIELD})
    asked = copy(envelope)
    asked.content = content
    return asked


def _metrics(content: RecordDict) -> RecordDict:
    return RecordDict({k: MetricRecord({**m}) for k, m in content.metric_records.items()})
