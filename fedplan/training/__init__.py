# SPDX-License-Identifier: Apache-2.0
"""A client's local training: settings, loops, client hooks, freezing and probes."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.training.activation_cache import ActivationCache
    from fedplan.training.client_hooks import alternate, control_variates, proximal
    from fedplan.training.fit import ClientHook, Fit, FitResult, Job, TrainConfig, plain_fit
    from fedplan.training.freezing import TrainableParams, trainable
    from fedplan.training.loops import ExamplesDataset, attach
    from fedplan.training.lora_ranks import train_at_client_rank
    from fedplan.training.lr_schedules import LRSchedule, make_lr_schedule
    from fedplan.training.optimizers import (
        ClientOptimizer,
        adamw,
        make_client_optimizer,
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
    "TrainConfig",
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
    "train_at_client_rank",
    "trainable",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "activation_cache": "ActivationCache",
        "client_hooks": "alternate control_variates proximal",
        "fit": "ClientHook Fit FitResult Job TrainConfig plain_fit",
        "freezing": "TrainableParams trainable",
        "loops": "ExamplesDataset attach",
        "lora_ranks": "train_at_client_rank",
        "lr_schedules": "LRSchedule make_lr_schedule",
        "optimizers": "ClientOptimizer adamw make_client_optimizer register_optimizer sgd",
        "probes": "Probe ProbeInput attention_probe data_independent fixed_probe "
        "get_probe gradient_probe last_probe middle_probe random_probe",
    },
)
