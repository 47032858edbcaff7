# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .client import KeyDirectory, ProtocolClient
from .config import (
    AGGREGATION_KINDS,
    MASKED_INPUT_STEP,
    NO_DEFENCE,
    SECAGG_STEPS,
    SecAggConfig,
    check_secagg_support,
    drift_tracked_kinds,
)
from .crypto import NodeKey, SecAggError, sha256_of
from .messages import read_terms_digest, to_json
from .progress import DiskProgressStore, RevealLog, RoundProgress
from .round import (
    EVALUATION_CHECKPOINT,
    ROUND_CHECKPOINT,
    SCORING_CHECKPOINT,
    ClientInput,
    SecureRound,
    simulate_secagg_round,
)
from .server import UnmaskedSums
from .terms import Slot, Terms
