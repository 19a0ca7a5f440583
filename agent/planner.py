"""What fits: bytes of weights and caches, worked out from a model's config before it is loaded.

Nothing is estimated that can be counted: a cache's bytes are those of the pool that the cache would
allocate, made on torch's meta device, and weights are those of the model made there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from agent.bench.shapes import SHAPES, shape_config
from agent.load_options import method_name, read_quantization
from agent.model_errors import UnknownModel
from agent.models import DTYPES, INT8, choose_device, choose_precision, config_of, resolve
from agent.quantizers import quantization_of
from agent.run_options import OptionError, RunOptions
from agent.weight_sizes import Weights, int8_weights, weights_of
from cache import EvictingConfig, Pool, RaggedPool, preset
from cache.config import TokenBudget
from cache.placement import Place
from cache.policy import Policy
from cache.pools import cache_shape, observer_of
from cache.query_window import QueryWindow
from cache.ragged_store import SPARE

GIB = 1 << 30
_META = torch.device("meta")
# Left free on each device for activations, scores while evicting, and the allocator's gaps.
_RESERVE, _RESERVE_SHARE = GIB, 0.05


def bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    shape = cache_shape(config)
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize


def cache_bytes(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    eviction: EvictingConfig,
    chunk: int,
    *,
    reply: int = 0,
) -> int:
    """Most bytes that a cache under a token budget holds between forward passes.

    With what its method keeps, block ids, and room for a chunk; copies while it grows are not in
    it, nor what `prefill_eviction: end` holds while it reads a prompt. reply: tokens it writes in
    one go, which all stay until the next prompt where the scope is prefill.
    """
    shape = cache_shape(config)
    ceiling = Policy(eviction).token_ceiling
    if ceiling is None:
        raise ValueError("a density has no bytes of its own: they depend on the tokens seen")
    kind = RaggedPool if eviction.ragged else Pool
    pool = kind(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        key_dim=shape.head_dim,
        value_dim=shape.head_dim,
        block_size=eviction.block_size,
        dtype=dtype,
        device=_META,
        with_sums=observer_of([eviction]) is not None,
    )
    if eviction.scope == "prefill" and reply:  # it grows by more than it needs
        pool.make_room(pool.take(), ceiling + reply + chunk, headroom=0.25)
    else:
        pool.make_room(pool.take(), chunk, expected=ceiling + chunk)
    window = QueryWindow(eviction.window, [Place(range(shape.layers), _META)])
    ring = (shape.layers, shape.query_heads, eviction.window, shape.head_dim)
    window.restore(torch.empty(ring, dtype=dtype, device=_META) if eviction.window else None)
    # Ragged buffers are given back when they are larger than needed by more than this.
    return int(pool.nbytes * (1 + SPARE if eviction.ragged else 1)) + window.nbytes


def tokens_in(
    size: int,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    eviction: EvictingConfig,
    chunk: int,
    *,
    reply: int = 0,
) -> int:
    """The largest token budget, in whole blocks, whose cache takes at most `size` bytes; 0 where
    there is none."""
    block = eviction.block_size

    def fits(blocks: int) -> bool:
        budget = TokenBudget(tokens=blocks * block)
        own = eviction.model_copy(update={"budget": budget})
        return cache_bytes(config, dtype, own, chunk, reply=reply) <= size

    low, high = 0, size // (bytes_per_token(config, dtype) * block) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * block


def budget_tokens(options: RunOptions, seed: int = 0) -> int:
    """What `cache_gib` of a run comes to, in tokens. Raises OptionError, and ModelError where the
    model's config cannot be had."""
    model = _Found.of(options)
    eviction = preset(options.method, **options.cache_data(seed))
    assert isinstance(eviction, EvictingConfig)
    return _budget_tokens(options, model, eviction)


def _budget_tokens(options: RunOptions, model: _Found, eviction: EvictingConfig) -> int:
    assert options.cache_gib is not None
    chunk, reply = options.chunk, options.settings().limits.new_tokens
    size = int(options.cache_gib * GIB)
    tokens = tokens_in(size, model.config, model.dtype, eviction, chunk, reply=reply)
    least = _least(eviction)
    if tokens < least:
        need = eviction.model_copy(update={"budget": TokenBudget(tokens=least)})
        gib = cache_bytes(model.config, model.dtype, need, chunk, reply=reply) / GIB
        raise OptionError(
            f"--cache-gib {options.cache_gib:g} holds {tokens} tokens of {model.name}, fewer than "
            f"the {least} that must stay (sinks, recent window); give at least {gib + 5e-4:.3f}"
        )
    return tokens


def _least(eviction: EvictingConfig) -> int:
    """Tokens of the blocks that must stay whatever happens, and one to choose."""
    block = eviction.block_size
    recent = (eviction.recent_tokens + 2 * block - 2) // block
    return (eviction.sinks + recent + 1) * block


@dataclass(frozen=True, slots=True)
class Room:
    """A device, and its bytes: all, those free now, and what of them is left to activations."""

    name: str
    total: int
    free: int
    reserve: int

    @property
    def usable(self) -> int:
        return max(0, self.free - self.reserve)


def rooms(device: str = "auto") -> list[Room]:
    """The devices a model can be put on: all GPUs, or the CPU. Raises ValueError."""
    where = choose_device(device)
    if where.type == "cuda":
        numbers = range(torch.cuda.device_count()) if where.index is None else [where.index]
        found = []
        for number in numbers:
            free, total = torch.cuda.mem_get_info(number)
            found.append(_room(f"cuda:{number}", total, free))
        return found
    return [_room(str(where), *_memory())]


def _room(name: str, total: int, free: int) -> Room:
    return Room(name, total, free, max(_RESERVE, int(total * _RESERVE_SHARE)))


def _memory(root: Path = Path("/")) -> tuple[int, int]:
    """All memory and what of it is free, within the limit of the cgroup one is in."""
    found = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) * 1024
    total, free = found["MemTotal"], found["MemAvailable"]
    group = root / "sys/fs/cgroup"
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return total, free
    return min(total, limit), min(free, max(0, limit - used))


@dataclass(frozen=True, slots=True)
class Plan:
    """What fits of a model on these devices. Sizes are bytes."""

    model: str
    parameters: int
    weights: int
    weights_exact: bool
    precision: str
    dtype: str  # of the cache
    per_token: int
    context: int  # tokens that the dense cache is reckoned for
    dense: int
    rooms: tuple[Room, ...]
    method: str
    chunk: int
    largest_budget: int  # tokens of one cache in what is left
    budget: int
    budget_bytes: int
    sessions: int

    @property
    def tokens_per_gib(self) -> int:
        return GIB // self.per_token

    @property
    def left(self) -> int:
        """Bytes for caches, weights and reserves taken off; negative where weights do not fit."""
        return sum(room.free - room.reserve for room in self.rooms) - self.weights

    @property
    def spread(self) -> bool:
        """Whether one device is too small for the weights, so that a device map is needed."""
        return self.weights > max(room.usable for room in self.rooms)


def plan(
    options: RunOptions, *, context: int | None = None, on: Sequence[Room] | None = None
) -> Plan:
    """What fits of the options' model, at their budget (the default one where they name none).

    context: tokens of a dense cache to compare with; None takes the model's own. on: the devices.
    Raises OptionError, and ModelError where the model's config cannot be had.
    """
    model = _Found.of(options)
    config, dtype = model.config, model.dtype
    weights = model.weights()
    eviction = preset(options.method, **options.cache_data(0))
    if not isinstance(eviction, EvictingConfig) or not isinstance(eviction.budget, TokenBudget):
        raise OptionError("what fits is reckoned for a method with a budget in tokens")
    budget = eviction.budget
    if options.cache_gib is not None:
        budget = TokenBudget(tokens=_budget_tokens(options, model, eviction))
        eviction = eviction.model_copy(update={"budget": budget})
    chunk, reply = options.chunk, options.settings().limits.new_tokens
    each = cache_bytes(config, dtype, eviction, chunk, reply=reply)
    found = tuple(rooms(options.device) if on is None else on)
    per_token = bytes_per_token(config, dtype)
    reach = context or int(getattr(config.get_text_config(), "max_position_embeddings", 0))
    made = Plan(
        model=model.name,
        parameters=weights.parameters,
        weights=weights.size,
        weights_exact=weights.exact,
        precision=model.shown_precision,
        dtype=str(dtype).removeprefix("torch."),
        per_token=per_token,
        context=reach,
        dense=per_token * reach,
        rooms=found,
        method=eviction.method,
        chunk=chunk,
        largest_budget=0,
        budget=budget.tokens,
        budget_bytes=each,
        sessions=0,
    )
    if made.left <= 0:
        return made
    largest = tokens_in(made.left, config, dtype, eviction, chunk, reply=reply)
    return replace(made, largest_budget=largest, sessions=made.left // each)


@dataclass(frozen=True, slots=True)
class _Found:
    """The model that options name, or one whose shape was published, as it would be loaded."""

    name: str
    config: PreTrainedConfig
    folder: Path | None  # where it lies in one
    precision: str
    quantization: Mapping[str, Any] | None  # its own, or the one that is asked for

    @classmethod
    def of(cls, options: RunOptions) -> _Found:
        """Raises OptionError, ModelError, and ValueError for a device or dtype."""
        name = options.model.lower()
        folder = None
        try:
            source = resolve(options.model)
        except UnknownModel:
            if name not in SHAPES:
                raise
            config = shape_config(name)
        else:
            name, config = source.name, config_of(source)
            folder = source.path if source.kind == "folder" else None
        asked = read_quantization(options.quantize) if options.quantize else None
        bits = quantization_of(config) or asked
        plain = bits is not None or options.device_map is not None
        precision = choose_precision(options.dtype, choose_device(options.device), plain=plain)
        return cls(name, config, folder, precision, bits)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and cache."""
        return torch.float32 if self.precision == INT8 else DTYPES[self.precision]

    @property
    def shown_precision(self) -> str:
        return self.precision if self.quantization is None else method_name(self.quantization)

    def weights(self) -> Weights:
        """Its weights; of a quantised checkpoint that lies here, what its files take."""
        if self.precision == INT8:
            return int8_weights(self.config)
        found = weights_of(self.config, self.dtype, self.quantization)
        if self.folder is not None and quantization_of(self.config) is not None:
            size = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
            found = replace(found, size=size, exact=True) if size else found
        return found
