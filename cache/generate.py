"""Feeding tokens to a model through an `EvictingCache`, and taking tokens out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from cache.evicting_cache import EvictingCache
from cache.placement import input_device
from cache.sampling import Sampling, choose_rows

DEFAULT_CHUNK = 512
# Feeds a cache one token, evicting nothing: float32 logits [vocabulary] behind it.
FeedOne = Callable[[EvictingCache, int], torch.Tensor]


def cache_keyword(model: PreTrainedModel) -> str:
    """The keyword under which this transformers release takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def forward(model: PreTrainedModel, cache: EvictingCache, ids: torch.Tensor) -> torch.Tensor:
    """One forward pass of ids [q] on top of `cache`; float32 logits [vocabulary] of the last.

    A pass that breaks off leaves the cache as it was.
    """
    taken: dict[str, Any] = {cache_keyword(model): cache}
    with cache.whole_pass():
        out = model(input_ids=ids.unsqueeze(0), use_cache=True, logits_to_keep=1, **taken)
    return out.logits[0, -1].float()


@torch.inference_mode()
def prefill(
    model: PreTrainedModel,
    cache: EvictingCache,
    ids: Sequence[int],
    *,
    chunk: int = DEFAULT_CHUNK,
    on_chunk: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Feed `ids` in chunks, evicting as the config says; logits [vocabulary] after the last one.

    on_chunk is told how many tokens have been fed. Raises ValueError for no ids.
    """
    if not ids:
        raise ValueError("nothing to feed: no new ids")
    if chunk < 1:
        raise ValueError(f"a chunk holds at least one token, not {chunk}")
    cache.reserve(min(chunk, len(ids)))
    logits, device = torch.empty(0), input_device(model)
    for start in range(0, len(ids), chunk):
        part = torch.tensor(ids[start : start + chunk], device=device)
        logits = forward(model, cache, part)
        fed = start + len(part)
        cache.evict("prefill", last_chunk=fed == len(ids))
        if on_chunk is not None:
            on_chunk(fed)
    return logits


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    cache: EvictingCache,
    logits: torch.Tensor,
    *,
    sampling: Sampling,
    feed: FeedOne | None = None,
) -> Iterator[int]:
    """Sample without end, from the logits of the last token fed.

    A sampled id is fed only when the next one is asked for: the caller who stops leaves the last
    id unfed, to go in front of the next turn's tokens. feed: how; None is a forward pass.
    """
    feed = feed or _by_a_pass(model)
    while True:
        [token] = choose_rows(logits.unsqueeze(0), [sampling], [cache.seen])
        yield token
        logits = feed(cache, token)
        cache.evict("decode")


@torch.inference_mode()
def replay(
    model: PreTrainedModel,
    cache: EvictingCache,
    ids: Sequence[int],
    *,
    feed: FeedOne | None = None,
    on_token: Callable[[int], None] | None = None,
) -> None:
    """Feed again, one by one, `ids` that `decode` sampled once: the cache becomes what it was then.

    feed: as `decode` had it. on_token is told how many have been fed.
    """
    feed = feed or _by_a_pass(model)
    for fed, token in enumerate(ids, 1):
        feed(cache, token)
        cache.evict("decode")
        if on_token is not None:
            on_token(fed)


def _by_a_pass(model: PreTrainedModel) -> FeedOne:
    device = input_device(model)
    return lambda cache, token: forward(model, cache, torch.tensor([token], device=device))


def generate(
    model: PreTrainedModel,
    ids: Sequence[int],
    cache: EvictingCache,
    *,
    max_new_tokens: int = 128,
    stop_ids: frozenset[int] = frozenset(),
    sampling: Sampling | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> list[int]:
    """Feed the *new* `ids` and return what the model says, the stop id included.

    The cache lives on: call again with the next turn's ids, which begin with the last id returned
    here, since that one has not been fed yet.
    """
    logits = prefill(model, cache, ids, chunk=chunk)
    out: list[int] = []
    for token in decode(model, cache, logits, sampling=sampling or Sampling()):
        out.append(token)
        if token in stop_ids or len(out) >= max_new_tokens:
            break
    return out
