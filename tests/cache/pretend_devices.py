"""Two devices on a machine that has one: tensors that say they are elsewhere, and do not mix.

A pretended tensor reports `meta:0` or `meta:1` and holds its numbers in a CPU tensor. As with real
devices, an operation takes tensors of one device only (and numbers from the CPU); `to` and `copy_`
go from one to another. accelerate places models on them as it does on GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import PreTrainedModel

FIRST, SECOND = torch.device("meta:0"), torch.device("meta:1")
_KIND = FIRST.type
_CPU = torch.device("cpu")
_CROSSING = ("aten.copy_.default", "aten._to_copy.default")
# What takes a number, or a shape that depends on numbers, from a device.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


@dataclass
class Trace:
    """What happened on pretended devices: operations that make the host wait, and calls that
    compute or copy, each of which is at least one launch on a GPU."""

    waits: list[str] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)


_traces: list[Trace] = []


@contextmanager
def traced() -> Iterator[Trace]:
    """Notes what happens within it."""
    _traces.append(Trace())
    try:
        yield _traces[-1]
    finally:
        _traces.pop()


class MixedDevices(RuntimeError):
    """An operation got tensors of different devices."""


class Pretended(torch.Tensor):
    """A tensor that says it is on `device`; `inner` holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        for trace in _traces:
            trace.waits.append("tolist")
        return self.inner.tolist()


@contextmanager
def pretended_devices() -> Iterator[None]:
    """Within it, tensors can be made on FIRST and SECOND and moved to them."""
    with _Functions(), _Operations(), torch.no_grad():
        yield


def place(model: PreTrainedModel, layers: str) -> PreTrainedModel:
    """Put layer i on the first or second device as `layers` ("011") says; all else on the first,
    but for the last norm, which goes with the last layer."""
    devices = {"0": FIRST, "1": SECOND}
    names = {f"model.layers.{i}": devices[mark] for i, mark in enumerate(layers)}
    rest = ("model.embed_tokens", "model.rotary_emb", "lm_head")
    device_map = {**dict.fromkeys(rest, FIRST), **names, "model.norm": devices[layers[-1]]}
    placed: PreTrainedModel = accelerate.dispatch_model(model, device_map, force_hooks=True)
    return placed


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and "device" in kwargs:  # it would not ask the mode above
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.__getitem__ and isinstance(
            args[1], tuple
        ):  # lists, written past it
            args = (args[0], tuple(torch.tensor(i) if type(i) is list else i for i in args[1]))
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = str(func)
    checked = args
    if name.startswith(("aten.index.", "aten.index_put", "aten._index_put")):
        own = [i for i in args[1] if isinstance(i, Pretended)]  # indices may come from the CPU
        checked = (args[0], own, *args[2:])
    found = [x for x in tree_flatten((checked, kwargs))[0] if isinstance(x, torch.Tensor)]
    devices = {x.device for x in found if isinstance(x, Pretended) or x.dim()}
    if len(devices) > 1 and name not in _CROSSING:
        raise MixedDevices(f"{name}: {[(str(x.device), tuple(x.shape)) for x in found]}")
    if kwargs.get("device") is not None:
        where = torch.device(kwargs["device"])
    else:
        where = args[0].device if name == "aten.copy_.default" else next(iter(devices), _CPU)
    if _traces:
        _note(func, args, {where, *devices})
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if func._schema.name.endswith("_"):
        return args[0]
    if where.type != _KIND:
        return out
    return tree_map(lambda x: Pretended(x, where) if isinstance(x, torch.Tensor) else x, out)


def _note(func: Any, args: Any, devices: set[torch.device]) -> None:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    elsewhere = {device for device in devices if device.type == _KIND}
    if not elsewhere:
        return
    waits = name in _READS or (str(func) in _CROSSING and len(devices) > 1)
    if name in ("index", "index_put"):  # a mask says only by its numbers how many it names
        waits = waits or any(i is not None and i.dtype == torch.bool for i in args[1])
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    for trace in _traces:
        if waits:
            trace.waits.append(name)
        if not view and not name.startswith(("empty", "new_empty")):
            trace.launches[name] += 1


def _inner(x: Any) -> Any:
    if isinstance(x, Pretended):
        return x.inner
    return _CPU if isinstance(x, torch.device) and x.type == _KIND else x
