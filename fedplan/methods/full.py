# SPDX-License-Identifier: Apache-2.0
"""Methods that share the whole model, with different local fits and server optimizers."""

from __future__ import annotations

from fedplan.language.plan import keep, share
from fedplan.methods.method import Method
from fedplan.methods.server_optimizer import adam, yogi
from fedplan.methods.server_optimizer import momentum as with_momentum
from fedplan.training.client_hooks import CONTROL, control_variates, proximal


def fedavg() -> Method:
    """FedAvg: all clients train the whole model, the server averages it.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
    """
    return Method(share())


def fedprox(mu: float = 0.01) -> Method:
    """FedProx: FedAvg with a proximal term, mu/2 * squared distance to the global model.

    Li et al., Federated Optimization in Heterogeneous Networks, 2020.
    """
    return Method(share(), client_hooks=(proximal(mu),))


def scaffold() -> Method:
    """SCAFFOLD: control variates correct each local step for client drift.

    Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging, 2020 (option II). A control
    variate is sent with each shared param, which doubles the traffic. Derived for plain SGD.
    """
    return Method(share(), client_hooks=(control_variates,), aux=(CONTROL,))


def fedavgm(lr: float = 1.0, momentum: float = 0.9) -> Method:
    """FedAvgM: FedAvg with momentum on the server.

    Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019.
    """
    return Method(share(), server_optimizer=with_momentum(lr, momentum))


def fedadam(lr: float = 0.01, eps: float = 1e-3) -> Method:
    """FedAdam: Adam on the server, without bias correction.

    Reddi et al., Adaptive Federated Optimization, 2021.
    """
    return Method(share(), server_optimizer=adam(lr, eps=eps))


def fedyogi(lr: float = 0.01, eps: float = 1e-3) -> Method:
    """FedYogi: Yogi on the server.

    Reddi et al., Adaptive Federated Optimization, 2021.
    """
    return Method(share(), server_optimizer=yogi(lr, eps=eps))


def local_only() -> Method:
    """Local only: each client trains alone. The baseline of personalization."""
    return Method(keep())
