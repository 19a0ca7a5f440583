"""Where the time of one kind of step goes: torch.profiler, and what can be counted in it.

decode: one token through the model and the cache. evict: one eviction step alone. prefill: one
chunk, read behind what the cache holds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from agent.bench.clock import synchronize
from agent.bench.contestants import Contestant, Own, OwnStream, Plan, Stream
from agent.bench.contexts import Content

What = Literal["decode", "evict", "prefill"]
WHAT: tuple[What, ...] = get_args(What)

# Operations by which the host waits for a device or takes a value from a tensor.
_SYNCS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "cudaStreamSynchronize")
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_BEHIND = 4  # tokens written before the profiler looks


@dataclass(frozen=True)
class Op:
    """One operation, per step: times in ms of its own, bytes it took."""

    name: str
    calls: float
    host_ms: float
    device_ms: float
    taken_bytes: float


@dataclass
class Profile:
    """What the profiler saw of `steps` steps; numbers are per step.

    ms: wall time with the profiler off. taken: bytes that were allocated, of which the most at
    once by one operation is `largest`.
    """

    what: str
    who: str
    seen: int
    steps: int
    ms: float
    launches: float = 0.0
    syncs: dict[str, float] = field(default_factory=dict)
    calls: float = 0.0
    taken: float = 0.0
    largest: float = 0.0
    ops: list[Op] = field(default_factory=list)

    def data(self, top: int) -> dict[str, Any]:
        """As plain data, with the `top` costliest operations."""
        plain = {name: value for name, value in vars(self).items() if name != "ops"}
        return {**plain, "ops": [asdict(op) for op in self.ops[:top]]}


@torch.inference_mode()
def profiled(
    model: PreTrainedModel,
    contestant: Contestant,
    what: What,
    *,
    seen: int,
    steps: int,
    chunk: int = 512,
) -> Profile:
    """Profile `steps` steps behind `seen` random tokens. Raises ValueError where nothing evicts."""
    block = 1
    if what == "evict":
        if not isinstance(contestant, Own) or not contestant.config.evicts:
            raise ValueError(f"{contestant.name} evicts nothing: there is no step to look at")
        if getattr(contestant.config, "scope", "") != "prefill+decode":
            raise ValueError(
                f"{contestant.name} does not evict while it decodes: give it the scope"
            )
        block = contestant.config.block_size
    each = chunk if what == "prefill" else block
    # Twice: without the profiler for the clock, then with it.
    room = _BEHIND + 2 * (steps + 1) * each
    plan = Plan(seen, room, chunk)
    context = contestant.fill(plan, Content(model, seen)) if seen else None
    stream = contestant.open(plan, context)
    ids = [i % model.config.get_text_config().vocab_size for i in range(chunk)]
    for _ in range(_BEHIND):
        stream.step()
    step = _step(stream, what, ids)
    step()
    seconds = sum(step() for _ in range(steps))
    with _hushed(), _profiler(model.device):
        pass  # the first start is slow, and its own
    found = Profile(what, contestant.name, seen, steps, 1e3 * seconds / steps)
    sessions = [_profiler(model.device) for _ in range(steps)]
    with _hushed():
        for session in sessions:
            step(session)
    stream.close()
    _add_up(found, sessions)
    return found


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Without what the profiler's library writes to stderr at every start and stop, past Python and
    whatever its own log level is."""
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)


def _profiler(device: torch.device) -> profile:
    kinds = [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    return profile(activities=kinds, profile_memory=True, acc_events=True)


def _step(stream: Stream, what: What, ids: list[int]) -> Callable[..., float]:
    """A call that makes one step: it returns the seconds of what is looked at, and enters the
    context that it is given around that part alone."""
    device = stream.model.device

    def step(around: Any = None) -> float:
        do = _to_be_seen(stream, what, ids)
        synchronize(device)
        began = time.perf_counter()
        with around or contextlib.nullcontext():
            do()
            synchronize(device)
        return time.perf_counter() - began

    return step


def _to_be_seen(stream: Stream, what: What, ids: list[int]) -> Callable[[], Any]:
    """What is looked at; where it is an eviction, what leads up to it is done first."""
    if what == "decode":
        return stream.step
    if what == "prefill":
        return functools.partial(stream.feed, ids)
    assert isinstance(stream, OwnStream)
    [cache] = stream.caches
    stream.step_without_eviction()
    while cache.seen % cache.config.block_size:
        stream.step_without_eviction()
    return functools.partial(cache.evict, "decode")


def _add_up(found: Profile, sessions: list[profile]) -> None:
    """Averages over the steps' profiles."""
    ops: dict[str, list[float]] = {}
    for session in sessions:
        for event in session.key_averages():
            into = ops.setdefault(event.key, [0.0] * 4)
            into[0] += event.count
            into[1] += event.self_cpu_time_total / 1e3
            into[2] += getattr(event, "self_device_time_total", 0.0) / 1e3
            into[3] += max(0, event.self_cpu_memory_usage) + max(
                0, getattr(event, "self_device_memory_usage", 0)
            )
        for event in session.events():
            size = max(event.self_cpu_memory_usage, getattr(event, "self_device_memory_usage", 0))
            found.largest = max(found.largest, float(size))
    count = found.steps
    averages = [Op(name, *(value / count for value in values)) for name, values in ops.items()]
    on_device = any(op.device_ms for op in averages)
    averages.sort(key=lambda op: -(op.device_ms if on_device else op.host_ms))
    found.ops = averages
    found.calls = sum(op.calls for op in averages if op.name.startswith("aten::"))
    found.launches = sum(op.calls for op in averages if op.name in _LAUNCHES)
    found.taken = sum(op.taken_bytes for op in averages)
    found.syncs = {op.name: op.calls for op in averages if op.name in _SYNCS}


def profile_rows(found: Profile, top: int) -> tuple[list[str], list[list[str]]]:
    """The costliest operations as a table."""
    header = ["operation", "calls a step", "host ms", "device ms", "allocates KiB"]
    rows = [
        [
            op.name,
            f"{op.calls:,.1f}",
            f"{op.host_ms:.3f}",
            f"{op.device_ms:.3f}" if op.device_ms else "–",
            f"{op.taken_bytes / 1024:,.1f}",
        ]
        for op in found.ops[:top]
    ]
    return header, rows


def profile_words(found: Profile) -> str:
    """What was counted, as a sentence."""
    syncs = ", ".join(f"{name} {count:g}" for name, count in found.syncs.items()) or "none"
    kernels = f"{found.launches:,.0f} kernel launches, " if found.launches else ""
    return (
        f"{found.who}, {found.what} at {found.seen:,} seen: {found.ms:.2f} ms a step without the "
        f"profiler; {kernels}{found.calls:,.0f} operations, {found.taken / 2**20:.2f} MiB "
        f"allocated, the largest by one operation {found.largest / 2**20:.2f} MiB; the host waits "
        f"or reads a value: {syncs}."
    )
