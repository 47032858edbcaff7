# SPDX-License-Identifier: Apache-2.0
"""Faults that a second reader found: each broke a promise, and must not come back."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch
import zoo
from clients import Few
from torch import Tensor, nn
from torch.nn import functional as F

from fedplan.data.examples import MaskedTokens, RaggedArray, TokenSequences, block_seeds
from fedplan.errors import PrivacyError, StoreError
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.privacy.accounting.accountant import Release, combined_noise, epsilon
from fedplan.privacy.accounting.budget import Budget
from fedplan.privacy.dpsgd import ghost_clipping as ghost
from fedplan.privacy.dpsgd.fit import DPSGDConfig, train_dp_sgd
from fedplan.privacy.dpsgd.per_example import (
    ClippedSum,
    Objective,
    TrainedTensor,
    add_clipped_one_by_one,
    require_independent_examples,
)
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import ClientGuard
from fedplan.privacy.mechanisms.gaussian import GaussianMechanism
from fedplan.privacy.mechanisms.noise import NoiseStream, load_or_create_secret
from fedplan.privacy.mechanisms.vote import NoisyVote
from fedplan.storage import append_log
from fedplan.storage.append_log import LogHead, head_file
from fedplan.tensors.sums import GRID, ExactSum
from fedplan.training.fit import Job, TrainArguments
from fedplan.training.optimizers import sgd

SECRET = bytes(range(32))


def texts_of(texts: list[list[int]]) -> TokenSequences:
    return TokenSequences(
        RaggedArray.from_lists(texts), 0, torch.zeros(len(texts), dtype=torch.long)
    )


def far(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    answer = model(**batch)
    return 30 * ((answer if isinstance(answer, Tensor) else answer.logits) - 0.3).square().mean()


def test_the_same_request_from_other_values_has_another_noise_and_costs(tmp_path: Path) -> None:
    guarantee = Guarantee("example", 900.0, 1e-5, 0.1, 50.0, 0.5, steps=1, batch_size=4)
    guard = ClientGuard(guarantee, tmp_path)
    changes = list[Tensor]()
    for content in ("a", "a", "b"):
        torch.manual_seed(0)
        model = zoo.build("bert")
        roles = resolve(parse("share()"), describe(model), Turn())
        before = get_values(model, roles)
        fit = guard.make_fit(1, "study/1/hospital", content)
        fit(Job(model, roles, Few("bert", 0, 8), far, TrainArguments(sgd(), lr=1.0), 7, before))
        changes.append(
            torch.cat([(v - before[k]).flatten() for k, v in get_values(model, roles).items()])
        )
    assert torch.equal(changes[0], changes[1]) and len(guard.budget.charges) == 2
    assert (changes[0] - changes[2]).norm() > changes[0].norm()


def test_masks_and_dropout_follow_no_public_seed() -> None:
    privately = DPSGDConfig(
        max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, sampling_rate=1.0, steps=1
    )

    def moved(seed: int, key: bytes) -> Tensor:
        torch.manual_seed(0)
        model = zoo.build("bert")
        roles = resolve(parse("share()"), describe(model), Turn())
        before, noise = get_values(model, roles), NoiseStream(key)
        job = Job(model, roles, Few("bert", 0, 4), far, TrainArguments(sgd(), lr=1.0), seed, before)
        train_dp_sgd(
            job, privately, noise=lambda s, *_: torch.zeros(s).double(), uniform=noise.uniform
        )
        return torch.cat([(v - before[k]).flatten() for k, v in get_values(model, roles).items()])

    one = moved(3, b"a" * 32)
    assert torch.equal(one, moved(4, b"a" * 32))
    assert not torch.equal(one, moved(3, b"b" * 32))


def test_hidden_tokens_follow_no_public_seed() -> None:
    """The rows that a fit draws its masks for are seeded from the secret source too."""
    texts = [[5] * 30] * 8
    rows = MaskedTokens(
        texts_of(texts), block_seeds(RaggedArray.from_lists(texts)), 4, torch.tensor([0]), 60
    )
    seen = list[int]()

    class Spy:
        def __len__(self) -> int:
            return len(rows)

        def batch(self, indices: Tensor) -> dict[str, Tensor]:
            return rows.batch(indices)

        def with_seed(self, seed: int) -> MaskedTokens:
            seen.append(seed)
            return rows.with_seed(seed)

    model = zoo.build("bert-mlm")
    roles = resolve(parse("share()"), describe(model), Turn())
    privately = DPSGDConfig(
        max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, sampling_rate=1.0, steps=1
    )
    noise = NoiseStream(b"a" * 32)
    job = Job(
        model,
        roles,
        Spy(),
        lambda m, b: m(**b).loss,
        TrainArguments(sgd()),
        7,
        get_values(model, roles),
    )
    train_dp_sgd(job, privately, noise=lambda s, *_: torch.zeros(s).double(), uniform=noise.uniform)
    assert seen and 7 not in seen


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.dense, self.head = nn.Embedding(64, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, input_ids: Tensor, **more: Tensor) -> Tensor:
        return self.head(self.pooled(input_ids))

    def pooled(self, input_ids: Tensor) -> Tensor:
        return self.dense(self.embed(input_ids)).tanh().mean(1)


class Normed(Tiny):
    """Batch statistics by hand, and only when it trains."""

    def pooled(self, input_ids: Tensor) -> Tensor:
        found = super().pooled(input_ids)
        return F.batch_norm(found, None, None, training=True) if self.training else found


class Remembering(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(6))

    def pooled(self, input_ids: Tensor) -> Tensor:
        found = super().pooled(input_ids)
        before = self.memory
        if self.training:
            self.memory = before * 0.5 + 0.5 * found.detach()[-1]
        return found - 5 * before


class Dropped(Tiny):
    layerdrop = 0.1


def subject(model: nn.Module, rows: object) -> Objective:
    model.train()
    tensors = tuple(TrainedTensor(n, p) for n, p in model.named_parameters())
    return Objective(model, tensors, rows, far)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make, lengths",
    [(Tiny, [3] * 7 + [30]), (Normed, [5] * 8), (Dropped, [5] * 8)],
    ids=["padding counts", "statistics in training", "layers left out"],
)
def test_rows_that_change_each_other_are_taken_one_by_one(
    make: type[Tiny], lengths: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]
    rows = texts_of(texts)
    assert ghost.why_not_ghost_clipping(subject(make(), rows))
    assert not ghost.why_not_ghost_clipping(subject(Tiny(), texts_of([t[:3] for t in texts])))


def test_a_model_that_remembers_rows_is_refused() -> None:
    with pytest.raises(PrivacyError, match="memory of Remembering changes while it trains"):
        require_independent_examples(subject(Remembering(), Few("bert", 0, 8)))


def test_one_by_one_a_row_is_not_remembered_for_the_next() -> None:
    """Also where nobody tried the model: what a row left in a buffer is taken back."""
    made = subject(Remembering(), Few("bert", 0, 8))
    sums = [ClippedSum(made.tensors, 1.0) for _ in range(3)]
    for total, rows in zip(sums, ([0, 1], [0], [1]), strict=True):
        add_clipped_one_by_one(made, torch.tensor(rows), total)
    for name, whole in sums[0].totals.items():
        assert torch.equal(whole, sums[1].totals[name] + sums[2].totals[name])


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2"])
def test_one_row_moves_a_sum_by_the_bound_at_most(name: str) -> None:
    """Of whole models as they train, with dropout drawn row by row."""
    model, bound = zoo.build(name), 0.01
    made = subject(model, Few(name, 0, 6))
    model.eval()  # as if the masks of each row were the same in both worlds
    sums = [ClippedSum(made.tensors, bound), ClippedSum(made.tensors, bound)]
    for total, rows in zip(sums, (torch.arange(6), torch.arange(1, 6)), strict=True):
        (add_clipped_one_by_one if ghost.why_not_ghost_clipping(made) else ghost.add_ghost_clipped)(
            made, rows, total
        )
    squares = [(sums[0].sums[n] - sums[1].sums[n]).square().sum() for n in sums[0].totals]
    assert math.sqrt(float(sum(squares))) <= bound * (1 + 1e-5)


def test_the_bits_of_noisy_counts_tell_nothing() -> None:
    vote = NoisyVote(1, 1.0)
    for count in (0, 1):
        found = [vote.release({"a": count}, SECRET, f"{i}")["a"] for i in range(2000)]
        assert all(value * 2**30 == round(value * 2**30) for value in found)


def test_the_last_bit_of_a_sum_is_no_finer_than_its_noise() -> None:
    mechanism = GaussianMechanism({"x": ((50_000,), torch.float64)}, 100.0, 1.0, 1.0)
    odd = list[int]()
    for victim in (0, 1):
        total = ExactSum()
        total.add({"x": torch.full((50_000,), -120.0, dtype=torch.float64)}, 1)
        mechanism.add(total, {"x": torch.full((50_000,), GRID * victim, dtype=torch.float64)})
        released = mechanism.release(total, SECRET, "r")["x"]
        odd.append(int(((released / GRID) % 2 != 0).sum()))
    assert odd == [0, 0]


def test_one_name_twice_is_one_cohort(tmp_path: Path) -> None:
    held = Budget(tmp_path / "charges.jsonl", delta=1e-5)
    for digest in ("a" * 32, "b" * 32):
        held.charge(Release(1.0, 0.05), "round 1", digest=digest)
    assert held.epsilon_spent() == epsilon([Release(combined_noise(1.0, 1.0), 0.05)], 1e-5)
    assert held.epsilon_spent() > epsilon([Release(1.0, 0.05)] * 2, 1e-5)


def test_an_interrupt_loses_no_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Budget(tmp_path / "charges.jsonl", delta=1e-5, limit=4.5)
    held.charge(Release(2.0), "round 1")

    def interrupt(name: str) -> None:
        if name == "log.synced":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(append_log, "failpoint", interrupt)
        with pytest.raises(KeyboardInterrupt):
            held.charge(Release(2.0), "round 2")
    assert [charge.name for charge in held.charges] == ["round 1", "round 2"]


def test_a_file_with_fewer_charges_than_there_were_is_refused(tmp_path: Path) -> None:
    guarantee = Guarantee("example", 900.0, 1e-5, 0.1, 5.0, 0.5, steps=1, batch_size=4)
    guard = ClientGuard(guarantee, tmp_path)
    for i in range(3):
        guard.make_fit(i + 1, f"round {i}", "")
    file = tmp_path / "charges.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)[:3]
    file.write_bytes(b"".join(lines))
    with pytest.raises(PrivacyError, match="does not hold line 4"):
        ClientGuard(guarantee, tmp_path)
    head = LogHead()
    for line in lines:
        head = head.extended_by(line)
    head_file(file).write_text(head.text)  # somebody who puts back an older copy of both files
    again = ClientGuard(guarantee, tmp_path)
    again.require_charge_count(2)
    with pytest.raises(PrivacyError, match="holds 2 charges, and there were 3"):
        again.require_charge_count(3)


def test_a_disk_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fedplan.storage.locks.fcntl.flock", no_locks)
    held = Budget(tmp_path / "charges.jsonl", delta=1e-5)
    with pytest.raises((PrivacyError, StoreError), match="without locks"):
        held.charge(Release(1.0), "round 1")


def test_all_that_start_at_once_have_one_secret(tmp_path: Path) -> None:
    found = list[bytes]()
    threads = [
        threading.Thread(target=lambda: found.append(load_or_create_secret(tmp_path / "secret")))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(found)) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]
