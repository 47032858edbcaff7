# SPDX-License-Identifier: Apache-2.0
"""A server that chooses values by one example: what it sees is the same with it and without it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import sites
import torch
from masked_runs import MaskedRun
from sites import study_text, world_of
from torch import Tensor, nn

from fedplan.data.tasks.definition import Task
from fedplan.federation.endpoint import TRAIN, Endpoint
from fedplan.federation.ledger.faults import read_faults
from fedplan.federation.messages import request_message
from fedplan.federation.rounds import make_request
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.methods.method import Method
from fedplan.models.description import describe
from fedplan.models.values import set_values
from fedplan.privacy.dpsgd import fit as private_fit
from fedplan.privacy.dpsgd.ghost_clipping import add_ghost_clipped
from fedplan.privacy.dpsgd.per_example import (
    ClippedSum,
    Objective,
    add_clipped_one_by_one,
    require_independent_examples,
    trained_tensors,
)
from fedplan.privacy.guarantee import Guarantee
from fedplan.tensors.serialization import unpack_message
from fedplan.training.freezing import trainable

ROWS = 24
WIDE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
PRIVATE = f'unit = "example"\nepsilon = 1.0\nexamples_per_site = {ROWS}\n'
STUDY = study_text(model=WIDE, privacy=PRIVATE, rounds=5)
TARGET = np.random.default_rng(5).integers(0, 255, (1, 8, 8), dtype=np.uint8)
"""The image that the server asks about."""


def site(folder: Path, *, has_target: bool, seed: int, study: str = STUDY) -> Endpoint:
    """A site whose table has the target first, or is the same table without it."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    image, digit = draw.integers(0, 255, (ROWS, 8, 8), dtype=np.uint8), draw.integers(0, 3, ROWS)
    if has_target:
        image, digit = np.concatenate([TARGET, image]), np.concatenate([[1], digit])
    sites.write_rows(folder / "rows.npz", image=image, digit=digit, patient=np.arange(len(digit)))
    return sites.site_of(folder, study)


def crafted(endpoint: Endpoint, seed: int, scale: float) -> dict[str, Tensor]:
    """Values that make the logits of the target, the first example, nothing but rounding."""
    setup, draw = endpoint.site.setup, torch.Generator().manual_seed(seed)
    values = {k: v.clone() for k, v in setup.start.items()}
    for key, value in values.items():
        if "layer." in key and key.endswith("weight") and value.dim() == 2:
            values[key] = torch.randn(value.shape, generator=draw) * 0.3
    set_values(setup.model, values, endpoint.agreement.trainable)
    inputs = list[Tensor]()
    hook = setup.model.get_submodule("classifier").register_forward_pre_hook(
        lambda _, args: inputs.append(args[0].detach().double())
    )
    with torch.no_grad():
        setup.loss(setup.model.eval(), endpoint.site.examples.batch(torch.tensor([0])))
    hook.remove()
    feature = inputs[0][0]
    weight = torch.randn(3, len(feature), generator=draw, dtype=torch.float64)
    weight -= (weight @ feature)[:, None] * feature / (feature @ feature)
    values["classifier.weight"] = (scale * weight).float()
    values["classifier.bias"] = -(values["classifier.weight"].double() @ feature).float()
    return values


@pytest.fixture(scope="module")
def servers_copy(tmp_path_factory: pytest.TempPathFactory) -> Endpoint:
    """The server's own site: it knows the study and the target, and tries its values there."""
    return site(tmp_path_factory.mktemp("server") / "site", has_target=True, seed=999)


def observed(endpoint: Endpoint, values: dict[str, Tensor]) -> Any:
    """All of an answer but noisy values: words, names, shapes, sizes."""
    world = replace(world_of(endpoint), values=values, versions=dict.fromkeys(values, 1))
    down = make_request(endpoint.agreement, world, sites.NAME, {}, full=True)
    answer = endpoint.answer(TRAIN, request_message(down))
    tensors, words = unpack_message(answer)
    line = dict(words.pop("ledger_line", {}))
    line |= {k: len(line[k]) for k in ("before", "after") if k in line}
    shapes = {k: (tuple(v.shape), v.dtype) for k, v in sorted(tensors.items())}
    return words, line, shapes, len(answer.header), [len(blob) for blob in answer.blobs]


# ------------------------------------------------------------------------------ apart.py

SEEDS = (35,)
"""Seeds of values by which the loss of the target differs most between two batches."""


def worst_values(endpoint: Endpoint, seeds: Any) -> dict[str, Tensor]:
    """Of several crafted values, those with the largest difference of the target's losses."""
    setup, found = endpoint.site.setup, list[tuple[float, int, dict[str, Tensor]]]()
    for seed in seeds:
        for scale in (1e6, 1e7, 1e8):
            values = crafted(endpoint, seed, scale)
            set_values(setup.model, values, endpoint.agreement.trainable)
            with torch.no_grad():
                alone, twice = (
                    setup.loss(setup.model, endpoint.site.examples.batch(torch.tensor(i))).item()
                    for i in ([0], [0, 0])
                )
            found.append((abs(alone - twice) / (abs(alone) + 1e-3), len(found), values))
    return max(found)[2]


def answers(folder: Path, values: dict[str, Tensor], seeds: range) -> dict[bool, list[Any]]:
    """What a server sees of sites with the target and without it."""
    return {
        has: [
            observed(site(folder / f"{has}-{seed}", has_target=has, seed=seed), values)
            for seed in seeds
        ]
        for has in (True, False)
    }


@contextmanager
def tried_in_the_turn() -> Generator[None]:
    """The mistake put back: a turn tries private examples with the server's values, and fails."""
    real = private_fit.NoisyGradients.__init__

    def tried(self: Any, objective: Objective, *args: Any, **more: Any) -> None:
        require_independent_examples(objective)
        more["contain"] = False
        real(self, objective, *args, **more)

    with (
        patch.object(private_fit.NoisyGradients, "__init__", tried),
        patch("fedplan.federation.client.ClientPrivacy.contained_fault", None),
    ):
        yield


def test_values_made_for_one_example_decide_nothing(servers_copy: Endpoint, tmp_path: Path) -> None:
    values = worst_values(servers_copy, SEEDS)
    seen = answers(tmp_path / "now", values, range(2))
    assert all(each == seen[True][0] for each in (*seen[True], *seen[False]))
    assert seen[True][0][2], "every turn is answered with tensors"
    with tried_in_the_turn():
        seen = answers(tmp_path / "fault", values, range(2))
    assert not any(each[2] for each in seen[True]), "with the target the turn fails"
    assert any(each[2] for each in seen[False])


@pytest.mark.nightly
def test_values_made_for_one_example_decide_nothing_in_500_turns_of_each_world(
    servers_copy: Endpoint, tmp_path: Path
) -> None:
    values = worst_values(servers_copy, range(40))
    seen = answers(tmp_path, values, range(100, 600))
    assert all(each == seen[True][0] for each in (*seen[True], *seen[False]))


# ------------------------------------------------------------------------------ rounding


def objective_of(endpoint: Endpoint, values: dict[str, Tensor]) -> Objective:
    setup = endpoint.site.setup
    set_values(setup.model, values, endpoint.agreement.trainable)
    roles = resolve(parse("share()"), describe(setup.model), Turn())
    tensors = trained_tensors(setup.model.train(), roles)
    return Objective(setup.model, tensors, endpoint.site.examples, setup.loss)


def moved_by_one(add: Callable[..., None], objective: Objective, indices: list[int]) -> float:
    """How far the last example moves the sum of all, in clips."""
    sums = [ClippedSum(objective.tensors, 1.0) for _ in range(2)]
    for total, chosen in zip(sums, (indices, indices[:-1]), strict=True):
        add(objective, torch.tensor(chosen), total)
    one, other = (total.sums for total in sums)
    return float(sum((one[k] - other[k]).double().square().sum() for k in one)) ** 0.5


def test_values_that_amplify_rounding_need_ghost_clipping(servers_copy: Endpoint) -> None:
    """Several at a time, one example moves a sum by up to 2.5 clips; one by one, by its own."""
    batches = [[*[0] * count, other] for count in (1, 2, 3) for other in (1, 3)]
    together, alone = list[float](), list[float]()
    model = servers_copy.site.setup.model
    with trainable(model, resolve(parse("share()"), describe(model), Turn())):
        for seed in (6, 15):
            objective = objective_of(servers_copy, crafted(servers_copy, seed, 1e8))
            together += [moved_by_one(add_ghost_clipped, objective, b) for b in batches]
            alone += [moved_by_one(add_clipped_one_by_one, objective, b) for b in batches]
    assert max(together) > 1.5, "the attack works where several run at a time"
    assert max(alone) <= 1 + 1e-12


def test_one_by_one_an_example_adds_the_same_bits_whoever_else_is_there(
    servers_copy: Endpoint,
) -> None:
    model, added = servers_copy.site.setup.model, list[list[bytes]]()
    real = ClippedSum.clip_factors

    def spied(self: ClippedSum, squared_norms: Tensor) -> Tensor:
        added[-1].append(squared_norms.double().numpy().tobytes())
        return real(self, squared_norms)

    with (
        trainable(model, resolve(parse("share()"), describe(model), Turn())),
        patch.object(ClippedSum, "clip_factors", spied),
    ):
        objective = objective_of(servers_copy, crafted(servers_copy, 6, 1e8))
        for indices in ([0, 1, 2, 3], [0], [1], [2], [3], [3, 0], [2, 2, 0]):
            added.append([])
            add_clipped_one_by_one(
                objective, torch.tensor(indices), ClippedSum(objective.tensors, 1.0)
            )
    whole, *others = added
    one, two, three, four, last_first, twice = others
    assert whole == [*one, *two, *three, *four]
    assert last_first == [whole[3], whole[0]] and twice == [whole[2], whole[2], whole[0]]


# ------------------------------------------------------------------------- a failing turn


@contextmanager
def failing(error: Exception) -> Generator[None]:
    """A loss that fails on the target alone, wherever it is in a batch."""
    real = Task.loss
    pattern = torch.from_numpy(TARGET[0].astype(np.float32))

    def loss(self: Task, model: nn.Module, batch: Any) -> Tensor:
        pixels = batch["pixel_values"][:, 0]
        scaled = (pixels * 0.5 + 0.5) * 255
        if any(torch.allclose(each, pattern, atol=1.0) for each in scaled):
            raise error
        return real(self, model, batch)

    with patch.object(Task, "loss", loss):
        yield


FAILURES = [ValueError("a bad example"), MemoryError()]
EVERYONE = STUDY.replace("batch_size = 12", f"batch_size = {ROWS}")


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_an_example_that_breaks_the_training_changes_nothing_that_is_seen(
    error: Exception, tmp_path: Path
) -> None:
    with failing(error):
        seen = list[Any]()
        for has in (True, False):
            endpoint = site(tmp_path / f"{has}", has_target=has, seed=1, study=EVERYONE)
            seen.append(observed(endpoint, dict(endpoint.site.setup.start)))
    assert seen[0] == seen[1] and seen[0][2]
    faults = read_faults(tmp_path / "True" / "state")
    assert len(faults) == 1 and "1 of 25 sampled examples failed" in faults[0]
    assert type(error).__name__ in faults[0], "the site itself reads the cause"
    assert not (tmp_path / "False" / "state" / "faults.log").exists()


def test_an_example_that_fails_takes_no_other_with_it(servers_copy: Endpoint) -> None:
    """An answer of noise alone would tell: all that the others add would be missing."""
    setup, left_out = servers_copy.site.setup, list[Exception]()
    task: Any = setup.loss
    model, loss = setup.model, lambda *batch: task.__self__.loss(*batch)
    with trainable(model, resolve(parse("share()"), describe(model), Turn())):
        objective = replace(objective_of(servers_copy, setup.start), loss=loss)
        sums = [ClippedSum(objective.tensors, 1.0) for _ in range(2)]
        with failing(ValueError("bad")):
            with pytest.raises(ValueError, match="bad"):  # as in a simulation
                add_clipped_one_by_one(objective, torch.arange(6), sums[0])
            add_clipped_one_by_one(objective, torch.arange(1, 6), sums[0])
            add_clipped_one_by_one(objective, torch.arange(6), sums[1], left_out.append)
    assert len(left_out) == 1
    assert all(torch.equal(sums[0].totals[k], sums[1].totals[k]) for k in sums[0].totals)


@pytest.mark.parametrize("contained", [True, False], ids=["now", "the fault put back"])
def test_a_turn_that_breaks_as_a_whole_is_answered_with_noise(
    contained: bool, tmp_path: Path
) -> None:
    real = private_fit.NoisyGradients.write_gradients

    def broken(self: Any, indices: Tensor) -> None:
        if len(indices):
            raise RuntimeError("the disk of a cache is full")
        real(self, indices)

    sound = site(tmp_path / "sound", has_target=True, seed=1, study=EVERYONE)
    with patch.object(private_fit, "add_ghost_clipped") as several_at_a_time:
        expected = observed(sound, dict(sound.site.setup.start))
    several_at_a_time.assert_not_called()
    endpoint = site(tmp_path / "broken", has_target=True, seed=1, study=EVERYONE)
    uncontained = patch("fedplan.federation.client.ClientPrivacy.contained_fault", None)
    with (
        patch.object(private_fit.NoisyGradients, "write_gradients", broken),
        nullcontext() if contained else uncontained,
    ):
        seen = observed(endpoint, dict(endpoint.site.setup.start))
    assert (seen == expected) == contained
    assert "cache is full" in read_faults(tmp_path / "broken" / "state")[0]
    assert sites.charges(tmp_path / "broken") == sites.charges(tmp_path / "sound") == 1


# ------------------------------------------------------------- votes, and updates in sums


def test_an_example_that_breaks_its_vote_has_none(tmp_path: Path) -> None:
    """With the example and without it, a vote is answered alike."""
    method = sites.SAFL.replace("}", ', probe = "gradient" }')
    study = study_text(model=WIDE, method=method, privacy=sites.PRIVATE + sites.VOTE)
    study = study.replace("batch_size = 12", f"batch_size = {ROWS}")
    seen = list[Any]()
    with failing(ValueError("a bad example")):
        for has in (True, False):
            endpoint = site(tmp_path / f"{has}", has_target=has, seed=1, study=study)
            _, words = sites.asked(endpoint, world_of(endpoint), "poll")
            seen.append([block[:2] for block in words["scores"]])
    assert seen[0] == seen[1] and len(seen[0]) == 2
    assert "a bad example" in read_faults(tmp_path / "True" / "state")[0]


@pytest.mark.parametrize("contained", [True, False], ids=["now", "the fault put back"])
def test_a_site_whose_training_breaks_is_in_a_noisy_sum_all_the_same(
    contained: bool, tmp_path: Path
) -> None:
    guarantee = Guarantee("client", 60.0, 1e-5, 1.0, 1.0)
    run = MaskedRun(
        Method(parse("share(head)")),
        tmp_path / "run",
        rounds=1,
        accounts=tmp_path / "accounts",
        guarantee=guarantee,
    )
    broken = run.endpoints["client-1"].site

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("out of memory")

    broken.setup = replace(broken.setup, loss=fail)
    uncontained = patch("fedplan.federation.client.ClientPrivacy.contained_fault", None)
    with nullcontext() if contained else uncontained:
        server = run.carry()
    assert all(bool(value.isfinite().all()) for value in server.global_state.values.values())
    (line,) = run.rounds()
    assert ("client-1" in line["aggregated"]) == contained, line
    assert "out of memory" in read_faults(run.folder / "sites" / "client-1")[0]
