# SPDX-License-Identifier: Apache-2.0
"""Published methods that train the model itself: all of it, a part, or with personal parts."""

from __future__ import annotations

from fedplan.errors import FedplanError
from fedplan.language.parser import parse_part
from fedplan.language.parts import bias, blocks, body, head, mlp, norm, value
from fedplan.language.plan import best, chain, cycle, freeze, keep, share, when
from fedplan.language.predicates import after, phase
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases, SettledPhase
from fedplan.methods.server_optimizer import Dynamic, adam, nesterov, yogi
from fedplan.methods.server_optimizer import momentum as with_momentum
from fedplan.models.params import Kind
from fedplan.training.client_hooks import (
    CONTROL,
    alternate,
    control_variates,
    dynamic,
    keep_optimizer,
    normalize_steps,
    proximal,
    train_own_copy,
)
from fedplan.training.probes import attention_probe, get_probe


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
    variate is sent with each shared param, which doubles the traffic. Derived for plain SGD. The
    mean weighs clients by their examples; in the paper they weigh alike.
    """
    return Method(share(), client_hooks=(control_variates,), aux=(CONTROL,))


def feddyn(alpha: float = 0.01) -> Method:
    """FedDyn: a linear term at each client, and its sum at the server, remove client drift.

    Acar et al., Federated Learning Based on Dynamic Regularization, 2021 (arXiv 2111.04263). The
    loss of a client has in addition alpha/2 * squared distance to the global model, minus a linear
    term that the client keeps and changes by alpha * its change in each turn. The traffic is that
    of FedAvg, and all clients weigh alike.
    """
    optimizer = Dynamic()
    return Method(
        share(), client_hooks=(dynamic(alpha),), equal_weights=True, server_optimizer=optimizer
    )


def fednova(steps: int = 10) -> Method:
    """FedNova: clients with more local steps do not pull the global model more.

    Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, 2020 (arXiv 2007.07481). Each client sends its change per local step, times
    `steps`. The paper takes the mean of the clients' numbers of steps there, which the server would
    have to know; set `steps` to about that. A step counts 1, as derived for plain SGD.
    """
    return Method(share(), client_hooks=(normalize_steps(steps),))


def ditto(lam: float = 0.1) -> Method:
    """Ditto: FedAvg, and each client trains its own copy of the model near the global one.

    Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, 2021 (arXiv
    2012.04221). After its update a client trains its copy with lam/2 * squared distance to the
    global model, by the same settings, so a turn takes twice the steps. The copy begins as the
    global model of the client's first turn; the paper's as the initial model. The copy is never
    sent; personal scores and exports of a client are of the copy.
    """
    return Method(share(), client_hooks=(train_own_copy(lam),), own_copy=True)


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


def diloco(lr: float = 0.7, momentum: float = 0.9) -> Method:
    """DiLoCo: Nesterov momentum on the server, and each client keeps its optimizer's state.

    Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023
    (arXiv 2311.08105). The outer gradient is the mean change of the clients, here weighed by their
    examples; the inner optimizer is `train.optimizer`, AdamW in the paper, with hundreds of steps
    in a round (`train.steps`). Its state stays at the client. The traffic is that of FedAvg.
    """
    return Method(share(), client_hooks=(keep_optimizer,), server_optimizer=nesterov(lr, momentum))


def local_only() -> Method:
    """Local only: each client trains alone. The baseline of personalization."""
    return Method(keep())


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


def safl(
    k: int = 4,
    whole: int = 0,
    probe: str = "attention",
    to: str = "",
    by: str = "",
    examples: int = 64,
    joint_choice: bool = False,
    absent: bool = False,
    with_head: bool = True,
) -> Method:
    """SAFL: each client trains and sends the `k` blocks with the highest attention scores.

    Li and Zhang, Selective Attention Federated Learning, 2025 (arXiv 2504.11793). A block's score
    is the attention from the query tokens `by` to the key tokens `to`, on `examples` examples: see
    `attention_probe`. The paper leaves open whether the head is trained (here by `with_head`), how
    the chosen blocks are pruned, and how a block that only some clients sent is averaged. With
    `whole` from 1 to `k` - 1, only the `whole` blocks of highest score train the MLP; otherwise all
    chosen blocks do. `absent`: clients that did not send a block count as unchanged,
    instead of not at all. `joint_choice` makes one choice for all clients from summed scores, which
    also shrinks the download. The controls are other probes: random, gradient, last, middle.
    """
    scorer = (
        attention_probe(to=to, by=by, examples=examples)
        if probe == "attention"
        else get_probe(probe)
    )
    chosen = chain(best(k, body & ~mlp), best(whole)) if 0 < whole < k else best(k)
    plan = chain(freeze(), *([share(head)] if with_head else []), chosen)
    return Method(plan, probe=scorer, joint_choice=joint_choice, absent=absent)


def bitfit() -> Method:
    """BitFit: train the biases and the head.

    Ben Zaken et al., BitFit: Simple Parameter-efficient Fine-tuning, 2022.
    """
    return Method(chain(freeze(), share(bias | head)))


def fedpart(depth: int = 12) -> Method:
    """FedPart: one block per round, in order; the head in every round.

    Wang et al., Why Go Full? Elevating Federated Learning Through Partial Network Updates, 2024.
    The cycle has the blocks 0 to `depth` - 1, and repeats until the run ends. The paper begins with
    rounds that train the whole model: for these, write a plan with `when(after(...), ...)`.
    """
    rounds = [share(blocks(block)) for block in range(depth)]
    return Method(chain(freeze(), cycle(*rounds), share(head)))


def head_only() -> Method:
    """Linear probing: train the head only. The baseline of partial methods."""
    return Method(chain(freeze(), share(head)))


def fedfrozen(
    warmup: int = 10,
    part: str = "query | key",
    reading: str = "A",
    with_head: bool = True,
    settle: float = 0.0,
    by: str = "bend",
) -> Method:
    """FedFrozen: train everything for `warmup` rounds, then freeze query and key.

    Du et al., FedFrozen, 2026 (arXiv 2605.06446). The paper leaves open which params are trained
    after the freeze in a deep Transformer: in reading A everything but `part`, in reading B the
    values and, by `with_head`, the head. The layers below still move, so frozen queries and keys
    are not a frozen attention map. Other parts are controls: `value`, or `kernel`, which includes
    relative positions and adapters. With `settle` above 0 the freeze comes after at least `warmup`
    rounds, once the part has settled by the rule `by` ("bend" or "chance") with the threshold
    `settle`: see `SettledPhase`. Raises FedplanError for an unknown reading or rule, for a `by`
    other than "bend" without `settle`, and with `settle` for a `part` that is not kinds joined by
    `|`.
    """
    # The head of a language model is tied to its embeddings, so it can be left out.
    values = value | head if with_head else value
    readings = {"A": freeze(parse_part(part)), "B": chain(freeze(), share(values))}
    if reading not in readings:
        raise FedplanError(f"fedfrozen has the readings A and B, not {reading!r}")
    if by != "bend" and not settle:
        raise FedplanError(
            f"by = {by!r} takes effect only if settle is above 0: set settle, for example to 0.1"
        )
    plan = chain(share(), when(phase("frozen"), readings[reading]))
    if settle:
        # Drift is measured by kind, and not for smaller parts.
        kinds = tuple(word.strip() for word in part.split("|"))
        if unknown := [kind for kind in kinds if kind not in {kind.value for kind in Kind}]:
            raise FedplanError(
                f"settle takes whole kinds, and {unknown[0]!r} is none: join some, as query | key"
            )
        return Method(plan, phase_rule=SettledPhase("frozen", kinds, settle, warmup, by))
    return Method(plan, phase_rule=PlannedPhases({"frozen": warmup}))


METHODS = (
    *(fedavg, fedprox, scaffold, feddyn, fednova, fedavgm, fedadam, fedyogi, diloco),
    local_only,
    *(ditto, fedper, fedrep, lg_fedavg, fedbabu, fedbn, fedfrozen),
    *(safl, bitfit, fedpart, head_only),
)
"""The methods of this module, as lists of methods order them."""
