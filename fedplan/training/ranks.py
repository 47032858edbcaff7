# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one model together, each on its share of the examples of a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedplan import seeds
from fedplan.data.examples import Examples, Loss, count_labels, split_step
from fedplan.errors import FedplanError
from fedplan.tensors.devices import CPU, eval_mode, model_device, to_device
from fedplan.tensors.named import Tensors


class RankLost(FedplanError):
    """Another rank ended, failed or did not reply in time, so that no step can be taken."""


@dataclass(frozen=True)
class Ranks:
    """The place of this process among `count` processes that train one model: its `rank`, from 0.

    Call `join` first, in every process; `leave` ends the process group of torch.distributed. A
    collective raises RankLost if another rank is gone, or silent for `seconds`.
    """

    rank: int
    count: int
    seconds: float = 600.0

    def join(self, file: Path, device: torch.device) -> None:
        """Wait until all ranks have joined the process group of `file`, a new file for each group.

        `device` is this rank's. Raises FedplanError if the process has a process group already.
        """
        if dist.is_initialized():
            raise FedplanError(
                "this process has a process group of torch.distributed already, and fedplan needs "
                "its own for devices_per_client: start the run in another process"
            )
        if sys.platform == "linux":  # the ranks are on this machine, and nobody else may listen
            os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
        # Else a lost rank ends this process, or never returns.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        on_card = device.type == "cuda"
        if on_card:
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(
                "nccl" if on_card else "gloo",
                store=cast("Any", dist).FileStore(str(file), self.count),
                rank=self.rank,
                world_size=self.count,
                timeout=timedelta(seconds=self.seconds),
            )
        except RuntimeError as error:
            raise RankLost(f"not all {self.count} ranks have joined: {error}") from error

    @staticmethod
    def leave() -> None:
        """End this process's part in the process group, so that other ranks do not wait for it."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def seed(self, seed: int) -> int:
        """Return this rank's seed of a turn: ranks draw different dropout masks."""
        return seeds.seed("rank", seed, self.rank) if self.rank else seed

    def share(self, indices: Tensor) -> Tensor:
        """Return this rank's share of the examples of a step, which may be empty."""
        return indices.tensor_split(self.count)[self.rank]

    def broadcast(
        self, specs: Mapping[str, tuple[str, list[int]]], tensors: Tensors, device: torch.device
    ) -> dict[str, Tensor]:
        """Send rank 0's `tensors` to the other ranks, which return them in host memory.

        `specs`: dtype and shape by name, as of `tensor_specs`; other ranks need these only.
        """
        received = dict[str, Tensor]()
        for name, (dtype, shape) in specs.items():
            value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if self.rank == 0:
                value.copy_(tensors[name])
            if value.numel():
                self._call(dist.broadcast, value.view(-1).view(torch.uint8), 0)
            if self.rank:
                received[name] = value.to(CPU)
        return received

    def average_step(
        self, params: Iterable[nn.Parameter], losses: Iterable[Tensor], labels: int
    ) -> Tensor:
        """Average the gradients of `params` over all ranks in place; return the mean loss.

        The sum of `losses`, and the gradients, are means over this rank's number of `labels`, which
        is their weight. A param without gradient at all ranks stays without. One all-reduce, of
        float32 or finer.
        """
        leaves = list(params)
        dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)
        sizes = [*(leaf.numel() for leaf in leaves), len(leaves), 1, 1]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=leaves[0].device)
        *gradients, presence, mean, total = cast("tuple[Tensor, ...]", flat.split(sizes))
        for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
            if leaf.grad is not None:
                presence[i] = 1.0
                if labels:  # the mean over no labels may be NaN
                    gradient.copy_(leaf.grad.reshape(-1)).mul_(labels)
        for loss in losses if labels else ():
            mean += loss * labels
        total.fill_(labels)
        self._call(dist.all_reduce, flat)
        present = cast("list[float]", self._call(presence.tolist))
        flat.div_(total.clamp(min=1.0).clone())
        for leaf, gradient, found in zip(leaves, gradients, present, strict=True):
            leaf.grad = gradient.view_as(leaf).to(leaf.dtype) if found else None
        return mean.clone().reshape(())  # a view would keep all gradients until the turn ends

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.count} lost another: {error}") from error


def tensor_specs(tensors: Tensors) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of each tensor, as JSON."""
    return {k: (str(v.dtype).removeprefix("torch."), list(v.shape)) for k, v in tensors.items()}


@torch.no_grad()
def require_mean_loss(model: nn.Module, loss: Loss, examples: Examples) -> bool:
    """Raise FedplanError unless the loss of two examples is the mean of the losses of each.

    Else the shares of several ranks would not add up to the step of one. The two have different
    labels if the first examples have. Returns False, unchecked, for fewer than two examples.
    """
    if len(examples) < 2:
        return False
    first, other = examples.batch(torch.tensor([0])).get("labels"), 1
    if first is not None and first.numel() == 1:
        found = examples.batch(torch.arange(min(len(examples), 256)))["labels"]
        different = (found.reshape(-1) != first.reshape(())).nonzero()
        other = int(different[0]) if len(different) else 1
    with eval_mode(model):
        whole, *single = (
            split_step(examples, torch.tensor(rows), 2)[0] for rows in ([0, other], [0], [other])
        )
        device, labels = model_device(model), count_labels([whole])
        both = loss(model, to_device(whole.batch, device)).item()
        weighted = (
            loss(model, to_device(each.batch, device)).item() * count_labels([each])
            for each in single
            if count_labels([each])
        )
        mean = sum(weighted) / max(labels, 1)
    if labels and abs(both - mean) > 0.01 * max(abs(both), abs(mean)):
        raise FedplanError(
            f"devices_per_client: the loss of two examples is {both:.6g}, and the mean of the "
            f"losses of each is {mean:.6g}, so that devices cannot share the examples of a step: "
            "use one device per client, or a loss that is a mean over examples or labels"
        )
    return True
