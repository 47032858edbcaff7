# SPDX-License-Identifier: Apache-2.0
"""An audit with a hostile server: it chooses values, studies and orders of requests.

Two worlds differ in one row, or in one client. All that the server sees is the same in both to the
bit once the noisy values come out the same, and no sum below the noise differs by more than is
charged for. Each mistake that broke this once is found when it is put back.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from differences import Finding
from hostile import Attack, drawn_attack
from hostile_runs import carried
from neighbours import prepare
from torch import Tensor, nn

from fedplan.data.tasks.definition import Task
from fedplan.errors import FedplanError
from fedplan.federation import client_round
from fedplan.federation.aggregation import distributed_dp
from fedplan.federation.client import ClientPrivacy
from fedplan.privacy.accounting.budget import Budget
from fedplan.privacy.dpsgd import fit as private_fit
from fedplan.privacy.dpsgd.per_example import require_independent_examples
from fedplan.privacy.mechanisms.noise import NoiseStream, derive_key
from fedplan.studies import federated_data

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT, IMAGE = "text-classification", "image-classification"
APART = Attack(IMAGE, "fedavg", values="orthogonal to it", seed=4)
LABEL = Attack(TEXT, "head-only", settings=("without its label",))
DIVERGES = Attack(TEXT, "fedavg", values="its word is NaN")
DAY = [
    APART,
    LABEL,
    DIVERGES,
    Attack(TEXT, "fedper", values="its output is certain", order="restarts"),
    Attack("token-classification", "head-only", order="two studies", values="random"),
    Attack("image-text", "fedbn", values="ones"),
    Attack("causal-lm", "fedavg", values="its word is huge", order="two runs"),
    Attack("masked-lm", "fedfrozen", values="zeros", order="again"),
    Attack("regression", "lora", row="a number without end", settings=("two steps",)),
    Attack("multi-label", "vote", order="polls", values="its word is infinite"),
    Attack("instruction", "random", order="malformed", row="a cell missing"),
    Attack("seq2seq-lm", "fedadam", order="unannounced", settings=("a small budget",)),
]
RUNS = [
    Attack(TEXT, "head-only", "client", "plain", values="infinite"),
    Attack(TEXT, "head-only", "client", "secure", values="largest"),
    Attack(TEXT, "fedper", "example", "secure", values="orthogonal to it"),
]
KINDS = [("example", "plain"), ("example", "secure"), ("client", "plain"), ("client", "secure")]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hostile")
    prepare(place)
    return place


def found_by(attacks: list[Attack], here: Path) -> dict[str, list[Finding]]:
    """The findings of attacks that have any; each releases something, or it tries nothing."""
    outcomes = {str(attack): carried(attack, here) for attack in attacks}
    assert all(outcome.releases for outcome in outcomes.values())
    return {name: outcome.findings for name, outcome in outcomes.items() if outcome.findings}


def test_a_hostile_server_sees_nothing_of_a_site_but_what_is_charged_for(here: Path) -> None:
    assert found_by(DAY, here) == {}


def test_a_hostile_server_or_client_sees_nothing_of_a_run_but_what_is_charged_for(
    here: Path,
) -> None:
    assert found_by(RUNS, here) == {}


@pytest.mark.parametrize("seed", range(3))
def test_no_random_attack_on_a_site_tells_two_worlds_apart(seed: int, here: Path) -> None:
    assert carried(drawn_attack(seed), here).findings == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("seed", range(100, 130))
def test_no_random_attack_tells_two_worlds_apart(
    seed: int, kind: tuple[str, str], here: Path
) -> None:
    assert carried(drawn_attack(seed, *kind), here).findings == []


# ---------------------------------------------------------------------------- mistakes put back


@contextmanager
def private_examples_checked() -> Generator[None]:
    """A turn tries its batch on private examples first, and fails if their losses differ."""
    real = private_fit.NoisyGradients.write_gradients

    def checked(self: private_fit.NoisyGradients, indices: Tensor) -> None:
        require_independent_examples(self._objective)
        real(self, indices)

    with patch.object(private_fit.NoisyGradients, "write_gradients", checked):
        yield


def errors_answered() -> Any:
    """A turn that fails is answered by its error."""
    return patch.object(ClientPrivacy, "contained_fault", None)


@contextmanager
def strict_loss() -> Generator[None]:
    """No mistake by itself: a loss that raises an error where it is not finite."""
    real = Task.loss

    def loss(self: Task, model: nn.Module, batch: Any) -> Tensor:
        found = real(self, model, batch)
        if not bool(found.isfinite()):
            raise ValueError("the loss is not finite")
        return found

    with patch.object(Task, "loss", loss):
        yield


def codes_by_label() -> Any:
    """A row that does not fit the study is an error of the study."""

    def refused(task: Any, table: Any) -> Any:
        raise FedplanError("a label is not one of the task's").with_code("data")

    return patch.object(federated_data, "_leave_out_unfit", refused)


def noise_by_name() -> Any:
    """Noise follows from the name of a release alone."""

    def source(secret: bytes, name: str, *_: str | int | bytes) -> NoiseStream:
        return NoiseStream(derive_key(secret, "noise", name))

    return patch.object(NoiseStream, "for_release", staticmethod(source))


def nothing_charged() -> Any:
    return patch.object(Budget, "charge", lambda *_, **__: None)


@contextmanager
def divergence_shown() -> Generator[None]:
    """An update that is not finite is neither replaced nor made empty."""
    with (
        patch.object(client_round, "all_finite", lambda *_: True),
        patch.object(distributed_dp, "all_finite", lambda *_: True),
    ):
        yield


PLANTED: dict[str, tuple[list[Any], Attack, str]] = {
    "a check on private examples": ([private_examples_checked], APART, "sensitivity"),
    "a check that fails the turn": ([private_examples_checked, errors_answered], APART, "answer"),
    "a failing turn answered by an error": ([strict_loss, errors_answered], DIVERGES, "answer"),
    "a code by label": ([codes_by_label], LABEL, "answer"),
    "noise by name": ([noise_by_name], APART, "noise"),
    "nothing charged": ([nothing_charged], LABEL, "account"),
    "divergence shown": ([divergence_shown], RUNS[1], "answer"),
}


def test_each_mistake_that_is_put_back_is_found(here: Path) -> None:
    for name, (plants, attack, expected) in PLANTED.items():
        with ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            found = {each.what for each in carried(attack, here).findings}
        assert expected in found, name


def test_an_example_that_breaks_its_own_loss_is_left_out_alone(here: Path) -> None:
    with strict_loss():
        assert carried(DIVERGES, here).findings == []
