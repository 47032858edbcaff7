# SPDX-License-Identifier: Apache-2.0
"""The agreement of server and clients: all settings that determine the results of a run.

Also the last round in which each param may change, by the plan, for all classes of clients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from fedplan.errors import FedplanError, PrivacyError
from fedplan.federation.aggregation.defence import Defence, require_defence
from fedplan.federation.aggregation.lora_products import MAX_MEASURED_NUMEL, check_product_rule
from fedplan.federation.wire_cost import WireCost
from fedplan.language.canonical import canonical_text
from fedplan.language.plan import Best, Plan, Role, Roles, Step
from fedplan.language.predicates import Turn
from fedplan.language.resolution import (
    certain_roles,
    class_representatives,
    client_classes,
    params_with_roles,
    permitted_roles,
    resolve,
    rounds_to_check,
)
from fedplan.methods.lora import LoraLayer, lora_layers
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.server_optimizer import Dynamic
from fedplan.models.catalog import manifest_json
from fedplan.models.params import ITEMSIZE, Block, Param, Params
from fedplan.privacy.guarantee import Guarantee
from fedplan.secagg.config import SecAggConfig, check_secagg_support, drift_tracked_kinds
from fedplan.tensors.compression import plain
from fedplan.tensors.named import aux_names, param_key
from fedplan.training.fit import TrainArguments, plain_fit
from fedplan.training.optimizers import check_lr_by_part
from fedplan.training.probes import is_data_independent

_COPY_TEXT = "each client also trains its own copy of each shared param, which it never sends"


@dataclass(frozen=True)
class Agreement:
    """Settings that server and clients fix before round 1; both sides build the same object.

    `experiment`: name and seed of the study. `params`: all params of the model. `method`: plan and
    training method. `train_arguments`: hyperparameters. `guarantee`: differential privacy, or None.
    `study`, `start`: digests of the study and of the initial model. `run`: id of the run, part of
    the names of requests; no result depends on it. `defence`: robust aggregation.
    `secagg`: secure aggregation. Server and clients compare `fingerprint`. Other members derive
    from the plan the roles, params and bytes of a turn (one client in one round). The constructor
    raises FedplanError if the method cannot be combined with `defence`, `secagg`, the guarantee or
    `lr_by_part`.
    """

    experiment: str
    params: Params
    method: Method
    train_arguments: TrainArguments
    guarantee: Guarantee | None = None
    study: str = ""
    start: str = ""
    run: str = ""
    defence: Defence = field(default_factory=Defence)
    secagg: SecAggConfig = field(default_factory=SecAggConfig)

    def __post_init__(self) -> None:
        if rates := self.train_arguments.lr_by_part:
            check_lr_by_part(rates, self.params)
            if self.method.loop is not plain_fit:
                raise FedplanError(
                    "lr_by_part is for fedplan's own training loop, and this method has another: "
                    "set the rates there"
                )
        require_defence(self.defence, self.method, self.guarantee)
        defence = self.defence.text if self.defence.active else ""
        check_secagg_support(self.secagg, self.method, self.guarantee, defence)
        if not self.method.lora_aggregation.is_separate:
            plan, params = self.method.plan, self.params
            changing = set(params_with_roles(plan, params, Role.SHARE, Role.KEEP, Role.HOLD))
            frozen = tuple(p for p in params if p not in changing)
            check_product_rule(
                self.method, params, params_with_roles(plan, params, Role.SHARE), frozen
            )

    @property
    def distributed_dp(self) -> bool:
        """Whether client-level DP runs under secure aggregation: clients add the noise."""
        guarantee = self.guarantee
        return self.secagg.active and guarantee is not None and guarantee.unit == "client"

    @property
    def hides_metrics(self) -> bool:
        """Whether no metrics of one client leave, but score counts, under masks or with noise."""
        return self.secagg.active or self.guarantee is not None

    @property
    def equal_weights(self) -> bool:
        """Whether all clients weigh alike in a mean, by the method or for secure aggregation."""
        return self.method.equal_weights or self.secagg.equal_weights

    @cached_property
    def has_personal(self) -> bool:
        """Whether clients' models differ: a turn makes a param personal, or clients have copies."""
        plan, params = self.method.plan, self.params
        return self.method.own_copy or bool(params_with_roles(plan, params, Role.KEEP, Role.HOLD))

    @cached_property
    def clients_keep_state(self) -> bool:
        """Whether a client may have to remember something from one round to the next.

        That is personal values, memory of the local fit, or charges of a privacy budget.
        """
        guarantee = self.guarantee
        charges = guarantee is not None and (guarantee.unit == "example" or self.distributed_dp)
        return self.has_personal or charges or self.method.fit_keeps_memory

    @cached_property
    def text(self) -> str:
        """All settings that change results, one per line; `digest` is the SHA-256 of this text.

        Left out: the experiment's name (part of each request's name), the examples and loss
        function (covered by the study's digest only), and of custom functions what `canonical_text`
        does not cover, as globals and other functions that they call.
        """
        settings = {
            **({"defence": self.defence.text} if self.defence.active else {}),
            **({"secagg": self.secagg.text} if self.secagg.active else {}),
            "train": canonical_text(self.train_arguments),
            "guarantee": canonical_text(self.guarantee),
            "study": canonical_text(self.study),
            "start": canonical_text(self.start),
            "params": hashlib.sha256(manifest_json(self.params).encode()).hexdigest(),
        }
        return "\n".join(
            (*self.method.lines, *(f"{name} {text}" for name, text in settings.items()))
        )

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of `digest`."""
        return self.digest[:16]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `text`, in full where an attacker may search for collisions."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def exchanged(self) -> Params:
        """Params that are ever sent: some turn may share them, or the server merges into them."""
        shared = params_with_roles(self.method.plan, self.params, Role.SHARE)
        exchanged = {*shared, *self.server_merged}
        return tuple(p for p in self.params if p in exchanged)

    @cached_property
    def layers(self) -> tuple[LoraLayer, ...]:
        """LoRA layers of which some turn may share all factors: the server sums their products B A.

        Empty under secure aggregation, which would need a second sum for the products, and if the
        method only measures the products and they exceed MAX_MEASURED_NUMEL.
        """
        if self.secagg.active:
            return ()
        shared = set(params_with_roles(self.method.plan, self.params, Role.SHARE))
        layers = tuple(e for e in lora_layers(self.params) if shared.issuperset(e.factors))
        small = sum(layer.numel for layer in layers) <= MAX_MEASURED_NUMEL
        return layers if small or not self.method.lora_aggregation.is_separate else ()

    @cached_property
    def tracks_drift(self) -> frozenset[str]:
        """Keys of params whose drift is summed under secure aggregation, as phases need it."""
        kinds = drift_tracked_kinds(self.method) if self.secagg.active else frozenset[str]()
        return frozenset(p.key for p in self.exchanged if p.kind in kinds)

    @cached_property
    def server_merged(self) -> Params:
        """Frozen base weights that the server merges LoRA products into."""
        layers = self.layers if self.method.lora_aggregation.updates_weight else ()
        return tuple(host for layer in layers for host in layer.hosts)

    @cached_property
    def trainable(self) -> Params:
        """Params with values that may change: trained in some turn, or merged by the server."""
        trained = params_with_roles(self.method.plan, self.params, Role.SHARE, Role.KEEP)
        changing = {*trained, *self.server_merged}
        return tuple(p for p in self.params if p in changing)

    @cached_property
    def frozen(self) -> Params:
        """Params that never change: all but `trainable`."""
        changing = {p.key for p in self.trainable}
        return tuple(p for p in self.params if p.key not in changing)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks of the model."""
        return tuple(dict.fromkeys(p.block_id for p in self.params if p.block_id))

    @cached_property
    def max_k(self) -> int:
        """Largest k of any `best(k)` in the plan, the size of a ballot; 0 without best."""
        return max((s.count for s in self.method.plan.walk() if isinstance(s, Best)), default=0)

    def selects_blocks(self, turn: Turn) -> bool:
        """Whether the plan chooses blocks by scores in a turn (`best`)."""
        return any(isinstance(step, Best) for step in self.method.plan.active_steps(turn))

    @cached_property
    def _roles_cache(self) -> dict[tuple[bool, tuple[Step, ...]], Roles]:
        """Roles by whether they are an upper bound and by active steps of a turn."""
        return {}

    def _cached_roles(self, turn: Turn, *, upper: bool) -> Roles:
        key = (upper, self.method.plan.active_steps(turn))
        if key not in self._roles_cache:
            bound = permitted_roles if upper else certain_roles
            self._roles_cache[key] = bound(self.method.plan, self.params, turn)
        return self._roles_cache[key]

    def permitted(self, turn: Turn) -> Roles:
        """Return `permitted_roles` of the plan for a turn, cached: `best` trains all candidates."""
        return self._cached_roles(turn, upper=True)

    def certain(self, turn: Turn) -> Roles:
        """Return `certain_roles` of the plan for a turn, cached: trained whatever the scores."""
        return self._cached_roles(turn, upper=False)

    def resolved(self, turn: Turn) -> Roles:
        """Return the role of each param in a turn; raise PlanError if needed scores are missing."""
        if not self.selects_blocks(turn):
            return self.permitted(turn)
        return resolve(self.method.plan, self.params, turn)

    def sent_params(self, turn: Turn, roles: Roles) -> Params:
        """Return the params that a client sends in a turn: all with SHARE in `roles`.

        `roles`: result of `resolved(turn)`. Under distributed DP all clients send the same params,
        `public_params(turn)`, and `roles` is ignored.
        """
        if self.distributed_dp:
            return self.public_params(turn)
        return tuple(p for p in self.params if roles[p] is Role.SHARE)

    def public_params(self, turn: Turn) -> Params:
        """Return the params that any possible client may share in the round and phase of a turn.

        The turn's client and traits are ignored; scores count only with `joint_choice`. Under
        distributed DP every client sends all these params with noise, trained or not.
        """
        scores = turn.scores if self.method.joint_choice else None
        return self.shared_params(
            replace(turn, client=t.client, traits=t.traits, scores=scores)
            for _, t in client_classes(self.method.plan, None)
        )

    def shared_params(self, turns: Iterable[Turn]) -> Params:
        """Return the params that may be shared in any of `turns`.

        A turn with scores shares the params that the scores choose, a turn without scores shares
        all permitted params. All turns with scores must have the same scores: of turns with the
        same active steps only one is resolved.
        """
        distinct = {(self.method.plan.active_steps(t), bool(t.scores)): t for t in turns}
        roles = [self.resolved(t) if t.scores else self.permitted(t) for t in distinct.values()]
        return tuple(p for p in self.params if any(each[p] is Role.SHARE for each in roles))

    def personal_bits(self, turn: Turn) -> int:
        """Return which `exchanged` params are personal in a turn: bit i for the i-th param."""
        roles = self.permitted(turn)
        return sum(1 << i for i, p in enumerate(self.exchanged) if roles[p].is_personal)

    def required(self, turn: Turn, personal_bits: int = 0) -> dict[str, int]:
        """Return the keys of the global values that a client needs in a turn, with first versions.

        The first version counts for a client that never received the value. 0: the client has the
        initial value, so the server sends only a changed one (params that are personal in the turn,
        params that the server merges into, auxiliary tensors, which start at zero). -1: the server
        must send the value (all other params in `exchanged`). Auxiliary tensors are those of the
        params that the turn shares. `personal_bits`: params that are already personal at the client
        (bit i: i-th of `exchanged`); such a param is left out if the first version is 0.
        """
        roles, params = self.permitted(turn), dict[str, int]()
        merged = {p.key for p in self.server_merged}
        for i, p in enumerate(self.exchanged):
            version = 0 if roles[p].is_personal or p.key in merged else -1
            if version or not personal_bits >> i & 1:
                params[p.key] = version
        shared = [p.key for p in self.exchanged if roles[p] is Role.SHARE]
        return params | dict.fromkeys(aux_names(shared, self.method.aux), 0)

    @cached_property
    def download_bytes(self) -> dict[str, int]:
        """Bytes of each param and auxiliary tensor that may be downloaded, by key."""
        sizes = {p.key: p.nbytes for p in self.exchanged}
        return sizes | {n: sizes[param_key(n)] for n in aux_names(sizes, self.method.aux)}

    def upload_bytes(self, param: Param) -> int:
        """Return the bytes that one shared param takes in an upload, with auxiliary tensors.

        Under secure aggregation: the bytes of the param's masked input, drift included.
        """
        if self.secagg.active:
            return self.secagg.nbytes(param.numel, int(param.key in self.tracks_drift))
        compressed = self.method.compression.nbytes(param.shape, ITEMSIZE[param.dtype])
        return compressed + len(self.method.aux) * param.nbytes

    @cached_property
    def wire_cost(self) -> WireCost:
        """Transfer costs of the run; the `text` names each setting that changes bytes or memory."""
        compression, aux = self.method.compression.text, self.method.aux
        words = [f"wire {compression}"] if compression != plain().text else []
        words += [f"each shared param has auxiliary tensors: {', '.join(aux)}"] if aux else []
        words += [_COPY_TEXT] if self.method.own_copy else []
        server_merged = frozenset(p.key for p in self.server_merged)
        if server_merged:
            words.append(f"the server merges into {len(server_merged)} weights and sends them")
        if self.defence.buffers_updates:
            megabytes = sum(p.nbytes for p in self.exchanged) * (1 + len(aux)) / 1e6
            words.append(f"{self.defence.cost_text} (up to {megabytes:.1f} MB a client)")
        words += [self.secagg.cost_text] if self.secagg.active else []
        return WireCost(self.upload_bytes, len(aux), "; ".join(words), server_merged)

    @property
    def request_prefix(self) -> str:
        """Prefix of the names of all requests of the run."""
        return "".join(f"{part}/" for part in (self.experiment, self.fingerprint, self.run) if part)

    def request_name(self, number: int, client: str) -> str:
        """Return the name of the request to a client in a round."""
        return f"{self.request_prefix}{number}/{client}"


def require_private_method(guarantee: Guarantee, method: Method) -> None:
    """Raise PrivacyError, with a remedy, if a method cannot be combined with a DP guarantee.

    Refused: layer choice by private scores without a vote (or a vote without that choice),
    auxiliary tensors, LoRA products and FedDyn's server under client-level DP, phases that depend
    on updates, and client hooks or a custom loop under example-level DP.
    """
    selects_blocks = any(isinstance(step, Best) for step in method.plan.walk())
    private = selects_blocks and not is_data_independent(method.probe)
    refusals: list[tuple[bool, str]] = [
        (
            private and not guarantee.vote_noise_multiplier,
            "it chooses layers by scores of private examples, which the privacy budget does not "
            "cover: let clients vote (privacy.vote_noise_multiplier), or choose layers by chance, "
            "a fixed list, or the last or middle ones (probe random, last, middle), or by a plan "
            "without best",
        ),
        (
            bool(guarantee.vote_noise_multiplier) and not private,
            "there is a vote (privacy.vote_noise_multiplier) and nothing to vote on: its plan has "
            "no best, or its probe uses no examples; remove the vote, which spends budget",
        ),
        (bool(method.aux), "its auxiliary tensors are not clipped: use a method without them"),
        (
            guarantee.unit == "client" and not method.lora_aggregation.is_separate,
            "its server multiplies each client's update, and noise protects only sums of clipped "
            "updates: average the factors separately (fedit), or set privacy.unit to example",
        ),
        (
            guarantee.unit == "client" and isinstance(method.server_optimizer, Dynamic),
            "FedDyn's server counts the clients that sent each param, which the guarantee hides: "
            "use a method that does not count, such as fedprox",
        ),
        (
            type(method.phase_rule) is not PlannedPhases,
            "its phases depend on the clients' updates: plan them (method.phases)",
        ),
        (
            guarantee.unit == "example"
            and (bool(method.client_hooks) or method.loop is not plain_fit),
            "it has a local fit of its own, and DP-SGD covers only the built-in one: use a method "
            "without it (no client hooks, no loop), or set privacy.unit to client",
        ),
    ]
    for applies, reason in refusals:
        if applies:
            raise PrivacyError(f"this method cannot be combined with privacy: {reason}")


def versions_digest(versions: Mapping[str, int]) -> str:
    """Return 16 hex digits of SHA-256 over versions by key; independent of their order."""
    text = json.dumps(sorted(versions.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Roster = Mapping[str, Mapping[str, str]]
"""Traits of every client by name."""


def class_turns(plan: Plan, roster: Roster, number: int, phase: str) -> list[Turn]:
    """Return one turn in round `number` for each class of clients that the plan distinguishes.

    Each turn has the name and traits of the class's first client in `roster`, and `phase`.
    """
    clients = class_representatives(plan, roster)
    return [Turn(number, name, phase, traits) for name, traits in clients]


def last_changing_rounds(agreement: Agreement, roster: Roster) -> dict[str, dict[str, float]]:
    """Return by phase, then by param key, the last round in which any client may share the param.

    Phases: "" and all phases of the agreement's phase rule. `roster`: traits of all clients by
    name. Assumes a run without end, since rounds may be added later: inf if the plan shares the
    param for ever. A param that is never shared in a phase is left out. If the plan has too many
    rounds to check, each phase has inf for all exchanged params.
    """
    plan, params, by_phase = agreement.method.plan, agreement.params, dict[str, dict[str, float]]()
    rounds = rounds_to_check(plan)
    for phase in ("", *agreement.method.phase_rule.phases):
        if rounds is None:
            by_phase[phase] = dict.fromkeys((p.key for p in agreement.exchanged), inf)
            continue
        distinct = {
            plan.active_steps(turn): (turn, inf if repeats else number)
            for number, repeats in rounds
            for turn in class_turns(plan, roster, number, phase)
        }
        last_rounds = by_phase.setdefault(phase, {})
        for turn, last in distinct.values():
            roles = permitted_roles(plan, params, turn)
            for p in (p for p in params if roles[p] is Role.SHARE):
                last_rounds[p.key] = max(last, last_rounds.get(p.key, 0))
    return by_phase
