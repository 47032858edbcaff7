# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .aggregation.defence import RULES, Defence
from .aggregation.factory import open_partial_sum
from .aggregation.mean import MeanAggregator
from .aggregation.protocol import Aggregator, TensorsAndJson
from .aggregation.robust import find_capped_weights, group_weights, params_by_senders
from .aggregation.secure import SecureAggregator, SecureSum, open_counts_sum
from .aggregation.secure_input import scoring_slots
from .agreement import Agreement, require_private_method
from .client import (
    KEY,
    SCORE_COUNTS,
    Client,
    ClientPrivacy,
    EvalSet,
    MetricPolicy,
    TrainSetup,
    last_trained_round,
    load_client_state,
    make_example_guard,
    make_noise_guard,
    require_private_setup,
)
from .client_round import keep_rejected_turn, score_layers, train_round
from .edges import (
    accept_sum,
    edge_request_message,
    open_edge_round,
    read_edge_request,
    read_sum,
    report_sum,
    sum_limit,
    sum_message,
)
from .endpoint import (
    COMMITTED_ROUND,
    EVALUATE,
    EVALUATED_ROUND,
    HELLO,
    TRAIN,
    Endpoint,
    only_run_folder,
    open_journal,
    read_personal_model,
    site_run_folder,
)
from .evaluation import (
    BestBy,
    EvalConfig,
    Scores,
    SiteScores,
    combine_scores,
    evaluate_client,
    join_validation,
    make_eval_request,
    metrics_from_json,
)
from .global_state import (
    BEST,
    METRICS,
    GlobalState,
    continued_state,
    global_values,
    personal_values,
)
from .identity import (
    GLOBAL_FOLDER,
    RUN_FILE,
    STUDY,
    RunIdentity,
    changed_examples,
    closed_rounds,
    is_run_id,
    read_identity,
)
from .ledger.callbacks import (
    COHORT_PREFIXES,
    PER_CLIENT_PREFIXES,
    VALIDATION_REMEDY,
    EarlyStopping,
    make_tracker,
)
from .ledger.digests import (
    ExamplesSummary,
    InitialModel,
    digest_initial_model,
    examples_digest,
    keyed_digest,
    summarize_examples,
)
from .ledger.egress import (
    AGREEMENT,
    DELTA,
    EGRESS_LOG,
    REPLIES,
    SCORES,
    STATISTICS,
    UNMASKING,
    UPDATE,
    Account,
    Answer,
    Authorization,
    EgressEntry,
    EgressLog,
    Limits,
    agreement_folders,
    bytes_by_part,
    content_digest,
    error_entry,
    read_agreement,
    read_egress,
    read_replies,
    require_complete_account,
    unaccounted_answers,
)
from .ledger.events import (
    Callback,
    ClientChanged,
    CommittedRound,
    Event,
    Notice,
    RoundStarted,
    RunChanged,
    RunStalled,
    RunStarted,
)
from .ledger.faults import (
    APPROVAL,
    KINDS,
    FaultLog,
    decode_reason,
    describe_code,
    encode_code,
    error_code_of,
    error_fields,
    read_faults,
)
from .ledger.history import (
    Metrics,
    Row,
    join_scores,
    ledger_rows,
    make_warnings,
    recent_drifts,
    run_failure,
)
from .ledger.records import (
    ROLE_BY_LETTER,
    ROLE_LETTERS,
    WHOLE_SUM,
    Record,
    RecordError,
    RoundRecord,
    TurnRecord,
    join_digests,
    parse_line,
    read_record,
    read_turn,
    split_digests,
)
from .ledger.segments import (
    closed_segment_faults,
    last_ledger_round,
    ledger_lines,
    newest_segment,
    segment_header_faults,
    segment_number,
)
from .ledger.status import (
    LIVE,
    RunState,
    RunStatus,
    SiteState,
    ask_to_stop,
    read_status,
    read_stop_request,
    site_state_from_reason,
    write_status,
)
from .ledger.stream import EventStream, StopRequested
from .messages import (
    ClientStateMissing,
    Request,
    RequestRefused,
    UpdateRejected,
    block_scores_from_json,
    block_scores_to_json,
    local_versions,
    package_differences,
    protocol_mismatch,
    read_request,
    read_run_id,
    read_update,
    request_header,
    request_message,
    turn_digest,
)
from .participation import Participation, Timeouts
from .rounds import (
    RoundState,
    accept_masked_report,
    accept_update,
    announce_phase,
    close_round,
    make_request,
)
from .score_sums import SENDERS, ScoreVector
from .secure_client import SecAggClient
from .server import EVALUATION, WRITE_ONCE_FILES, Server
from .wire_cost import WireCost
