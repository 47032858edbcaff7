# SPDX-License-Identifier: Apache-2.0
"""The forecast of a run: for each class of clients its stages, roles, uploads and downloads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fedplan.federation.wire_cost import WireCost
from fedplan.language.plan import Best, Plan, Roles, Step
from fedplan.models.params import Param, Params

ByteRange = tuple[int, int]
"""The least and the most bytes; layer scores and other clients decide between them."""


@dataclass(frozen=True)
class StageForecast:
    """The rounds in which the same steps of a plan apply to a client, with roles and bytes.

    `name` is "rounds 1-20" or the like; `rounds` are the numbers, empty for a phase whose start is
    not known. `steps` are the active steps of the plan. The roles of all params: `certain` if layer
    scores choose no block, `permitted` if layer scores choose every block, `heaviest` if layer
    scores choose the blocks with the most bytes to upload. `upload_range` is the upload of a client
    per round; `download_range` the global params that one round updates (a client downloads these
    in the next turn). `trained_params` is the number of trained values, `optimizer_bytes` the size
    of AdamW's state; both are maxima over the choices of blocks.
    """

    name: str
    rounds: tuple[int, ...]
    steps: tuple[Step, ...]
    certain: Roles
    permitted: Roles
    heaviest: Roles
    upload_range: ByteRange
    download_range: ByteRange
    trained_params: int
    optimizer_bytes: int

    @property
    def max_upload(self) -> int:
        """The most bytes that a client uploads in a round."""
        return self.upload_range[1]

    @property
    def max_download(self) -> int:
        """The most bytes of global params that one round updates."""
        return self.download_range[1]

    def choosing_step(self, param: Param) -> Best | None:
        """Return the `best` step whose layer scores decide a param's role; None if no step does."""
        if self.certain[param] is self.permitted[param]:
            return None
        deciding = [s for s in self.steps if isinstance(s, Best) and s.part.holds(param)]
        return deciding[-1]


@dataclass(frozen=True)
class ClientForecast:
    """The forecast for a class of clients, for a client that takes part in every round.

    `client_class` describes the class in words. `stages` cover all rounds of the run, then the
    phases whose start is not known. `uploads` and `downloads` have (least, most) bytes of each
    round, in order.
    """

    client_class: str
    stages: tuple[StageForecast, ...]
    uploads: tuple[ByteRange, ...]
    downloads: tuple[ByteRange, ...]

    @property
    def first_download(self) -> int:
        """The most bytes of the download in the first round."""
        return self.downloads[0][1]

    @cached_property
    def upload_range(self) -> ByteRange:
        """The bytes that the client uploads in the whole run."""
        return _sum(self.uploads)

    @cached_property
    def download_range(self) -> ByteRange:
        """The bytes that the client downloads in the whole run."""
        return _sum(self.downloads)

    @property
    def max_upload(self) -> int:
        """The most bytes that the client uploads in the whole run."""
        return self.upload_range[1]

    @property
    def max_download(self) -> int:
        """The most bytes that the client downloads in the whole run."""
        return self.download_range[1]


@dataclass(frozen=True)
class Forecast:
    """The forecast of `plan` on a model over a run of `rounds` rounds.

    `params` are all params of the model, `clients` one forecast per class of clients, `notes`
    sentences on limits of the forecast, and `wire_cost` the assumed compression of uploads.
    """

    plan: Plan
    params: Params
    rounds: int
    clients: tuple[ClientForecast, ...]
    notes: tuple[str, ...]
    wire_cost: WireCost

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the whole model: the upload of `share()` per round."""
        return sum(p.nbytes for p in self.params)


def _sum(ranges: Iterable[ByteRange]) -> ByteRange:
    """Return the sum of ranges, of their least and of their most."""
    least, most = zip(*ranges, strict=True)
    return sum(least), sum(most)
