"""Keys of runs: whatever decides changes them, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.batch import item as item_module
from agent.batch.item import DECIDING, Item, config_data, config_digest, make_items, settled
from agent.run_options import OptionError, RunOptions, parse_options
from environments import Choice


@dataclass(frozen=True)
class Row:
    instance_id: str = "pkg-1"
    digest: str = "aa"


def options(**changes: Any) -> RunOptions:
    return parse_options({"instance": "any", "seed": 3, **changes})


def made(source: str = "pairs", row: Row | None = None, **changes: Any) -> Item:
    """One item; config is given, so that what else decides is seen alone."""
    cell = changes.pop("cell", "")
    config = changes.pop("config", "c")
    attempts = changes.pop("attempts", 1)
    found = make_items(
        source, [row or Row()], options(**changes), cell=cell, config=config, attempts=attempts
    )
    return found[-1]


CHANGES: dict[str, Any] = {
    "model": "smollm2-135m",
    "dtype": "float32",
    "device": "cpu",
    "device_map": "balanced",
    "quantize": "4bit",
    "tools": "r2e",
    "method": "snapkv",
    "protocol": "full_context",
    "scope": "prefill",
    "budget": 99,
    "density": 0.5,
    "cache_gib": 0.5,
    "prefill_eviction": "end",
    "chunk": 64,
    "temperature": 0.1,
    "top_p": 0.5,
    "seed": 4,
    "overrides": ("limits.steps=3",),
    "sandbox": "docker",
}


def test_every_option_that_decides_changes_the_key() -> None:
    assert set(CHANGES) == set(DECIDING)
    keys = [made().key]
    for name, value in CHANGES.items():
        changed = options().model_copy(update={name: value})
        keys += [make_items("pairs", [Row()], changed, config="c")[0].key]
    keys += [
        made(row=Row("pkg-2")).key,
        made(row=Row(digest="bb")).key,
        made(cell="nexus").key,
        made(config="d").key,
        made(attempts=2).key,
    ]
    assert len(set(keys)) == len(keys) == len(DECIDING) + 6


def test_the_place_of_the_rows_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made("pairs").key == made(str(tmp_path / "rows.jsonl")).key
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert made("rows.jsonl").source == str(tmp_path / "rows.jsonl")


def test_every_field_of_the_options_was_thought_of() -> None:
    no_part = {
        "task", "instance", "repo", "issue", "image", "test_command",  # the instance is the row's
        "attempts", "until_resolved", "parallel",  # runs are one attempt each
        "apply", "branch", "env", "setup",  # of a repository of one's own
        "snapshot_turns", "snapshot_seconds",  # how often its state is saved
        "tools_reason",  # how the tool set was found, not which
    }  # fmt: skip
    assert set(RunOptions.model_fields) == {*DECIDING, *no_part}


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("device_map", {"model": 0, "lm_head": 0}, {"model": 0, "lm_head": 1}),
        ("quantize", {"quant_method": "gptq", "bits": 4}, {"quant_method": "gptq", "bits": 8}),
    ],
)
def test_what_a_file_says_of_loading_is_in_the_config(
    name: str, one: Any, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "how.json"
    monkeypatch.chdir(tmp_path)
    file.write_text(json.dumps(one))
    asked = settled(options(**{name: file.name}, sandbox="bubblewrap"))
    assert getattr(asked, name) == str(file)
    before = config_digest(asked)
    assert before != config_digest(options())
    file.write_text(json.dumps(other))
    assert config_digest(asked) != before


def test_a_device_map_says_where_and_a_device_does_not() -> None:
    asked = settled(options(device_map="auto", sandbox="bubblewrap"))
    assert (asked.device, asked.device_map) == ("auto", "auto")
    assert asked.dtype in ("bfloat16", "float32")
    item = make_items("pairs", [Row()], asked, config="c")[0]
    assert item.run_options().device_map == "auto"


def test_a_key_is_the_same_after_json_and_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(overrides=("limits.steps=3",), budget=7)
    data = json.loads(json.dumps(one.model_dump(mode="json")))
    assert Item.model_validate(data).key == one.key
    data["options"] = dict(reversed(data["options"].items()))
    assert Item.model_validate(data).key == one.key
    assert len(one.key) == 64
    monkeypatch.setattr(item_module, "FORMAT", 2)
    assert Item.model_validate(data).key != one.key


def test_attempts_sample_with_seeds_of_their_own_and_share_the_caches() -> None:
    first, second, third = make_items("pairs", [Row()], options(), attempts=3, config="c")
    assert [item.run_options().first_seed for item in (first, second, third)] == [3, 4, 5]
    assert first.run_options().cache_data(0)["seed"] == 0  # none of its own: the run's
    assert third.run_options().cache_data(5)["seed"] == 3
    own = make_items("p", [Row()], options(overrides=("cache.seed=9",)), attempts=2, config="c")
    assert own[1].run_options().cache_data(4)["seed"] == 9
    dense = make_items("p", [Row()], options(method="dense"), attempts=2, config="c")[1]
    assert dense.run_options().overrides == ()


def test_all_first_attempts_come_first() -> None:
    rows = [Row("a"), Row("b")]
    found = make_items("pairs", rows, options(), attempts=2, config="c")
    assert [(item.instance_id, item.attempt) for item in found] == [
        ("a", 1), ("b", 1), ("a", 2), ("b", 2),
    ]  # fmt: skip


def test_a_run_is_never_the_demo() -> None:
    without = parse_options({})
    item = make_items("pairs", [Row()], without, config="c")[0]
    run = item.run_options()
    assert (run.instance, run.first_seed, run.demo) == ("pkg-1", 0, False)
    assert run.cache_data(0)["budget"]["tokens"] == 8192
    assert config_data(without) == config_data(options(seed=0))


def test_the_config_is_what_the_options_come_to(tmp_path: Path) -> None:
    sets = tmp_path / "own.yaml"
    from importlib import resources

    text = (resources.files("agent") / "config" / "compact.yaml").read_text()
    sets.write_text(text)
    before = config_digest(options(tools=str(sets)))
    assert config_digest(options(tools=str(sets))) == before
    sets.write_text(text.replace("steps:", "steps:  "))  # the same, written otherwise
    assert config_digest(options(tools=str(sets))) == before
    sets.write_text(text.replace("name: compact", "name: compact2"))
    assert config_digest(options(tools=str(sets))) != before
    base = config_data(options())
    assert base["cache"]["budget"] == {"kind": "tokens", "tokens": 8192}
    assert config_data(options(overrides=("cache.window=9",)))["cache"]["window"] == 9
    with pytest.raises(OptionError, match="unknown method"):
        config_digest(options(method="magic"))


def test_other_weights_in_the_same_folder_are_another_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"one")
    before = config_digest(options(model=str(folder)))
    (folder / "model.safetensors").write_bytes(b"other")
    assert config_digest(options(model=str(folder))) != before
    assert config_data(options())["local_model"] is None


def test_auto_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.choose", lambda kind: Choice("bubblewrap", "said so"))
    found = settled(options(device="cpu"))
    assert (found.sandbox, found.device) == ("bubblewrap", "cpu")
    assert found.dtype in ("bfloat16", "int8", "float32")
    assert settled(found) == found
    for wrong in ({"dtype": "half-ish"}, {"device": "toaster"}, {"device": "cuda:99"}):
        with pytest.raises(OptionError, match=next(iter(wrong.values()))):
            settled(options(**wrong))
