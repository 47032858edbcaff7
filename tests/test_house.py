# SPDX-License-Identifier: Apache-2.0
"""Rules of the house, read from the package's own source."""

from __future__ import annotations

import ast
import importlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedplan

PACKAGE = Path(fedplan.__file__).parent
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "templates" not in p.parts)
FACES = [f for f in FILES if f.name == "__init__.py" and f.parent != PACKAGE]

# Imports flow one way: each package, or module of the root, may use those that stand before it.
ORDER = (
    *("errors", "seeds", "faces", "reader", "naming"),
    *("tensors", "storage", "models", "language", "data", "training", "methods", "privacy"),
    *("federation", "studies", "runners", "audits", "reports", "sites", "sweeps"),
    *("__init__", "parts", "testing", "console", "model_commands", "study_commands"),
    *("operation_commands", "audit_commands", "report_commands", "server_commands"),
    *("site_commands", "sweep_commands", "cli"),
)
APART = {("privacy", "methods")}
"""Neither of these two imports the other: a method is no promise, and a promise no method."""
LENT = {
    "tensors": """
        AUTO CARRY DTYPES Digests GRID HOST JSON LARGEST_SUM LARGEST_VALUE
        LARGEST_WEIGHT PIECES Place WORD Words add_words all_finite at_rest autocast
        beside brought chance checksum counts_of_words deterministic device_named
        device_of device_text device_word distances dtype_of forked integers is_rider
        looked_at nbytes numbers numbers_of param_of places_in plain rider riders_of
        same_bits scaler settled split_riders take_words viewed whole_digest wide_of
        widened widest words_of_counts
    """,
    "storage": """
        BrokenChain ChainFile Claim Entry Generation Head Process Read a_study_name
        alone claimed client_names explained folder_named head_file home_of keep_file
        make_folder mark_of_file now put_file reach read_chain read_head read_lines
        synced this_process
    """,
    "models": """
        CONFIG ITEMSIZE LowRank Preprocessing QUANTISED SETTINGS SHORT TASKS TEMPLATE
        TRAINED add_prompts aligned bare blocks_of buffers_of centre_of configuration
        configured drawn families_in family_named fetched graft is_hub_id is_quantised
        layers_of learn listen load_adapter mixes_rows moved places quantisation quiet
        read report require_rest save_adapter scales_in skeleton small_copy steadied
        untaught value_in whole written
    """,
    "language": """
        After Assign Best By Condition Crowd MANY Part Phase Roles Step Trait When
        adapter bias blocks body candidates certain common conditions fusion head key
        kinds_of lora_a lora_b mlp norm own phases_in phrase prompt query require_told
        rounds_ahead spelled_out stated text_of told_apart touched value
    """,
    "data": """
        Collate Column Hollow KINDS METRIC_NAMES Measure NO_LABEL OWN Own Seeded
        TASK_NAMES TableLook contents division is_among label_order label_text labels_in
        labels_of look_at model_loss named_columns names_in refitted require_packing
        require_sight rows some spread task_class to_train values where
    """,
    "training": """
        CONTROL DECAY LOOP_NAMES MOMENTUM OPTIMISER_NAMES PROBE_NAMES ROOM WRAP_NAMES
        adjust checkpointed is_public loop_named public_look wrap_named
    """,
    "methods": """
        ByResidual METHOD_NAMES SERVER_OPTIMISER_NAMES Sides Told hosts_of list_methods
        product_told server_optimiser_named sheet_of told_method
    """,
    "privacy": """
        Advert Adverts BOUNDS Boxes CHARGES Change Consent Consents Contribution
        Delivery Diary Directory Guard MaskedWords MaskingError MaskingServer
        MaskingSite Mechanism NOISES NodeKey Noise Opened Openings PartWords RoundNotes
        SECRET ShareGuard Slot Survivors Terms Unit Unmasking Unwritten Vote aggregate
        ballot capped counted derived digest_of needed node_public parts_of read_secret
        rehearsed require_pace secret_of unit_in
    """,
    "federation": """
        AGREEMENT ALL ANSWERS APPROVAL Account BEST Base Callback Closed DELTA DOCKET
        DRAWN Disclosure Docket EVALUATE EarlyStopping Egress Exam Fare FaultLog GRAVE
        HELLO Identity KEY KINDS Kept LETTERS LIVE LOWER Limits METRICS MaskedPoll
        MaskedSum Masker Metrics POLL_DOCKET Patience PlainSum RECORD ROLES RULES RUN
        Record RecordError RunState RunStatus SCORES SINGLE SMALL SPREADS STEPS STUDY
        SUMS Scores Scoring Sent SiteState SiteStatus Status UNMASKING UPDATE WORLD
        Warrant advert_of advert_said adverts_said agreements_in announced ask_to_stop
        asked_of base_of boxes_of boxes_said by_part by_senders caps_of changed_rows
        close_all closed_faults code_of consent_of consents_said cut delivery_said
        drifts_of emptied ended evaluate guard_of hear is_id joined journal_in keyed
        last_of last_told ledger_lines letter_in letter_message listed mark_of meant
        merge metrics_of newest_segment note_docket opened opening opening_faults
        other_versions own_values own_versions parsed parted personal_values place_of
        private_folder question read_agreement read_answers read_asked read_docket
        read_egress read_faults read_identity read_record read_status read_turn
        request_header request_message require_sound run_of said_of scored scores_of
        segment_number sent share_guard_of state_said stopping survivors_said together
        told tracker_named understood unlike_versions unmasking_of update_of warnings_of
        words_in world_values
    """,
    "studies": """
        Count DeviceName Given MethodSection Section Wanted WentOn agreed_run
        agreement_in as_fault begun carry_over continuing division_of exam_of flat
        found_in guarantee_of lay_over looked_at method_of new_study note_task odd
        open_study opened_run outline_of participation_of placed read_said read_toml
        require_fitting require_free scoring_of shares_of statement_of study_in study_of
        value_of write_run
    """,
    "runners": """
        ServerSection Site Worker Workers drive folder_of is_known link_in make_keys
        make_site_keys new_federation new_site noded private public_key read_site
        run_link run_study serve simulate table_of workers_of
    """,
    "reports": """
        Balance Bar Dot Drawing Figure Forecast GridCell GridRow HUES Html Page
        PageSection Scale Segment Series Shape Shown SiteRecord Stroke Words asked badge
        bar_chart byte_unit cell_grid differing drift_section duration facts_of
        follow_flower foreseen_of foretold harmless holdings_of in_order limits_said
        line_chart listed log_line mean_series megabytes millions moment paragraphs
        parts_table printable report roles_section said_of_study scaled screen
        seed_groups shortened spelled state stated table tag together told_of watched
        width_of
    """,
    "sites": """
        approvals_of examine is_home officer_page rejoin screen serve_site write_lock
    """,
    "sweeps": """
        follow_sweep ground_of is_sweep runs_in
    """,
}
"""What a package lends to those above it, beside what its face shows to everybody."""
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__", "hasattr"}
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "random", "yaml"}
UNSAFE_ARGUMENTS = {"trust_remote_code", "allow_pickle", "shell"}
VAGUE = {"utils", "util", "helpers", "common", "misc", "base"}
WITHOUT_TORCH = (
    *("fedplan", "fedplan.parts", "fedplan.cli", "fedplan.tensors.message", "fedplan.models"),
    *("fedplan.models.schema", "fedplan.models.layouts", "fedplan.language.resolution"),
    *("fedplan.language.parser", "fedplan.federation.codes", "fedplan.federation.fare"),
    *("fedplan.reports.explanation", "fedplan.runners.flower"),
)


def name_of(file: Path) -> str:
    """A module's name within the house, without `fedplan.`."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room(module: str) -> str:
    """The package of a module, or itself if it stands in the root."""
    return module.split(".")[0]


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """What a module imports of the house: from which module, and by which name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fedplan":
                    yield alias.name.removeprefix("fedplan").lstrip(".") or "__init__", ""
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedplan":
            module = (node.module or "").removeprefix("fedplan").lstrip(".")
            for alias in node.names:
                below = f"{module}.{alias.name}".lstrip(".")
                place = PACKAGE.joinpath(*below.split("."))
                if place.is_dir() or place.with_suffix(".py").is_file():
                    yield below, ""  # a module, of which anything may be used
                else:
                    yield module or "__init__", alias.name


def shown(package: str) -> set[str]:
    return set(importlib.import_module(f"fedplan.{package}").__all__)


def test_every_module_has_its_place() -> None:
    assert {room(name_of(file)) for file in FILES} == set(ORDER)
    assert not VAGUE & {part for file in FILES for part in name_of(file).split(".")}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_flow_one_way(file: Path) -> None:
    own = room(name_of(file))
    before = set(ORDER[: ORDER.index(own)])
    before -= {other for pair in APART if own in pair for other in pair}
    for module, name in imported(file):
        assert room(module) in before | {own}, (module, name)


def test_flower_and_the_worker_import_no_runner_above_them() -> None:
    """Subpackages stand by themselves: nothing of a runner but its own folder imports Flower's."""
    for file in FILES:
        if name_of(file).startswith("runners.") and not name_of(file).startswith("runners.flower"):
            assert not any(m.startswith("runners.flower") for m, _ in imported(file)), file


@pytest.mark.parametrize("package", [p for p in ORDER if (PACKAGE / p).is_dir()])
def test_others_import_what_a_package_shows_or_lends(package: str) -> None:
    used = {
        name
        for file in FILES
        if room(name_of(file)) != package
        for module, name in imported(file)
        if room(module) == package and name != "*"
    }
    lent = set(LENT.get(package, "").split())
    assert used - {""} - shown(package) == lent, "the table of what is lent is out of date"
    assert not any(name.startswith("_") for name in used)


@pytest.mark.parametrize("file", FACES, ids=name_of)
def test_a_face_is_one_sentence_and_what_it_says(file: Path) -> None:
    tree, package = ast.parse(file.read_text()), importlib.import_module(f"fedplan.{name_of(file)}")
    doc = ast.get_docstring(tree) or ""
    assert len(doc.splitlines()) == 1 and doc.endswith("."), doc
    typed = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedplan.")
        for alias in node.names
    } - {"face"}
    assert typed == set(package.__all__)
    for name in package.__all__:
        found = getattr(package, name)
        assert not isinstance(found, type(fedplan)), f"{name} is hidden by a module of its name"
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_no_two_public_classes_have_one_name() -> None:
    seen = dict[str, Path]()
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in seen, (node.name, file, seen[node.name])
                seen[node.name] = file


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_these_import_no_torch(module: str) -> None:
    said = f"import {module}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", said], check=True)


@pytest.mark.parametrize(("package", "place"), [("flwr", "flower"), ("ray", "actors.py")])
def test_flower_stays_in_one_folder_and_ray_in_one_module(package: str, place: str) -> None:
    for file in FILES:
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        }
        assert place in file.parts or package not in names, file


def test_modules_are_small() -> None:
    lines = {str(file): len(file.read_text().splitlines()) for file in FILES}
    assert statistics.median(lines.values()) < 200, lines
    assert max(lines.values()) < 400, lines


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_unsafe_is_called(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in UNSAFE_NAMES, node.lineno
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & UNSAFE_MODULES, node.lineno
        if isinstance(node, ast.ImportFrom):
            assert node.module not in UNSAFE_MODULES, node.lineno
        if isinstance(node, ast.keyword) and node.arg in UNSAFE_ARGUMENTS:
            assert isinstance(node.value, ast.Constant) and node.value.value is False, node.lineno


def test_weights_and_tokenizers_are_loaded_in_one_place() -> None:
    """What may be looked up, and that no code beside weights is run, is said there."""
    calls = {
        (name_of(file), ast.unparse(node.func.value))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "from_pretrained"
    }
    # peft's configuration is a file of JSON in a folder that is there.
    assert calls == {("models.hub", "loader"), ("models.grafting", "peft.PeftConfig")}


def test_every_public_name_is_documented() -> None:
    for name in fedplan.__all__:
        assert getattr(fedplan, name).__doc__, name


def test_every_kind_and_call_of_the_language_has_a_word() -> None:
    from fedplan.language import parts
    from fedplan.models import Kind

    # What no anatomy explains has a kind, and no word: no plan can mean it.
    assert set(Kind) - {Kind.UNKNOWN} <= set(parts.WORDS)
    assert Kind.UNKNOWN not in parts.WORDS
    for word in parts.WORDS:
        assert getattr(parts, word) == parts.Word(word)
