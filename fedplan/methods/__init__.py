# SPDX-License-Identifier: Apache-2.0
"""Published federated methods, and the classes to define your own."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.methods.adapters import fedex_lora, fedit, fedsa_lora, ffa_lora, flexlora
    from fedplan.methods.compositions import fedper_safl, pfeddc_held, safl_frozen, safl_lora
    from fedplan.methods.frozen import fedfrozen
    from fedplan.methods.full import (
        fedadam,
        fedavg,
        fedavgm,
        fedprox,
        fedyogi,
        local_only,
        scaffold,
    )
    from fedplan.methods.layers import bitfit, fedpart, head_only, safl
    from fedplan.methods.lora_products import ProductRule, average_separately, by_residual, by_svd
    from fedplan.methods.method import Method
    from fedplan.methods.personal import fedbabu, fedbn, fedper, fedrep, lg_fedavg
    from fedplan.methods.phases import PhaseContext, PhaseRule, PlannedPhases, SettledPhase
    from fedplan.methods.prompts import local_prompts, pfeddc, promptfl
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
    "yogi",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "adapters": "fedex_lora fedit fedsa_lora ffa_lora flexlora",
        "compositions": "fedper_safl pfeddc_held safl_frozen safl_lora",
        "frozen": "fedfrozen",
        "full": "fedadam fedavg fedavgm fedprox fedyogi local_only scaffold",
        "layers": "bitfit fedpart head_only safl",
        "method": "Method",
        "personal": "fedbabu fedbn fedper fedrep lg_fedavg",
        "phases": "PhaseRule PlannedPhases SettledPhase PhaseContext",
        "lora_products": "ProductRule average_separately by_residual by_svd",
        "prompts": "local_prompts pfeddc promptfl",
        "registry": "METHODS method_by_name register_method",
        "server_optimizer": "ServerOptimizer adagrad adam mean momentum yogi",
    },
)
