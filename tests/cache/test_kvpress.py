"""Scores, kept sets and budgets against kvpress, which was written from the same papers by others.

What is compared on our side is what an `EvictingCache` computes while a prompt is fed in chunks; on
theirs, what their methods return for an eager pass of transformers (see kvpress_driver.py).
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_harness import Run, Turn, random_ids, run, tiny
from safetensors.torch import load_file

from cache import Observation, preset
from cache.allocation import apportion, head_counts, layer_counts, pyramid_shares
from cache.methods import H2O, SnapKV

pytestmark = pytest.mark.oracle

ORACLES = Path(__file__).parents[2] / ".oracles"  # `make oracles`
LENGTH, KEEP, WINDOW, KERNEL, SINKS = 160, 48, 8, 5, 4
BLOCK = 8  # divides LENGTH and WINDOW: theirs counts a cut-off chunk as a whole one
CHUNK = 48
REAL = "smollm2-135m"
# 1, 3, 4, 4 and 4 queries per KV head; SmolLM2 has 3.
TINY = ["llama-g1-kv2", "llama-g3-kv2", "llama-g4-kv1", "qwen2-g4-kv2", "qwen3-g4-kv2"]


def leaving(kept: int, of: int) -> float:
    """The compression ratio at which they keep int(of * (1 - ratio)) = kept, whatever rounds."""
    return 1 - (kept + 0.5) / of


SNAPKV = {
    "kind": "SnapKVPress",
    "compression_ratio": leaving(KEEP, LENGTH),
    "window_size": WINDOW,
    "kernel_size": KERNEL,
}
STREAMING = {"kind": "StreamingLLMPress", "compression_ratio": SNAPKV["compression_ratio"]}
CHUNKS = {
    "kind": "ChunkKVPress",
    "chunk_length": BLOCK,
    "press": {
        **SNAPKV,
        "kernel_size": 1,
        "compression_ratio": leaving(KEEP // BLOCK, LENGTH // BLOCK),
    },
}
ASKS = [
    {"name": "snapkv", "what": "scores", "press": SNAPKV},
    {"name": "snapkv-kept", "what": "kept", "press": SNAPKV},
    {"name": "h2o", "what": "scores", "press": {"kind": "ObservedAttentionPress"}},
    {"name": "streaming-kept", "what": "kept", "press": {**STREAMING, "n_sink": SINKS}},
    {"name": "chunks-kept", "what": "kept", "press": CHUNKS},
    {
        "name": "ada-kept",
        "what": "kept",
        "press": {"kind": "AdaKVPress", "alpha_safeguard": 0.0, "press": SNAPKV},
    },
]

# (layers, length, window, mean tokens kept per layer, beta)
PYRAMIDS = [
    (32, 8192, 64, 1638, 20),
    (32, 4096, 8, 819, 20),
    (28, 4096, 8, 819, 20),
    (5, 1000, 8, 301, 7),
    (2, 1000, 8, 301, 7),
    (4, 1000, 64, 600, 20),  # twice the mean is more than there is: the first layer keeps all
    (3, 300, 8, 100, 1),  # beta 1: all alike
]
# Their lowest layer would hold less than the window.
UNIFORM = (32, 4096, 64, 819, 20)

Answers = dict[str, torch.Tensor]


def name_of(pyramid: tuple[int, ...]) -> str:
    return "-".join(map(str, pyramid))


def pyramid_ask(pyramid: tuple[int, ...]) -> dict[str, Any]:
    layers, length, window, kept, beta = pyramid
    press = {
        "kind": "PyramidKVPress",
        "compression_ratio": 1 - kept / length,
        "window_size": window,
        "beta": beta,
    }
    return {"name": name_of(pyramid), "layers": layers, "length": length, "press": press}


def ask_kvpress(folder: Path, **job: Any) -> Answers:
    """Answers by name; `folder` is for the files that are exchanged."""
    question, out = folder / "job.json", folder / "answers.safetensors"
    question.write_text(json.dumps({"models": [], "budgets": [], **job}))
    driver = Path(__file__).with_name("kvpress_driver.py")
    done = subprocess.run(
        [sys.executable, "-P", driver, question, out],  # -P: our own modules stay out of its way
        env={**os.environ, "PYTHONPATH": str(ORACLES), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out)


@dataclass
class Subject:
    """A model, a prompt, and what kvpress says about them."""

    model: Any
    ids: list[int]
    answers: Answers

    def run(self, config: Any, chunk: int = CHUNK) -> Run:
        result = run(self.model, config, [Turn(self.ids, [])], chunk=chunk)
        assert len(result.records) == 1
        return result


def about(name: str, folder: Path, ids: list[int]) -> dict[str, Any]:
    return {"name": name, "folder": str(folder), "ids": ids, "asks": ASKS}


def tiny_ids(name: str) -> list[int]:
    return random_ids(LENGTH, seed=TINY.index(name))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """On the tiny models and on budgets: a process costs seconds, so it is one."""
    folder = tmp_path_factory.mktemp("kvpress")
    for name in TINY:
        tiny(name).save_pretrained(folder / name)
    return ask_kvpress(
        folder,
        models=[about(name, folder / name, tiny_ids(name)) for name in TINY],
        budgets=[pyramid_ask(pyramid) for pyramid in [*PYRAMIDS, UNIFORM]],
    )


@pytest.fixture(scope="module", params=[*TINY, pytest.param(REAL, marks=pytest.mark.model)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    name: str = request.param
    if name == REAL:
        from agent.models import load

        loaded = load(REAL, dtype="float32", device="cpu")
        model, ids = loaded.model, loaded.tokenizer(inspect.getsource(textwrap)).input_ids[:LENGTH]
        folder = tmp_path_factory.mktemp("kvpress")
        found = ask_kvpress(folder, models=[about(REAL, loaded.path, ids)])
    else:
        model, ids, found = tiny(name), tiny_ids(name), request.getfixturevalue("answers")
    mine = {key: value for key, value in found.items() if key.startswith(f"{name}/")}
    return Subject(model, ids, {key.removeprefix(f"{name}/"): mine[key] for key in mine})


def spy(monkeypatch: pytest.MonkeyPatch, method: type[Any], note: Callable[..., Any]) -> list[Any]:
    """What `note` makes of (observation, weights) of each call, which may be for some layers.

    It must copy what it takes: an observation is a view of what the eviction then moves.
    """
    notes: list[Any] = []
    original = method.weights

    def weights(self: Any, observation: Observation) -> torch.Tensor:
        out = original(self, observation)
        notes.append(note(observation, out))
        return out

    monkeypatch.setattr(method, "weights", weights)
    return notes


def kept_mask(run: Run) -> torch.Tensor:
    """Bool [L, H_kv, LENGTH], by token."""
    blocks, size = run.records[0].kept, run.cache.config.block_size
    count = LENGTH // size
    mask = torch.zeros(*blocks.shape[:2], count + 1, dtype=torch.bool)
    mask.scatter_(-1, blocks.where(blocks >= 0, count), True)  # the last place is for padding
    return mask[..., :-1].repeat_interleave(size, -1)


def assert_same_kept(ours: torch.Tensor, theirs: torch.Tensor, scores: torch.Tensor) -> None:
    """Equal, but for what two float32 sums may order either way: tokens with the score of the cut.

    scores: theirs, laid out so that the last axis is what was ranked at once.
    """
    assert torch.equal(ours.sum(-1), theirs.sum(-1))
    cut = scores.masked_fill(~theirs, float("inf")).amin(-1, keepdim=True)
    tied = (scores - cut).abs() <= 1e-5 * cut.abs()
    assert not bool(((ours ^ theirs) & ~tied).any())


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """To what float32 leaves after many layers (1e-5 of a value is seen)."""
    mean = float(theirs.double().mean())
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-6 * mean)


def snapkv(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "window": WINDOW,
        "kernel": KERNEL,
        "pooling": "avg",
        "budget": {"kind": "tokens", "tokens": KEEP},
    }
    return preset(changes.pop("name", "snapkv"), **{**settings, **changes})


def test_snapkv_scores(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """One factor for all heads of a layer: theirs is a mean over the window, ours sums to 1."""
    parts = spy(monkeypatch, SnapKV, lambda _, weights: weights.clone())
    subject.run(snapkv())
    ours = torch.cat(parts)[..., :-WINDOW]
    theirs = subject.answers["snapkv"][..., :-WINDOW].double()
    assert ours.shape == theirs.shape
    factor = theirs.sum((1, 2), keepdim=True) / ours.sum((1, 2), keepdim=True)
    assert_close(ours * factor, theirs)


def test_snapkv_kept_sets(subject: Subject) -> None:
    theirs = subject.answers["snapkv-kept"]
    assert bool((theirs.sum(-1) == KEEP).all())
    assert_same_kept(kept_mask(subject.run(snapkv())), theirs, subject.answers["snapkv"])


@pytest.mark.parametrize("chunk", [CHUNK, LENGTH])
def test_h2o_sums_of_the_prompt(
    subject: Subject, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs is the mean over the queries that see a key, ours the sum over them."""
    parts = spy(monkeypatch, H2O, lambda seen, _: seen.sums.gather(-1, seen.slot_order))
    config = preset("h2o", recent=WINDOW, budget={"kind": "tokens", "tokens": KEEP})
    subject.run(config, chunk)
    queries = torch.arange(LENGTH, 0, -1)
    assert_close(torch.cat(parts) / queries, subject.answers["h2o"])


def test_streaming_llm_kept_sets(subject: Subject) -> None:
    """As sets: theirs come out in the order of `topk`, which scrambles them (fault 5)."""
    config = preset("streaming_llm", sinks=SINKS, budget={"kind": "tokens", "tokens": KEEP})
    assert torch.equal(kept_mask(subject.run(config)), subject.answers["streaming-kept"])


def test_blocks_of_largest_attention(subject: Subject) -> None:
    """Direct attention alone, one decision per layer, is ChunkKV over unpooled SnapKV scores."""
    config = preset(
        "nexus",
        block_size=BLOCK,
        window=WINDOW,
        walk_weight=0,
        recency_tiebreak=0,
        selection="top_k",
        heads="layer_attention",
        sinks=0,
        budget={"kind": "tokens", "tokens": KEEP},
    )
    theirs = subject.answers["chunks-kept"]
    assert bool((theirs.sum(-1) == KEEP).all())
    assert torch.equal(kept_mask(subject.run(config)), theirs)


# --- budgets that differ by head ---------------------------------------------------------------


def test_ada_head_counts_from_their_scores(subject: Subject) -> None:
    """Their floor reserves places for the window, ours spreads free ones: alike only without."""
    theirs = subject.answers["ada-kept"].sum(-1)
    for layer, scores in enumerate(subject.answers["snapkv"]):
        candidates = torch.ones_like(scores, dtype=torch.bool)
        candidates[:, -WINDOW:] = False
        free = len(scores) * (KEEP - WINDOW)
        counts = head_counts(scores, candidates, free, floor=0.0)
        assert sum(counts) == free
        assert [count + WINDOW for count in counts] == theirs[layer].tolist()


def test_ada_kept_sets(subject: Subject) -> None:
    theirs, scores = subject.answers["ada-kept"], subject.answers["snapkv"]
    result = subject.run(snapkv(name="ada-snapkv", head_floor=0.0))
    ours = kept_mask(result)
    assert_same_kept(ours.flatten(1), theirs.flatten(1), scores.flatten(1))
    assert torch.equal(result.cache.lengths, ours.sum(-1))
    assert ours.shape[1] == 1 or not torch.equal(ours.sum(-1), torch.full(ours.shape[:2], KEEP))


# --- budgets that differ by layer --------------------------------------------------------------


@pytest.mark.parametrize("pyramid", PYRAMIDS, ids=name_of)
def test_pyramid_is_theirs_with_an_exact_sum(answers: Answers, pyramid: tuple[int, ...]) -> None:
    """Their base takes the window in, so ours is called with that base and nothing forced."""
    layers, length, window, kept, beta = pyramid
    theirs = answers[name_of(pyramid)].tolist()
    assert beta == 1 or theirs[0] > theirs[-1], "theirs fell back to one budget for all layers"
    shares = pyramid_shares(kept, layers, beta, length - window)
    ours = apportion(shares, layers * kept, [length - window] * layers)
    assert sum(ours) == layers * kept
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1


def test_pyramid_does_not_fall_back_silently(answers: Answers) -> None:
    """Theirs is plain SnapKV where the last layer would get less than a window (fault 14)."""
    layers, length, window, kept, beta = UNIFORM
    assert answers[name_of(UNIFORM)].tolist() == [kept] * layers
    config = preset(
        "pyramidkv",
        window=window,
        pyramid_beta=beta,
        budget={"kind": "tokens", "tokens": kept},
    )
    heads = 8
    totals = layer_counts(
        config, target=kept, forced=window, present=[length * heads] * layers, heads=heads
    )
    ours = [total // heads for total in totals]
    assert totals == [heads * count for count in ours]
    assert sum(ours) == layers * kept
    assert ours == sorted(ours, reverse=True)
    assert ours[0] > 2 * kept - 2 * window
    assert window < ours[-1] < 2 * window


@pytest.mark.parametrize("adaptive", [False, True])
def test_pyramid_keeps_their_best_in_every_layer(subject: Subject, adaptive: bool) -> None:
    """Each layer's number by our rule; then the best of their scores, by head or of all heads."""
    name, floor = ("ada-pyramidkv", {"head_floor": 0.0}) if adaptive else ("pyramidkv", {})
    ours = kept_mask(subject.run(snapkv(name=name, **floor)))
    scores = subject.answers["snapkv"]
    layers, heads = ours.shape[:2]
    by_layer = ours.sum((1, 2))
    assert by_layer.tolist() == sorted(by_layer.tolist(), reverse=True)
    assert int(by_layer[0]) > int(by_layer[-1])
    assert int(by_layer.sum()) == KEEP * layers * heads
    if adaptive:
        ours, scores = ours.flatten(1)[:, None], scores.flatten(1)[:, None]
    counts = by_layer // ours.shape[1]
    rank = scores.argsort(-1, descending=True).argsort(-1)
    assert_same_kept(ours, rank < counts[:, None, None], scores)
