"""Rivals, pyramids and adaptive heads on a real model: attention that peaks, G = 3.

Kept sets are those of the definitions in plain loops, in the lowest, a middle and the highest
layer; logits are those of full attention under the replayed mask, which is of all layers.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import method_oracles
import pytest
from cache_harness import Run, Turn, replayed, run

from cache import preset

pytestmark = pytest.mark.model

LENGTHS = [(90, 15), (45, 5)]
LAYERS = (0, 14, 29)
SETTINGS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 8},
    "h2o": {"recent": 16},
    "morphkv": {"window": 8},
    "streaming_llm": {},
    "topk": {"window": 8, "block_size": 4},
    "pyramidkv": {"block_size": 4, "sinks": 1},
    "ada-pyramidkv": {},
    "ada-nexus": {"window": 8, "block_size": 4},
}


@pytest.fixture(scope="module")
def loaded() -> Any:
    from agent.models import load

    return load("smollm2-135m", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def turns(loaded: Any) -> list[Turn]:
    ids, out = loaded.tokenizer(inspect.getsource(textwrap)).input_ids, []
    for fed, decoded in LENGTHS:
        out.append(Turn(ids[:fed], ids[fed : fed + decoded]))
        ids = ids[fed + decoded :]
    return out


def assert_as_defined(model: Any, turns: list[Turn], name: str, **changes: Any) -> Run:
    config = preset(
        name,
        **{
            "scope": "prefill+decode",
            "budget": {"kind": "tokens", "tokens": 48},
            **SETTINGS[name],
            **changes,
        },
    )
    result = run(model, config, turns, chunk=64)
    logits, captured = replayed(model, result)
    assert {record.phase for record in result.records} == {"prefill", "decode"}
    assert (result.logits - logits).abs().max() < 1e-3  # logits go up to 20
    expected = method_oracles.expected_kept(result, captured, layers=LAYERS)
    for kept, wanted in zip(result.kept, expected, strict=True):
        assert [kept[layer] for layer in LAYERS] == [wanted[layer] for layer in LAYERS]
    return result


@pytest.mark.parametrize("name", SETTINGS)
def test_kept_sets_and_logits(loaded: Any, turns: list[Turn], name: str) -> None:
    result = assert_as_defined(loaded.model, turns, name)
    last = result.kept[-1]
    differ = any(head != layer[0] for layer in last for head in layer)
    assert differ == (name != "streaming_llm")
    lengths = {len(head) for layer in last for head in layer}
    assert (len(lengths) > 1) == (name in ("pyramidkv", "ada-pyramidkv", "ada-nexus"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("snapkv", {"block_size": 8, "pooling": "avg", "group": "max", "sinks": 1}),
        ("h2o", {"block_size": 8, "prefill_eviction": "chunk", "sinks": 1}),
        ("morphkv", {"block_size": 8, "fuse": "max", "sinks": 1}),
    ],
)
def test_by_blocks(loaded: Any, turns: list[Turn], name: str, changes: dict[str, Any]) -> None:
    assert_as_defined(loaded.model, turns, name, **changes)
