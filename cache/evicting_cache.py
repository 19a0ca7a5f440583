"""EvictingCache: one session's keys and values, cut back to a budget and never rebuilt.

Two lengths are told apart. Logical: tokens the stream has had (`get_seq_length`), from which
positions go on. Physical: slots held now (`get_mask_sizes`, `get_query_offset`). The session calls
`evict` after a forward pass, never inside one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from cache.attention import attach, lower_right_mask, mark_owner
from cache.budgets import ceil_blocks
from cache.config import AnyConfig, EvictingConfig, Phase
from cache.eviction import Moment, cut
from cache.methods import Method, make_method
from cache.policy import Policy
from cache.pools import AnyPool, make_pool, observer_of, require_fit
from cache.query_window import QueryWindow
from cache.ragged_store import Segments
from cache.state import CacheState, model_shape
from cache.stats import CacheStats, EvictionRecord


class EvictingCache(Cache):
    """A transformers cache for one sequence that evicts under a budget.

    Args:
        model: the model it will serve; `attach(model)` is called.
        config: method, budget and schedule.
        pool: where its pages live; None makes a pool with one row.
        record_kept: keep every eviction's kept sets in `stats.records` (for checks; they add up).
        forks: configs that forks of this cache will have: what their methods observe is kept too.

    Raises UnsupportedModel for an architecture it cannot serve, PoolFull when no row is free,
    ValueError for a pool of another kind and for `forks` that cannot be served together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: AnyConfig,
        *,
        pool: AnyPool | None = None,
        record_kept: bool = False,
        forks: Sequence[AnyConfig] = (),
    ) -> None:
        super().__init__(layers=[])
        attach(model)
        shape: PreTrainedConfig = model.config.get_text_config()
        self.config = config
        self.num_layers: int = shape.num_hidden_layers
        self._forks = tuple(forks)
        self._observer = observer_of((config, *forks))
        self.pool = pool if pool is not None else make_pool(model, config, forks=forks)
        require_fit(self.pool, config, self._observer)
        self.row = self.pool.take()
        self.stats = CacheStats()
        self.record_kept = record_kept
        self.seen = 0
        self._closed = False
        self._model = model
        self._policy: Policy | None = None
        self._method: Method[Any] | None = None
        if isinstance(config, EvictingConfig):
            self._policy, self._method = Policy(config), make_method(config)
        size = max(getattr(each, "window", 0) for each in (config, *forks))
        self._window = QueryWindow(size, self.pool.places)
        self._added: dict[int, Sequence[torch.Tensor]] = {}  # by layer, per head, for the sums
        self._scaling = [0.0] * self.num_layers
        self._pending = 0  # tokens of the forward pass under way
        self._whole: bool | None = None  # in a `whole_pass`: whether the last layer has attended
        self._masks: dict[torch.device, torch.Tensor] = {}

    @property
    def model(self) -> PreTrainedModel:
        """The model it serves."""
        return self._model

    # -- what transformers asks ------------------------------------------------------------------

    def __len__(self) -> int:
        return self.num_layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen: the next token's position."""
        return self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Slots held, after which new tokens are stored."""
        return self.resident

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that `query_length` new tokens will be compared with, and their offset (0)."""
        return self.resident + int(query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum: the stream may go on for ever."""
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.num_layers

    @property
    def is_linear(self) -> list[bool]:
        """No layer is: `generate` would otherwise feed again what was seen."""
        return [False] * self.num_layers

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * self.num_layers

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, H_kv, q, D] to one layer; views of all its keys and values, new ones last.

        The tokens count as seen once the last layer has attended to them, in a `whole_pass` when
        that is over: a forward pass that breaks off before leaves the cache as it was.
        """
        if self._closed:
            raise RuntimeError("this cache was closed; make a new one")
        batch, _, length, _ = key_states.shape
        if batch != 1:
            raise ValueError(f"an EvictingCache holds one sequence, not a batch of {batch}")
        if layer_idx == 0:
            self._begin(length)
            self.reserve(length)
        self.pool.write(layer_idx, self.row, key_states[0], value_states[0])
        keys, values = self.pool.view(layer_idx, self.row, length)
        mark_owner(keys, self)
        return keys, values

    def _begin(self, tokens: int) -> None:
        """A forward pass of so many tokens begins; what an unfinished one left is dropped."""
        self._pending = tokens
        self._window.begin()
        self._added.clear()

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Within it one forward pass counts its tokens when it is over, so that what breaks off
        behind the last layer's attention leaves the cache as it was as well."""
        self._whole = False
        try:
            yield
            attended = self._whole
        finally:
            self._whole = None
        if attended:
            self.finish_layer(self.num_layers - 1)

    def reset(self) -> None:
        """Forget everything, as if newly made; pins too."""
        row = self.row
        self.pool.give_back(row)
        self.row = self.pool.take()
        self.stats = CacheStats()
        self.seen = self._pending = 0
        if self._policy is not None:
            self._policy = Policy(self._policy.config)
        self._window.clear()
        self._added.clear()

    # Refusals, not gaps: what transformers may ask for and no cache that forgets can do.

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("an evicting cache cannot be cropped: what left is gone")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("an EvictingCache holds one sequence; beam search needs several")

    # -- what the attention function tells -------------------------------------------------------

    def segments(self, layer: int) -> Segments | None:
        """Where the keys of each head are in what `update` returned, the new ones included; None
        where it is a rectangle."""
        held = self.pool.segments(layer, self.row)
        if held is None:
            return None
        return Segments(held.starts, tuple(count + self._pending for count in held.lengths))

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        segments: Segments | None,
        scaling: float,
    ) -> None:
        """Take note of a layer's rotated queries [1, H_q, q, D] and its factor of q.k.

        key: all that they attend to, in slot order: [1, H_kv, T, D], or flat with `segments`.
        """
        self._scaling[layer] = scaling
        self._window.stage(layer, query[0])
        if self._observer is None:
            return
        if segments is None:
            self._added[layer] = self._observer.observe(query[0], key[0], scaling).unbind()
            return
        flat, grouped = key[0, 0], query[0].unflatten(0, (len(segments.starts), -1))
        parts = zip(grouped, segments.starts, segments.lengths, strict=True)
        self._added[layer] = [
            self._observer.observe(queries, flat[None, start : start + count], scaling)[0]
            for queries, start, count in parts
        ]

    def causal_mask(self, queries: int, keys: int, like: torch.Tensor) -> torch.Tensor:
        """`lower_right_mask`, made once for all layers of a forward pass that are on one device:
        one for fewer keys is the right part of one for more."""
        made = self._masks.get(like.device)
        if made is None or made.shape[0] != queries or made.shape[1] < keys:
            made = self._masks[like.device] = lower_right_mask(queries, keys, like)
        return made[:, made.shape[1] - keys :]

    def finish_layer(self, layer: int) -> None:
        """After the last layer the new tokens are valid and count as seen (see `whole_pass`)."""
        if layer != self.num_layers - 1:
            return
        if self._whole is not None:
            self._whole = True
            return
        self.pool.advance(self.row, self._pending, self.seen)
        self.seen += self._pending
        self._window.commit(self.seen)
        if self._observer is not None:
            self.pool.add_sums(self.row, [self._added[layer] for layer in range(self.num_layers)])
            self._added.clear()
        self._pending = 0
        self._masks.clear()
        self.stats.peak_tokens = max(self.stats.peak_tokens, self.resident)

    def accept(self, queries: torch.Tensor, scaling: Sequence[float]) -> None:
        """One token that was written behind what the row holds is valid and counts as seen.

        queries: rotated ones of all layers, [L, H_q, D]; scaling: factor of q.k in each layer. For
        passes that do not come through `update` (see `static_step`).
        """
        self._begin(1)
        if self._observer is None:
            self._window.stage_all(queries.unsqueeze(2))
        else:
            for layer, query in enumerate(queries[:, None, :, None]):
                key, _ = self.pool.view(layer, self.row, 1)
                self.observe(layer, query, key, self.segments(layer), scaling[layer])
        self._scaling = list(scaling)
        self.finish_layer(self.num_layers - 1)

    # -- size ------------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        """Slots held per layer and KV head; the mean where they differ, which is whole."""
        return self.pool.length(self.row)

    @property
    def lengths(self) -> torch.Tensor:
        """Slots held by each layer and KV head, int64 [L, H_kv] on the CPU."""
        return self.pool.lengths(self.row)

    @property
    def blocks(self) -> int:
        """Blocks held per layer and KV head (the mean), the partial one included."""
        return ceil_blocks(self.resident, self.pool.block_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors behind this cache: its pool (shared with other rows) and state."""
        return self.pool.nbytes + self._window.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of what the method needs beside keys and values: kept queries, sums."""
        return self._window.nbytes + self.pool.sums_nbytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were ever held at once, copies while growing included."""
        return self.pool.peak_bytes + self._window.nbytes

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more; a token budget's own room is taken at once."""
        ceiling = self._policy.token_ceiling if self._policy else None
        if ceiling is None or self.resident > ceiling:
            self.pool.make_room(self.row, tokens, headroom=0.25)
        else:
            # Once heads differ, each has its own ceiling.
            uneven = self.config.ragged and self.stats.evictions > 0
            self.pool.make_room(self.row, tokens, expected=0 if uneven else ceiling + tokens)

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, start: int, stop: int) -> None:
        """Never evict the tokens with indices start .. stop - 1.

        Raises ValueError for an empty span, for tokens that are gone, and when a token budget
        could not hold all that must stay.
        """
        if not 0 <= start < stop:
            raise ValueError(f"cannot pin tokens {start}..{stop}: not a span")
        if self._policy is None:
            return
        size = self.pool.block_size
        first = start // size
        # Of a span that is still to come, or coming, there is that much less to look for.
        last = max(first, ceil_blocks(min(stop, self.seen), size))
        held = self.kept_blocks()
        wanted = torch.arange(first, last, device=held.device)
        if not (held.unsqueeze(-1) == wanted).any(-2).all():
            raise ValueError(
                f"tokens {start}..{stop} cannot be pinned: some were evicted already; pin a span "
                "before the eviction that follows it"
            )
        self._policy.pin(start, stop)

    # -- eviction --------------------------------------------------------------------------------

    @property
    def block_ids(self) -> torch.Tensor:
        """int64 [L, H_kv, N]: the block each page holds, in slot order; -1 in front where a head
        holds fewer than others."""
        ids = [self.pool.held(self.row, range(i, i + 1)).block_ids for i in range(self.num_layers)]
        most = max(part.shape[-1] for part in ids)
        device = ids[0].device  # of the first layer, wherever the others are
        return torch.cat(
            [pad(part, (most - part.shape[-1], 0), value=-1).to(device) for part in ids]
        )

    def kept_blocks(self) -> torch.Tensor:
        """int64 [L, H_kv, N]: blocks held, ascending; -1 in front where a head holds fewer."""
        return self.block_ids.sort(dim=-1).values

    @torch.no_grad()
    def evict(self, phase: Phase, *, last_chunk: bool = True) -> EvictionRecord | None:
        """Cut back to the budget if `phase` and the config's schedule ask for it.

        Call it after every forward pass: with phase "prefill" after each chunk of new tokens
        (`last_chunk` for the last one), with "decode" after each generated token. Returns what
        happened, or None. Raises ValueError when a fixed budget cannot hold what must stay.
        """
        began = time.perf_counter()
        try:
            return self._evict(phase, last_chunk)
        finally:
            self.stats.eviction_seconds += time.perf_counter() - began

    def _evict(self, phase: Phase, last_chunk: bool) -> EvictionRecord | None:
        policy, method = self._policy, self._method
        if (
            policy is None
            or method is None
            or not policy.due(phase, self.seen, last_chunk=last_chunk)
        ):
            return None
        target = policy.target(phase, seen=self.seen, resident=self.resident, last_chunk=last_chunk)
        record = self._cut(policy, method, phase, target) if self.blocks > target else None
        if record is not None and phase == "prefill" and policy.config.prefill_eviction == "end":
            self.pool.fit(self.row, policy.token_ceiling or int(self.resident * 1.25))
        return record

    def _cut(
        self, policy: Policy, method: Method[Any], phase: Phase, target: int
    ) -> EvictionRecord:
        length, before = self.resident, self.blocks
        moment = Moment(
            seen=self.seen,
            step=self.stats.evictions,
            target=target,
            window=self._window,
            scaling=tuple(self._scaling),
        )
        cut(self.pool, self.row, method, policy, moment)
        record = EvictionRecord(
            step=self.stats.evictions,
            phase=phase,
            seen=self.seen,
            before=before,
            after=target,
            kept=self.kept_blocks().cpu() if self.record_kept else None,
        )
        self.stats.evictions += 1
        self.stats.evicted_tokens += length - self.resident
        if self.record_kept:
            self.stats.records.append(record)
        return record

    # -- copies ----------------------------------------------------------------------------------

    def state(self) -> CacheState:
        """Everything that decides what comes next; tensors are to be copied by the taker."""
        tensors = self.pool.export(self.row)
        if (queries := self._window.ring) is not None:
            tensors["queries"] = queries
        return CacheState(
            model=model_shape(self._model),
            config=self.config.model_dump(mode="json"),
            seen=self.seen,
            scaling=tuple(self._scaling),
            policy={} if self._policy is None else self._policy.state(),
            stats=self.stats.counters(),
            room=self.pool.capacity,
            tensors=tensors,
        )

    def restore(self, state: CacheState) -> None:
        """Become a copy of the cache that `state` was taken from; nothing is shared with it.

        Raises ValueError, naming what differs, for another model or config.
        """
        state.require(model_shape(self._model), self.config.model_dump(mode="json"))
        self.reset()
        self._take(state)
        self._window.restore(state.tensors.get("queries"))
        if self._policy is not None:
            self._policy.restore(state.policy)

    def _take(self, state: CacheState) -> None:
        content = {name: state.tensors[name] for name in state.tensors if name != "queries"}
        if self._observer is None:
            content.pop("sums", None)
        if state.room and not self.pool.ragged:
            # As much room as there was: the next step need not grow.
            self.pool.make_room(self.row, state.room)
        self.pool.fill(self.row, content)
        self.seen = state.seen
        self._scaling = list(state.scaling)
        self.stats = CacheStats(**state.stats)

    def fork(
        self, *, pool: AnyPool | None = None, config: AnyConfig | None = None
    ) -> EvictingCache:
        """A copy that shares nothing mutable with this, in a row of `pool` or a pool of its own.

        It costs a copy of the row. With another `config` (one of `forks`, or one that observes no
        more than this) it goes on by that method; nothing may have been evicted or pinned before,
        and `evict("prefill")` is still to be called for what was fed. Raises PoolFull when `pool`
        has no free row, ValueError when the other config cannot take over.
        """
        if config is None or config == self.config:
            twin = EvictingCache(
                self._model,
                self.config,
                pool=pool,
                record_kept=self.record_kept,
                forks=self._forks,
            )
            twin.restore(self.state())
            twin.stats.records.extend(self.stats.records)
            return twin
        if self.stats.evictions:
            raise ValueError(
                f"{self.stats.evictions} evictions have happened: what they took is gone for "
                "another config too; fork before the first one"
            )
        twin = EvictingCache(self._model, config, pool=pool, record_kept=self.record_kept)
        if twin._window.size > self._window.size or (
            twin._observer is not None and type(twin._observer) is not type(self._observer)
        ):
            twin.close()
            raise ValueError(
                f"{config.method} needs what this cache did not keep (window "
                f"{twin._window.size}, here {self._window.size}; sums); name its config in `forks` "
                "when the cache is made"
            )
        twin._take(self.state().uncut(config))
        twin._window.adopt(self._window, self.seen)
        return twin

    def close(self) -> None:
        """Give the row back to its pool; the cache cannot be used any more."""
        if not self._closed:
            self.pool.give_back(self.row)
            self._closed = True
