# SPDX-License-Identifier: Apache-2.0
"""The agreement agrees on all that changes a result: by texts, the same in every process."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import partial, wraps
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedplan
from fedplan.errors import FedplanError
from fedplan.federation.aggregation.defence import Defence
from fedplan.federation.agreement import Agreement
from fedplan.language.canonical import canonical_text, format_call, with_text
from fedplan.language.parser import parse
from fedplan.language.plan import best, keep, share
from fedplan.language.predicates import Turn
from fedplan.language.resolution import certain_roles, permitted_roles, resolve
from fedplan.methods import (
    METHODS,
    Method,
    PlannedPhases,
    fedadam,
    fedavg,
    fedavgm,
    fedper,
    fedprox,
    fedrep,
    fedyogi,
    mean,
    method_by_name,
    scaffold,
)
from fedplan.methods.phases import PhaseContext
from fedplan.models.catalog import params_of
from fedplan.models.params import Block
from fedplan.parts import query
from fedplan.privacy.guarantee import Guarantee
from fedplan.tensors.compression import parse_codec
from fedplan.training import optimizers as optimizers
from fedplan.training.client_hooks import alternate, proximal
from fedplan.training.fit import Fit, TrainArguments
from fedplan.training.optimizers import LRSchedule, adamw, make_lr_schedule, sgd
from fedplan.training.probes import (
    ProbeInput,
    attention_probe,
    data_independent,
    fixed_probe,
    gradient_probe,
    last_probe,
    random_probe,
)

PARAMS = params_of("bert-base")
GUARANTEE = Guarantee("client", 8.0, 1e-5, 1.0, 1.0, evaluation_noise_multiplier=1.0)
OTHERS: dict[str, Any] = {
    **{
        "unit": "example",
        "epsilon": 4.0,
        "delta": 1e-6,
        "clipping_norm": 2.0,
        "noise_multiplier": 2.0,
        "sampling_rate": 0.5,
    },
    **{
        "steps": 1,
        "batch_size": 1,
        "vote_noise_multiplier": 1.0,
        "vote_every": 5,
        "clipping_quantile": 0.5,
        "max_weight": 9,
        "ghost_clipping": True,
        "evaluation_noise_multiplier": 2.0,
        "evaluate_every": 5,
    },
}
"""Another value of every field of a guarantee."""


def scores(look: ProbeInput) -> dict[Block, float]:
    """A probe of a user."""
    return {block: 1.0 for block in look.blocks}


def scaled(strength: float) -> Callable[[Fit], Fit]:
    """A wrap of a user, with a setting that it captures."""

    def wrap(fit: Fit) -> Fit:
        return proximal(strength)(fit)

    return wrap


@dataclass(frozen=True)
class Late:
    """A user's phases."""

    after: int
    phases: tuple[str, ...] = ("late",)

    def __call__(self, sign: PhaseContext) -> str:
        return "late" if sign.round > self.after else ""


def methods() -> dict[str, Method]:
    """Methods of which every two work out something else."""
    made = {
        "fedavg": fedavg(),
        "fedprox 0.1": fedprox(0.1),
        "fedprox 0.2": fedprox(0.2),
        "fedadam": fedadam(),
        "fedadam, another floor": fedadam(eps=0.1),
        "fedyogi": fedyogi(),
        "fedavgm": fedavgm(),
        "scaffold": scaffold(),
        "fedper": fedper(),
        "fedrep": fedrep(),
        "another server optimizer": Method(share(), server_optimizer=mean(lr=0.5)),
        "alternate 3": Method(share(), client_hooks=(alternate(3),)),
        "two wraps": Method(share(), client_hooks=(proximal(0.1), alternate(3))),
        "two wraps, swapped": Method(share(), client_hooks=(alternate(3), proximal(0.1))),
        "another wire": Method(share(), compression=parse_codec("bf16()")),
        "together": Method(share(), joint_choice=True),
        "absent": Method(share(), absent=True),
        "equal weights": Method(share(), equal_weights=True),
        "own copy": Method(share(), own_copy=True),
        "riders": Method(share(), aux=("a",)),
        "phases": Method(share(), phase_rule=PlannedPhases({"a": 1})),
        "phases, another round": Method(share(), phase_rule=PlannedPhases({"a": 2})),
        "phases, another name": Method(share(), phase_rule=PlannedPhases({"b": 1})),
        "a user's phases": Method(share(), phase_rule=Late(1)),
        "a user's phases, later": Method(share(), phase_rule=Late(2)),
        "a user's wrap": Method(share(), client_hooks=(scaled(0.1),)),
        "a user's wrap, stronger": Method(share(), client_hooks=(scaled(0.2),)),
    }
    probes = (
        last_probe,
        fixed_probe(1),
        fixed_probe(1, 2),
        attention_probe(),
        attention_probe(to="last"),
        gradient_probe(),
    )
    probes = (*probes, gradient_probe(8), scores, lambda _: {}, lambda _: {Block("a", 1): 1.0})
    return made | {f"probe {i}": Method(share(), probe=probe) for i, probe in enumerate(probes)}


def agreements() -> dict[str, Agreement]:
    """Agreements of which every two work out something else."""
    base = Agreement("law", PARAMS, fedavg(), TrainArguments())
    made = {name: replace(base, method=each) for name, each in methods().items()}
    paces = {
        "optimizer": sgd(),
        "lr": 10.0,
        "epochs": 2,
        "steps": 3,
        "batch_size": 16,
        "max_grad_norm": 1.0,
        "lr_scheduler": LRSchedule("linear"),
        "gradient_accumulation_steps": 2,
        "decay_norm_and_bias": False,
        "precision": "bf16",
        "gradient_checkpointing": True,
        "torch_compile": "eager",
        "group_by_length": True,
        "num_workers": 1,
        "cache_activations": True,
        "lr_by_part": ((query, 0.1),),
    }
    assert paces.keys() == {f.name for f in fields(TrainArguments)}
    made |= {
        f"pace {k}": replace(base, train_arguments=replace(TrainArguments(), **{k: v}))
        for k, v in paces.items()
    }
    rates = [LRSchedule("linear", rounds=9), LRSchedule("linear", 0.5), LRSchedule("linear", 2, 9)]
    rates += [make_lr_schedule("polynomial", {"power": 2.0}), LRSchedule("cosine")]
    made |= {
        each.text: replace(base, train_arguments=TrainArguments(lr_scheduler=each))
        for each in rates
    }
    made["pace fp16"] = replace(base, train_arguments=TrainArguments(precision="fp16"))
    others = {"decay": adamw(weight_decay=0.1), "momentum": sgd(momentum=0.9)}
    made |= {
        f"its {k}": replace(base, train_arguments=TrainArguments(each))
        for k, each in others.items()
    }
    made["guarantee"] = replace(base, guarantee=GUARANTEE)
    assert OTHERS.keys() == {f.name for f in fields(Guarantee)}
    for name, value in OTHERS.items():
        made[f"guarantee {name}"] = replace(base, guarantee=replace(GUARANTEE, **{name: value}))
    defences = {
        "rule": "median",
        "max_weight": 9,
        "max_weight_fraction": 0.5,
        "max_norm_ratio": 2.0,
    }
    made |= {f"defence {k}": replace(base, defence=Defence(**{k: v})) for k, v in defences.items()}
    made["defence liars"] = replace(base, defence=Defence(rule="median", malicious_clients=2))
    assert {*defences, "malicious_clients"} == {f.name for f in fields(Defence)}
    made["start"], made["study"] = replace(base, start="0" * 16), replace(base, study="0" * 16)
    made["params"] = replace(base, params=PARAMS[:-1])
    return made


def test_every_two_that_differ_have_two_fingerprints() -> None:
    made = agreements()
    for one, other in combinations(made, 2):
        assert made[one].fingerprint != made[other].fingerprint, (one, other)


def test_published_methods_that_differ_are_told_apart() -> None:
    made = {name: "\n".join(method_by_name(name).lines) for name in METHODS}
    same = [pair for pair in combinations(made, 2) if made[pair[0]] == made[pair[1]]]
    assert not same


def test_the_same_made_twice_has_one_fingerprint() -> None:
    one, other = agreements(), agreements()
    assert {k: v.fingerprint for k, v in one.items()} == {
        k: v.fingerprint for k, v in other.items()
    }


@pytest.mark.parametrize("seed", ["1", pytest.param("2", marks=pytest.mark.nightly)])
def test_another_process_makes_the_same(seed: str) -> None:
    said = f"from {__name__} import agreements\nfor each in agreements().values(): print(each.text)"
    root = str(Path(fedplan.__file__).parent.parent)
    path = os.pathsep.join([*sys.path, root, str(Path(__file__).parent)])
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", said], env=env, capture_output=True, text=True, check=True
    )
    here = [line for each in agreements().values() for line in each.text.splitlines()]
    assert done.stdout.splitlines() == here


def test_the_name_of_a_class_of_ours_is_no_part_of_it() -> None:
    text = {name: agreement.text for name, agreement in agreements().items()}
    classes = (
        TrainArguments,
        Guarantee,
        Defence,
        type(mean()),
        PlannedPhases,
        Method,
        type(fixed_probe(1)),
        type(share()),
    )
    for cls in classes:
        assert not any(f"{cls.__name__}(" in each for each in text.values()), cls
    renamed = {cls: (cls.__name__, cls.__qualname__) for cls in classes}
    try:
        for cls in classes:
            cls.__name__ = cls.__qualname__ = "Renamed"
        assert {name: agreement.text for name, agreement in agreements().items()} == text
    finally:
        for cls, names in renamed.items():
            cls.__name__, cls.__qualname__ = names


def test_each_line_begins_with_its_word() -> None:
    words = (
        "plan compression aux joint_choice absent probe phases client_hooks loop server adapt train "
        "guarantee study"
    )
    for agreement in agreements().values():
        lines = agreement.text.splitlines()
        said = [line.split()[0] for line in lines]
        only_if_set = ("defence", "equal_weights", "own_copy")
        said = [word for word in said if word not in only_if_set]
        assert said == [*words.split(), "start", "params"]


def test_no_text_of_a_method_of_ours_depends_on_its_source() -> None:
    for name in METHODS:
        assert "fedplan." not in "\n".join(method_by_name(name).lines), name


def test_what_may_not_change_a_result_is_no_part_of_it() -> None:
    one = Agreement("law", PARAMS, fedavg(), TrainArguments(lr=1.0))
    assert replace(one, run="0" * 16).fingerprint == one.fingerprint
    assert replace(one, train_arguments=TrainArguments(lr=1)).fingerprint == one.fingerprint
    swapped = PlannedPhases({"b": 2, "a": 1}), PlannedPhases({"a": 1, "b": 2})
    assert canonical_text(swapped[0]) == canonical_text(swapped[1])


def test_a_function_is_told_by_what_it_does_and_was_given() -> None:
    def made(number: int) -> list[Callable[..., object]]:
        log = list[int]()

        def noting(x: int, by: int = number) -> int:
            log.append(x)
            return x * by

        return [noting, partial(noting, number), lambda: number, fixed_probe(number).__call__]

    for one, same, other in zip(made(1), made(1), made(2), strict=True):
        before = canonical_text(one)
        if one.__class__ is made.__class__ and one.__name__ == "noting":
            one(3)  # what it notes is no part of it
        assert canonical_text(one) == before == canonical_text(same) != canonical_text(other)


def test_a_function_without_a_source_is_told_by_its_bytecode() -> None:
    def defined(source: str) -> object:
        space: dict[str, Any] = {"__name__": "typed"}
        exec(source, space)
        return space["f"]

    one, other = "def f(x):\n return x in {'a', 'b'}", "def f(x):\n return x in {'a', 'c'}"
    assert (
        canonical_text(defined(one))
        == canonical_text(defined(one))
        != canonical_text(defined(other))
    )


def test_a_wrapper_does_not_speak_by_the_text_of_what_it_wraps() -> None:
    @wraps(random_probe)
    def other(look: ProbeInput) -> dict[Block, float]:
        return {}

    assert canonical_text(other) != canonical_text(random_probe) == "random"
    assert canonical_text(with_text(format_call("mine", 3, to="x"))(lambda: 0)) == 'mine(3, to="x")'
    # A text of two lines is no two lines of the agreement.
    assert "\n" not in canonical_text(with_text("random\nphases none")(lambda: 0))


def test_a_function_that_holds_on_to_itself_has_a_text() -> None:
    def again(number: int) -> int:
        return again(number - 1) if number else 0

    assert "itself" in canonical_text(again)


def test_plans_that_differ_have_two_fingerprints() -> None:
    plans = (share(), keep(), best(2), best(3))
    made = {Agreement("law", PARAMS, Method(plan), TrainArguments()).fingerprint for plan in plans}
    assert len(made) == len(plans)


def test_a_registered_name_is_told_with_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def calm(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr)

    def wild(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=10 * lr)

    texts = set[str]()
    for make in (calm, wild):
        monkeypatch.delitem(optimizers.OPTIMIZER_NAMES.registered, "mine", raising=False)
        optimizers.register_optimizer("mine", make)
        train_arguments = TrainArguments(optimizers.make_client_optimizer("mine"))
        texts.add(Agreement("law", PARAMS, fedavg(), train_arguments).fingerprint)
    assert len(texts) == 2


def test_wrappers_and_values_that_cannot_change_are_told_apart() -> None:
    def one(call: Any) -> Any:
        @functools.wraps(call)
        def inner(*args: Any) -> Any:
            return call(*args)

        return inner

    def two(call: Any) -> Any:
        @functools.wraps(call)
        def inner(*args: Any) -> Any:
            return call(*args) * 2

        return inner

    def own(look: Any) -> Any:
        return look

    assert canonical_text(one(own)) != canonical_text(two(own)) != canonical_text(own)
    assert canonical_text(functools.lru_cache(one)) != canonical_text(functools.lru_cache(two))
    pairs = [(torch.float16, torch.float32), (np.float32(0.1), np.float32(0.2)), (1j, 2j)]
    pairs += [(range(2), range(3)), (Path("a"), Path("b")), (Decimal(1), Decimal(2))]
    for a, b in pairs:
        assert canonical_text(functools.partial(own, a)) != canonical_text(
            functools.partial(own, b)
        ), (a, b)
        assert canonical_text(a) == canonical_text(copy.copy(a))
    first = Method(best(1), probe=lambda look: {})
    assert first.lines != replace(first, probe=data_independent(lambda look: {})).lines


@pytest.mark.parametrize("riders", ["control", ("",), ("#a",), ("scale",), ("index",), ["a"]])
def test_riders_that_no_name_can_tell_are_refused(riders: Any) -> None:
    with pytest.raises(FedplanError, match=r"aux|codec"):
        Method(share(), aux=riders)


@pytest.mark.parametrize(
    "plan",
    [
        "share()",
        "chain(freeze(), share(head), best(2, encoder))",
        "cycle(chain(freeze(), share(head)), share())",
        'chain(share(), when(after(2), hold(query)), by("role", {"a": keep(head)}, share()))',
    ],
)
def test_roles_that_are_remembered_are_those_of_the_turn(plan: str) -> None:
    method = replace(fedavg(), plan=parse(plan), probe=last_probe)
    agreement = Agreement("a", PARAMS, method, TrainArguments())
    scores = {block: float(block.number) for block in agreement.blocks}
    turns = [
        Turn(number, client, "", {"role": client}, said)
        for number in (1, 2, 3, 4)
        for client in ("a", "b")
        for said in (scores, {block: -score for block, score in scores.items()})
    ]
    for turn in turns * 2:
        assert agreement.permitted(turn) == permitted_roles(method.plan, PARAMS, turn)
        assert agreement.certain(turn) == certain_roles(method.plan, PARAMS, turn)
        assert agreement.resolved(turn) == resolve(method.plan, PARAMS, turn)


def test_params_of_one_key_are_told_apart_though_they_hash_alike() -> None:
    one, other = PARAMS[0], replace(PARAMS[0], dtype="bfloat16")
    assert hash(one) == hash(replace(one)) and {one: 1}[replace(one)] == 1
    assert len({one, other}) == 2
