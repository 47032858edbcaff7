# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .accounting.accountant import NOISE_MULTIPLIERS
from .accounting.budget import Budget, Unit, read_budget_unit
from .dpsgd.fit import ReportFault, require_dp_sgd, require_train_arguments
from .guarantee import Guarantee, evaluation_name, vote_name
from .guard import (
    CHARGES_FILE,
    SECRET_FILE,
    ClientGuard,
    DistributedGuard,
    Guard,
    NoExamples,
    OneExample,
    ServerGuard,
    contain_faults,
)
from .mechanisms.clipping import CLIPPING_NORMS, capped_weight
from .mechanisms.gaussian import Change, GaussianMechanism
from .mechanisms.noise import derive_key, load_or_create_secret, read_secret
from .mechanisms.vote import make_ballot
from .statement import HISTORY, PRIVACY_FILE, SPENT, Expense, Statement, expenses_from_json
