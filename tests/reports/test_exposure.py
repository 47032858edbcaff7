# SPDX-License-Identifier: Apache-2.0
"""The warning of what updates tell: whenever something leaves without noise, and only then."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from attacks import victims

import fedplan as fp
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.language.plan import Role
from fedplan.language.resolution import params_with_roles
from fedplan.methods.registry import METHODS, method_by_name
from fedplan.models.catalog import meta_model
from fedplan.models.description import describe
from fedplan.privacy.guarantee import Guarantee
from fedplan.reports.plan_warnings import study_exposure
from fedplan.secagg.config import SecAggConfig
from fedplan.training.fit import TrainArguments

PROMPTED = ("pfeddc", "promptfl", "local-prompts", "pfeddc-held")
PERSONAL = ("local-only", "local-prompts")
CLIENT = Guarantee("client", 8.0, 1e-5, 1.0, 1.0)
EXAMPLE = Guarantee("example", 8.0, 1e-5, 1.0, 1.0, 0.5, 2, 2)
SECURE = SecAggConfig("secure")


@cache
def agreement(name: str) -> Agreement:
    model = (
        victims.image_classifier() if name in PROMPTED else meta_model("bert-base", num_labels=3)
    )
    method = method_by_name(name)
    if method.adapt is not None:
        model = method.adapt(model)
    return Agreement("warned", describe(model), method, TrainArguments())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_warns_of_what_it_shares_without_noise(name: str) -> None:
    plain = agreement(name)
    shared = params_with_roles(plain.method.plan, plain.params, Role.SHARE)
    warning = study_exposure(plain)
    assert bool(warning) == bool(shared) == (name not in PERSONAL)
    explanation = fp.explain(plain.method.plan, plain.params, rounds=1)
    assert explanation.warning == explanation.json()["warning"] == warning
    assert " ".join(warning.split()) in " ".join(str(explanation).split())
    if not shared:
        return
    named = warning.partition("(")[2].partition(")")[0].split(", ")
    assert set(named) == {str(p.kind) for p in shared}
    assert "Without differential privacy, each update (" in warning and "label" in warning
    assert ("every token" in warning) == ("embed" in named)
    assert study_exposure(replace(plain, guarantee=EXAMPLE)) == ""
    try:
        hidden = replace(plain, secagg=SECURE)
    except FedplanError:
        return  # it cannot be summed securely
    assert "Without differential privacy, each sum of 3 or more sites (" in study_exposure(hidden)
    assert study_exposure(replace(hidden, guarantee=CLIENT)) == ""


def test_a_server_that_adds_the_noise_sees_updates_without_it() -> None:
    warning = study_exposure(replace(agreement("fedavg"), guarantee=CLIENT))
    assert warning.startswith("Before the server adds its noise, each update (")
