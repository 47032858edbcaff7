# SPDX-License-Identifier: Apache-2.0
"""Published methods, each a docstring with its citation and a sentence."""

from typing import TYPE_CHECKING

from fedplan.faces import face

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
    from fedplan.methods.method import Method
    from fedplan.methods.personal import fedbabu, fedbn, fedper, fedrep, lg_fedavg
    from fedplan.methods.phases import Announce, Planned, Settled, Sign
    from fedplan.methods.products import ProductRule, apart, by_residual, by_svd
    from fedplan.methods.prompts import local_prompts, pfeddc, promptfl
    from fedplan.methods.registry import METHODS, method_named, register_method
    from fedplan.methods.server_optimiser import (
        ServerOptimiser,
        adagrad,
        adam,
        mean,
        momentum,
        yogi,
    )

__all__ = [
    "Announce",
    "METHODS",
    "Method",
    "Planned",
    "ProductRule",
    "ServerOptimiser",
    "Settled",
    "Sign",
    "adagrad",
    "adam",
    "apart",
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
    "method_named",
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

__getattr__, __dir__ = face(
    __name__,
    {
        "adapters": "fedex_lora fedit fedsa_lora ffa_lora flexlora",
        "compositions": "fedper_safl pfeddc_held safl_frozen safl_lora",
        "frozen": "fedfrozen",
        "full": "fedadam fedavg fedavgm fedprox fedyogi local_only scaffold",
        "layers": "bitfit fedpart head_only safl",
        "method": "Method",
        "personal": "fedbabu fedbn fedper fedrep lg_fedavg",
        "phases": "Announce Planned Settled Sign",
        "products": "ProductRule apart by_residual by_svd",
        "prompts": "local_prompts pfeddc promptfl",
        "registry": "METHODS method_named register_method",
        "server_optimiser": "ServerOptimiser adagrad adam mean momentum yogi",
    },
)
