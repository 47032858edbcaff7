# SPDX-License-Identifier: Apache-2.0
"""Hold the estimate of a turn's memory against what one step really holds, model by model.

Measured are the bytes of activations that autograd saves (each storage once, without the weights),
and the peak of all tensors that are alive in a step: weights, gradients, AdamW's memory and work.
Models are drawn from configurations, without dropout, with torch's own attention, on the CPU. The
last table has the peak of a language model's loss and its gradient alone: with the logits of all
tokens at once, as of small batches, and in the chunks of larger ones.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from study import FACTS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedplan.data.tasks import chunked_loss
from fedplan.data.tasks.language import CausalLanguage
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.reports.memory import TrainingStep, estimate_memory
from fedplan.training.freezing import trainable

LANGUAGE = CausalLanguage("causal-lm", "none", ("text",), "", ())
OUT = Path(__file__).parent / "results" / "bench_turn.txt"
SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY: dict[str, Any] = {"vocab_size": 2000, "intermediate_size": 256, **SHAPE}
MANY: dict[str, Any] = {**TINY, "vocab_size": 20000}
MID: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
ALL, LORA = "share()", "chain(freeze(), share(adapter))"
TOP, HEAD = "chain(freeze(), share(blocks(-1)))", "chain(freeze(), share(head))"


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that come and go, and the most that there were."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self.now = self.most = held
        self.known = weakref.WeakSet[Any]()
        self.before = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(found) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage not in self.known and storage.data_ptr() not in self.before:
                self.known.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return found

    def _gone(self, count: int) -> None:
        self.now -= count


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a turn: fedplan's of a language model, else the model's own."""
    lm = batch["labels"].dim() > 1
    return LANGUAGE.loss(model, batch) if lm else model(**batch).loss


def saved(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """The bytes that autograd keeps of one forward pass, but for the weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = dict[int, int]()

    def kept(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        loss = loss_of(model, batch)
        found = sum(seen.values())
        loss.backward()
    return found


def measured(model: nn.Module, plan: str, batch: dict[str, Tensor]) -> tuple[int, int]:
    """What a step saves, and the most that is alive in it."""
    params = describe(model)
    model.train()
    with trainable(model, resolve(parse(plan), params, Turn(1, "a"))) as marked:
        optimizer = torch.optim.AdamW(list(marked.parameters()))
        found = saved(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        states = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
        held = [*model.parameters(), *states]
        alive = Alive(sum(t.nbytes for t in held))
        alive.before = {t.untyped_storage().data_ptr() for t in [*held, *batch.values()]}
        with alive:
            loss_of(model, batch).backward()
            optimizer.step()
    return found, alive.most


def compared(
    name: str,
    make: Callable[[], nn.Module],
    plan: str,
    step: TrainingStep,
    words: int,
    labels: bool,
) -> str:
    model = make()
    if plan == LORA:
        adapt = method_by_name("fedit", {"rank": 4, "with_head": False}).adapt
        assert adapt is not None
        model = adapt(model)
    if step.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
    ids = torch.randint(words, (step.batch_size, step.sequence_length))
    batch = {
        "input_ids": ids,
        "labels": torch.zeros(step.batch_size, dtype=torch.long) if labels else ids,
    }
    params = describe(model)
    said = estimate_memory(params, resolve(parse(plan), params, Turn(1, "a")), step)
    kept, most = measured(model, plan, batch)
    logs = 4 * step.tokens * words if said.logits else 0
    about = said.activations + logs
    # Of a loss in chunks, autograd saves the logits of each, and keeps none.
    many = step.tokens * words > chunked_loss.CHUNK_LOGITS
    saves = f"{about / 1e6:9.2f} {kept / 1e6:9.2f} {about / max(kept, 1):6.2f}"
    return (
        f"{name:28} {plan:34} {' ' * len(saves) if many else saves}"
        f" {said.total / 1e6:9.2f} {most / 1e6:9.2f} {said.total / most:6.2f}"
    )


def peak_of_logits(dtype: torch.dtype, autocast: bool, most: int) -> str:
    """The peak of the loss of 2,048 tokens of 20,000 words, with at most so many logits at once."""
    shape: dict[str, Any] = {"vocab_size": 20000, "hidden_size": 64, "intermediate_size": 64}
    model = llama(**shape, num_hidden_layers=1, num_attention_heads=2).to(dtype)
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)  # pyright: ignore
    ids, before = torch.randint(20000, (4, 512)), chunked_loss.CHUNK_LOGITS
    chunked_loss.CHUNK_LOGITS = most
    batch = {"input_ids": ids, "labels": ids}
    with torch.no_grad():
        loss_of(model, {name: each[:, :500] for name, each in batch.items()})  # it is tried once
    alive = Alive(0)
    alive.before = {each.untyped_storage().data_ptr() for each in [*model.parameters(), ids]}
    with alive:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, batch)
        loss.backward()
    chunked_loss.CHUNK_LOGITS = before
    count = min(ids.numel() * 20000, most)
    kind = f"{str(dtype)[6:]}{' under autocast' if autocast else ''}"
    way = "in chunks" if most < ids.numel() * 20000 else "at once"
    return f"{kind:28} {way:10} {alive.most / 1e6:9.2f} {alive.most / count:12.2f}"


def bert(**settings: Any) -> nn.Module:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**still, **settings)
    return transformers.BertForSequenceClassification(config)


def llama(**settings: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=2, **settings)
    )


def gpt2(**settings: Any) -> nn.Module:
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**still, **settings))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small, chunked, again, mid = (
        TrainingStep(4, 64),
        TrainingStep(4, 256),
        TrainingStep(4, 64, gradient_checkpointing=True),
        TrainingStep(4, 128),
    )
    gpt = {"vocab_size": 2000, "n_embd": 64, "n_layer": 3, "n_head": 4}
    cases: list[tuple[str, Callable[[], nn.Module], str, TrainingStep, int, bool]] = [
        *(
            ("bert, 0.3 M", lambda: bert(**TINY), p, small, 2000, True)
            for p in (ALL, TOP, HEAD, LORA)
        ),
        *(("llama, 0.4 M", lambda: llama(**TINY), p, small, 2000, False) for p in (ALL, TOP, LORA)),
        *(("gpt2, 0.3 M", lambda: gpt2(**gpt), p, small, 2000, False) for p in (ALL, TOP)),
        *(
            ("llama in bfloat16", lambda: llama(**TINY).to(torch.bfloat16), p, small, 2000, False)
            for p in (ALL, LORA)
        ),
        ("llama, checkpointing", lambda: llama(**TINY), ALL, again, 2000, False),
        *(
            ("llama, 20,000 words", lambda: llama(**MANY), p, chunked, 20000, False)
            for p in (ALL, LORA)
        ),
        *(
            ("the same in bfloat16", lambda: llama(**MANY).bfloat16(), p, chunked, 20000, False)
            for p in (ALL, LORA)
        ),
        *(
            ("bert as gte-small, 33 M", lambda: bert(**MID), p, mid, 2000, True)
            for p in (ALL, LORA)
        ),
    ]
    heads = f"{'model':28} {'plan':34} {'kept':>9} {'measured':>9} {'ratio':>6} {'in all':>9}"
    lines = [f"{heads} {'measured':>9} {'ratio':>6}"] + [compared(*case) for case in cases]
    told = f"# python research/bench_turn.py, {FACTS}; MB of a million"
    kinds = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
    ways = (sys.maxsize, chunked_loss.CHUNK_LOGITS)
    logits = [peak_of_logits(*kind, most) for most in ways for kind in kinds]
    last = f"{'loss of 41 M logits':28} {'way':10} {'peak':>9} {'bytes/logit':>12}"
    text = "\n".join([told, *lines, "", last, *logits, ""])
    sys.stdout.write(text)
    OUT.write_text(text)


if __name__ == "__main__":
    main()
