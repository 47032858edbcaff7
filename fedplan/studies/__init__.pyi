# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .dictionary import dictionary, statistics_refusal
from .evaluation import (
    absence_reason,
    evaluate_run,
    is_evaluated,
    predict_all,
    read_evaluation,
    write_evaluation,
)
from .experiment import (
    Experiment,
    build_experiment,
    make_eval_set,
    make_method,
    make_participation,
    make_scoring,
    outline_agreement,
    privacy_guarantee,
    privacy_statement,
    require_usable_batches,
    validated_models,
)
from .export import export_run, load_run_model, load_run_values
from .federated_data import EMPTY_CLIENTS, compute_split, load_federated_data
from .federation_sections import (
    AggregationConfig,
    ClientsConfig,
    DefenceConfig,
    EvaluateConfig,
    PrivacyConfig,
)
from .field_types import Count, PartText, Positive, named_objects
from .in_memory import InMemoryInputs
from .model_card import describe_export
from .record import (
    DATA_FILE,
    ENVIRONMENT_FILE,
    INITIAL_SCORES_FILE,
    data_record,
    environment_changes,
    environment_faults,
    read_data_record,
    read_initial_scores,
    read_sessions,
    record_session,
    write_record,
)
from .resume import continue_study, has_progress, import_kept_params, open_study, prepare_folder
from .run import (
    SWEEP_FILE,
    RunAdvanced,
    RunReader,
    claim_run_folder,
    read_consistently,
    read_earlier_expenses,
    read_run,
    read_run_agreement,
    read_run_study,
    sweep_expenses,
    update_run_files,
    write_run_files,
)
from .run_scores import (
    CLIENT_COLUMNS,
    CLIENT_TESTS,
    COMMON_TEST,
    GLOBAL_PREFIXES,
    SPREAD_PREFIXES,
    RunScore,
    RunScores,
    ScoreKind,
    ScoreRules,
    is_personal,
    run_scores,
    score_rules,
    score_text,
    untrained_note,
    untrained_params,
)
from .schema import (
    Study,
    flatten_fields,
    read_json_object,
    read_study,
    read_study_values,
    resolve_paths,
    study_from_dict,
)
from .section import (
    SCHEMA_LINE,
    ConfigError,
    DeviceName,
    Section,
    as_value_error,
    parse_section,
    parse_toml,
    parse_toml_value,
    set_field,
)
from .sections import TrainConfig
from .starter import StudyOptions, new_study
from .stored_model import MODEL_FOLDER, STORED_FILE, store_model, stored_files

__all__ = ["build_experiment"]
