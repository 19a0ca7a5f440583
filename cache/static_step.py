"""A decode step whose shapes do not depend on how much the rows hold.

Tokens, positions and lengths are tensors on the device, written in place; keys and values go to the
slot that the device's length names, and attention is over the pool's capacity under a mask of the
lengths. So on CUDA the whole forward pass is one graph, captured once and replayed for every token,
until the pool's capacity changes. Eviction stays outside. Elsewhere the same function runs as it
is.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from cache.attention import mark_batch
from cache.batch_attention import attend_rows
from cache.evicting_cache import EvictingCache
from cache.generate import cache_keyword
from cache.placement import all_devices
from cache.store import Pool
from cache.support import shared_rotation


def can_capture(model: PreTrainedModel) -> bool:
    """Whether a step of `model` can be one CUDA graph: it is on one GPU, its layers are torch's
    own, and no hook moves what they compute."""
    devices = all_devices(model)
    return (
        len(devices) == 1
        and devices[0].type == "cuda"
        and getattr(model, "hf_quantizer", None) is None
        and shared_rotation(model) is None
        and not any(hasattr(module, "_hf_hook") for module in model.modules())
    )


class StaticStep:
    """Feeds one token to caches in rows of a uniform pool. All rows are computed; those that are
    not fed get a token behind what they hold that is never counted."""

    def __init__(self, model: PreTrainedModel, pool: Pool) -> None:
        self.model = model
        self.pool = pool
        self.captures = 0
        self._keyword = cache_keyword(model)
        device = pool.keys.device
        # Of each row: token, position, slots held; then the rows that are asked for, in order.
        self._inputs = torch.zeros(4, pool.rows, dtype=torch.int64, device=device)
        self._batch = _Rows(pool, self._inputs[2])
        self._planes: weakref.ref[torch.Tensor] | None = None  # the pool's, when last prepared
        self._graph: torch.cuda.CUDAGraph | None = None
        # Its own: what torch keeps for a stream goes with the first graph that was captured on it.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._logits = torch.empty(0)

    def step(self, caches: Sequence[EvictingCache], tokens: Sequence[int]) -> torch.Tensor:
        """Feed tokens[i] to caches[i], each in a row of its own; float32 logits [B, vocabulary].

        A pass that breaks off leaves every cache as it was.
        """
        pool = self.pool
        for cache in caches:
            cache.reserve(1)
        for row in range(pool.rows):  # those that are not fed are written to as well
            pool.make_room(row, 1)
        held = [pool.length(row) for row in range(pool.rows)]
        fed, positions = [0] * pool.rows, [0] * pool.rows
        for cache, token in zip(caches, tokens, strict=True):
            fed[cache.row], positions[cache.row] = token, cache.seen
        asked = [cache.row for cache in caches]
        padded = asked + [0] * (pool.rows - len(asked))
        self._inputs.copy_(torch.tensor([fed, positions, held, padded]), non_blocking=True)
        if self._planes is None or self._planes() is not pool.keys:
            self._prepare(held)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._logits = self._pass()
        for cache in caches:
            cache.accept(self._batch.queries[:, cache.row], self._batch.scaling)
        return self._logits.index_select(0, self._inputs[3, : len(asked)]).float()

    def _pass(self) -> torch.Tensor:
        """One forward pass of all rows: logits [R, vocabulary], in the model's dtype."""
        taken: dict[str, Any] = {self._keyword: self._batch}
        out = self.model(
            input_ids=self._inputs[0].unsqueeze(-1),
            position_ids=self._inputs[1].unsqueeze(-1),
            use_cache=True,
            logits_to_keep=1,
            **taken,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _prepare(self, held: Sequence[int]) -> None:
        """Get ready for the pool's tensors, which are new ones."""
        self._graph, self._planes, self._logits = None, None, torch.empty(0)
        for row, length in enumerate(held):
            # New memory can hold anything, and no number times a NaN is zero.
            self.pool.keys[:, row, :, length:] = 0
            self.pool.values[:, row, :, length:] = 0
        if self._stream is not None:
            self._capture(self._stream)
        self._planes = weakref.ref(self.pool.keys)
        self.captures += 1

    def _capture(self, stream: torch.cuda.Stream) -> None:
        """Record the pass as one graph. What warming up writes, the first replay writes again.

        What cannot be captured runs as it is, with a warning.
        """
        with torch.cuda.device(stream.device):
            before = torch.cuda.current_stream()
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._pass()
            before.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            gc.collect()
            collecting = gc.isenabled()
            gc.disable()  # an old graph that is freed meanwhile would break this one
            try:
                # Other threads may go on meanwhile: a session that reads what its row holds, say.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self._logits = self._pass()
            except RuntimeError as error:
                torch.cuda.set_stream(before)  # a capture that cannot end leaves its own
                torch.cuda.synchronize()
                why = str(error).partition("\n")[0]
                warnings.warn(
                    f"decoding without a CUDA graph, which is slower: {why}", stacklevel=2
                )
            else:
                self._graph = graph
            finally:
                if collecting:
                    gc.enable()


class _Rows(Cache):
    """What the model takes for its cache: all rows of the pool, lengths [R] on the device.

    queries: the pass's rotated queries [L, R, H_q, D]; scaling: of q.k, by layer.
    """

    def __init__(self, pool: Pool, lengths: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self._lengths = lengths
        layers, rows, heads = pool.keys.shape[:3]
        self._row = torch.arange(rows, device=lengths.device).unsqueeze(-1)
        self._head = torch.arange(heads, device=lengths.device)
        self.queries = torch.empty(0)
        self.scaling = [0.0] * layers

    def __len__(self) -> int:
        return len(self.scaling)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots of a row: what is known without asking the device."""
        return self._pool.capacity

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [R, H_kv, 1, D] behind what each row holds."""
        pool, slot = self._pool, self._lengths.unsqueeze(-1)
        pool.keys[layer_idx][self._row, self._head, slot] = key_states[:, :, 0]
        pool.values[layer_idx][self._row, self._head, slot] = value_states[:, :, 0]
        if pool.sums is not None:
            pool.sums[layer_idx].scatter_(2, slot.unsqueeze(-1).expand(-1, len(self._head), 1), 0.0)
        mark_batch(key_states, self)
        return key_states, value_states

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Each row over what it holds and its new token."""
        if self.queries.numel() == 0:
            rows, heads, _, dim = query.shape
            self.queries = query.new_empty(len(self.scaling), rows, heads, dim)
        self.queries[layer] = query[:, :, 0]
        self.scaling[layer] = scale
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        out = attend_rows(query, keys, values, self._lengths + 1, scale)
        return out.transpose(1, 2)
