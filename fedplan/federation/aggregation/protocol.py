# SPDX-License-Identifier: Apache-2.0
"""What all aggregations have in common: `Aggregation` of a run, and `Aggregator` of one round.

Mean (`mean`), robust rules (`robust`), client-level DP (`private`), secure aggregation (`secure`)
and secure aggregation of noised updates (`distributed_dp`) are values behind these two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.lora_products import Errors
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import GlobalState
from fedplan.federation.ledger.records import DefenceRecord, SecAggRecord
from fedplan.federation.messages import UpdateRejected
from fedplan.federation.participation import Participation
from fedplan.language.predicates import Turn
from fedplan.models.params import Block, Params
from fedplan.privacy.guard import ServerGuard
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import ExactSum

PollScores = Mapping[str, Mapping[Block, float]]
"""Scores of blocks by client, from a poll."""

TensorsAndJson = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and all else as JSON."""


@dataclass(frozen=True)
class AggregationResult:
    """Result of aggregating the updates of one round.

    `means`: aggregated value of each param that some client sent, and of base weights that a LoRA
    rule changes, before the server optimizer. `aux`: change to add to the global value of each
    auxiliary tensor. `drift`: by kind of param (mean squared distance of updates from their mean,
    squared step of the mean). `clipping_norm`: norm for the next round if the norm adapts, else 0.
    `products`: relative errors of LoRA products (`lora_products.Errors`); None if not measured.
    `defence`: actions of the robust defence; None if off. `secagg`: secure aggregation's entry for
    the ledger; None if off. `fractions`: by key, which fraction of all clients sent the param;
    empty unless the method weighs all clients alike.
    """

    means: dict[str, Tensor]
    aux: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    drift: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    clipping_norm: float = 0.0
    products: Errors | None = None
    defence: DefenceRecord | None = None
    secagg: SecAggRecord | None = None
    fractions: dict[str, float] = field(default_factory=dict[str, float])


class Aggregator(ABC):
    """Aggregates the updates of one round: `require` and `add` each update, then `close` once.

    An update has `values` (trained params by key), `aux` (changes of auxiliary tensors by key) and
    a `weight` (number of examples, 1 or more).

    Workers add updates to partial sums: `describe` the round's aggregator, open an empty one from
    the description (`factory.open_partial_sum`), and `merge` its `state`. Merging gives the same
    bits as one sum, in any order. An aggregator without these four methods has no partial sums,
    and they raise FedplanError.
    """

    @abstractmethod
    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise UpdateRejected or FedplanError if an update cannot be added; add nothing."""

    @abstractmethod
    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Add one client's update; if this raises, nothing of the update is added."""

    @abstractmethod
    def close(self) -> AggregationResult:
        """Return the aggregate of all added updates; the aggregator cannot be used afterwards."""

    def describe(self) -> dict[str, Any]:
        """Return JSON, with a "kind", to open a partial sum; contains no updates and no secret."""
        self._refuse_partial_sum()

    def empty(self) -> Aggregator:
        """Return an aggregator of the same round without updates."""
        self._refuse_partial_sum()

    def state(self) -> TensorsAndJson:
        """Return (tensors, JSON with "kind") of all added updates, for `merge` elsewhere.

        The tensors are not copied: send them before the aggregator changes.
        """
        self._refuse_partial_sum()

    def merge(self, tensors: Tensors, fields: Mapping[str, Any]) -> None:
        """Add the `state` of an aggregator of other clients of the round; may keep the tensors.

        Raises FedplanError if the state is of another kind, and SumError if a sum could overflow.
        """
        self._refuse_partial_sum()

    def _refuse_partial_sum(self) -> Never:
        raise FedplanError(f"{type(self).__name__} has no partial sums: use --runner local")

    def _require_kind(self, kind: str, fields: Mapping[str, Any]) -> None:
        if fields["kind"] != kind:
            raise FedplanError(
                f"a partial sum of kind {fields['kind']} cannot be merged into a "
                f"{type(self).__name__}"
            )


@dataclass(frozen=True)
class Aggregation(ABC):
    """Aggregation strategy of a whole run: draws the clients and aggregates each round's updates.

    `agreement`: settings of the run. `participation`: how the clients of a round are drawn.
    `guard`: the server's privacy budget, to which every round is charged; None without client-level
    DP. In each round call `sample_clients`, then `open_round`.
    """

    agreement: Agreement
    participation: Participation
    guard: ServerGuard | None

    @property
    def hides_clients(self) -> bool:
        """Whether client-level DP holds.

        Then no output of the server may depend on which clients took part, except through noise.
        """
        return self.guard is not None

    def sample_clients(self, number: int, roster: Sequence[str]) -> list[str]:
        """Return the clients of round `number`, drawn from all client names in `roster`.

        Raises PrivacyError if the privacy budget does not suffice for the round, and FedplanError
        if secure aggregation does not allow a sum of that many clients.
        """
        if self.guard is not None:
            self.guard.require_affordable_round(number, round_charge_name(number))
        return self.participation.cohort(self.agreement.experiment, number, list(roster))

    def shared_params(self, turns: Iterable[Turn]) -> Params:
        """Return the params that the clients of a round send; `turns`: one for each class of them.

        All turns are of one round and phase, and have the same scores.
        """
        return self.agreement.shared_params(turns)

    @abstractmethod
    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Return one score per block for all clients of round `number`, from all clients' scores.

        `polled`: block scores by client; see `score_layers`.
        """

    @abstractmethod
    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> Aggregator:
        """Return an empty Aggregator for round `global_state.round + 1`; charges no privacy budget.

        `shared`: returns the global values of the `shared_params` of the round. `roster`: number of
        all clients of the run.
        """


def round_charge_name(number: int) -> str:
    """Return the name of a round's charge to the privacy budget."""
    return f"round {number}"


def require_no_aux(aux: Tensors) -> None:
    """Raise UpdateRejected if an update has auxiliary tensors, which DP does not clip."""
    if aux:
        raise UpdateRejected(f"{min(aux)!r} is not covered by differential privacy")


def sums_state(
    kind: str, sums: Mapping[str, ExactSum], fields: Mapping[str, Any]
) -> TensorsAndJson:
    """Return the `Aggregator.state` of exact sums by name, with further JSON fields."""
    tensors, facts = dict[str, Tensor](), dict[str, Any]()
    for name, total in sums.items():
        counts, facts[name] = total.export_raw()
        tensors |= {f"{name}/{key}": value for key, value in counts.items()}
    return tensors, {"kind": kind, "sums": facts, **fields}


def merge_sums(sums: Mapping[str, ExactSum], tensors: Tensors, fields: Mapping[str, Any]) -> None:
    """Add the sums in a state of `sums_state` to `sums` of the same names."""
    for name, total in sums.items():
        prefix = f"{name}/"
        raw = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        total.merge(ExactSum.from_raw(raw, fields["sums"][name]))
