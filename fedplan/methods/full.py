# SPDX-License-Identifier: Apache-2.0
"""Methods that share the whole model: they differ in the local fit and in the server optimiser."""

from __future__ import annotations

from fedplan.language.plan import keep, share
from fedplan.methods.method import Method
from fedplan.methods.server_optimiser import adam, yogi
from fedplan.methods.server_optimiser import momentum as with_momentum
from fedplan.training.wraps import CONTROL, controlled, proximal


def fedavg() -> Method:
    """FedAvg: everybody trains everything, the server averages it.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
    """
    return Method(share())


def fedprox(strength: float = 0.01) -> Method:
    """FedProx: FedAvg with a pull towards the world, strength/2 times the squared distance.

    Li et al., Federated Optimization in Heterogeneous Networks, 2020.
    """
    return Method(share(), wraps=(proximal(strength),))


def scaffold() -> Method:
    """SCAFFOLD: each step is corrected by how this client's gradient differs from all clients'.

    Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging, 2020 (option II). A control rides
    beside each shared param, so twice the bytes travel. It is derived for plain SGD.
    """
    return Method(share(), wraps=(controlled,), riders=(CONTROL,))


def fedavgm(rate: float = 1.0, momentum: float = 0.9) -> Method:
    """FedAvgM: FedAvg with momentum on the server.

    Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019.
    """
    return Method(share(), server_optimiser=with_momentum(rate, momentum))


def fedadam(rate: float = 0.01, floor: float = 1e-3) -> Method:
    """FedAdam: Adam on the server, without bias correction.

    Reddi et al., Adaptive Federated Optimization, 2021.
    """
    return Method(share(), server_optimiser=adam(rate, floor=floor))


def fedyogi(rate: float = 0.01, floor: float = 1e-3) -> Method:
    """FedYogi: Yogi on the server.

    Reddi et al., Adaptive Federated Optimization, 2021.
    """
    return Method(share(), server_optimiser=yogi(rate, floor=floor))


def local_only() -> Method:
    """Local only: nothing is shared. The floor that every personal method must beat."""
    return Method(keep())
