# SPDX-License-Identifier: Apache-2.0
"""Noise and charges follow from content: of anything else there is other noise, and it costs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sites
import torch
from clients import GUARANTEES, few, loss
from sites import (
    PRIVATE,
    SAFL,
    VOTE,
    asked,
    change_of,
    charges,
    site_of,
    study_text,
    words_of,
    world_of,
)

from fedplan.federation.agreement import Agreement
from fedplan.federation.endpoint import POLL, Endpoint
from fedplan.federation.ledger.faults import read_faults
from fedplan.privacy.dpsgd.fit import NoisyGradients
from fedplan.privacy.guard import ServerGuard
from fedplan.runners.local import Federation
from fedplan.runners.site_runtime import SiteRuntime
from fedplan.studies.schema import read_study
from fedplan.tensors.sums import ExactSum

EDITS: dict[str, dict[str, Any]] = {
    "another rate": {"study": {"train": "lr = 0.5"}, "rate": 0.5},
    "momentum": {"study": {"train": "lr = 1.0\nmomentum = 0.5"}},
    "one row less": {"rows": {"count": 23}},
    "one other label": {"rows": "label"},
    "one other pixel": {"rows": "pixel"},
    "two rows in another order": {"rows": "order"},
    "only some patients": {"study": {"data": f"filter = {{ patient = {list(range(1, 24))} }}"}},
    "labels in another order": {"study": {"labels": "[2, 1, 0]"}},
    "another activation": {"study": {"model": {"hidden_act": '"relu"'}}},
    "another seed": {"study": {"seed": 1}},
    "other values from the server": {"world": {"scale": 1.001, "version": 3}},
    "another round": {"world": {"round": 3}},
    "another part is trained": {"study": {"method": 'plan = "chain(share(), freeze(norm))"'}},
    "another frozen base": {"base": True},
    "another word of the node": {"node": {"traits": {"ward": "3"}}},
}


def edited(folder: Path, edit: dict[str, Any], method: dict[str, Any]) -> Endpoint:
    """The same site with one thing changed. What it remembers is gone, so it answers anew."""
    shutil.rmtree(folder / "state" / "federation-0", ignore_errors=True)
    draw = {"label": "digit", "pixel": "image", "order": "image"}
    rows = edit.get("rows", {})
    if isinstance(rows, str):
        sites.write_rows(folder / "rows.npz")
        with sites.np.load(folder / "rows.npz") as held:
            column = held[draw[rows]].copy()
        if rows == "order":
            column[[3, 4]] = column[[4, 3]]
        else:
            column.flat[7] = (column.flat[7] + 1) % 3
        rows = {draw[rows]: column}
    sites.write_rows(folder / "rows.npz", **rows)
    endpoint = site_of(
        folder, study_text(**{**method, **edit.get("study", {})}), **edit.get("node", {})
    )
    if edit.get("base"):
        rebased(endpoint)
    return endpoint


def rebased(endpoint: Endpoint) -> None:
    """Another value of a param that no plan of these tests trains: the class token."""
    from fedplan.federation.ledger.digests import digest_initial_model
    from fedplan.models.values import get_values, set_values

    site, agreement = endpoint.site, endpoint.agreement
    held = [p for p in agreement.params if p.key == "vit.embeddings.cls_token"]
    model = site.setup.model
    set_values(model, {k: v + 0.01 for k, v in get_values(model, held).items()}, held)
    start = get_values(model, agreement.trainable)
    initial = digest_initial_model(model, agreement.params, start)
    site.setup = replace(site.setup, start=start, initial=initial)


FROZEN = {"method": "plan = \"chain(share(), freeze(named('*cls_token')))\""}


@pytest.mark.parametrize("name", EDITS)
def test_another_content_has_other_noise_and_costs(name: str, tmp_path: Path) -> None:
    edit = EDITS[name]
    first = edited(tmp_path, {}, FROZEN)
    one = change_of(first, world_of(first))
    assert charges(tmp_path) == 1
    again = edited(tmp_path, {}, FROZEN)
    assert torch.equal(change_of(again, world_of(again)), one), "the same has the same bytes"
    assert charges(tmp_path) == 1, "and costs nothing more"
    endpoint = edited(tmp_path, edit, FROZEN)
    two = change_of(endpoint, world_of(endpoint, **edit.get("world", {})), edit.get("rate", 1.0))
    assert charges(tmp_path) == 2
    if len(one) == len(two):
        # Of the same noise next to nothing would be left.
        assert (one - two).norm() > 1.2 * one.norm()


@pytest.mark.parametrize("name", [name for name in EDITS if "trained" not in name])
def test_a_vote_on_another_content_has_other_noise_and_costs(name: str, tmp_path: Path) -> None:
    method, edit = {"method": SAFL, "privacy": PRIVATE + VOTE}, EDITS[name]
    found = list[list[float]]()
    for each in ({}, {}, edit):
        endpoint = edited(tmp_path, each, method)
        _, said = asked(endpoint, world_of(endpoint, **each.get("world", {})), POLL)
        assert "scores" in said, said
        found.append([score for *_, score in said["scores"]])
    assert found[0] == found[1] and charges(tmp_path) == 2
    apart = [a - b for a, b in zip(found[0], found[2], strict=True)]
    assert all(abs(each - round(each)) > 1e-6 for each in apart), "counts apart, noise the same"


def test_another_run_has_other_noise_and_costs(tmp_path: Path) -> None:
    """A model that is not deterministic has another sum in each run: equal noise would cancel."""
    (tmp_path / "study.toml").write_text(study_text())
    site, limits = words_of(tmp_path)
    runtime = SiteRuntime(site, read_study(tmp_path / "study.toml"), limits)
    one, two = (
        change_of(endpoint, world_of(endpoint))
        for endpoint in (runtime.endpoint(run * 16) for run in "01")
    )
    assert (one - two).norm() > 1.2 * one.norm() and charges(tmp_path) == 2


def test_equal_counts_of_another_round_are_not_told_to_be_equal(tmp_path: Path) -> None:
    guard = ServerGuard(GUARANTEES["veiled"], tmp_path)
    mechanism, norms = guard.make_mechanism({"x": torch.zeros(3)}, 1000), list[float]()
    for value in (0.1, 0.2, 0.1):
        total = mechanism.clipped_sum({"x": torch.full((3,), value)})
        norms.append(guard.next_clipping_norm(mechanism, total, 250, 500, "round 1"))
    assert norms[0] == norms[2] != norms[1]
    votes = [
        guard.release_votes(ballots, ["a", "b"], 2, "round 1")
        for ballots in ([{"a"}, {"b"}], [{"a", "b"}, set[str]()], [{"b"}, {"a"}])
    ]
    assert votes[0] == votes[2] != votes[1]


def test_an_example_that_fails_has_no_vote_and_the_site_answers(tmp_path: Path) -> None:
    endpoint = site_of(tmp_path, study_text(method=SAFL, privacy=PRIVATE + VOTE))
    method, looked = endpoint.agreement.method, list[int]()

    def probe(look: Any) -> Any:
        looked.append(len(looked))
        if len(looked) == 3:
            raise ValueError("what one example holds")
        return method.probe(look)

    endpoint.agreement = replace(endpoint.agreement, method=replace(method, probe=probe))
    _, words = asked(endpoint, world_of(endpoint), POLL)
    assert "scores" in words and len(looked) > 3 and charges(tmp_path) == 1, words
    assert "what one example holds" in str(read_faults(tmp_path / "state"))


def test_a_turn_that_fails_has_other_noise_in_each_run(tmp_path: Path) -> None:
    """Its answer is noise alone: equal noise in two runs would tell that both failed."""
    (tmp_path / "study.toml").write_text(study_text())
    site, limits = words_of(tmp_path)
    runtime = SiteRuntime(site, read_study(tmp_path / "study.toml"), limits)
    real = NoisyGradients.write_gradients

    def failing(self: Any, indices: torch.Tensor) -> None:
        if len(self._objective.examples):
            raise ValueError("what the examples hold")
        real(self, indices)

    with patch.object(NoisyGradients, "write_gradients", failing):
        one, two = (
            change_of(endpoint, world_of(endpoint))
            for endpoint in (runtime.endpoint(run * 16) for run in "01")
        )
    assert (one - two).norm() > 1.2 * one.norm()


def test_equal_counts_of_other_weights_are_not_told_to_be_equal(tmp_path: Path) -> None:
    """The same bytes for two contents would tell, for nothing, that no row changed its mind."""
    endpoint = site_of(tmp_path, study_text(method=SAFL, privacy=PRIVATE + VOTE))
    scores = list[str]()
    for version in range(1, 6):
        world = world_of(endpoint, scale=1 + version * 1e-5, version=version)
        scores.append(str(asked(endpoint, world, POLL)[1]["scores"]))
    assert len(set(scores)) == 5 == charges(tmp_path)


@pytest.mark.parametrize("change", ["sum", "within", "scale", "nothing"])
def test_another_sum_of_a_round_has_other_noise_and_costs(change: str, tmp_path: Path) -> None:
    guard = ServerGuard(replace(GUARANTEES["veiled"], vote_noise_multiplier=0.0), tmp_path)
    shared = {"x": torch.zeros(50)}
    found = list[torch.Tensor]()
    for time in range(2):
        other = change if time else ""
        mechanism = guard.make_mechanism(shared, 10, 2.0 if other == "scale" else 1.0)
        total = ExactSum()
        mechanism.add(total, {"x": torch.full((50,), 0.1 if other == "sum" else 0.05)})
        within = "8 of 9" if other == "within" else "9 of 9"
        found.append(guard.release_mean(mechanism, total, 1, "round 1", within)["x"])
    assert len(guard.budget.charges) == (1 if change == "nothing" else 2)
    if change in ("sum", "scale"):
        assert (found[0] - found[1]).norm() > 0.5 * found[0].norm()
    else:
        assert torch.equal(*found)


@pytest.mark.parametrize("name", ["rows", "pace", "experiment"])
def test_a_simulated_client_pays_for_another_content_too(name: str, tmp_path: Path) -> None:
    import zoo

    from fedplan.methods.registry import method_by_name
    from fedplan.models.description import describe
    from fedplan.training.fit import TrainArguments

    guarantee = replace(GUARANTEES["cloaked"], vote_noise_multiplier=0.0)
    for time in range(2):
        model, rows = zoo.build("bert"), few("bert", 2)
        if time and name == "rows":
            rows["client-0"].rows["input_ids"][0, 0] += 1
        rate = 1e-2 * (1 + (time and name == "pace"))
        experiment = "b" if time and name == "experiment" else "a"
        agreement = Agreement(
            experiment,
            describe(model),
            method_by_name("fedavg"),
            TrainArguments(lr=rate, batch_size=2, steps=2),
            guarantee,
        )
        shutil.rmtree(tmp_path / "global", ignore_errors=True)
        shutil.rmtree(tmp_path / "clients", ignore_errors=True)
        for file in ("ledger.jsonl", "metrics.jsonl"):
            (tmp_path / file).unlink(missing_ok=True)
        fed = Federation(agreement, model, rows, loss, tmp_path, rounds=1)
        fed.run_round()
    guard = fed.clients["client-0"].privacy.guard
    assert guard is not None and len(guard.budget.charges) == 2


def test_values_of_one_short_digest_have_other_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 hex digits a server finds two values by 2**32 trials, and asks for both in two runs."""
    monkeypatch.setattr("fedplan.tensors.named.DigestCache.short_digest", lambda *_: "0" * 16)
    found = list[torch.Tensor]()
    for scale in (1.0, 1.001):
        endpoint = edited(tmp_path, {}, {})
        found.append(change_of(endpoint, world_of(endpoint, scale=scale, version=3)))
    assert (found[0] - found[1]).norm() > 1.2 * found[0].norm()
    assert charges(tmp_path) == 2
