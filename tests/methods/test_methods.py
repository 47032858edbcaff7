# SPDX-License-Identifier: Apache-2.0
"""Every method keeps the laws on an encoder, a decoder, vision, two towers, fused rows and LoRA."""

from __future__ import annotations

import pytest
import zoo
from clients import few, loss
from settings import PROMPTED, SETTINGS

from fedplan.errors import FedplanError
from fedplan.language.parts import key, norm, query, value
from fedplan.language.plan import best, chain, freeze, keep, share, when
from fedplan.language.predicates import after
from fedplan.methods.method import Method
from fedplan.methods.registry import METHODS, method_by_name
from fedplan.tensors.compression import parse_codec
from fedplan.testing import check_method
from fedplan.training.probes import Probe, last_probe, random_probe

ARCHITECTURES = ("bert", "vit", "clip", "gpt-neox", "phi3", "modernbert", "llama")
# By day each method is tried on two architectures, each architecture by many methods; at night all.
TRIED = [m for m in METHODS if m not in PROMPTED]
DAILY = {(m, ARCHITECTURES[(2 * i + j) % 7]) for i, m in enumerate(TRIED) for j in range(2)}
PAIRS = [
    pytest.param(m, a, marks=[] if (m, a) in DAILY else [pytest.mark.nightly])
    for m in TRIED
    for a in ARCHITECTURES
]


@pytest.mark.parametrize(("name", "architecture"), PAIRS)
def test_methods_keep_the_laws(name: str, architecture: str) -> None:
    made = method_by_name(name, SETTINGS.get(name))
    model = zoo.build(architecture)
    if name == "bitfit" and architecture in ("llama", "phi3"):
        with pytest.raises(FedplanError, match="bias matches no parameter"):
            check_method(made, model, few(architecture), loss)
    else:
        check_method(made, model, few(architecture), loss)


@pytest.mark.parametrize(
    "compression", ["delta()", "pipe(delta(), bf16())", "pipe(delta(), int8())"]
)
@pytest.mark.parametrize("architecture", ["bert", "gpt-neox"])
def test_wires_keep_the_laws(compression: str, architecture: str) -> None:
    plan = chain(freeze(), share(value), keep(norm))
    check_method(
        Method(plan, compression=parse_codec(compression)),
        zoo.build(architecture),
        few(architecture),
        loss,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("probe", [random_probe, last_probe])
def test_chosen_blocks_keep_the_laws(architecture: str, probe: Probe) -> None:
    plan = chain(freeze(), best(1), when(after(2), freeze(query | key)), keep(norm))
    made = Method(plan, probe=probe)
    check_method(made, zoo.build(architecture), few(architecture), loss)


def test_every_method_has_a_docstring_that_says_what_and_whose() -> None:
    for name, make in METHODS.items():
        assert make.__doc__ and len(make.__doc__.splitlines()[0]) > 20, name


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("fedproxy", {}, "did you mean fedprox"),
        ("fedprox", {"strength": 1.0}, "fedprox takes no 'strength'; it takes mu"),
        ("fedprox", {"mu": "much"}, "mu such as 0.01, not 'much'"),
    ],
)
def test_a_wrong_name_or_setting_is_an_error_that_helps(
    name: str, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(FedplanError, match=words):
        method_by_name(name, settings)
