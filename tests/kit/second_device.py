# SPDX-License-Identifier: Apache-2.0
"""A second device in pure Python: it computes on the CPU, mixes with nothing, counts transfers,
launches of operations, and operations that wait for the device as the shape of a result asks it.

Torch keeps a backend free for others (PrivateUse1). Tensors of this one wrap tensors of the CPU,
and its random numbers are its own. Registering it is for good in a process, but it is there only
within `second()`: tests that come after it find no device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch, backend_registration

NAME = "elsewhere"
CPU = torch.device("cpu")
FACTORIES = (
    *("empty.memory_format", "empty_strided", "full", "scalar_tensor", "arange", "arange.start"),
    *("arange.start_step", "rand", "randn", "randint", "randint.low", "randperm", "linspace"),
    *("tril_indices", "triu_indices", "eye"),
)

LOWERED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv2d")
"""What autocast computes in the smaller dtype; the rest is computed as it comes."""


class Mixed(RuntimeError):
    """Tensors of two devices in one operation."""


@dataclass
class Backend:
    """What torch asks of a device, and what was moved to it and from it."""

    here: bool = False
    sent: list[tuple[int, ...]] = field(default_factory=list)
    fetched: list[tuple[int, ...]] = field(default_factory=list)
    sent_bytes: int = 0
    fetched_bytes: int = 0
    launches: int = 0
    waits: list[str] = field(default_factory=list)
    random: Tensor = field(default_factory=lambda: torch.Generator().get_state())

    def forget(self) -> None:
        """Count anew."""
        self.sent, self.fetched, self.sent_bytes, self.fetched_bytes = [], [], 0, 0
        self.launches, self.waits = 0, []

    def is_available(self) -> bool:
        return self.here

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return int(self.here)

    def current_device(self) -> int:
        return 0

    def device(self, _: torch.device) -> Any:
        return nullcontext()

    def _is_in_bad_fork(self) -> bool:
        return not self.here

    def get_rng_state(self, _: torch.device | None = None) -> Tensor:
        return self.random.clone()

    def set_rng_state(self, state: Tensor, _: torch.device | None = None) -> None:
        self.random = state.clone()

    def manual_seed(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed).get_state()

    manual_seed_all = manual_seed

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Second(torch.Tensor):
    """A tensor of the second device: nothing but its operations can reach what it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Second:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Second({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _inner(each: Any) -> Any:
    return each.held if isinstance(each, Second) else each


def _outer(each: Any) -> Any:
    return Second(each) if isinstance(each, Tensor) and not isinstance(each, Second) else each


def _each(change: Callable[[Any], Any], said: Any) -> Any:
    """What an operation is given, or gives: changed one by one, in lists too."""
    if isinstance(said, list | tuple):
        return type(said)([_each(change, one) for one in said])
    return change(said)


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on what tensors hold; only copies may have tensors of two devices."""
    backend, aten = device(), torch.ops.aten
    if op is aten.copy_.default:
        _note(backend, args[1], to=args[0].device)
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    target = kwargs.get("device")
    if op is aten._to_copy.default:
        to = args[0].device if target is None else torch.device(target)
        _note(backend, args[0], to=to)
        found = op(_inner(args[0]), **{**kwargs, **({"device": CPU} if target else {})})
        return found if to.type == "cpu" else Second(found)
    _each(lambda each: _require_here(op, each), [args, [*kwargs.values()]])
    if op is aten._local_scalar_dense.default:
        _note(backend, args[0], to=CPU)
        return op(_inner(args[0]))
    backend.launches += not op.is_view
    if torch.Tag.dynamic_output_shape in op.tags and not _by_number(op, args):
        backend.waits.append(str(op))
    said = {**kwargs, "device": CPU} if target is not None else kwargs
    with _chance(backend, op):
        found = op(*_each(_inner, args), **{k: _each(_inner, v) for k, v in said.items()})
    found = _each(_outer, found)
    return _python_dispatch.return_and_correct_aliasing(op, args, kwargs, found)


def _by_number(op: Any, args: Any) -> bool:
    """Whether tensors of numbers choose the rows, so that their shape is that of the result."""
    is_index = op in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
    return is_index and all(i is None or i.dtype is not torch.bool for i in args[1])


def _copied(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    _note(device(), source, to=into.device)
    _inner(into).copy_(_inner(source))
    return into


def _note(backend: Backend, tensor: Tensor, *, to: torch.device) -> None:
    size = tensor.numel() * tensor.element_size()
    if not size:
        return
    if tensor.device.type == "cpu" and to.type == NAME:
        backend.sent.append(tuple(tensor.shape))
        backend.sent_bytes += size
    elif tensor.device.type == NAME and to.type == "cpu":
        backend.fetched.append(tuple(tensor.shape))
        backend.fetched_bytes += size


def _require_here(op: Any, each: Any) -> None:
    if isinstance(each, Tensor) and not isinstance(each, Second) and each.dim():
        raise Mixed(f"{op}: a tensor of {tuple(each.shape)} is on {each.device}, not on {NAME}")
    if isinstance(each, torch.Generator):
        raise Mixed(f"{op}: a generator of {each.device} draws for {NAME}")


@contextmanager
def _chance(backend: Backend, op: Any) -> Generator[None]:
    """The device's own random numbers, for an operation that draws some."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(backend.random)
    try:
        yield
    finally:
        backend.random = torch.get_rng_state()
        torch.set_rng_state(before)


def _factory(op: Any) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Second:
        said = {**kwargs, "device": CPU, "pin_memory": False}
        with _chance(device(), op):
            return Second(op(*args, **said))

    return make


def _lowered(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def lower(each: Any) -> Any:
            floats = isinstance(each, Tensor) and each.dtype is torch.float32
            return each.to(dtype) if floats else each

        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*_each(lower, args), **{k: _each(lower, v) for k, v in kwargs.items()})

    return run


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


@cache
def device() -> Backend:
    """The backend, registered when it is first asked for."""
    backend = Backend()
    hook = type("Hook", (torch._C._acc.PrivateUse1Hooks,), _HOOKS)()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend, hook)
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _factory(op), "PrivateUse1")
    # torch.tensor copies by this one, past the dispatch of wrappers.
    library.impl("_copy_from", _copied, "PrivateUse1")
    for name in LOWERED:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _lowered(op), "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _kept.append((library, others, hook))
    return backend


_HOOKS: dict[str, Any] = {
    "is_available": lambda _: device().here,
    "has_primary_context": lambda _, __: True,
    "is_built": lambda _: True,
}
_kept: list[Any] = []
"""What torch forgets as soon as nobody holds it."""


@contextmanager
def second() -> Generator[Backend]:
    """The second device, there for a while.

    Ties of a model's weights outlive its move. The autograd engine counts devices at its first
    backward pass, and then has no thread for another: here it has none.
    """
    backend = device()
    backend.forget()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    threads = torch.autograd.set_multithreading_enabled(False)
    try:
        backend.here = True
        torch.__future__.set_swap_module_params_on_conversion(True)
        with threads:
            yield backend
    finally:
        backend.here = False
        torch.__future__.set_swap_module_params_on_conversion(swaps)
