# SPDX-License-Identifier: Apache-2.0
"""The agreement of server and clients: all settings that determine the results of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedplan.federation.defence import Defence, require_defence
from fedplan.federation.lora_product_sum import check_product_rule, shared_lora_layers
from fedplan.federation.secagg_config import SecAggConfig, check_secagg_support, drift_tracked_kinds
from fedplan.federation.wire_cost import WireCost
from fedplan.language.canonical import canonical_text
from fedplan.language.client_classes import client_classes
from fedplan.language.plan import Best, Role, Roles, Step
from fedplan.language.resolution import certain_roles, params_with_roles, permitted_roles, resolve
from fedplan.language.turn import Turn
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases
from fedplan.models.lora_layers import LoraLayer
from fedplan.models.manifest import manifest_json
from fedplan.models.params import ITEMSIZE, Block, Param, Params
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.guarantee import Guarantee
from fedplan.tensors.aux_tensors import aux_names, param_key
from fedplan.tensors.compression import plain
from fedplan.training.fit import TrainConfig, plain_fit
from fedplan.training.probes import is_data_independent


@dataclass(frozen=True)
class Agreement:
    """Settings that server and clients agree on before a run starts.

    `experiment`: name and seed of the study. `params`: all params of the model.
    `guarantee`: differential privacy, if promised. `defence`: robust aggregation.
    `secagg`: secure aggregation. `study`, `start`: digests of the study and of the initial model.
    `run`: id of the run, part of the names of requests; no result depends on it.
    Raises an error if the settings cannot be combined.
    """

    experiment: str
    params: Params
    method: Method
    train_config: TrainConfig
    guarantee: Guarantee | None = None
    study: str = ""
    start: str = ""
    run: str = ""
    defence: Defence = field(default_factory=Defence)
    secagg: SecAggConfig = field(default_factory=SecAggConfig)

    def __post_init__(self) -> None:
        require_defence(self.defence, self.method, self.guarantee)
        check_secagg_support(self.secagg, self.method, self.guarantee, self.defence)
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

    @cached_property
    def text(self) -> str:
        """All settings that change results, one per line; server and clients compare its digest.

        It does not contain the experiment's name, which is in each request's name; the examples and
        their loss, which only the study's digest covers; and parts of custom functions that
        `canonical_text` does not see.
        """
        settings = {
            **({"defence": self.defence.text} if self.defence.active else {}),
            **({"masking": self.secagg.text} if self.secagg.active else {}),
            "train": canonical_text(self.train_config),
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
        """LoRA layers whose products B A are aggregated: some turn may share both factors.

        Empty under secure aggregation, which would need a second sum for the products.
        """
        if self.secagg.active:
            return ()
        return shared_lora_layers(
            self.method, self.params, params_with_roles(self.method.plan, self.params, Role.SHARE)
        )

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
        """Params whose values may change: trained in some turn, or merged by the server."""
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
        """Resolved roles by kind (permitted or certain) and active steps of a turn."""
        return {}

    def permitted(self, turn: Turn) -> Roles:
        """Return `permitted_roles` of the plan for a turn, cached."""
        cache_key = (True, self.method.plan.active_steps(turn))
        if cache_key not in self._roles_cache:
            self._roles_cache[cache_key] = permitted_roles(self.method.plan, self.params, turn)
        return self._roles_cache[cache_key]

    def certain(self, turn: Turn) -> Roles:
        """Return `certain_roles` of the plan for a turn, cached."""
        cache_key = (False, self.method.plan.active_steps(turn))
        if cache_key not in self._roles_cache:
            self._roles_cache[cache_key] = certain_roles(self.method.plan, self.params, turn)
        return self._roles_cache[cache_key]

    def resolved(self, turn: Turn) -> Roles:
        """Return the roles in a turn; a turn that chooses blocks must have scores."""
        if not self.selects_blocks(turn):
            return self.permitted(turn)
        return resolve(self.method.plan, self.params, turn)

    def sent_params(self, turn: Turn, roles: Roles) -> Params:
        """Return the params that a client sends in a turn, given its resolved roles.

        Under distributed DP all clients send the same params: `public_params`.
        """
        if self.distributed_dp:
            return self.public_params(turn)
        return tuple(p for p in self.params if roles[p] is Role.SHARE)

    def public_params(self, turn: Turn) -> Params:
        """Return the params that any possible client may share in a turn's round.

        Only joint scores count, not a client's own. Under distributed DP every client sends all of
        these, since a param that a client leaves out would lack its part of the noise.
        """
        scores = turn.scores if self.method.joint_choice else None
        turns = (each for _, each in client_classes(self.method.plan, None))
        return self.shared_params(
            replace(turn, client=t.client, traits=t.traits, scores=scores) for t in turns
        )

    def shared_params(self, turns: Iterable[Turn]) -> Params:
        """Return the params that may be shared in any of some turns, given their scores if any."""
        distinct = {(self.method.plan.active_steps(t), bool(t.scores)): t for t in turns}
        roles = [self.resolved(t) if t.scores else self.permitted(t) for t in distinct.values()]
        return tuple(p for p in self.params if any(each[p] is Role.SHARE for each in roles))

    def personal_bits(self, turn: Turn) -> int:
        """Return which `exchanged` params are personal in a turn: bit i for the i-th param."""
        roles = self.permitted(turn)
        return sum(1 << i for i, p in enumerate(self.exchanged) if roles[p].is_personal)

    def required(self, turn: Turn, personal_bits: int = 0) -> dict[str, int]:
        """Return the global values that a client needs in a turn, with their initial versions.

        `personal_bits`: params that the client already has as personal; these are not needed.
        The initial version is 0 if the client starts with the value: personal params, params that
        the server merges into, and auxiliary tensors, which are zero. It is -1 for all other
        params, which are sent in the first request.
        """
        roles = self.permitted(turn)
        merged = {p.key for p in self.server_merged}
        initial_versions = [
            (i, p.key, 0 if roles[p].is_personal or p.key in merged else -1)
            for i, p in enumerate(self.exchanged)
        ]
        params = {
            k: version
            for i, k, version in initial_versions
            if version or not personal_bits >> i & 1
        }
        shared = [p.key for p in self.exchanged if roles[p] is Role.SHARE]
        return params | dict.fromkeys(aux_names(shared, self.method.aux), 0)

    @cached_property
    def download_bytes(self) -> dict[str, int]:
        """Bytes of each param and auxiliary tensor that may be downloaded, by key."""
        sizes = {p.key: p.nbytes for p in self.exchanged}
        return sizes | {n: sizes[param_key(n)] for n in aux_names(sizes, self.method.aux)}

    def upload_bytes(self, param: Param) -> int:
        """Return the bytes of a shared param in an upload, with its auxiliary tensors.

        Under secure aggregation these are the bytes of its masked input, drift included.
        """
        if self.secagg.active:
            return self.secagg.nbytes(param.numel, int(param.key in self.tracks_drift))
        compressed = self.method.compression.nbytes(param.shape, ITEMSIZE[param.dtype])
        return compressed + len(self.method.aux) * param.nbytes

    @cached_property
    def wire_cost(self) -> WireCost:
        """Transfer costs of the run, with a text of everything unusual."""
        compression, aux = self.method.compression.text, self.method.aux
        words = [f"wire {compression}"] if compression != plain().text else []
        words += [f"each shared param has auxiliary tensors: {', '.join(aux)}"] if aux else []
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
    """Raise PrivacyError, with a remedy, if a method cannot give a privacy guarantee."""
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
        (
            bool(method.aux),
            "its auxiliary tensors are not clipped: use a method without them",
        ),
        (
            guarantee.unit == "client" and not method.lora_aggregation.is_separate,
            "its server multiplies each client's update, and noise protects only sums of clipped "
            "updates: average the factors separately (fedit), or set privacy.unit to example",
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
    """Return 16 hex digits of SHA-256 over versions by key, whatever their order."""
    text = json.dumps(sorted(versions.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
