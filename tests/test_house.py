# SPDX-License-Identifier: Apache-2.0
"""Rules of the house, read from the package's own source."""

from __future__ import annotations

import ast
import importlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedplan

PACKAGE = Path(fedplan.__file__).parent
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "templates" not in p.parts)
FACES = [f for f in FILES if f.name == "__init__.py" and f.parent != PACKAGE]

# Imports flow one way: each package, or module of the root, may use those that stand before it.
ORDER = (
    *("errors", "seeds", "lazy", "reader", "naming"),
    *("tensors", "storage", "models", "language", "data", "training", "methods", "privacy"),
    *("secagg", "federation", "studies", "runners", "audits", "reports", "sites", "sweeps"),
    *("run", "__init__", "parts", "testing", "cli"),
)
APART = {("privacy", "methods")}
"""Neither of these two imports the other: a method is no promise, and a promise no method."""
LENT = {
    "tensors": """
        AUTO CARRY_BITS CODED_PART_NAMES CPU DTYPES DigestCache GRID JSON MAX_SUM_STEPS
        MAX_VALUE MAX_WEIGHT TensorEntry WORD Words add_words all_finite autocast
        aux_name aux_names check_device_name checksum counts_from_words deterministic
        device_description dtype_name eval_mode fork_rng_state full_digest grad_scaler
        ints_from_words is_aux model_device move_model nbytes only_aux param_key
        parse_entries peak_steps_and_squared_distances plain read_floats read_ints
        resolve_device rng_state same_bits split_aux squared_distances subtract_words
        sum_dtype tensor_view to_device widen_words words_from_counts words_from_ints
    """,
    "storage": """
        DamagedLog FolderLock LogEntry LogHead Process TensorsAndMeta
        acquire_folder_lock client_state_folder current_process failpoint
        file_size_and_digest head_file locked_folder make_folder read_head
        read_json_lines safe_folder_name sync_folder timestamp utc_now
        validate_client_names validate_study_name wrap_disk_errors write_atomic
        write_if_changed
    """,
    "models": """
        CONFIG ITEMSIZE Preprocessing QUANTIZATIONS SETTINGS SHORT_NAMES TASK_CLASSES
        TEMPLATE TRAINABLE_DTYPES adapter_families adapter_family add_adapter
        add_prompts align_mask attention_shift block_modules capture_attention
        copy_buffers image_mean_std image_tensor is_hub_id is_quantized load_adapter
        load_model_config load_pretrained lora_scales make_peft_config manifest_json
        merge_and_dequantize meta_model mixes_examples no_progress_bars param_value
        pin_packed_layout proposal_report quantization_config read_manifest
        register_study_layer_map require_unchanged_buffers restore_layer_maps
        save_adapter small_model_like strip_hub_prefix token_mask
    """,
    "language": """
        After Assign Best By Condition MAX_ROUNDS_CHECKED Part Participants Phase Roles
        Step Trait When adapter bias blocks body candidate_blocks canonical_text
        certain_roles class_representatives client_classes common format_call
        format_dataclass fusion head key lora_a lora_b mlp norm own params_with_roles
        phase_names plan_conditions prompt query require_known_part rounds_to_check
        value with_text
    """,
    "data": """
        CUSTOM_KIND CustomTask METRIC_NAMES PARTITION_KINDS SeededExamples
        SparseExamples TASK_NAMES TableSchema adapt_task class_names column_values
        epoch_steps example_digests filter_rows infer_schema label_names label_sort_key
        label_text label_values matches_any metric_spread model_loss partition_table
        prefetch require_attention_mask require_packing_support sample_rows select_rows
        split_step task_class token_lengths training_mask
    """,
    "training": """
        CLIENT_HOOK_NAMES CONTROL DECAY DEFAULT_MEGABYTES LOOP_NAMES MOMENTUM
        OPTIMIZER_NAMES PROBE_NAMES adjust_gradients data_independent_input
        get_client_hook get_training_loop is_data_independent use_gradient_checkpointing
    """,
    "methods": """
        LoraFactors LoraLayer METHOD_REGISTRY MeansAndResidual RecordedMethod
        SERVER_OPTIMIZER_REGISTRY hosts_of list_methods lora_layers
        make_server_optimizer method_info parse_product_rule parse_recorded_method
    """,
    "privacy": """
        CHARGES_FILE CLIPPING_NORMS Change DistributedGuard GaussianMechanism Guard
        NOISE_MULTIPLIERS SECRET_FILE SPENT Unit capped_weight derive_key
        load_or_create_secret make_ballot read_budget_unit read_secret
        require_train_arguments
    """,
    "secagg": """
        AGGREGATION_KINDS KeyDirectory MASKED_INPUT_STEP NodeKey ROUND_CHECKPOINT
        RevealLog RoundProgress SCORING_CHECKPOINT SECAGG_STEPS check_secagg_support
        drift_tracked_kinds read_terms_digest sha256_of to_json
    """,
    "federation": """
        AGREEMENT APPROVAL Account Aggregator Authorization BEST BestBy COHORT_PREFIXES
        Callback ClientChanged ClientPrivacy CommittedRound DELTA EGRESS_LOG EVALUATE
        EarlyStopping EgressLog EvalConfig EvalSet Event EventStream FaultLog
        GLOBAL_FOLDER HELLO InitialModel KEY KINDS LIVE LOWER_IS_BETTER Limits METRICS
        MeanAggregator MetricPolicy Metrics Notice PER_CLIENT_PREFIXES REPLIES
        ROLE_BY_LETTER ROLE_LETTERS RULES RUN_FILE Record RecordError RoundStarted
        RunChanged RunIdentity RunStalled RunState RunStatus SCORES SPREADS STUDY Scores
        SecAggClient SecureAggregator SiteState TensorsAndJson Timeouts TrainSetup
        UNMASKING UPDATE WHOLE_SUM WRITE_ONCE_FILES WireCost accept_masked_report
        agreement_folders announce_phase ask_to_stop block_scores_from_json
        block_scores_to_json bytes_by_part changed_examples closed_segment_faults
        combine_scores decode_reason describe_code digest_initial_model encode_code
        error_code_of error_entry error_fields evaluate_client examples_digest
        find_capped_weights global_values group_weights is_run_id join_digests
        join_scores keyed_digest last_ledger_round ledger_lines ledger_rows
        local_versions make_eval_request make_example_guard make_noise_guard
        make_tracker make_warnings metrics_from_json newest_segment only_run_folder
        open_journal open_partial_sum package_differences params_by_senders parse_line
        personal_values protocol_mismatch read_agreement read_egress read_faults
        read_identity read_personal_model read_record read_replies read_request
        read_run_id read_status read_stop_request read_turn read_update recent_drifts
        request_header request_message require_private_method segment_header_faults
        segment_number site_run_folder site_state_from_reason split_digests turn_digest
    """,
    "studies": """
        AggregationConfig ClientsConfig Count DefenceConfig DeviceName EvaluateConfig
        InMemoryInputs PrivacyConfig RunAdvanced Section StudyOptions TrainConfig
        as_value_error claim_run_folder compute_split continue_study flatten_fields
        has_progress import_kept_params load_federated_data load_run_model make_eval_set
        make_method make_participation make_scoring named_objects new_study open_study
        outline_agreement parse_toml parse_toml_value prepare_folder privacy_guarantee
        privacy_statement read_consistently read_run_agreement read_run_study
        read_study_values require_usable_batches resolve_paths set_field study_from_dict
        unserializable_reason update_run_files write_run_files write_task_file
    """,
    "runners": """
        PoolConfig ProcessTransport ServerSection Site SiteRuntime is_key_registered
        load_site_table make_keys make_pool_config make_site_keys new_federation
        new_site private_umask read_public_key read_site read_superlink run_on_superlink
        run_superlink run_supernode serve_tasks site_study_folder
    """,
    "reports": """
        Bar Drawing Forecast GridCell GridRow HUES Page PageBlock PageFigure PageSection
        RoleFigure Series StageForecast WIDTHS bar_chart block byte_unit cell_grid
        data_distribution differing_fields drift_section duration explain_plan
        explain_study format_log_entry group_by_seed interval_chart line_chart
        make_console mean_series megabytes millions parse_since parts_table
        read_privacy_statement read_run_facts replace_control_chars report roles_section
        round_spans run_flower_with_progress sort_params spreadsheet_safe study_fields
        watch_report write_privacy_statement
    """,
    "sites": """
        allow_rejoin check_site compliance_page doctor_table is_site_state
        read_egress_report serve_site site_approvals
    """,
    "sweeps": """
        find_run_folders is_sweep read_base_study sweep_with_progress
    """,
}
"""What a package lends to those above it, beside what its face shows to everybody."""
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__", "hasattr"}
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "random", "yaml"}
UNSAFE_ARGUMENTS = {"trust_remote_code", "allow_pickle", "shell"}
VAGUE = {"utils", "util", "helpers", "common", "misc", "base"}
WITHOUT_TORCH = (
    *("fedplan", "fedplan.parts", "fedplan.cli", "fedplan.tensors.message", "fedplan.models"),
    *("fedplan.models.catalog", "fedplan.models.layer_maps", "fedplan.language.resolution"),
    *(
        "fedplan.language.parser",
        "fedplan.federation.ledger.faults",
        "fedplan.federation.wire_cost",
    ),
    *("fedplan.reports.explanation", "fedplan.runners.flower"),
)


def name_of(file: Path) -> str:
    """A module's name within the house, without `fedplan.`."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room(module: str) -> str:
    """The package of a module, or itself if it stands in the root."""
    return module.split(".")[0]


@cache
def imported(file: Path) -> list[tuple[str, str]]:
    """What a module imports of the house: from which module, and by which name."""
    return list(_imported(file))


def _imported(file: Path) -> Iterator[tuple[str, str]]:
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
    } - {"lazy_exports"}
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


@pytest.mark.parametrize(("package", "place"), [("flwr", "flower"), ("ray", "ray_actors.py")])
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
    assert statistics.median(lines.values()) < 250, lines
    assert max(lines.values()) < 500, lines


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
    assert calls == {("models.catalog", "loader"), ("models.adapters", "peft.PeftConfig")}


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
