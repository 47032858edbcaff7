# SPDX-License-Identifier: Apache-2.0
"""A client of a federation: its state, and how it takes requests of the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from fedplan import seeds
from fedplan.data.examples import Examples, Loss
from fedplan.federation.account import Account, Answer
from fedplan.federation.agreement import Agreement, versions_digest
from fedplan.federation.digests import combine_digests, examples_digest, model_digest
from fedplan.federation.eval_sets import EvalSet, MetricPolicy
from fedplan.federation.initial_model import InitialModel
from fedplan.federation.messages import ClientStateMissing, Request, RequestRefused
from fedplan.federation.record import role_letters
from fedplan.language.plan import Roles
from fedplan.language.turn import Turn
from fedplan.models.values import set_values
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import ClientGuard, DistributedGuard, Guard
from fedplan.privacy.mechanisms.secret import load_or_create_secret
from fedplan.storage.journal import Journal
from fedplan.tensors.aux_tensors import only_aux, param_key
from fedplan.tensors.named import DigestCache, Tensors
from fedplan.training.activation_cache import ActivationCache
from fedplan.training.probes import ProbeInput, data_independent_input, is_data_independent

G = TypeVar("G", bound=Guard)
KEY = "key"
"""File beside a journal with the key for digests of a client's personal values."""


@dataclass
class Client:
    """One client and its state.

    `journal`: stores personal values and answers. `model`: the model that turns train in place.
    `start`, `start_digests`: initial values of params, and digests of all params' initial values.
    `received`, `received_versions`: global values last received, and their versions.
    `digests`: cache of digests of tensors.
    `guard`: example-level DP. `noise_guard`: the client's share of distributed DP noise.
    `account`: answers of all studies on the dataset; None in a simulation.
    `deterministic`: use deterministic algorithms, and fail where there are none.
    `hide_loss`: do not report the training loss.
    `eval_set`, `metric_policy`: test examples, and the metrics that may leave the client.
    `cached_digest`: the examples and their digest, computed once.
    `initial_model`: digests of all initial values; `start` then only needs params that may change.
    `activation_cache`: cache of frozen activations, shared by all clients of the process.
    """

    name: str
    examples: Examples
    journal: Journal
    model: nn.Module
    start: dict[str, Tensor]
    start_digests: dict[str, str]
    loss: Loss
    traits: dict[str, str] = field(default_factory=dict[str, str])
    received: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    received_versions: dict[str, int] = field(default_factory=dict[str, int])
    digests: DigestCache = field(default_factory=DigestCache)
    guard: ClientGuard | None = None
    noise_guard: DistributedGuard | None = None
    account: Account | None = None
    deterministic: bool = False
    hide_loss: bool = False
    eval_set: EvalSet | None = None
    metric_policy: MetricPolicy = field(default_factory=MetricPolicy)
    cached_digest: tuple[Examples, str] | None = None
    initial_model: InitialModel | None = None
    activation_cache: ActivationCache | None = None

    @property
    def budget_guard(self) -> Guard | None:
        """The guard with the client's privacy budget; None without differential privacy here."""
        return self.guard or self.noise_guard

    @cached_property
    def digest_key(self) -> bytes:
        """Secret key for digests of personal values; created in the journal's folder if missing."""
        return load_or_create_secret(self.journal.make_folder() / KEY, self.journal.encryption)

    def examples_digest(self) -> str:
        """Return the digest of the examples, computed once for each examples object."""
        if self.cached_digest is None or self.cached_digest[0] is not self.examples:
            self.cached_digest = self.examples, examples_digest(self.examples)
        return self.cached_digest[1]


def make_example_guard(
    agreement: Agreement, folder: Path, account: Account | None = None
) -> ClientGuard | None:
    """Create the guard for example-level DP; None if the study does not promise it.

    Its budget is in the folder, or on the account if one is given.
    """
    guarantee = agreement.guarantee
    if guarantee is None or guarantee.unit != "example":
        return None
    if account is None:
        return ClientGuard(guarantee, folder)
    return _on_account(ClientGuard, guarantee, agreement, account)


def make_noise_guard(agreement: Agreement, account: Account) -> DistributedGuard | None:
    """Create the guard for distributed DP on a site's account; None if the study has none."""
    guarantee = agreement.guarantee
    if guarantee is None or not agreement.distributed_dp:
        return None
    return _on_account(DistributedGuard, guarantee, agreement, account)


def _on_account(kind: type[G], guarantee: Guarantee, agreement: Agreement, account: Account) -> G:
    """Create a guard whose budget is on a site's account, with the account's limits."""
    limits = account.limits
    return kind(
        guarantee,
        account.folder,
        run=agreement.request_prefix,
        limit=limits.epsilon,
        delta=limits.delta,
        encryption=account.encryption,
    )


def receive_request(
    agreement: Agreement, client: Client, request: Request, notes: Mapping[str, Any]
) -> None:
    """Store the global values of a request in the client's `received` and `received_versions`.

    `notes`: notes of the client's journal. Raises RequestRefused if the request is of another run
    or study, or has values that the plan does not send. Raises ClientStateMissing if the client
    lacks values that the server expects it to have.
    """
    name = agreement.request_name(request.turn.round, client.name)
    if request.run != agreement.run:
        raise RequestRefused(
            f"{client.name} is in run {agreement.run}, and the request is of {request.run[:40]!r}"
        )
    if (request.agreement_digest, request.name) != (agreement.fingerprint, name):
        raise RequestRefused(
            f"{client.name} agreed to {agreement.fingerprint}, and the request is "
            f"{request.name[:120]!r}: server and site must run the same study"
        ).with_code("another-study")
    personal_bits = join_bits(known_personal_bits(request, notes))
    required = agreement.required(client_turn(client, request), personal_bits)
    _require_requested_values(agreement, client, request, required)
    versions = ({} if request.full else client.received_versions) | request.versions
    required_versions = {key: versions.get(key, first) for key, first in required.items()}
    if versions_digest(required_versions) != request.versions_digest:
        raise ClientStateMissing(
            f"{client.name} has lost values that it received before: it needs all of them"
        )
    client.received, client.received_versions = client.received | request.values, versions


def known_personal_bits(request: Request, notes: Mapping[str, Any]) -> dict[str, str]:
    """Return the params that became personal by round, as far as the server knows of them.

    Values are hex numbers with one bit for each param (`Agreement.personal_bits`).
    """
    by_round: dict[str, str] = {} if request.full else notes.get("settled", {})
    return {n: bits for n, bits in by_round.items() if int(n) <= request.last_update_round}


def join_bits(bits_by_round: Mapping[str, str]) -> int:
    """Return the bitwise or of hex numbers."""
    return reduce(lambda joined, bits: joined | int(bits, 16), bits_by_round.values(), 0)


def _require_requested_values(
    agreement: Agreement, client: Client, request: Request, required: Mapping[str, int]
) -> None:
    """Raise RequestRefused if a request has values not required, or of another dtype or shape."""
    if extra := (request.values.keys() | request.versions.keys()) - required.keys():
        raise RequestRefused(
            f"{client.name} takes no {min(extra)!r} from the server: the plan does not send it"
        ).with_code("values")
    expected = {p.key: (f"torch.{p.dtype}", p.shape) for p in agreement.exchanged}
    for key, value in request.values.items():
        kind, shape = expected[param_key(key)]
        if (str(value.dtype), tuple(value.shape)) != (kind, shape):
            raise RequestRefused(
                f"{client.name} received {key!r} as {value.dtype} {tuple(value.shape)}, and it is "
                f"{kind} {shape}"
            ).with_code("values")


def client_turn(client: Client, request: Request) -> Turn:
    """Return the request's turn with the client's own name and traits, and without scores."""
    return replace(request.turn, client=client.name, traits=client.traits, scores=None)


def received_values(client: Client, keys: Iterable[str]) -> dict[str, Tensor]:
    """Return the client's copy of global values: as last received, else the initial values."""
    return {k: client.received[k] if k in client.received else client.start[k] for k in keys}


def received_digests(
    agreement: Agreement, client: Client, turn: Turn, client_state: Tensors
) -> dict[str, str]:
    """Return full digests of all global values and auxiliary tensors that a turn starts from.

    `client_state`: the client's stored values. Personal params among these are left out.
    """
    roles = agreement.permitted(turn)
    keys = [
        p.key for p in agreement.exchanged if not (roles[p].is_personal and p.key in client_state)
    ]
    values = received_values(client, keys) | only_aux(client.received)
    return {key: client.digests.full_digest(value) for key, value in values.items()}


def require_same_start(client: Client, request: Request, digests: Mapping[str, str]) -> None:
    """Raise RequestRefused if the client's start values differ from the request's base digests.

    In secure aggregation all sites check the same base digests, so all start from one model.
    """
    for key, digest in digests.items():
        if digest != request.base_digests.get(key):
            raise RequestRefused(
                f"{client.name} received another {key} than all sites start from: its update could "
                "be told from the sum"
            ).with_code("values")


def load_start_values(
    agreement: Agreement, client: Client, turn: Turn, client_state: Tensors
) -> dict[str, Tensor]:
    """Put the start values of a turn into the client's model, in eval mode, and return them.

    A personal param has the client's stored value, any other param (or a personal one without a
    stored value) the global value.
    """
    roles = agreement.permitted(turn)
    personal = {p.key for p in agreement.trainable if roles[p].is_personal}
    stored = {key: value for key, value in client_state.items() if key in personal}
    sources = (stored, client.received, client.start)
    values = {
        p.key: next(source[p.key] for source in sources if p.key in source)
        for p in agreement.trainable
    }
    set_values(client.model, values, agreement.trainable)
    # An earlier turn may have left train mode. Checking costs less than eval().
    if any(module.training for module in client.model.modules()):
        client.model.eval()
    return values


def make_probe_input(agreement: Agreement, client: Client, turn: Turn) -> ProbeInput:
    """Return the inputs of the method's probe; without examples if it is data-independent."""
    seed = seeds.seed(agreement.experiment, "probe", turn.round, client.name)
    if is_data_independent(agreement.method.probe):
        return data_independent_input(agreement.blocks, seed)
    return ProbeInput(client.model, client.examples, agreement.blocks, seed, client.loss)


def charge_answer(agreement: Agreement, client: Client, request: Request, answer: Answer) -> None:
    """Charge an answer to the site's account, if it has one; call this before computing it.

    Sets the answer's `protected`. Raises RequestRefused if the account's limits refuse it.
    """
    if client.account is not None:
        without_data = answer.kind == "scores" and is_data_independent(agreement.method.probe)
        protected = client.budget_guard is not None or without_data
        client.account.charge(replace(answer, protected=protected))


def answer_content(
    agreement: Agreement,
    client: Client,
    turn: Turn,
    roles: Roles,
    before: Tensors,
    client_state: Tensors,
) -> str:
    """Return the digest of all inputs of an answer; empty if the client has no guard or account.

    `before`: start values of trainable params. `client_state`: the client's stored values.
    """
    if client.guard is None and client.account is None:
        return ""
    # Full digests: the server chooses the values, and must not find two values with one digest,
    # whose answers would share their noise.
    aux, memory = only_aux(client.received), only_aux(client_state)
    study = [agreement.experiment, agreement.text]
    request = [turn.round, turn.phase, client.name, client.traits, role_letters(roles)]
    data = [client.examples_digest(), len(client.examples), model_digest(client.model)]
    values = (before, aux, memory)
    digests = [{k: client.digests.full_digest(v) for k, v in each.items()} for each in values]
    return combine_digests(study, request, data, [_frozen_digests(client, before), *digests])


def _frozen_digests(client: Client, before: Tensors) -> dict[str, str]:
    """Return full digests of the initial values of all params that are not in `before`."""
    if client.initial_model is not None:
        return {k: digest for k, digest in client.initial_model.digests.items() if k not in before}
    return {k: client.digests.full_digest(v) for k, v in client.start.items() if k not in before}
