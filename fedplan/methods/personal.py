# SPDX-License-Identifier: Apache-2.0
"""Methods in which each client keeps a part of the model."""

from __future__ import annotations

from fedplan.language.parts import head, norm
from fedplan.language.plan import chain, freeze, keep, share, when
from fedplan.language.predicates import after
from fedplan.methods.method import Method
from fedplan.training.client_hooks import alternate


def fedper() -> Method:
    """FedPer: share the base, keep the head personal.

    Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
    """
    return Method(chain(share(), keep(head)))


def fedrep(head_epochs: int = 1) -> Method:
    """FedRep: FedPer with the head trained first, for `head_epochs` epochs, then the base.

    Collins et al., Exploiting Shared Representations for Personalized Federated Learning, 2021.
    """
    return Method(chain(share(), keep(head)), client_hooks=(alternate(head_epochs),))


def lg_fedavg() -> Method:
    """LG-FedAvg: keep the representation personal, share the head.

    Liang et al., Think Locally, Act Globally, 2020.
    """
    return Method(chain(keep(), share(head)))


def fedbabu(rounds: int = 50) -> Method:
    """FedBABU: share the base under a frozen head for `rounds` rounds, then train a personal head.

    Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022.
    The last step is the paper's fine-tuning, here of the head alone.
    """
    return Method(chain(share(), freeze(head), when(after(rounds), chain(freeze(), keep(head)))))


def fedbn() -> Method:
    """FedBN: keep the norms personal, share the rest.

    Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, 2021;
    designed for batch norms, here for all norms of a Transformer.
    """
    return Method(chain(share(), keep(norm)))
