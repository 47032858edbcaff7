# SPDX-License-Identifier: Apache-2.0
"""Method: a federated method as a value; also read back from the lines of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import final

from torch import nn

from fedplan.errors import FedplanError
from fedplan.language.canonical import canonical_text
from fedplan.language.parser import parse
from fedplan.language.plan import Plan, chain
from fedplan.methods.lora import ProductRule, average_separately, parse_product_rule
from fedplan.methods.phases import PhaseRule, PlannedPhases
from fedplan.methods.server_optimizer import Dynamic, ServerOptimizer, mean
from fedplan.models.params import Kind, Params
from fedplan.tensors.codecs import CODED_PART_NAMES, Codec
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.compression import plain as as_is
from fedplan.training.client_hooks import keep_optimizer
from fedplan.training.fit import ClientHook, Fit, plain_fit
from fedplan.training.probes import Probe, is_data_independent, random_probe


@dataclass(frozen=True)
class Method:
    """A federated method: a plan, and how clients train and compress and how the server aggregates.

    Immutable settings; use `dataclasses.replace` to change one. `plan`: the role of each param by
    client and round. `client_hooks`: wrappers of the local fit, the first outermost. `probe`:
    computes the block scores by which `best` chooses; `joint_choice`: one choice for all clients by
    the sum of the clients' scores, instead of one choice per client. `phase_rule`: names the phase
    of each round. `aux`: kinds of auxiliary tensors that travel with each shared param, for example
    "control". `compression`: the codec of updates. `absent`: average each param over all clients of
    the round, where a client that did not send the param counts as unchanged; if False, over the
    senders only. `equal_weights`: all clients weigh alike; if False, by their number of examples.
    `own_copy`: client hooks keep a copy of shared params in memory of the kind `COPY`, which the
    client's personal model has. `server_optimizer`: makes the next global value of a param from the
    mean of the clients. `adapt`: adds modules, for example LoRA, to the initial model; None for no
    change. `lora_aggregation`: how the two factors of LoRA are aggregated. `loop`: the local fit
    inside all hooks; for your own training loop see `fedplan.attach`. `fit` is the wrapped loop.
    `plan_without_head`: the plan for language models, which `for_params` chooses; None for `plan`.
    Raises FedplanError for invalid `aux`, for a `loop` with several required arguments, for
    `keep_optimizer` beside another hook or a loop, and for settings that would make
    `lora_aggregation` or FedDyn's server optimizer inexact.
    """

    plan: Plan
    client_hooks: tuple[ClientHook, ...] = ()
    probe: Probe = random_probe
    joint_choice: bool = False
    phase_rule: PhaseRule = field(default_factory=PlannedPhases)
    aux: tuple[str, ...] = ()
    compression: Codec = field(default_factory=as_is)
    absent: bool = False
    equal_weights: bool = False
    own_copy: bool = False
    server_optimizer: ServerOptimizer = field(default_factory=mean)
    adapt: Callable[[nn.Module], nn.Module] | None = None
    lora_aggregation: ProductRule = field(default_factory=average_separately)
    loop: Fit = plain_fit
    plan_without_head: Plan | None = None

    def __post_init__(self) -> None:
        valid = all(re.fullmatch("[a-z_]+", kind) for kind in self.aux)
        if type(self.aux) is not tuple or not valid:
            raise FedplanError(f"aux is {self.aux!r}: give a tuple of kinds, as ('control',)")
        if reserved := CODED_PART_NAMES & set(self.aux):
            raise FedplanError(
                f"aux kind {min(reserved)!r} is the name of a codec's part: choose another name"
            )
        if not self.lora_aggregation.is_separate:
            codec = self.compression.text
            problems = {
                f"compression {codec} changes the values: use plain()": codec != as_is().text,
                "a server optimizer other than mean() moves each factor separately: leave it out": (
                    self.server_optimizer != mean()
                ),
                "absent counts missing factors as unchanged: leave it out": self.absent,
            }
            for problem in (problem for problem, present in problems.items() if present):
                raise FedplanError(f"{self.lora_aggregation.text} would not be exact: {problem}")
        if isinstance(self.server_optimizer, Dynamic) and (self.absent or not self.equal_weights):
            raise FedplanError(
                "FedDyn's server adds up the changes of all clients alike: set equal_weights, and "
                "leave absent out"
            )
        alone = self.client_hooks == (keep_optimizer,) and self.loop is plain_fit
        if keep_optimizer in self.client_hooks and not alone:
            other = "an own loop" if self.loop is not plain_fit else "another client hook"
            raise FedplanError(
                f"keep_optimizer (DiLoCo) keeps the state of the built-in training, and {other} "
                "may make other optimizers or several: leave one of them out"
            )
        try:
            params = list(signature(self.loop).parameters.values())
        except (TypeError, ValueError):  # a signature that cannot be read is accepted
            params = []
        required = [p for p in params if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(required) > 1:
            names = ", ".join(p.name for p in required)
            raise FedplanError(f"the loop takes {names}: wrap it, as in loop = fedplan.attach(...)")

    @property
    def lines(self) -> tuple[str, ...]:
        """The method as text lines "key canonical-text", which server and clients compare."""
        # The keys are part of the agreement's digest.
        texts = {
            "plan": f"{self.plan.fingerprint} {self.plan.text}",
            "compression": self.compression.text,
            "aux": canonical_text(self.aux),
            "joint_choice": canonical_text(self.joint_choice),
            "absent": canonical_text(self.absent),
            "probe": canonical_text(self.probe)
            + (" without examples" if is_data_independent(self.probe) else ""),
            "phases": canonical_text(self.phase_rule),
            "client_hooks": canonical_text(self.client_hooks),
            "loop": canonical_text(self.loop),
            "server optimizer": canonical_text(self.server_optimizer),
            "adapt": canonical_text(self.adapt),
        }
        if not self.lora_aggregation.is_separate:
            texts["lora_aggregation"] = self.lora_aggregation.text
        # Written only if set, so that other methods keep the text of earlier versions.
        flags = {"equal_weights": self.equal_weights, "own_copy": self.own_copy}
        texts |= {name: canonical_text(flag) for name, flag in flags.items() if flag}
        return tuple(f"{key} {text}" for key, text in texts.items())

    @property
    def fit(self) -> Fit:
        """The local fit: `loop` wrapped in all client hooks, the first outermost."""
        fit = self.loop
        for hook in reversed(self.client_hooks):
            fit = hook(fit)
        return fit

    def for_params(self, params: Params) -> Method:
        """Return this method with the plan for a model: without the head of a language model.

        Such a head has the shape of the table of tokens, or is the table itself. A model whose head
        is unknown keeps `plan`.
        """
        if self.plan_without_head is None or any("head" in p.uncertain_words for p in params):
            return self
        matrices = [p for p in params if len(p.shape) == 2]
        tables = [p.shape for p in matrices if p.kind is Kind.EMBED]
        heads = {p.shape for p in matrices if p.kind is Kind.HEAD}
        most_rows = max(tables, default=(0,))[0]  # of several tables, that of tokens has the most
        if not tables or heads - {shape for shape in tables if shape[0] == most_rows}:
            return self
        return replace(self, plan=self.plan_without_head, plan_without_head=None)

    def then(self, plan: Plan) -> Method:
        """Return this method with a plan that follows its own, and changes roles."""
        headless = self.plan_without_head
        return replace(
            self,
            plan=chain(self.plan, plan),
            plan_without_head=None if headless is None else chain(headless, plan),
        )

    @property
    def fit_keeps_memory(self) -> bool:
        """Whether the local fit may return tensors that the client stores for its next round."""
        plain = {f"{name} {canonical_text(fit)}" for name, fit in _PLAIN.items()}
        return not plain <= set(self.lines)

    def with_training_of(self, other: Method) -> Method:
        """Return this method with the training of `other`.

        Example: `fedfrozen().with_training_of(scaffold())`.

        Hooks and aux kinds of `other` are put before this method's; server optimizer and weights
        are of `other`; the loop too if this method has the default loop. Plan, probe, compression
        and the rest stay.
        """
        return replace(
            self,
            client_hooks=(*other.client_hooks, *self.client_hooks),
            aux=(*other.aux, *self.aux),
            loop=other.loop if self.loop is plain_fit else self.loop,
            server_optimizer=other.server_optimizer,
            equal_weights=other.equal_weights,
            own_copy=other.own_copy or self.own_copy,
        )


_PLAIN: dict[str, object] = {"client_hooks": (), "loop": plain_fit}
"""Values of the fields of a method whose local fit keeps no memory."""


@final
@dataclass(frozen=True)
class RecordedMethod(Method):
    """A method read back from the lines of a run: enough to check the run, not to continue.

    Made by `parse_recorded_method`; fields that are not in the lines have default values.
    """

    recorded_lines: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines as they were recorded."""
        return self.recorded_lines

    @property
    def fit(self) -> Fit:
        """Raises FedplanError: the code of the method is not known."""
        raise FedplanError("this method was given from Python: pass it again to continue its run")


def parse_recorded_method(lines: Sequence[str]) -> RecordedMethod:
    """Return a method of the `lines` of a Method; FedplanError if they cannot be parsed."""
    texts = {key: text for key, _, text in (line.partition(" ") for line in lines)}
    try:
        return RecordedMethod(
            plan=parse(texts["plan"].partition(" ")[2]),
            joint_choice=json.loads(texts["joint_choice"]),
            absent=json.loads(texts["absent"]),
            equal_weights="equal_weights" in texts,
            own_copy="own_copy" in texts,
            aux=tuple(json.loads(texts["aux"])),
            compression=parse_codec(texts["compression"]),
            lora_aggregation=parse_product_rule(
                texts.get("lora_aggregation", average_separately().text)
            ),
            recorded_lines=tuple(lines),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise FedplanError(f"these lines do not describe a method: {error}") from error
