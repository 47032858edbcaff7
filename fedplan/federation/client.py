# SPDX-License-Identifier: Apache-2.0
"""A client of a federation: its state, its test examples, and how it takes requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedplan import seeds
from fedplan.data.examples import Examples, Loss
from fedplan.data.metrics import Predictions
from fedplan.data.score_counts import ScoreCounts
from fedplan.federation.agreement import Agreement, versions_digest
from fedplan.federation.ledger.digests import InitialModel, examples_digest
from fedplan.federation.ledger.egress import Account, Answer
from fedplan.federation.messages import (
    ClientStateMissing,
    OutdatedClientState,
    Request,
    RequestRefused,
)
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.models.values import set_values
from fedplan.privacy.dpsgd.fit import ReportFault, require_dp_sgd
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import ClientGuard, DistributedGuard, Guard
from fedplan.privacy.mechanisms.noise import load_or_create_secret
from fedplan.storage.journal import Journal
from fedplan.storage.store import TensorsAndMeta
from fedplan.tensors.devices import deterministic
from fedplan.tensors.named import DigestCache, Tensors, only_aux, param_key
from fedplan.training.activation_cache import ActivationCache
from fedplan.training.fit import ClientHook
from fedplan.training.probes import ProbeInput, data_independent_input, is_data_independent

EXAMPLE_COUNT = "examples"
"""Name of the metric with the number of test examples."""

SCORE_COUNTS = "counts"
"""Name by which a client's policy lets score counts leave, under masks or with noise."""

ScoreFn = Callable[[nn.Module, Examples], Mapping[str, float]]
"""Returns the metrics of a model on examples, by name."""
PredictFn = Callable[[nn.Module, Examples], Predictions]
"""Returns the predictions of a model on examples."""


@dataclass(frozen=True)
class EvalSet:
    """A client's test examples, with the function and the rounds of evaluation.

    `examples`: None if the client has no test examples. `score`: function (model, examples) to
    metrics by name. `personal`: evaluate the client's personal model too, not only the global one.
    `every`: rounds between evaluations. `rounds`: last round of the run, always evaluated. Requests
    for other rounds are refused. `validation`: examples on which the best round is chosen; None for
    none. `counts`, `predict`: what is counted where no metrics leave, and the function (model,
    examples) to predictions; None if the task has no such counts. `validates`: validation examples
    are counted too, also at a client that has none.
    """

    examples: Examples | None
    score: ScoreFn
    personal: bool = True
    every: int = 1
    rounds: int = 0
    validation: Examples | None = None
    counts: ScoreCounts | None = None
    predict: PredictFn | None = None
    validates: bool = False


@dataclass(frozen=True)
class MetricPolicy:
    """A client's own policy for the metrics that may be sent to the server.

    `metrics`: names of allowed metrics; None allows all. The number of examples is always sent.
    `min_examples`: with fewer test examples no metrics are sent, and score counts without noise are
    zeros. `personal`: allow evaluation of the personal model; metrics of many evaluations can
    reveal personal values.
    """

    metrics: frozenset[str] | None = None
    min_examples: int = 1
    personal: bool = True

    def filter_metrics(self, name: str, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the allowed metrics among `scores`, and the example count if present.

        `name`: the client, for the message. Raises RequestRefused if no metric is allowed.
        """
        allowed = scores.keys() - {EXAMPLE_COUNT}
        if self.metrics is not None:
            allowed &= self.metrics
        if not allowed:
            names = ", ".join(sorted(scores.keys() - {EXAMPLE_COUNT}))
            raise RequestRefused(
                f"the policy of {name} allows none of {names}: name those that may leave"
            ).with_code("metrics-not-allowed")
        return {n: value for n, value in scores.items() if n in allowed or n == EXAMPLE_COUNT}


G = TypeVar("G", bound=Guard)
KEY = "key"
"""File beside a journal with the key for digests of a client's personal values."""


@dataclass(frozen=True)
class TrainSetup:
    """The model and how it is trained, shared by all clients of a process.

    `model`: trained in place by each turn, with `loss`. `start`: initial values of the params that
    may change. `initial`: digests of all initial values. `digests`: cache of digests of tensors.
    `deterministic`: fail where there is no deterministic algorithm. `spread`: trains a turn on
    several devices. `activation_cache`: of frozen layers. `trial_examples`: to try DP-SGD, or None.
    """

    model: nn.Module
    loss: Loss
    start: dict[str, Tensor]
    initial: InitialModel
    digests: DigestCache = field(default_factory=DigestCache)
    deterministic: bool = False
    activation_cache: ActivationCache | None = None
    trial_examples: Examples | None = None
    spread: ClientHook | None = None


@dataclass(frozen=True)
class ClientPrivacy:
    """What limits the replies of a client.

    `guard`: privacy budget of example-level DP. `noise_guard`: privacy budget of distributed DP,
    where clients add noise. `account`: replies of all studies on the dataset; None in a simulation.
    `hide_loss`: do not report the training loss. `metric_policy`: metrics that may leave.
    `report_fault`: takes an error of private work that a site must not reveal, and logs it there;
    None, as in a simulation, raises it.
    """

    guard: ClientGuard | None = None
    noise_guard: DistributedGuard | None = None
    account: Account | None = None
    hide_loss: bool = False
    metric_policy: MetricPolicy = field(default_factory=MetricPolicy)
    report_fault: ReportFault | None = None

    @property
    def budget_guard(self) -> Guard | None:
        """The guard with the client's privacy budget; None without differential privacy here."""
        return self.guard or self.noise_guard

    @property
    def contained_fault(self) -> ReportFault | None:
        """`report_fault` of a client that adds noise itself, else None: then errors are raised."""
        return self.report_fault if self.budget_guard is not None else None


@dataclass
class Client:
    """One client of a run: its data, its stored values, and the model that it trains.

    The functions that take a Client (`train_round`, `evaluate_client`) change the model, `received`
    and `journal`; a Client serves one request at a time. `name`, `traits`: name, and declared
    properties that a plan may use. `examples`, `eval_set`: training and test examples. `journal`:
    stored personal values and replies. `received`, `received_versions`: global values last received
    by key, and their versions. `cached_digest`: memo of `examples_digest`. `may_rejoin`: the site's
    operator lets it go on from a state that is older than its last reply.
    """

    name: str
    examples: Examples
    journal: Journal
    setup: TrainSetup
    traits: dict[str, str] = field(default_factory=dict[str, str])
    received: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    received_versions: dict[str, int] = field(default_factory=dict[str, int])
    privacy: ClientPrivacy = field(default_factory=ClientPrivacy)
    eval_set: EvalSet | None = None
    cached_digest: tuple[Examples, str] | None = None
    may_rejoin: bool = False

    @cached_property
    def digest_key(self) -> bytes:
        """Secret key for digests of personal values; created in the journal's folder if missing."""
        file = self.journal.make_folder() / KEY
        return load_or_create_secret(file, self.journal.encryption, synced=self.journal.synced)

    def state(self, request: Request, before: str = "") -> TensorsAndMeta:
        """Return the stored values and notes for a request; see `load_client_state`.

        Also raises OutdatedClientState if there are personal values, and their key is lost.
        """
        answered_round = 0 if self.may_rejoin else request.last_update_round
        state, notes = load_client_state(self.journal, self.name, answered_round, before)
        file = self.journal.folder / KEY
        if notes.get("digests") and "digest_key" not in vars(self) and not file.exists():
            raise OutdatedClientState(
                f"{file} is lost, the key of {self.name}'s digests: restore a backup of it"
            )
        return state, notes

    def examples_digest(self) -> str:
        """Return the digest of the examples, computed once for each examples object."""
        if self.cached_digest is None or self.cached_digest[0] is not self.examples:
            self.cached_digest = self.examples, examples_digest(self.examples)
        return self.cached_digest[1]


def require_private_setup(agreement: Agreement, setup: TrainSetup) -> None:
    """Raise an error if the agreement has example-level DP and DP-SGD cannot train the model.

    Tries the initial model on `setup.trial_examples`, for all params that the agreement may train.
    Call this when a study is accepted, before any charge. Does nothing without trial examples.
    Raises as `require_dp_sgd`.
    """
    guarantee = agreement.guarantee
    if guarantee is None or guarantee.unit != "example" or setup.trial_examples is None:
        return
    roles = dict.fromkeys(agreement.params, Role.FREEZE)
    roles |= dict.fromkeys(agreement.trainable, Role.SHARE)
    arguments = agreement.train_arguments
    with deterministic(setup.deterministic):
        require_dp_sgd(setup.model, roles, setup.trial_examples, setup.loss, arguments)


def make_example_guard(
    agreement: Agreement, folder: Path, account: Account | None = None
) -> ClientGuard | None:
    """Return a guard (privacy budget, DP-SGD) for example-level DP; None if not in the agreement.

    The privacy ledger is a file in `folder`. If `account` is given, the privacy ledger is in the
    account's folder, the account's limits of epsilon and delta hold too, and `folder` is ignored.
    """
    guarantee = agreement.guarantee
    if guarantee is None or guarantee.unit != "example":
        return None
    if account is None:
        return ClientGuard(guarantee, folder)
    return _guard_on_account(ClientGuard, guarantee, agreement, account)


def make_noise_guard(agreement: Agreement, account: Account) -> DistributedGuard | None:
    """Return a guard for distributed DP with the account's budget; None if not in the agreement."""
    guarantee = agreement.guarantee
    if guarantee is None or not agreement.distributed_dp:
        return None
    return _guard_on_account(DistributedGuard, guarantee, agreement, account)


def _guard_on_account(
    guard_class: type[G], guarantee: Guarantee, agreement: Agreement, account: Account
) -> G:
    """Create a guard of a class, with the privacy ledger and limits of the account's folder.

    `guarantee`: the DP promise. The agreement's `request_prefix` identifies the run in the ledger.
    """
    run, limits, key = agreement.request_prefix, account.limits, account.encryption
    return guard_class(
        guarantee, account.folder, run=run, limit=limits.epsilon, delta=limits.delta, encryption=key
    )


def receive_request(
    agreement: Agreement, client: Client, request: Request, notes: Mapping[str, Any]
) -> None:
    """Check a request, then put the global values into `client.received` and `received_versions`.

    `notes`: notes of the client's journal. Raises RequestRefused if the request is of another run
    or agreement, or has values that the plan does not send to this client, or of another dtype or
    shape. Raises ClientStateMissing if the client lacks values that the server expects at the
    client. Nothing changes if this raises.
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
    sent = request.versions.keys()
    if extra := (sent - required.keys()) | (request.values.keys() - sent):
        raise RequestRefused(
            f"{client.name} takes no {min(extra)!r} from the server: the plan does not send it"
        ).with_code("unexpected-values")
    exchanged = {p.key: p for p in agreement.exchanged}
    for key, value in request.values.items():
        param = exchanged[param_key(key)]
        dtype, shape = getattr(torch, param.dtype), param.shape
        if value.dtype != dtype or value.shape != shape:
            raise RequestRefused(
                f"{client.name} received {key!r} as {value.dtype} {tuple(value.shape)}, and it is "
                f"{dtype} {shape}"
            ).with_code("unexpected-values")
    values, versions = ({}, {}) if request.full else (client.received, client.received_versions)
    # A version counts only with its value: an older request may have replaced the value meanwhile.
    versions = versions | {key: request.versions[key] for key in request.values}
    required_versions = {key: versions.get(key, first) for key, first in required.items()}
    if versions_digest(required_versions) != request.versions_digest:
        raise ClientStateMissing(
            f"{client.name} has lost values that it received before: it needs all of them"
        )
    client.received, client.received_versions = values | request.values, versions


def load_client_state(
    journal: Journal, client: str, answered_round: int, before: str = ""
) -> TensorsAndMeta:
    """Return a client's stored values and notes, as `journal.client_state(before)` does.

    `client`: the name, for messages. `answered_round`: last round of which the server has a reply
    of the client; 0 for none. Raises OutdatedClientState if the stored state is of an earlier
    round, unless the journal is optional: to go on from there would give other results, unnoticed.
    """
    client_state, notes = journal.client_state(before)
    if not journal.optional and (stored_round := last_trained_round(notes)) < answered_round:
        damage = f" ({'; '.join(map(str, journal.skipped))})" if journal.skipped else ""
        raise OutdatedClientState(
            f"the server has a reply of {client} for round {answered_round}, and the client's "
            f"state in {journal.folder} ends with round {stored_round}{damage}: files are lost or "
            "damaged, or an older copy; restore a backup of the run, or repair a simulation with "
            "`fedplan verify --repair`"
        )
    return client_state, notes


def last_trained_round(notes: Mapping[str, Any]) -> int:
    """Return the last round that a client has trained, by the notes of its journal; 0 for none."""
    return max((line["round"] for line in notes.get("ledger_lines", ())), default=0)


def known_personal_bits(request: Request, notes: Mapping[str, Any]) -> dict[str, str]:
    """Return by round which params became personal, for the rounds that the server received.

    `notes`: notes of the client's journal. Keys are round numbers as text, up to
    `request.last_update_round`. Values are hex numbers with one bit for each param that became
    personal (`Agreement.personal_bits`). Empty if the request is `full`.
    """
    by_round: dict[str, str] = {} if request.full else notes.get("personal_bits", {})
    return {n: bits for n, bits in by_round.items() if int(n) <= request.last_update_round}


def join_bits(bits_by_round: Mapping[str, str]) -> int:
    """Return the bitwise or of hex numbers."""
    return reduce(lambda joined, bits: joined | int(bits, 16), bits_by_round.values(), 0)


def client_turn(client: Client, request: Request) -> Turn:
    """Return the request's turn with the client's own name and traits, and without scores."""
    return replace(request.turn, client=client.name, traits=client.traits, scores=None)


def received_values(client: Client, keys: Iterable[str]) -> dict[str, Tensor]:
    """Return the client's copy of global values: as last received, else the initial values."""
    return {k: client.received[k] if k in client.received else client.setup.start[k] for k in keys}


def received_digests(
    agreement: Agreement, client: Client, turn: Turn, client_state: Tensors
) -> dict[str, str]:
    """Return full digests by key of the global values and aux tensors that a turn starts from.

    Each value is as last received, else the initial one. `client_state`: values in the client's
    journal. Params that are in there, and that the agreement makes personal in the turn, are left
    out.
    """
    roles = agreement.permitted(turn)
    keys = [
        p.key for p in agreement.exchanged if not (roles[p].is_personal and p.key in client_state)
    ]
    values = received_values(client, keys) | only_aux(client.received)
    return {key: client.setup.digests.full_digest(value) for key, value in values.items()}


def require_same_start(client: Client, request: Request, digests: Mapping[str, str]) -> None:
    """Raise RequestRefused if a digest in `digests` is not in the request's `base_digests`.

    `digests`: result of `received_digests`. Under secure aggregation all clients check the same
    `base_digests`, so all start from one model. Without `base_digests` every digest is refused.
    """
    for key, digest in digests.items():
        if digest != request.base_digests.get(key):
            raise RequestRefused(
                f"{client.name} received another {key} than all sites start from: its update could "
                "be told from the sum"
            ).with_code("unexpected-values")


def load_start_values(
    agreement: Agreement, client: Client, turn: Turn, client_state: Tensors
) -> dict[str, Tensor]:
    """Set the client's model to the start values of a turn, in eval mode; return the values by key.

    Covers the agreement's trainable params. A personal param starts from `client_state` (values in
    the journal) if there; any other param from the value last received, else the initial value.
    The returned tensors are the stored tensors, not copies.
    """
    roles = agreement.permitted(turn)
    personal = {p.key for p in agreement.trainable if roles[p].is_personal}
    stored = {key: value for key, value in client_state.items() if key in personal}
    sources = (stored, client.received, client.setup.start)
    values = {
        p.key: next(source[p.key] for source in sources if p.key in source)
        for p in agreement.trainable
    }
    model = client.setup.model
    set_values(model, values, agreement.trainable)
    # An earlier turn may have left train mode. Checking costs less than eval().
    if any(module.training for module in model.modules()):
        model.eval()
    return values


def make_probe_input(agreement: Agreement, client: Client, turn: Turn) -> ProbeInput:
    """Return the input of the agreement's probe, with a seed by the turn's round and the client.

    Without model and examples if the probe is data-independent.
    """
    seed = seeds.seed(agreement.experiment, "probe", turn.round, client.name)
    if is_data_independent(agreement.method.probe):
        return data_independent_input(agreement.blocks, seed)
    setup = client.setup
    return ProbeInput(setup.model, client.examples, agreement.blocks, seed, setup.loss)


def charge_answer(privacy: ClientPrivacy, answer: Answer, *, without_data: bool = False) -> None:
    """Append `answer`, the description of a reply, to the client's account; call before computing.

    Does nothing without an account. `answer.protected` is replaced: True if the client has a
    `budget_guard`, or if the reply is computed `without_data`. Raises as `Account.charge`.
    """
    if privacy.account is not None:
        protected = privacy.budget_guard is not None or without_data
        privacy.account.charge(replace(answer, protected=protected))
