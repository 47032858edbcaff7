# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .activation_cache import DEFAULT_MEGABYTES, ActivationCache
from .client_hooks import (
    CLIENT_HOOK_NAMES,
    CONTROL,
    alternate,
    control_variates,
    get_client_hook,
    proximal,
)
from .fit import (
    ClientHook,
    Fit,
    FitResult,
    Job,
    TrainArguments,
    adjust_gradients,
    plain_fit,
    use_gradient_checkpointing,
)
from .freezing import TrainableParams, trainable
from .loops import LOOP_NAMES, ExamplesDataset, attach, get_training_loop
from .optimizers import (
    DECAY,
    MOMENTUM,
    OPTIMIZER_NAMES,
    ClientOptimizer,
    LRSchedule,
    adamw,
    make_client_optimizer,
    make_lr_schedule,
    register_optimizer,
    sgd,
)
from .probes import (
    PROBE_NAMES,
    Probe,
    ProbeInput,
    attention_probe,
    data_independent,
    data_independent_input,
    fixed_probe,
    get_probe,
    gradient_probe,
    is_data_independent,
    last_probe,
    middle_probe,
    random_probe,
)
from .ranks import RankLost, Ranks, require_mean_loss, tensor_specs

__all__ = [
    "ActivationCache",
    "ClientHook",
    "ClientOptimizer",
    "ExamplesDataset",
    "Fit",
    "FitResult",
    "Job",
    "LRSchedule",
    "Probe",
    "ProbeInput",
    "TrainArguments",
    "TrainableParams",
    "adamw",
    "alternate",
    "attach",
    "attention_probe",
    "control_variates",
    "data_independent",
    "fixed_probe",
    "get_probe",
    "gradient_probe",
    "last_probe",
    "make_client_optimizer",
    "make_lr_schedule",
    "middle_probe",
    "plain_fit",
    "proximal",
    "random_probe",
    "register_optimizer",
    "sgd",
    "trainable",
]
