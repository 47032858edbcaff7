# SPDX-License-Identifier: Apache-2.0
"""Guards: add noise for differential privacy and charge the privacy budget before each release.

A guard has a folder with its secret and its file of charges. A charge is on disk before anything
that it pays for leaves the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from fedplan.data.examples import Examples
from fedplan.errors import PrivacyError
from fedplan.models.params import Block
from fedplan.models.values import copy_buffers, restore_buffers, set_values
from fedplan.privacy.accounting.accountant import Charge
from fedplan.privacy.accounting.budget import Budget, EpsilonCap
from fedplan.privacy.dpsgd.fit import DPSGDConfig, ReportFault, Uniform, dp_sgd
from fedplan.privacy.guarantee import COUNT_NOISE, Guarantee, evaluation_name, vote_name
from fedplan.privacy.mechanisms.clipping import AdaptiveClipping
from fedplan.privacy.mechanisms.gaussian import Change, GaussianMechanism
from fedplan.privacy.mechanisms.noise import (
    NoiseStream,
    derive_key,
    load_or_create_secret,
    sample_cohort,
)
from fedplan.privacy.mechanisms.vote import NoisyVote, count_ballots, make_ballot
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import make_folder
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import ExactSum
from fedplan.training.fit import Fit, FitResult, Job
from fedplan.training.probes import Probe, ProbeInput

T = TypeVar("T", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")
SECRET_FILE, CHARGES_FILE = "secret", "charges.jsonl"
"""Files in a guard's folder."""


class Guard:
    """Base of guards: a guarantee with the noise secret and the privacy budget in a folder.

    folder: created if missing, with the file SECRET_FILE; the first charge creates CHARGES_FILE.
    One folder may serve many runs.
    run: prefix of the names of this run's charges, which stay within the guarantee's epsilon.
    limit: largest epsilon of all charges in the folder at `delta` (0: the guarantee's delta), set
    by the folder's owner; 0: no limit. encryption: of the secret's file.
    Releasing methods first write a charge (an entry that pays for the release) to `budget`, and
    raise as `Budget.charge` does if the budget does not allow the release. The constructor raises a
    PrivacyError for damaged files, and StoreError if the secret cannot be decrypted.
    """

    def __init__(
        self,
        guarantee: Guarantee,
        folder: Path,
        *,
        run: str = "",
        limit: float = 0.0,
        delta: float = 0.0,
        encryption: Encryption | None = None,
    ) -> None:
        make_folder(folder)
        self.guarantee = guarantee
        self._secret = load_or_create_secret(
            folder / SECRET_FILE, encryption, used_by=folder / CHARGES_FILE
        )
        self._cap = EpsilonCap(guarantee.epsilon, guarantee.delta, run)
        self.budget = Budget(
            folder / CHARGES_FILE,
            delta=delta or guarantee.delta,
            limit=limit or None,
            unit=guarantee.unit,
            cap=self._cap,
        )

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of this run's charges so far, at the guarantee's delta."""
        return self.budget.epsilon_spent_under(self._cap)

    def require_affordable_round(self, round: int, name: str) -> None:
        """Raise a PrivacyError if the budget does not cover what a round has not paid yet."""
        paid = {charge.name for charge in self.budget.charges}
        events = self.guarantee.round_events(round, name).items()
        due = (Charge(event, release) for release, event in events if release not in paid)
        self.budget.require_affordable(*due)

    def require_charge_count(self, count: int) -> None:
        """Raise a PrivacyError if fewer than `count` charges are in the file: some were lost."""
        if (present := len(self.budget.charges)) < count:
            raise PrivacyError(
                f"{self.budget.file} holds {present} charges, and there were {count}: restore the "
                "latest copy of it; without it the epsilon spent is unknown"
            )

    def make_mechanism(
        self,
        shared: Mapping[str, Tensor],
        clients: int,
        clipping_norm: float = 0.0,
        noise_shares: int = 0,
    ) -> GaussianMechanism:
        """Make the Gaussian mechanism of one round of client-level DP.

        shared: a tensor of each name that any client may send. clients: size of the roster.
        noise_shares: number of clients that together add the whole noise; 0: the server adds it.
        """
        guarantee = self.guarantee
        return GaussianMechanism(
            {key: (tuple(value.shape), value.dtype) for key, value in shared.items()},
            clipping_norm or guarantee.clipping_norm,
            guarantee.noise_multiplier,
            clients * (guarantee.sampling_rate or 1.0),
            guarantee.sampling_rate,
            noise_shares,
        )

    def _noisy_counts(
        self,
        vote: NoisyVote,
        ballots: Iterable[Collection[T]],
        blocks: Sequence[T],
        name: str,
        content: str,
    ) -> dict[T, float]:
        """Charge a vote under `name`, then return the noisy count of ballots for each block."""
        counts = count_ballots(ballots, blocks, vote.k)
        digest = vote.digest(counts, self._secret, name, content)
        self.budget.charge(vote.event, name, digest=digest)
        return vote.release(counts, self._secret, name, content)


class ServerGuard(Guard):
    """The server's guard for client-level DP: samples cohorts, and adds noise to a round's sum.

    Per round: `sample_cohort`, `release_votes` in voting rounds, then `release_mean` (or
    `release_noisy_sum` if clients add the noise) and `next_clipping_norm`.
    """

    def sample_cohort(self, roster: Iterable[str], number: int) -> list[str]:
        """Clients of round `number`: Poisson-sampled by the secret, or all without a rate."""
        rate = self.guarantee.sampling_rate
        return list(roster) if rate is None else sample_cohort(roster, rate, self._secret, number)

    def release_votes(
        self, ballots: Iterable[Collection[T]], blocks: Sequence[T], k: int, name: str
    ) -> dict[T, float]:
        """Charge a vote as `vote_name(name)`; return the noisy number of clients by block.

        `ballots`: one per client, at most `k` of `blocks` each; others are ignored. Raises a
        PrivacyError if the budget does not allow the vote.
        """
        ballots = list(ballots)
        content = str(sorted(sorted(map(repr, ballot)) for ballot in ballots))
        vote = NoisyVote(k, self.guarantee.vote_noise_multiplier)
        return self._noisy_counts(vote, ballots, blocks, vote_name(name), content)

    def release_mean(
        self, mechanism: GaussianMechanism, total: ExactSum, round: int, name: str, within: str = ""
    ) -> dict[str, Tensor]:
        """Charge a round as `name`, then return the noisy mean of the clipped changes in `total`.

        within: with adaptive clipping, a text with the numbers of unclipped and of all clients: the
        charge pays for the next clipping norm too, and the text is part of its digest. Raises a
        PrivacyError if the budget does not allow the round.
        """
        digest = mechanism.digest(total, self._secret, name)
        if self.guarantee.clipping_quantile:
            digest = derive_key(self._secret, "digest", digest, within).hex()[:32]
        self.budget.charge(self.guarantee.round_events(round, name)[name], name, digest=digest)
        return mechanism.release(total, self._secret, name)

    def simulate_noisy_share(
        self, mechanism: GaussianMechanism, change: Change, name: str
    ) -> ExactSum:
        """One client's clipped change plus its share of noise, for simulations. Charges nothing."""
        return mechanism.add_noise(mechanism.clipped_sum(change), self._secret, name)

    def release_noisy_sum(
        self, mechanism: GaussianMechanism, total: ExactSum, round: int, name: str
    ) -> Tensors:
        """Charge a round as `name`, then return the mean of a sum to which clients added noise."""
        digest = mechanism.digest(total, self._secret, name)
        self.budget.charge(self.guarantee.round_events(round, name)[name], name, digest=digest)
        return mechanism.divide(total)

    def next_clipping_norm(
        self, mechanism: GaussianMechanism, total: ExactSum, within: int, cohort: int, name: str
    ) -> float:
        """Adaptive clipping norm of the next round; 0.0 if the guarantee sets no quantile.

        within: number of the `cohort` clients with an unclipped change. The noise follows from
        `name`, sum and numbers. Charges nothing: `release_mean` has paid.
        """
        quantile = self.guarantee.clipping_quantile
        if not quantile:
            return 0.0
        clipping = AdaptiveClipping(mechanism.clipping_norm, quantile, noise_multiplier=COUNT_NOISE)
        following = clipping.next_round(
            within,
            cohort,
            mechanism.divisor,
            secret=self._secret,
            name=name,
            content=mechanism.digest(total, self._secret, name),
        )
        return following.clipping_norm


class ClientGuard(Guard):
    """A client's guard for example-level DP: for DP-SGD, for votes, and for score counts."""

    def release_counts(
        self, counts: Sequence[int], sensitivity: float, name: str, content: str
    ) -> list[int]:
        """Charge score counts as `evaluation_name(name)`; return them with integer noise.

        sensitivity: L2 norm of the counts of one example. content: digest of all that they depend
        on: the same content has the same noise. Raises a PrivacyError if the budget does not allow
        the release.
        """
        release = evaluation_name(name)
        event = self.guarantee.evaluation_events(name).get(release)
        if event is None:
            raise PrivacyError("this study's guarantee covers no score counts")
        words = release, content, *counts
        digest = derive_key(self._secret, "digest", *words).hex()[:32]
        self.budget.charge(event, release, digest=digest)
        stddev = self.guarantee.evaluation_noise_multiplier * sensitivity
        noise = NoiseStream.for_release(self._secret, *words)
        # Counts are whole numbers, so noise in steps of 1 is a rounding of Gaussian noise on them.
        steps = noise.rounded_gaussian((len(counts),), stddev, 1.0)
        return [count + int(step) for count, step in zip(counts, steps, strict=True)]

    def release_votes(
        self,
        inputs: ProbeInput,
        probe: Probe,
        k: int,
        name: str,
        content: str,
        report_fault: ReportFault | None = None,
    ) -> dict[Block, float]:
        """Charge a vote as `vote_name(name)`; return the noisy number of examples for each block.

        Examples are sampled at the guarantee's rate, by the secret and `name`; each one votes for
        the `k` blocks of its highest scores by `probe`. content: digest of everything that the
        scores depend on. report_fault: called with the last exception of an example's probe; such
        an example has no vote; None raises the exception.
        """
        # The noise depends on `content`: by the counts alone, equal bytes would tell that two
        # counts are equal. The sample depends on the name: votes of one name are charged as sums
        # over one sample.
        rate, name = self.guarantee.sampling_rate or 1.0, vote_name(name)
        source = NoiseStream.for_release(self._secret, "rows of a vote", name)
        draws = self._uniform(source)(len(inputs.examples))
        sampled = (draws <= rate).nonzero().flatten()

        def vote_of(index: Tensor) -> Collection[Block]:
            one = replace(inputs, examples=OneExample(inputs.examples, int(index)))
            return make_ballot(probe(one), k)

        ballots = contain_faults(vote_of, sampled, report_fault)
        vote = NoisyVote(k, self.guarantee.vote_noise_multiplier, rate)
        return self._noisy_counts(vote, ballots, inputs.blocks, name, content)

    def require_affordable_turn(self, round: int, name: str, content: str) -> None:
        """Raise a PrivacyError if a turn is neither charged already nor within the budget."""
        self.budget.require_affordable(self._charge(round, name, content))

    def _charge(self, round: int, name: str, content: str) -> Charge:
        digest = derive_key(self._secret, "digest", name, content).hex()[:32]
        return Charge(self.guarantee.round_events(round, name)[name], name, digest)

    def make_fit(
        self,
        round: int,
        name: str,
        content: str,
        *,
        trial: Examples | None = None,
        report_fault: ReportFault | None = None,
    ) -> Fit:
        """Charge a turn (a client's work in a round) as `name`; return the fit that trains it.

        content: digest of everything that the turn depends on (examples, values, settings). The
        noise of DP-SGD follows from the secret, `name` and `content`, as the charge does: the same
        turn of the same run draws the same noise again. trial, report_fault: as in `train_dp_sgd`.
        With `report_fault`, a fit that raises an exception runs again without examples, so that an
        answer of noise alone leaves; what this raises does not depend on examples. Call the fit
        once.
        """
        guarantee = self.guarantee
        charge = self._charge(round, name, content)
        self.budget.charge(charge.event, name, digest=charge.digest)
        config = DPSGDConfig(
            max_grad_norm=guarantee.clipping_norm,
            noise_multiplier=guarantee.noise_multiplier,
            expected_batch_size=guarantee.batch_size,
            sampling_rate=guarantee.sampling_rate or 1.0,
            steps=guarantee.steps,
            ghost_clipping=guarantee.ghost_clipping,
        )

        def fit_with(noise: NoiseStream) -> Fit:
            return dp_sgd(
                config,
                noise=noise.rounded_gaussian,
                uniform=self._uniform(noise),
                trial=trial,
                report_fault=report_fault,
            )

        fit = fit_with(NoiseStream.for_release(self._secret, "turn", name, content))
        if report_fault is None:
            return fit
        blank = NoiseStream.for_release(self._secret, "turn without examples", name, content)
        return _contained(fit, fit_with(blank), report_fault)

    @staticmethod
    def _uniform(noise: NoiseStream) -> Uniform:
        def uniform(count: int) -> Tensor:
            return noise.uniform(count) if count else torch.empty(0, dtype=torch.float64)

        return uniform


class DistributedGuard(Guard):
    """A client's guard for distributed DP: `noisy_share`, of a sum that hides single shares."""

    def require_charged(self, name: str) -> None:
        """Raise a PrivacyError if no charge has this name, though its masked input was sent."""
        if name not in {charge.name for charge in self.budget.charges}:
            raise PrivacyError(
                f"{self.budget.file} has no charge of {name}, and its masked input was sent: "
                "restore the latest copy of it; without it the epsilon spent is unknown"
            )

    def noisy_share(
        self,
        mechanism: GaussianMechanism,
        change: Change,
        round: int,
        name: str,
        terms_digest: bytes,
    ) -> ExactSum:
        """Charge a round as `name`; return this client's clipped change plus a share of the noise.

        Another attempt at the round, with another `terms_digest` (of secure aggregation) and the
        same change, adds no charge and has other noise. The same arguments give the same bits.
        """
        # One charge is enough: at most one attempt's sum is ever unmasked.
        clipped = mechanism.clipped_sum(change)
        digest = mechanism.digest(clipped, self._secret, name)
        self.budget.charge(self.guarantee.round_events(round, name)[name], name, digest=digest)
        return mechanism.add_noise(clipped, self._secret, name, terms_digest)


def _contained(fit: Fit, fit_without: Fit, report_fault: ReportFault) -> Fit:
    """A fit that reports an exception of `fit` and runs `fit_without` on no examples instead."""

    def contained(job: Job) -> FitResult:
        params = [param for param in job.roles if param.key in job.start]
        buffers = copy_buffers(job.model)
        try:
            return fit(job)
        except Exception as error:
            report_fault(error)
            set_values(job.model, job.start, params)
            restore_buffers(job.model, buffers)
            return fit_without(replace(job, examples=NoExamples()))

    return contained


class NoExamples:
    """A data set without examples."""

    def __len__(self) -> int:
        return 0

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        raise IndexError("there are no examples")


def contain_faults(
    function: Callable[[Item], Result], items: Iterable[Item], report_fault: ReportFault | None
) -> list[Result]:
    """Results of a function for the items it does not raise for; reports the last exception."""
    results, fault = list[Result](), cast("Exception | None", None)
    for item in items:
        try:
            results.append(function(item))
        except Exception as error:
            if report_fault is None:
                raise
            fault = error
    if report_fault is not None and fault is not None:
        report_fault(fault)
    return results


@dataclass(frozen=True)
class OneExample:
    """Example `index` of a client's `examples` as a data set of length 1, for any index."""

    examples: Examples
    index: int

    def __len__(self) -> int:
        return 1

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return self.examples.batch(torch.full_like(indices, self.index))
