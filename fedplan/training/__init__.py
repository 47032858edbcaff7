# SPDX-License-Identifier: Apache-2.0
"""A client's local training: settings, loops, client hooks, freezing and probes."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.training.activation_cache import ActivationCache
    from fedplan.training.client_hooks import alternate, control_variates, proximal
    from fedplan.training.fit import ClientHook, Fit, FitResult, Job, TrainArguments, plain_fit
    from fedplan.training.freezing import TrainableParams, trainable
    from fedplan.training.loops import ExamplesDataset, attach
    from fedplan.training.optimizers import (
        ClientOptimizer,
        LRSchedule,
        adamw,
        make_client_optimizer,
        make_lr_schedule,
        register_optimizer,
        sgd,
    )
    from fedplan.training.probes import (
        Probe,
        ProbeInput,
        attention_probe,
        data_independent,
        fixed_probe,
        get_probe,
        gradient_probe,
        last_probe,
        middle_probe,
        random_probe,
    )

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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "activation_cache": "ActivationCache",
        "client_hooks": "alternate control_variates proximal",
        "fit": "ClientHook Fit FitResult Job TrainArguments plain_fit",
        "freezing": "TrainableParams trainable",
        "loops": "ExamplesDataset attach",
        "optimizers": "ClientOptimizer LRSchedule adamw make_client_optimizer make_lr_schedule "
        "register_optimizer sgd",
        "probes": "Probe ProbeInput attention_probe data_independent fixed_probe get_probe "
        "gradient_probe last_probe middle_probe random_probe",
    },
)
