# SPDX-License-Identifier: Apache-2.0
"""The end-to-end audit: from two tables or rosters that differ in one unit to all that is seen.

Nobody may tell two such worlds apart by more than was charged for; and each mistake that let them
once is flagged when it is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from differences import Finding, audited, measured, reused, told_apart
from neighbours import CANARY, METHODS, TASKS, UNITS, Case, World, prepare, tables_of
from torch import Tensor

from fedplan.data.examples import Examples
from fedplan.federation.endpoint import Endpoint
from fedplan.federation.messages import block_scores_to_json
from fedplan.privacy.dpsgd import per_example
from fedplan.privacy.mechanisms.noise import NoiseStream, derive_key
from fedplan.runners import site_runtime
from fedplan.runners.flower.records import ConnectedSite
from fedplan.runners.flower.server import ServerLoop
from fedplan.studies import experiment
from fedplan.studies.federated_data import FederatedData
from fedplan.tensors.message import Message
from fedplan.tensors.named import digest
from fedplan.tensors.serialization import pack_message, unpack_message
from fedplan.training.probes import ProbeInput, get_probe

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = [c for t in TASKS for m in METHODS for u in UNITS if (c := Case(t, m, u)).allowed]
GATE = [
    Case("text-classification", "fedavg", "example"),
    Case("text-classification", "fedper", "example"),
    Case("token-classification", "head-only", "example"),
    Case("image-classification", "vote", "example"),
    Case("image-text", "bitfit", "example"),
    Case("causal-lm", "fedavg", "example"),
    Case("masked-lm", "fedfrozen", "example"),
    Case("regression", "head-only", "example"),
    Case("instruction", "fedavg", "example"),
    Case("text-classification", "vote", "client"),
    Case("image-classification", "random, together", "client"),
    Case("causal-lm", "fedfrozen", "client"),
    Case("text-classification", "traits", "client"),
]
TEXT = Case("text-classification", "head-only", "example")
CLIENT = Case("text-classification", "head-only", "client")
DRAWS = 10_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    prepare(place)
    return place


@pytest.fixture
def here(models: Path, tmp_path: Path) -> Path:
    for each in models.iterdir():
        (tmp_path / each.name).symlink_to(each)
    return tmp_path


def named(case: Case) -> str:
    return f"{case.task}-{case.method}-{case.unit}"


@pytest.mark.parametrize("case", GATE, ids=named)
def test_two_worlds_differ_by_no_more_than_is_charged(case: Case, here: Path) -> None:
    assert audited(case, here).findings == []


@pytest.mark.nightly
@pytest.mark.parametrize("case", [c for c in EVERY if c not in GATE], ids=named)
def test_every_two_worlds_differ_by_no_more_than_is_charged(case: Case, here: Path) -> None:
    assert audited(case, here).findings == []


@pytest.mark.parametrize("case", [TEXT, CLIENT], ids=named)
def test_no_statistic_of_many_releases_is_above_the_claim(case: Case, here: Path) -> None:
    audit = audited(case, here)
    assert audit.findings + measured(case, audit, DRAWS) == []


@pytest.mark.nightly
@pytest.mark.parametrize("case", EVERY, ids=named)
def test_no_statistic_of_any_case_is_above_the_claim(case: Case, here: Path) -> None:
    audit = audited(case, here)
    assert audit.findings + measured(case, audit, DRAWS) == []


@pytest.mark.parametrize("more", ["", "train.lr = 0.5", "method.plan = 'freeze(embed)'"])
def test_two_contents_have_two_noises(more: str, here: Path) -> None:
    case = Case("text-classification", "fedavg", "example")
    assert reused(case, here, more) == []


def test_a_row_that_cannot_be_used_is_in_no_message(here: Path) -> None:
    tables = tables_of(TEXT)
    tables["north"][3]["label"] = CANARY
    seen = World(TEXT, here / "odd" / "world", tables).play()
    assert any(s.way == "up" for s in seen.said)
    assert told_apart(TEXT, seen) == []


# ---------------------------------------------------------------------------- mistakes put back

Planted = Callable[[], Any]


@contextmanager
def shared_as(change: Callable[[Examples], Examples]) -> Generator[None]:
    """A study whose rows to train on are made in another way."""
    real = experiment.load_federated_data

    def shares(study: Any, own: Any) -> FederatedData:
        found = real(study, own)
        return replace(found, train={name: change(held) for name, held in found.train.items()})

    with patch.object(experiment, "load_federated_data", shares):
        yield


class Chosen:
    """Some of the rows."""

    def __init__(self, rows: Examples, chosen: Tensor) -> None:
        self.rows, self.chosen = rows, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return self.rows.batch(self.chosen[indices])


class Stream:
    """The tokens of all rows as one stream, cut into blocks."""

    def __init__(self, rows: Examples, size: int = 7) -> None:
        batches = [rows.batch(torch.tensor([i])) for i in range(len(rows))]
        tokens = torch.cat([b["input_ids"][b["attention_mask"].bool()] for b in batches])
        self.blocks = tokens[: len(tokens) // size * size].view(-1, size)

    def __len__(self) -> int:
        return len(self.blocks)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        ids = self.blocks[indices]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def permuted(count: Callable[[int], int]) -> Callable[[Examples], Examples]:
    """So many rows, by a permutation of how many there are."""

    def chosen(rows: Examples) -> Examples:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        return Chosen(rows, order[: count(len(rows))].sort().values)

    return chosen


@contextmanager
def labels_of_rows() -> Generator[None]:
    """The labels are those that a site's rows have."""
    real = experiment.load_federated_data

    def shares(study: Any, own: Any) -> FederatedData:
        found = sorted(set(own[1]["label"])) if own else study.task.labels
        task = study.task.model_copy(update={"labels": found})
        return real(study.model_copy(update={"task": task}), own)

    with patch.object(experiment, "load_federated_data", shares):
        yield


def noise_by_name() -> Any:
    def source(secret: bytes, about: str, *_: str | int | bytes) -> NoiseStream:
        return NoiseStream(derive_key(secret, "noise", about.rsplit("/", 2)[-1]))

    return patch.object(NoiseStream, "for_release", staticmethod(source))


def bare_polls() -> Any:
    def poll(self: Endpoint, message: Message) -> Message:
        site = self.site
        look = ProbeInput(
            site.setup.model, site.examples, self.agreement.blocks, 0, site.setup.loss
        )
        return pack_message({}, {"scores": block_scores_to_json(get_probe("gradient")(look))})

    return patch.object(Endpoint, "_poll", poll)


def _answered(change: Callable[[Endpoint, Message], Message]) -> Any:
    real = Endpoint.answer

    def answer(self: Endpoint, kind: str, message: Message) -> Message:
        found = real(self, kind, message)
        return change(self, found) if kind == "train" else found

    return patch.object(Endpoint, "answer", answer)


def plain_digests() -> Any:
    def told(endpoint: Endpoint, answer: Message) -> Message:
        values, said = unpack_message(answer)
        kept, _ = endpoint.site.journal.client_state()
        line = {**said.get("ledger_line", {}), "after": "".join(map(digest, kept.values()))}
        return pack_message(values, {**said, "ledger_line": line})

    return _answered(told)


def errors_with_rows() -> Any:
    return _answered(
        lambda *_: pack_message({}, {"failed": f"label {CANARY!r} in column 'patient'"})
    )


@contextmanager
def short_lengths() -> Generator[None]:
    """Lengths come out short where nobody tried them."""
    real = per_example.squared_norm
    with patch.object(per_example, "squared_norm", lambda tensor: real(tensor) / 1e6):
        yield


@contextmanager
def traits_of_guests() -> Generator[None]:
    def fits(self: ServerLoop, name: str, guest: ConnectedSite) -> str:
        self.server.roster[name] = guest.traits
        return ""

    def own(study: Any, site: Any) -> dict[str, str]:
        return dict(site.traits)

    with (
        patch.object(ServerLoop, "_mismatch", fits),
        patch.object(site_runtime, "_traits", own),
    ):
        yield


def a_quorum() -> Any:
    real = ServerLoop.run

    def carry(self: ServerLoop, *args: Any) -> None:
        self.quorum = len(self.server.roster)
        real(self, *args)

    return patch.object(ServerLoop, "run", carry)


def named_objects(case: Case, **more: Any) -> Callable[[Path], list[Finding]]:
    return lambda here: audited(case, here, **more).findings


LANGUAGE = Case("causal-lm", "fedavg", "example")
KEEPS = Case("text-classification", "fedper", "example")
WARDS = {"east": {"ward": "a"}}
PLANTED: dict[str, tuple[Planted, Callable[[Path], list[Finding]], set[str]]] = {
    "texts as one stream": (
        lambda: shared_as(Stream),
        named_objects(LANGUAGE),
        {"sensitivity"},
    ),
    "held out by a permutation of the count": (
        lambda: shared_as(permuted(lambda n: int(0.8 * n))),
        named_objects(TEXT),
        {"sensitivity"},
    ),
    "limit by a permutation of the count": (
        lambda: shared_as(permuted(lambda n: 6)),
        named_objects(TEXT),
        {"sensitivity"},
    ),
    "labels read off the rows": (labels_of_rows, named_objects(TEXT), {"shape"}),
    "noise by names": (noise_by_name, lambda here: reused(KEEPS, here), {"noise"}),
    "bare polls": (bare_polls, named_objects(TEXT), {"poll", "shape"}),
    "plain digests": (plain_digests, named_objects(KEEPS), {"digest"}),
    "errors with rows": (errors_with_rows, named_objects(TEXT), {"words"}),
    "lengths too short": (short_lengths, named_objects(TEXT), {"sensitivity"}),
    "traits of guests": (
        traits_of_guests,
        named_objects(Case("text-classification", "traits", "client"), traits=WARDS),
        {"shape"},
    ),
    "a quorum": (a_quorum, named_objects(CLIENT), {"shape"}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_that_is_put_back_is_flagged(name: str, here: Path) -> None:
    plant, audit, expected = PLANTED[name]
    with ExitStack() as stack:
        stack.enter_context(plant())
        found = audit(here)
    assert expected & {each.what for each in found}, found


@pytest.mark.parametrize("case", [TEXT, CLIENT], ids=named)
def test_noise_too_small_is_flagged_by_many_releases(case: Case, here: Path) -> None:
    audit, real = audited(case, here), NoiseStream.rounded_gaussian

    def weak(self: NoiseStream, shape: tuple[int, ...], scale: float, step: float) -> Tensor:
        return real(self, shape, scale / 3, step)

    with patch.object(NoiseStream, "rounded_gaussian", weak):
        assert [each.what for each in measured(case, audit, DRAWS)] == ["epsilon"]
