# SPDX-License-Identifier: Apache-2.0
"""Published federated methods, and the classes to define your own."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.methods.adapters import (
        fedex_lora,
        fedit,
        fedsa_lora,
        ffa_lora,
        flexlora,
        local_prompts,
        pfeddc,
        promptfl,
    )
    from fedplan.methods.compositions import fedper_safl, pfeddc_held, safl_frozen, safl_lora
    from fedplan.methods.lora import (
        ProductRule,
        average_separately,
        by_residual,
        by_svd,
        train_at_client_rank,
    )
    from fedplan.methods.method import Method
    from fedplan.methods.phases import PhaseContext, PhaseRule, PlannedPhases, SettledPhase
    from fedplan.methods.published import (
        bitfit,
        fedadam,
        fedavg,
        fedavgm,
        fedbabu,
        fedbn,
        fedfrozen,
        fedpart,
        fedper,
        fedprox,
        fedrep,
        fedyogi,
        head_only,
        lg_fedavg,
        local_only,
        safl,
        scaffold,
    )
    from fedplan.methods.registry import METHODS, method_by_name, register_method
    from fedplan.methods.server_optimizer import (
        ServerOptimizer,
        adagrad,
        adam,
        mean,
        momentum,
        yogi,
    )

__all__ = [
    "PhaseRule",
    "METHODS",
    "Method",
    "PlannedPhases",
    "ProductRule",
    "ServerOptimizer",
    "SettledPhase",
    "PhaseContext",
    "adagrad",
    "adam",
    "average_separately",
    "bitfit",
    "by_residual",
    "by_svd",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedbabu",
    "fedbn",
    "fedex_lora",
    "fedfrozen",
    "fedit",
    "fedpart",
    "fedper",
    "fedper_safl",
    "fedprox",
    "fedrep",
    "fedsa_lora",
    "fedyogi",
    "ffa_lora",
    "flexlora",
    "head_only",
    "lg_fedavg",
    "local_only",
    "local_prompts",
    "mean",
    "method_by_name",
    "momentum",
    "pfeddc",
    "pfeddc_held",
    "promptfl",
    "register_method",
    "safl",
    "safl_frozen",
    "safl_lora",
    "scaffold",
    "train_at_client_rank",
    "yogi",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "adapters": "fedex_lora fedit fedsa_lora ffa_lora flexlora local_prompts pfeddc promptfl",
        "compositions": "fedper_safl pfeddc_held safl_frozen safl_lora",
        "lora": "ProductRule average_separately by_residual by_svd train_at_client_rank",
        "method": "Method",
        "phases": "PhaseContext PhaseRule PlannedPhases SettledPhase",
        "published": "bitfit fedadam fedavg fedavgm fedbabu fedbn fedfrozen fedpart fedper fedprox "
        "fedrep fedyogi head_only lg_fedavg local_only safl scaffold",
        "registry": "METHODS method_by_name register_method",
        "server_optimizer": "ServerOptimizer adagrad adam mean momentum yogi",
    },
)
