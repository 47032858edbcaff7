# SPDX-License-Identifier: Apache-2.0
"""A policy admits a study if, and only if, no turn of it does what the policy forbids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import duals
import pytest
import torch
import transformers
import zoo
from clients import few, loss
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from sentences import fitting, plan_strategy
from settings import PROMPTED, SETTINGS
from sites import PRIVATE, study_text
from studies import offered

from fedplan.errors import FedplanError, PlanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.records import ROLE_BY_LETTER, TurnRecord
from fedplan.federation.ledger.segments import read_segment
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.language.resolution import check_plan, phase_names, resolve
from fedplan.methods.method import Method
from fedplan.methods.registry import METHODS, method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Kind, Params
from fedplan.runners.local import Federation
from fedplan.sites.policy import (
    Policy,
    policy_violations,
    read_policy,
    shareable_params,
)
from fedplan.studies.experiment import build_experiment, outline_agreement
from fedplan.studies.schema import ConfigError, parse_toml, study_from_dict
from fedplan.tensors.named import param_key
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import sgd

ROUNDS = 3
PACE = TrainArguments(sgd(), lr=1e-2, batch_size=2, steps=1)
MASKED = '[aggregation]\nkind = "secure"\nthreshold = 5'
CLIENTS = 'unit = "client"\nepsilon = 900.0\nnoise_multiplier = 1.0\n'


def played(name: str, folder: Path) -> tuple[Agreement, set[str], set[str]]:
    """A method, the kinds that its ledger says were shared, and those of the values that were."""
    torch.manual_seed(0)
    made, prompted = method_by_name(name, SETTINGS.get(name)), name in PROMPTED
    model: Any = duals.build("clip") if prompted else zoo.build("bert")
    model = made.adapt(model) if made.adapt else model
    agreement = Agreement("policy", describe(model), made, PACE)
    rows = duals.pictures_of("client-0", "client-1") if prompted else few("bert", 2)
    asked = duals.ASKED.loss if prompted else loss
    whole = Federation(agreement, model, rows, asked, folder, rounds=ROUNDS, keep_replies=True)
    kinds, sent = {p.key: str(p.kind) for p in agreement.params}, set[str]()
    for _ in range(ROUNDS):
        round_state = whole.run_round()
        for client, request in round_state.cohort.items():
            answered = whole.clients[client].journal.reply_for(request.name)
            assert answered is not None
            sent |= {kinds[param_key(key)] for key in answered[0]}
        whole.commit(round_state)
    turns = [r for r in read_segment(folder / "ledger.jsonl")[1] if isinstance(r, TurnRecord)]
    told = {
        str(param.kind)
        for turn in turns
        for param, letter in zip(agreement.params, turn.roles, strict=True)
        if ROLE_BY_LETTER[letter] is Role.SHARE
    }
    return agreement, told, sent


@pytest.mark.parametrize("name", METHODS)
def test_a_part_is_barred_if_and_only_if_some_turn_of_a_run_shares_it(
    name: str, tmp_path: Path
) -> None:
    agreement, told, sent = played(name, tmp_path)
    assert sent <= told, "nothing is sent that the ledger does not say, riders neither"
    study = offered(rounds=ROUNDS)
    if "adapter" in told:  # an adapter is of what it changes too
        names = {p.name for p in agreement.params if str(p.kind) == "adapter"}
        hosts = {p: p.name.rpartition(".")[0].removesuffix(".base_layer") for p in agreement.params}
        told = told | {
            str(p.kind)
            for p, place in hosts.items()
            if any(n.startswith(f"{place}.") for n in names)
        }
    for kind in {str(p.kind) for p in agreement.params}:
        against = policy_violations(
            Policy(never_share=[kind]), study, agreement, Turn(client="client-0")
        )
        assert bool(against) == (kind in told), (kind, against)


PARAMS: Params = describe(zoo.build("bert"))


@settings(max_examples=often(1000))
@given(data=st.data())
def test_what_no_turn_can_share_is_admitted_and_nothing_else(data: st.DataObject) -> None:
    plan = data.draw(plan_strategy(st.sampled_from(fitting(PARAMS))))
    try:
        check_plan(plan, PARAMS)
    except PlanError:
        return
    agreement = Agreement("policy", PARAMS, Method(plan), PACE)
    rounds = data.draw(st.integers(1, 9))
    found = shareable_params(agreement, rounds)
    scores = {block: data.draw(st.floats(-1, 1)) for block in agreement.blocks}
    turn = Turn(
        round=data.draw(st.integers(1, rounds)),
        client=data.draw(st.sampled_from(["north", "south", "elsewhere"])),
        phase=data.draw(st.sampled_from(["", *phase_names(plan)])),
        traits=data.draw(
            st.dictionaries(st.sampled_from(["north", "7"]), st.sampled_from(["7", "x"]))
        ),
        scores=scores,
    )
    roles = resolve(plan, PARAMS, turn)
    assert {p for p in PARAMS if roles[p] is Role.SHARE} <= found.keys()
    alone = shareable_params(agreement, rounds, replace(turn, scores=None))
    assert {p for p in PARAMS if roles[p] is Role.SHARE} <= alone.keys() <= found.keys()
    for param, first in list(found.items())[:3]:
        if param.block_id is not None:
            chosen = {block: float(block == param.block_id) for block in agreement.blocks}
        else:
            chosen = scores
        # With this block before all others the turn that is named does share it.
        assert resolve(plan, PARAMS, replace(first, scores=chosen))[param] is Role.SHARE


def test_a_head_that_is_tied_to_the_embedding_does_not_leave_by_that_name() -> None:
    params = describe(zoo.build("gpt2"))
    assert any(p.tied for p in params)
    agreement = Agreement("policy", params, method_by_name("fedavg", {}), PACE)
    assert policy_violations(Policy(never_share=["head"]), offered(), agreement)


def test_a_part_is_any_part_of_the_language_and_the_sentence_names_what_leaves() -> None:
    study = offered("chain(share(), keep(head), when(~after(2), keep(last(1) & mlp)))")
    agreement = outline_agreement(study)
    (sentence,) = policy_violations(Policy(never_share=["last(1) & mlp", "head"]), study, agreement)
    assert "last(1) & mlp must never leave" in sentence and "from round 3 on" in sentence
    assert not policy_violations(Policy(never_share=["head"]), study, agreement)
    assert not policy_violations(Policy(never_share=["prompt"]), study, agreement), (
        "not in this model"
    )


def test_traits_are_those_of_the_site() -> None:
    study = offered('by("ward", {"3": share()}, keep())')
    agreement, policy = outline_agreement(study), Policy(never_share=["head"])
    assert policy_violations(policy, study, agreement)
    assert policy_violations(policy, study, agreement, Turn(client="north", traits={"ward": "3"}))
    assert not policy_violations(
        policy, study, agreement, Turn(client="north", traits={"ward": "4"})
    )


def test_a_trait_that_a_study_gives_a_site_counts_unless_the_site_says_otherwise() -> None:
    study = offered('by("ward", {"3": share()}, keep())')
    given = study.clients.model_copy(update={"traits": {"north": {"ward": "3"}}})
    study = study.model_copy(update={"clients": given})
    agreement, policy = outline_agreement(study), Policy(never_share=["head"])
    assert policy_violations(policy, study, agreement, Turn(client="north"))
    assert not policy_violations(
        policy, study, agreement, Turn(client="north", traits={"ward": "4"})
    )


def test_rounds_without_end_are_judged_in_no_time() -> None:
    study = offered("chain(keep(), when(after(900000), share()))", rounds=10**9)
    assert policy_violations(Policy(never_share=["head"]), study, outline_agreement(study))
    many = ", ".join(["share()", *["keep()"] * 12])
    plans = ", ".join(f"cycle({', '.join(['keep()'] * n)})" for n in (7, 11, 13, 17))
    study = offered(f"chain({plans}, cycle({many}))", rounds=10**9)
    assert policy_violations(Policy(never_share=["head"]), study, outline_agreement(study))


@pytest.mark.parametrize(
    ("policy", "change", "words"),
    [
        ({"limits": {"rounds": 2}}, {}, "limits.rounds is 2, but the study has 3 rounds"),
        ({"limits": {"rounds": 3}}, {}, ""),
        (
            {"limits": {"bytes": 1000}},
            {},
            "limits.bytes is .* MB, but the study sends at least .* MB",
        ),
        ({"limits": {"bytes": 10**6}}, {}, ""),
        (
            {"limits": {"epsilon": 2.0}},
            {},
            "limits.epsilon is 2, but the study has no differential privacy",
        ),
        ({"limits": {"epsilon": 2.0}}, {"privacy": PRIVATE}, ""),
        (
            {"limits": {"epsilon": 1e-3}},
            {"privacy": PRIVATE},
            "but the study spends epsilon .* at delta 1e-05",
        ),
        (
            {"limits": {"epsilon": 99.0}},
            {"privacy": CLIENTS},
            "no differential privacy that protects this site's examples",
        ),
        ({"limits": {"epsilon": 99.0}}, {"privacy": CLIENTS, "data": MASKED}, ""),
        (
            {"limits": {"epsilon": 1e-3}},
            {"privacy": CLIENTS, "data": MASKED},
            "but the study spends epsilon .* at delta 1e-05",
        ),
        (
            {"reveal_example_count": False},
            {},
            "each update of the study reveals this site's number",
        ),
        ({"reveal_example_count": False}, {"privacy": PRIVATE}, ""),
        (
            {"reveal_example_count": False},
            {"data": MASKED},
            "reveals the sum of the sites' numbers",
        ),
        ({"reveal_example_count": False}, {"privacy": PRIVATE, "data": MASKED}, ""),
        ({"reveal_example_count": False}, {"data": f"{MASKED}\nequal_weights = true"}, ""),
        ({"min_sites_in_sum": 3}, {"data": MASKED}, ""),
        ({"min_sites_in_sum": 4}, {"data": MASKED}, "the server may see a sum of only 3 sites"),
        ({"min_sites_in_sum": 3}, {"data": MASKED[:-13]}, "a round has 1 clients and secure"),
        ({"colluders": 1}, {}, "colluders is 1, but the study has no secure aggregation"),
        (
            {"colluders": 1},
            {"data": MASKED},
            "colluders is 1, but the study's aggregation.colluders is 0",
        ),
        ({"colluders": 1}, {"data": f"{MASKED}\ncolluders = 1"}, ""),
        (
            {"require_privacy": {"unit": "example", "epsilon": 9.0}},
            {},
            "has no differential privacy",
        ),
        (
            {"require_privacy": {"unit": "client", "epsilon": 1e4}},
            {"privacy": PRIVATE},
            "require_privacy.unit is 'client', but the study protects each example",
        ),
        (
            {"require_privacy": {"unit": "example", "epsilon": 9.0}},
            {"privacy": PRIVATE},
            "asks for epsilon 9 at delta 1e-05, but the study promises epsilon 900 at delta 1e-05",
        ),
        ({"require_privacy": {"unit": "example", "epsilon": 900.0}}, {"privacy": PRIVATE}, ""),
    ],
)
def test_limits_and_privacy(policy: dict[str, Any], change: dict[str, Any], words: str) -> None:
    study = offered(**change)
    found = policy_violations(Policy.model_validate(policy), study, outline_agreement(study))
    assert len(found) == bool(words), found
    if words:
        import re

        assert re.search(words, found[0]), found


@pytest.mark.parametrize("said", ["colluders = 1", "equal_weights = true"])
def test_what_only_masks_can_keep_is_refused_without_them(said: str) -> None:
    """Else a site whose policy asks for it would let a study in that shows its update."""
    with pytest.raises(ConfigError, match="sums are plain"):
        offered(data=f"[aggregation]\n{said}")


LORA = {"type": "lora", "target": "query | value", "r": 2}
SAID: dict[str, dict[str, Any]] = {
    "plain": {},
    "a method's adapter": {"method": {"name": "fedex-lora"}},
    "halves": {"model": {"dtype": "bfloat16"}, "method": {"name": "fedit"}},
    "a study's adapter": {"model": {"dtype": "float16", "adapter": LORA}},
    "dora": {"model": {"adapter": {**LORA, "use_dora": True}}},
    "ia3": {"model": {"adapter": {"type": "ia3", "target": "query | mlp"}}},
    "frozen batch norm": {"model": {"freeze_batch_norm": True}},
    "like another": {"model": {"layer_map_like": "vit"}},
    "weights": {"model": {"path": "weights"}},
}


@pytest.mark.parametrize("case", SAID)
def test_an_outline_has_the_params_of_the_model_itself(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = parse_toml(study_text(privacy=""))
    model = said["model"] | SAID[case].get("model", {})
    if case == "weights":
        monkeypatch.chdir(tmp_path)
        build_experiment(study_from_dict(said)).model.save_pretrained("weights")  # type: ignore[operator]
        model = SAID[case]["model"]
    study = study_from_dict(said | SAID[case] | {"model": model})
    assert outline_agreement(study).params == build_experiment(study).agreement.params


def test_an_outline_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()

    def loads(name: str, *, local_files_only: bool, **settings: Any) -> None:
        asked.append(local_files_only)
        raise OSError("not here")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", loads)
    said = parse_toml(study_text(privacy="")) | {"model": {"path": "hub:org/model"}}
    with pytest.raises(FedplanError, match="cannot be used for image-classification: not here"):
        outline_agreement(study_from_dict(said))
    assert asked == [True]
    saved = {"path": "hub:org/model", "adapter": {"path": "hub:org/adapter"}}
    with pytest.raises(FedplanError, match="'hub:org/model' is on the Hub"):
        outline_agreement(study_from_dict(said | {"model": saved}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "never_shared = []",
            "line 1: never_shared: there is no field .never_shared.: did you mean never_share",
        ),
        ('never_share = "head"', "never_share: Input should be a valid list"),
        ('never_share = ["heads"]', "never_share.0: .*heads"),
        ("auto_approve = 1", "auto_approve: Input should be a valid boolean"),
        (
            "[limits]\nround = 3",
            "line 2: limits.round: there is no field .round.: did you mean rounds",
        ),
        ("[limits]\nepsilon = -1.0", "limits.epsilon: "),
        ('[require_privacy]\nunit = "row"\nepsilon = 1.0', "require_privacy.unit: "),
        ("metrics = [", "cannot be read"),
        ("", ""),
    ],
)
def test_a_policy_is_read_strictly(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text)
    if not words:
        assert read_policy(tmp_path / "policy.toml") == Policy()
        return
    with pytest.raises(ConfigError, match=words):
        read_policy(tmp_path / "policy.toml")


def test_without_a_file_there_is_no_policy(tmp_path: Path) -> None:
    with pytest.raises(FedplanError, match="does not exist: write this site's policy"):
        read_policy(tmp_path / "policy.toml")


def test_a_policy_says_itself_in_words() -> None:
    said = {"never_share": ["head"], "metrics": ["loss"], "approvers": ["ada"]}
    text = "\n".join(Policy.model_validate(said).summary_lines())
    assert "approval of a person: ada" in text and "never leave: head" in text
    assert "from 20 examples on: loss" in text and Kind.HEAD in text
