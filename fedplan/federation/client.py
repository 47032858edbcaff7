# SPDX-License-Identifier: Apache-2.0
"""Clients: one party of a federation, what it has seen of the world, and what it keeps."""

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
from fedplan.federation.agreement import Agreement, basis
from fedplan.federation.exams import Disclosure, Exam
from fedplan.federation.marks import joint, mark_of, model_mark
from fedplan.federation.messages import Lacking, Refused, Request
from fedplan.federation.origin import Base
from fedplan.federation.record import spelled
from fedplan.language.plan import Roles
from fedplan.language.turn import Turn
from fedplan.models.values import put
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import ClientGuard, Guard, ShareGuard
from fedplan.privacy.mechanisms.secret import secret_of
from fedplan.storage.journal import Journal
from fedplan.tensors.named import Digests, Tensors
from fedplan.tensors.riders import beside, param_of
from fedplan.training.features import Features
from fedplan.training.probes import Look, is_public, public_look

G = TypeVar("G", bound=Guard)
KEY = "key"
"""The file beside a journal with what digests of a client's own values are keyed by."""


@dataclass
class Client:
    """One client: its rows, what it has seen of the world, and the journal of what it keeps.

    `held` are the versions of what it has seen. A `guard` hides each of its rows in every step;
    `shares` adds its share of the noise where it is hidden from the server. The
    `account` is of all that it has answered, in other studies too; a simulated client has none.
    With `deterministic` its device gives the same bits each time, or an error where it cannot. With
    `mute` it tells nobody the loss of its rows.
    `exam` is what its models are tested on, and `disclosure` says which scores may leave it.
    `base` tells of all that its model starts with; `start` need then hold only what may change.
    `features` keeps what frozen parts make of rows, of all clients of a process.
    """

    name: str
    rows: Examples
    journal: Journal
    model: nn.Module
    start: dict[str, Tensor]
    marks: dict[str, str]
    loss: Loss
    traits: dict[str, str] = field(default_factory=dict[str, str])
    seen: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    held: dict[str, int] = field(default_factory=dict[str, int])
    digests: Digests = field(default_factory=Digests)
    guard: ClientGuard | None = None
    shares: ShareGuard | None = None
    account: Account | None = None
    deterministic: bool = False
    mute: bool = False
    exam: Exam | None = None
    disclosure: Disclosure = field(default_factory=Disclosure)
    marked: tuple[Examples, str] | None = None
    base: Base | None = None
    features: Features | None = None

    @property
    def payer(self) -> Guard | None:
        """What pays for what leaves it, if anything is hidden here."""
        return self.guard or self.shares

    @cached_property
    def key(self) -> bytes:
        """What digests of its own values are keyed by: nobody else can check a guess at one."""
        return secret_of(self.journal.made() / KEY, self.journal.seal)

    def mark(self) -> str:
        """The digest of its rows, worked out once for as long as they are the same."""
        if self.marked is None or self.marked[0] is not self.rows:
            self.marked = self.rows, mark_of(self.rows)
        return self.marked[1]


def guard_of(
    agreement: Agreement, folder: Path, account: Account | None = None
) -> ClientGuard | None:
    """What hides a site's rows, if that was promised: in a folder of its own, or on its account."""
    guarantee = agreement.guarantee
    if guarantee is None or guarantee.unit != "example":
        return None
    if account is None:
        return ClientGuard(guarantee, folder)
    return _on_account(ClientGuard, guarantee, agreement, account)


def share_guard_of(agreement: Agreement, account: Account) -> ShareGuard | None:
    """What adds a site's share of the noise, if clients are hidden in that way: on its account."""
    guarantee = agreement.guarantee
    if guarantee is None or not agreement.in_shares:
        return None
    return _on_account(ShareGuard, guarantee, agreement, account)


def _on_account(kind: type[G], guarantee: Guarantee, agreement: Agreement, account: Account) -> G:
    limits = account.limits
    return kind(
        guarantee,
        account.folder,
        run=agreement.prefix,
        limit=limits.epsilon,
        delta=limits.delta,
        seal=account.seal,
    )


def receive(
    agreement: Agreement, client: Client, request: Request, notes: Mapping[str, Any]
) -> None:
    """Take what the server sends, if it is what was agreed and nothing is then lacking."""
    name = agreement.request(request.turn.round, client.name)
    if request.run != agreement.run:
        raise Refused(
            f"{client.name} is in run {agreement.run}, and is asked in run {request.run[:40]!r}"
        )
    if (request.agreed, request.name) != (agreement.fingerprint, name):
        raise Refused(
            f"{client.name} agreed to {agreement.fingerprint}, and is asked for "
            f"{request.name[:120]!r}: both ends must run the same study"
        ).coded("another-study")
    wanted = agreement.wanted(own_turn(client, request), bits_of(settled_by(request, notes)))
    _require_wanted(agreement, client, request, wanted)
    held = {} if request.anew else client.held
    held = held | request.versions
    if basis({k: held.get(k, first) for k, first in wanted.items()}) != request.basis:
        raise Lacking(f"{client.name} does not have what it was sent before: it needs all of it")
    client.seen, client.held = client.seen | request.values, held


def settled_by(request: Request, notes: Mapping[str, Any]) -> dict[str, str]:
    """What became the client's own, by rounds: as far as the server has heard of it."""
    found: dict[str, str] = {} if request.anew else notes.get("settled", {})
    return {number: bits for number, bits in found.items() if int(number) <= request.heard}


def bits_of(settled: Mapping[str, str]) -> int:
    """One number with a bit for each param that became the client's own."""
    return reduce(lambda found, bits: found | int(bits, 16), settled.values(), 0)


def _require_wanted(
    agreement: Agreement, client: Client, request: Request, wanted: Mapping[str, int]
) -> None:
    """Refuse values that the plan does not have come down, or that are of another kind."""
    if strange := (request.values.keys() | request.versions.keys()) - wanted.keys():
        raise Refused(
            f"{client.name} takes no {min(strange)!r} from the server: its plan says so"
        ).coded("values")
    own = {p.key: (f"torch.{p.dtype}", p.shape) for p in agreement.movable}
    for key, value in request.values.items():
        came = (str(value.dtype), tuple(value.shape))
        if came != (meant := own[param_of(key)]):
            raise Refused(
                f"{client.name} was sent {key!r} as {' '.join(map(str, came))}, and it is "
                f"{' '.join(map(str, meant))}"
            ).coded("values")


def own_turn(client: Client, request: Request) -> Turn:
    """The turn as the client itself sees it: its name, its traits, and no scores but its own."""
    return replace(request.turn, client=client.name, traits=client.traits, scores=None)


def world_held(client: Client, keys: Iterable[str]) -> dict[str, Tensor]:
    """What a client has of the world: what it was sent last, or what both ends start with."""
    return {key: client.seen[key] if key in client.seen else client.start[key] for key in keys}


def world_marks(agreement: Agreement, client: Client, turn: Turn, home: Tensors) -> dict[str, str]:
    """Whole digests of all that a turn takes from the world, shared by it or not, riders too.

    It is what `start_values` does not find at home; no word of the server says what that is.
    """
    roles = agreement.permitted(turn)
    taken = [p.key for p in agreement.movable if not (roles[p].own and p.key in home)]
    held = world_held(client, taken) | beside(client.seen)
    return {key: client.digests.whole(value) for key, value in held.items()}


def require_base(client: Client, request: Request, marks: Mapping[str, str]) -> None:
    """Refuse what is made of other values than the server says that all start from.

    All sites of a masked sum have the same digests in their terms: so nobody has another model.
    """
    for key, mark in marks.items():
        if mark != request.base.get(key):
            raise Refused(
                f"{client.name} was sent another {key} than the server says that all start from: "
                "what it made of that could be told from the sum"
            ).coded("values")


def start_values(
    agreement: Agreement, client: Client, turn: Turn, home: Tensors
) -> dict[str, Tensor]:
    """Each trainable param's value at the start of a turn, put into the model.

    It is the client's own, or the world's: scores never change whose a param is. What becomes the
    client's own for the first time starts from the world's.
    """
    roles = agreement.permitted(turn)
    own = {p.key: home[p.key] for p in agreement.trainable if roles[p].own and p.key in home}
    held = (client.start, client.seen, own)
    values = {
        p.key: next(v[p.key] for v in reversed(held) if p.key in v) for p in agreement.trainable
    }
    put(client.model, values, agreement.trainable)
    # A probe must not find the mode in which some other turn has left the model. To set it costs
    # more than to look.
    if any(module.training for module in client.model.modules()):
        client.model.eval()
    return values


def look_of(agreement: Agreement, client: Client, turn: Turn) -> Look:
    """What the client's probe may look at: of the rows nothing, if it says that it does not."""
    seed = seeds.seed(agreement.experiment, "probe", turn.round, client.name)
    if is_public(agreement.method.probe):
        return public_look(agreement.blocks, seed)
    return Look(client.model, client.rows, agreement.blocks, seed, client.loss)


def admit(agreement: Agreement, client: Client, request: Request, answer: Answer) -> None:
    """Count an answer on the site's account, or refuse it, before any work is done for it."""
    if client.account is not None:
        polled = answer.kind == "scores"
        hidden = client.payer is not None or (polled and is_public(agreement.method.probe))
        client.account.admit(replace(answer, hidden=hidden))


def content_of(
    agreement: Agreement, client: Client, turn: Turn, roles: Roles, before: Tensors, home: Tensors
) -> str:
    """All that an answer is made of: of another content it is another answer, by any name.

    Of a client that nothing hides and nobody counts, nobody asks. The server chooses the values:
    digests are whole, so that it finds no two values of one content, which would share a noise.
    """
    if client.guard is None and client.account is None:
        return ""
    riders, memory = beside(client.seen), beside(home)
    agreed = [agreement.experiment, agreement.text]
    asked = [turn.round, turn.phase, client.name, client.traits, spelled(roles)]
    made_of = [client.mark(), len(client.rows), model_mark(client.model)]
    values = (before, riders, memory)
    held = [{k: client.digests.whole(v) for k, v in each.items()} for each in values]
    return joint(agreed, asked, made_of, [_resting(client, before), *held])


def _resting(client: Client, before: Tensors) -> dict[str, str]:
    """The whole digests of all that no turn trains."""
    if client.base is not None:
        return {key: whole for key, whole in client.base.digests.items() if key not in before}
    return {k: client.digests.whole(v) for k, v in client.start.items() if k not in before}
