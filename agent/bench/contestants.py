"""What is timed side by side: our store under each method, and transformers' own caches.

A contestant opens streams: one model, one cache (or a batch of them), with a context behind it.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from agent.bench.clock import synchronize
from agent.bench.contexts import Content, filled_state
from cache import AnyConfig, EvictingCache, EvictingConfig, make_pool, prefill, preset, preset_names
from cache.attention import attach
from cache.batch_decode import BatchDecoder
from cache.generate import cache_keyword, forward
from cache.policy import Policy
from cache.state import CacheState

DYNAMIC, STATIC, AGAIN = "dynamic", "static", "re-prefill"
OUTSIDE = (DYNAMIC, STATIC, AGAIN)
FIXED = "+fixed"  # behind a method's name: decode by static shapes, one graph on CUDA
# What of a cache is work, and the part that it counts as.
_WORK = {
    "update": "storing",
    "observe": "noting",
    "finish_layer": "noting",
    "accept": "noting",
    "evict": "evicting",
}


class NotHere(RuntimeError):
    """Something cannot be measured in this installation; the text says why."""


@dataclass
class Parts:
    """Seconds in the parts of a cache's work, of `total` seconds.

    storing: writing new keys and values; noting: queries kept, lengths and block numbers moved on;
    evicting: all of `evict`, whether a step was due or not.
    """

    total: float = 0.0
    storing: float = 0.0
    noting: float = 0.0
    evicting: float = 0.0
    inside: bool = False

    def shares(self) -> dict[str, float]:
        """Each part of the total."""
        names = ("storing", "noting", "evicting")
        return {f"{name}_share": getattr(self, name) / self.total for name in names}


@dataclass
class Plan:
    """What a stream will go through; contexts are made to fit, so that nothing grows while timed.

    seen: tokens behind it; room: tokens that may follow; chunk: of a prefill.
    """

    seen: int
    room: int
    chunk: int
    batch: int = 1


class Stream(ABC):
    """A cache (or a batch of them) with tokens behind it, that reads and writes on."""

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.tokens = [1] * plan.batch  # fed next, one of each sequence

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> None:
        """Read `ids` (batch 1) in chunks; the next token is then known on the host."""

    @abstractmethod
    def step(self) -> bool:
        """Write one token of each sequence; whether something was evicted."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the caches' tensors."""

    @property
    def peak_bytes(self) -> int | None:
        """Most bytes there ever were at once, where that is counted."""
        return None

    @property
    @abstractmethod
    def resident(self) -> int:
        """Tokens held per layer, KV head and sequence (the most of any)."""

    @property
    def evictions(self) -> int:
        """Eviction steps so far, of all sequences."""
        return 0

    def watch(self, *, evicting_only: bool = False) -> Parts | None:
        """From now on fill the parts (all but `total`); None where there are none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free what it holds; nothing is read or written afterwards."""


class Contestant(ABC):
    """Opens streams of one kind."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        self.name, self.model = name, model

    @abstractmethod
    def open(self, plan: Plan, context: Any) -> Stream:
        """A stream with `context` behind it; None: nothing. Raises NotHere."""

    @abstractmethod
    def fill(self, plan: Plan, content: Content) -> Any:
        """A context of `plan.seen` random tokens."""

    @abstractmethod
    def keep(self, stream: Stream) -> Any:
        """The context that a stream has now, as a copy."""

    def reaches(self, plan: Plan) -> str:
        """Why it cannot be timed behind such a context; empty where it can."""
        return ""


# -- our own store -------------------------------------------------------------------------------


class OwnStream(Stream):
    """`EvictingCache`s in rows of one pool; several are written to as one batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: AnyConfig,
        plan: Plan,
        state: CacheState | None,
        *,
        fixed: bool = False,
    ) -> None:
        super().__init__(model, plan)
        attach(model)
        self.pool = make_pool(model, config, rows=plan.batch)
        self.caches = [EvictingCache(model, config, pool=self.pool) for _ in range(plan.batch)]
        self._decoder: BatchDecoder | None = None
        if plan.batch > 1 or fixed:
            self._decoder = BatchDecoder(model, self.pool, static=fixed)
        for each in self.caches:
            if state is not None:
                each.restore(state)

    def feed(self, ids: Sequence[int]) -> None:
        [cache] = self.caches
        logits = prefill(self.model, cache, ids, chunk=self.plan.chunk)
        self.tokens = [int(logits.argmax())]

    @torch.inference_mode()
    def step(self) -> bool:
        logits = self._pass()
        evicted = [each.evict("decode") is not None for each in self.caches]
        self.tokens = logits.argmax(-1).tolist()
        return any(evicted)

    @torch.inference_mode()
    def step_without_eviction(self) -> None:
        """`step`, but what is due to leave stays."""
        self.tokens = self._pass().argmax(-1).tolist()

    def _pass(self) -> torch.Tensor:
        """Feed `tokens`; logits [B, vocabulary]."""
        if self._decoder is not None:
            return self._decoder.step(self.caches, self.tokens)
        [cache] = self.caches
        fed = torch.tensor(self.tokens, device=self.model.device)
        return forward(self.model, cache, fed).unsqueeze(0)

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes + self._windows

    @property
    def peak_bytes(self) -> int:
        return self.pool.peak_bytes + self._windows

    @property
    def _windows(self) -> int:
        return sum(each.nbytes - self.pool.nbytes for each in self.caches)

    @property
    def resident(self) -> int:
        return max(each.resident for each in self.caches)

    @property
    def evictions(self) -> int:
        return sum(each.stats.evictions for each in self.caches)

    def watch(self, *, evicting_only: bool = False) -> Parts:
        parts = Parts()
        for each in self.caches:
            for name in ("evict",) if evicting_only else _WORK:
                call = _timed(getattr(each, name), parts, _WORK[name], self.model.device)
                setattr(each, name, call)
        return parts

    def close(self) -> None:
        for each in self.caches:
            each.close()


def _timed(call: Any, parts: Parts, part: str, device: torch.device) -> Any:
    """`call`, with the seconds that it takes added to a part; on CUDA until its work is done."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        if parts.inside:  # one of them calls another: its time is counted already
            return call(*args, **kwargs)
        parts.inside = True
        synchronize(device)
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            synchronize(device)
            parts.inside = False
            setattr(parts, part, getattr(parts, part) + time.perf_counter() - began)

    return timed


class Own(Contestant):
    """Our store with a config."""

    def __init__(
        self, name: str, model: PreTrainedModel, config: AnyConfig, *, fixed: bool = False
    ) -> None:
        super().__init__(name, model)
        self.config = config
        self.fixed = fixed

    def open(self, plan: Plan, context: CacheState | None) -> OwnStream:
        return OwnStream(self.model, self.config, plan, context, fixed=self.fixed)

    def fill(self, plan: Plan, content: Content) -> CacheState:
        cache = EvictingCache(self.model, self.config)
        return filled_state(cache, content, plan.seen, room=self._room(plan))

    def keep(self, stream: Stream) -> CacheState:
        assert isinstance(stream, OwnStream)
        [cache] = stream.caches
        state = cache.state()
        tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
        return replace(state, room=self._room(stream.plan), tensors=tensors)

    def _room(self, plan: Plan) -> int:
        """Slots that a cache of this config has reserved by the end of the plan, or soon after."""
        whole = plan.seen + plan.room
        if not isinstance(self.config, EvictingConfig):
            return whole
        config = self.config
        target = Policy(config).target("prefill", seen=whole, resident=whole, last_chunk=True)
        flat = config.scope == "prefill+decode" and config.prefill_eviction == "chunk"
        room = (target + 1) * config.block_size + (plan.chunk if flat else plan.room)
        # What a budget in tokens will need is reserved at once, however little there is yet.
        return room if flat and config.budget.kind == "tokens" else min(room, whole)


# -- transformers' caches ------------------------------------------------------------------------


class HfStream(Stream):
    """A cache of transformers, read by its SDPA attention."""

    def __init__(self, model: PreTrainedModel, plan: Plan, cache: Any) -> None:
        super().__init__(model, plan)
        if model.config._attn_implementation != "sdpa":
            model.set_attn_implementation("sdpa")
        self.cache = cache
        self._keyword = cache_keyword(model)

    @torch.inference_mode()
    def feed(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), self.plan.chunk):
            part = torch.tensor(ids[start : start + self.plan.chunk], device=self.model.device)
            logits = self._forward(part.unsqueeze(0))
        self.tokens = logits.argmax(-1).tolist()

    @torch.inference_mode()
    def step(self) -> bool:
        fed = torch.tensor(self.tokens, device=self.model.device).unsqueeze(1)
        self.tokens = self._forward(fed).argmax(-1).tolist()
        return False

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        taken = {self._keyword: self.cache}
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **taken)
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    @property
    def _planes(self) -> list[torch.Tensor]:
        found = [(each.keys, each.values) for each in self.cache.layers if each.is_initialized]
        return [plane for pair in found for plane in pair]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self._planes)

    @property
    def resident(self) -> int:
        return int(self.cache.get_seq_length())

    def close(self) -> None:
        self.cache = None


class Hf(Contestant):
    """`DynamicCache`, which grows by a copy at every token, or `StaticCache`, of fixed length."""

    def open(self, plan: Plan, context: tuple[torch.Tensor, torch.Tensor] | None) -> HfStream:
        if self.name == DYNAMIC:
            cache: Any = DynamicCache(config=self.model.config)
        else:
            cache = StaticCache(
                config=self.model.config, max_cache_len=max(plan.seen + plan.room, plan.chunk)
            )
        if context is not None:
            with torch.inference_mode():
                for layer, pair in enumerate(zip(*context, strict=True)):
                    keys, values = (
                        plane.unsqueeze(0).expand(plan.batch, -1, -1, -1) for plane in pair
                    )
                    cache.update(keys.contiguous(), values.contiguous(), layer)
        return HfStream(self.model, plan, cache)

    def fill(self, plan: Plan, content: Content) -> tuple[torch.Tensor, torch.Tensor]:
        return content.keys[:, :, : plan.seen], content.values[:, :, : plan.seen]

    def keep(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(stream, HfStream)
        held = slice(0, stream.resident)
        keys = torch.stack([each.keys[0, :, held] for each in stream.cache.layers])
        return keys, torch.stack([each.values[0, :, held] for each in stream.cache.layers])


class AgainStream(OwnStream):
    """Reads all that was ever seen once more before it reads what is new."""

    def feed(self, ids: Sequence[int]) -> None:
        vocabulary = self.model.config.get_text_config().vocab_size
        before = [i % vocabulary for i in range(self.plan.seen)]
        super().feed([*before, *ids])


class Again(Contestant):
    """A fresh dense cache at every turn: what an agent without a persistent cache does."""

    def open(self, plan: Plan, context: None) -> AgainStream:
        return AgainStream(self.model, preset("dense"), plan, None)

    def fill(self, plan: Plan, content: Content) -> None:
        return None

    def keep(self, stream: Stream) -> None:
        return None

    def reaches(self, plan: Plan) -> str:
        return "a batch is not read again" if plan.batch > 1 else ""


# -- by name -------------------------------------------------------------------------------------


def contestants(
    model: PreTrainedModel,
    names: Sequence[str],
    budgets: Sequence[int],
    *,
    densities: Sequence[float] = (),
    changes: dict[str, Any] | None = None,
) -> list[Contestant]:
    """Those that a command line names; one that evicts once for each budget, as NAME@BUDGET.

    changes: fields of the configs of all that evict. Raises ValueError for an unknown name, and
    for evicting ones without a budget.
    """
    found: list[Contestant] = []
    for name in names:
        base, fixed = name.removesuffix(FIXED), name.endswith(FIXED)
        if name in (DYNAMIC, STATIC):
            found.append(Hf(name, model))
        elif name == AGAIN:
            found.append(Again(name, model))
        elif base not in preset_names():
            known = ", ".join((*OUTSIDE, *preset_names()))
            raise ValueError(f"unknown method {name!r}; there are: {known}, and NAME{FIXED}")
        elif base == "dense":
            found.append(Own(name, model, preset(base), fixed=fixed))
        else:
            if not budgets and not densities:
                raise ValueError(f"{name} evicts: give it a budget")
            shares: list[tuple[str, dict[str, Any]]] = [
                (str(tokens), {"kind": "tokens", "tokens": tokens}) for tokens in budgets
            ]
            shares += [(f"{d:g}", {"kind": "density", "density": d}) for d in densities]
            for label, budget in shares:
                config = preset(base, budget=budget, **copy.deepcopy(changes or {}))
                found.append(Own(f"{name}@{label}", model, config, fixed=fixed))
    return found
