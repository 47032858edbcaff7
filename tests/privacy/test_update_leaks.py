# SPDX-License-Identifier: Apache-2.0
"""What an update or an opened sum tells of labels and members: without privacy, and with it."""

from __future__ import annotations

from functools import cache, partial
from math import inf
from pathlib import Path

import pytest
import torch
from attacks import victims
from attacks.label_counts import (
    CountsLeak,
    counts_from_bias,
    fit_counts,
    measure_counts,
    round_counts,
)
from attacks.membership import (
    MembershipLeak,
    matched_scores,
    measure_membership,
    score_members,
)
from attacks.shadows import CANDIDATES, MAX_EXAMPLES, Cohort, Seen, flatten
from attacks.token_recovery import DELTA, first_round_changes, train_by_dp_sgd
from torch import Tensor, nn

import fedplan as fp
from fedplan.methods.registry import method_by_name
from fedplan.privacy.accounting.accountant import DPSGDSteps, calibrate
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import sgd

CLASSES, CLIENTS, LR, EXPECTED = 4, 48, 0.1, 8
TEXTS = {"vocabulary": 200, "length": 12}


def make_model(number: int = 0) -> nn.Module:
    return victims.text_classifier(
        **TEXTS, width=32, blocks=1, spread=0.05, classes=CLASSES, number=number
    )


@pytest.mark.parametrize("sites", [1, 3])
@pytest.mark.parametrize("plan", ["share()", "chain(freeze(), share(head))"])
def test_the_heads_bias_tells_the_label_counts_of_a_run(
    plan: str, sites: int, tmp_path: Path
) -> None:
    public = victims.population_texts(1, 0, 64, **TEXTS, classes=CLASSES)
    for seed in range(3):
        model = make_model(seed)
        clients = {
            f"site-{i}": victims.population_texts(0, 10 * seed + i, 6 + i, **TEXTS, classes=CLASSES)
            for i in range(sites)
        }
        train = fp.TrainConfig(rounds=1, steps=1, optimizer="sgd", lr=LR, batch_size=16)
        run = fp.simulate(
            fp.parse(plan),
            model,
            clients,
            victims.classification_loss,
            train=train,
            options=fp.RunOptions(folder=tmp_path / f"{plan[:5]} {sites} {seed}"),
        )
        batch = public.batch(torch.arange(len(public)))
        batch.pop("labels")
        with torch.no_grad():
            probabilities = model(**batch).logits.softmax(-1).mean(0)
        change = run.global_model().classifier.bias - model.classifier.bias
        labels = torch.cat([each.labels for each in clients.values()])
        guess = counts_from_bias(change.detach(), probabilities, LR, len(labels))
        assert guess.tolist() == labels.bincount(minlength=CLASSES).tolist()


@cache
def cohort() -> Cohort:
    make_pool = partial(victims.population_texts, 0, 0, **TEXTS, classes=CLASSES)
    return Cohort.draw(make_pool, CLIENTS)


@cache
def train(method: str, epsilon: float, attacked: bool) -> Tensor:
    """Updates after one step: of attacked clients, or of candidates alone and then of shadows.

    epsilon: 0 for plain steps; else of DP-SGD, infinite for clipping alone.
    """
    data = cohort().clients[::2] if attacked else [*cohort().alone, *cohort().clients[1::2]]
    named = method_by_name(method)
    if epsilon:
        named = train_by_dp_sgd(named, epsilon, 1, EXPECTED)
    step = TrainArguments(sgd(), lr=LR, steps=1, batch_size=MAX_EXAMPLES)
    found = first_round_changes(named, make_model(), data, step)
    return flatten(found, found[0])


def attack(method: str, epsilon: float = 0.0, group: int = 1) -> tuple[MembershipLeak, CountsLeak]:
    """Attack half of the clients; shadows have no noise, and without privacy clients have weights."""
    quiet, variance = train(method, inf if epsilon else 0.0, attacked=False), 0.0
    rows = torch.empty(CLIENTS, quiet.shape[1]).double()
    rows[::2], rows[1::2] = train(method, epsilon, attacked=True), quiet[CANDIDATES:]
    counts = cohort().counts(CLASSES)
    weights = 1.0 if epsilon else counts.sum(1, keepdim=True).double()
    attacked, shadows = Seen(weights * rows, cohort().members, counts).halves()
    if 0 < epsilon < inf:
        noise = calibrate(epsilon, DELTA, lambda noise: [DPSGDSteps(noise, 1.0, 1)])
        variance = (LR * noise / EXPECTED) ** 2
    sums = shadows
    if group > 1:
        attacked, sums = attacked.groups(group), shadows.random_groups(group, 32)
    scored = score_members(attacked, sums, [quiet[:CANDIDATES]], variance)
    predicted, _ = fit_counts(attacked, shadows, variance, group)
    return (
        measure_membership(scored.filtered, attacked.members),
        measure_counts(predicted, attacked.counts),
    )


@pytest.mark.parametrize("method", ["fedavg", "fedper", "head-only"])
def test_one_update_tells_members_and_label_counts_whatever_is_kept_or_frozen(method: str) -> None:
    members, counts = attack(method)
    assert members.auc[1] > 0.6 and members.auc[1] > members.smallest_auc
    assert abs(members.chance_auc - 0.5) < members.smallest_auc - 0.5
    assert counts.exact[0] > 0.8 > 2 * counts.chance


def test_the_sum_of_the_smallest_group_tells_less_and_still_tells() -> None:
    assert fp.AggregationConfig().min_contributors == 3
    (one, _), (three, counts) = attack("head-only"), attack("head-only", group=3)
    assert 0.55 < three.auc[0] < one.auc[0] and counts.exact[0] > 0.7


def test_noise_leaves_no_more_than_its_bound_and_clipping_alone_hides_nothing() -> None:
    clipped, counts = attack("head-only", inf)
    assert clipped.auc[1] > 0.6 and counts.exact[0] > 0.8
    private, counts = attack("head-only", 0.5)
    # 4.5 standard errors: `smallest_auc` has 2.8 of them. The noise is new in each run.
    assert abs(private.auc[0] - 0.5) < 4.5 / 2.8 * (private.smallest_auc - 0.5)
    assert counts.exact[1] <= max(counts.smallest, 0.3)


def test_a_filter_finds_a_direction_in_noise_as_well_as_theory_says() -> None:
    draw = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=draw, dtype=torch.float64)
    lines = torch.nn.functional.normalize(normal(10, 50), dim=1)
    members = torch.rand(400, 10, generator=draw) < 0.5
    clean = members.double() @ lines
    scores = matched_scores(clean + 0.6 * normal(400, 50), lines, clean[::2], 0.36)
    best = float(torch.special.ndtr(torch.tensor(1 / 0.6 / 2**0.5)))
    leak = measure_membership(scores, members)
    assert best - 0.12 < leak.auc[0] < best + 0.01
    assert leak.smallest_auc < 0.55 and abs(leak.chance_auc - 0.5) < 0.02


def test_counts_are_whole_and_sum_to_the_examples() -> None:
    assert round_counts(torch.tensor([1.6, -0.3, 2.4, 0.2]), 4).tolist() == [2, 0, 2, 0]
    assert round_counts(torch.tensor([3.0, 3.0]), 4).sum() == 4
    exact = measure_counts(torch.tensor([[4, 1]] * 9), torch.tensor([[4, 1]] * 9))
    assert exact.exact[0] == 1 and 0.6 < exact.exact[1] < 0.8 and exact.chance == 0
