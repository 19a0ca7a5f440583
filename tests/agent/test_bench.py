"""`agent bench`: its arithmetic, and that what it says of caches is true. Never how fast it is."""

from __future__ import annotations

import csv
import json
import re
from functools import cache as memoize

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from agent.bench import speed_report
from agent.bench.contestants import NotHere, Parts, Plan, contestants
from agent.bench.contexts import Content, sizes_of
from agent.bench.profiles import profiled
from agent.bench.readings import Point, Reading, Readings, order, show, spread
from agent.bench.shapes import (
    SHAPES,
    bytes_read_per_token,
    shape_config,
    shaped_model,
    weight_bytes,
)
from agent.bench.speed import Bench, Request
from agent.bench.turns import Script, Side, Turns
from agent.cli import app
from cache import preset

BUDGET = {"kind": "tokens", "tokens": 192}


@memoize
def tiny():
    return shaped_model("tiny", layers=2, dtype=torch.float32)


# -- arithmetic ----------------------------------------------------------------------------------


def test_spread_is_median_and_extremes():
    found = spread([4.0, 1.0, 9.0])
    assert (found.median, found.low, found.high, found.count) == (4.0, 1.0, 9.0, 3)
    assert spread([]) is None
    assert show(found, "{:.0f}".format) == "4 (1 to 9)"
    assert show(spread([2.0]), "{:.0f}".format) == "2"
    assert show(None, str) == "–"


def test_every_other_repeat_is_backwards():
    assert [order("abc", repeat) for repeat in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_ratios_are_formed_within_a_repeat():
    a, b = Point("decode", "a", 10), Point("decode", "b", 10)
    # The machine is ten times slower in repeat 1, for both: only pairs show that a is twice b.
    readings = Readings(
        Reading(point, repeat, {"tokens_per_s": speed})
        for repeat, pair in enumerate([(20.0, 10.0), (2.0, 1.0), (24.0, 10.0)])
        for point, speed in zip((a, b), pair, strict=True)
    )
    readings.add(Reading(a, 3, {"tokens_per_s": 1000.0}))  # b has no repeat 3
    found = readings.ratio(a, b, "tokens_per_s")
    assert (found.median, found.low, found.high, found.count) == (2.0, 2.0, 2.4, 3)
    assert readings.points == [a, b]
    assert readings.spread(b, "tokens_per_s").median == 10.0


def test_parts_are_shares_of_the_total():
    shares = Parts(total=10.0, storing=1.0, noting=2.0, evicting=0.5).shares()
    assert shares == {"storing_share": 0.1, "noting_share": 0.2, "evicting_share": 0.05}


# -- shapes --------------------------------------------------------------------------------------

# Parameters as published, in billions.
PARAMETERS = {
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "qwen2.5-coder-0.5b": 0.494,
    "qwen2.5-coder-1.5b": 1.54,
    "qwen2.5-coder-7b": 7.62,
    "qwen2.5-coder-32b": 32.76,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.76,
    "deepswe": 32.76,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_as_many_parameters_as_published(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.bfloat16)
    if name in PARAMETERS:
        assert weight_bytes(model) / 2 / 1e9 == pytest.approx(PARAMETERS[name], rel=5e-3)
    tied = bool(model.config.tie_word_embeddings)
    looked_up = model.config.vocab_size * model.config.hidden_size * 2
    assert bytes_read_per_token(model) == weight_bytes(model) - (0 if tied else looked_up)


def test_a_shape_can_be_cut():
    assert shape_config("llama-3.1-8b", layers=3).num_hidden_layers == 3
    with pytest.raises(ValueError, match="has 3; choose from 1 to 3"):
        shape_config("tiny", layers=4)
    with pytest.raises(ValueError, match=r"unknown shape 'gpt'; there are: llama-3\.1-8b"):
        shape_config("gpt")


# -- contexts and contestants --------------------------------------------------------------------

OWN = ["dense", "nexus", "h2o", "ada-nexus"]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("seen", [100, 1000, 1024])
def test_filled_caches_are_as_if_they_had_read(name, seen):
    changes = {"scope": "prefill+decode", "prefill_eviction": "chunk"}
    model = tiny()
    [side] = contestants(model, [name], [192], changes=changes)
    plan = Plan(seen, 100, 64)
    filled = side.open(plan, side.fill(plan, Content(model, seen)))
    read = side.open(Plan(0, seen + 100, 64), None)
    read.feed([i % 128 for i in range(seen)])
    [ours], [theirs] = filled.caches, read.caches
    assert ours.seen == theirs.seen == seen
    assert ours.resident == theirs.resident == filled.resident
    newest = (seen - 1) // ours.config.block_size
    assert int(ours.block_ids.max()) == newest
    if name == "nexus":
        assert (ours.kept_blocks()[..., 0] == 0).all()  # the sink
        assert filled.nbytes == read.nbytes
    before = [cache.stats.evictions for cache in (ours, theirs)]
    for _ in range(70):
        filled.step()
        read.step()
    after = [cache.stats.evictions for cache in (ours, theirs)]
    assert after[0] - before[0] == after[1] - before[1]
    assert (after[0] > before[0]) == (name != "dense" and seen > 192)
    assert ours.resident == theirs.resident


def test_transformers_caches_are_filled_too():
    model = tiny()
    content = Content(model, 50)
    for side in contestants(model, ["dynamic", "static"], []):
        plan = Plan(50, 10, 64, batch=2)
        stream = side.open(plan, side.fill(plan, content))
        stream.step()
        assert stream.resident == 51
        keys = stream.cache.layers[1].keys
        assert torch.equal(keys[1, :, :50], content.keys[1])
        slots = 51 if side.name == "dynamic" else 64
        assert stream.nbytes == 2 * 2 * 2 * 2 * slots * 16 * 4  # K and V, L, batch, H_kv, S, D


def test_names_of_contestants():
    model = tiny()
    names = [side.name for side in contestants(model, ["nexus", "dense"], [64, 96])]
    assert names == ["nexus@64", "nexus@96", "dense"]
    assert contestants(model, ["h2o"], [], densities=[0.2])[0].config.budget.density == 0.2
    with pytest.raises(ValueError, match="nexus evicts: give it a budget"):
        contestants(model, ["nexus"], [])
    with pytest.raises(ValueError, match="unknown method 'snap'; there are: dynamic, static"):
        contestants(model, ["snap"], [64])


# -- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    names = ["dense", "dynamic", "nexus", "nexus+fixed", "re-prefill"]
    changes = {"scope": "prefill+decode", "prefill_eviction": "chunk"}
    sides = contestants(tiny(), names, [192], changes=changes)
    request = Request(
        prefill=(300,),
        seen=(0, 640),
        batches=(1, 2),
        observation=62,
        new_tokens=32,
        watched=32,
        chunk=64,
        repeats=2,
    )
    made = Bench(tiny(), sides, request)
    begun, work = [], []
    made.on_begin = lambda point, repeat: begun.append((repeat, point))
    made.on_work = work.append
    made.run()
    return made, begun, work


def test_runs_take_turns(bench):
    made, begun, work = bench
    first = [point for repeat, point in begun if repeat == 0]
    second = [point for repeat, point in begun if repeat == 1]
    assert second == first[::-1]
    assert len(set(first)) == len(first) == 4 + 2 * 5 + 2 * 4
    assert sum(work) == pytest.approx(made.work())
    assert made.finished


def test_what_cannot_be_measured_says_why(bench):
    made, _, _ = bench
    assert set(made.failed.values()) == {"a batch is not read again"}
    assert {(point.who, point.batch) for point in made.failed} == {("re-prefill", 2)}


def test_bytes_are_those_of_the_tensors(bench):
    made, _, _ = bench
    sizes = sizes_of(tiny())
    slot = 2 * sizes.layers * sizes.kv_heads * sizes.dim * 4  # of one token
    for run in made.readings.runs:
        point, values = run.point, run.values
        if point.who == "dynamic":
            assert values["bytes"] == point.batch * slot * values["resident"]
            continue
        ids, window = 8 * sizes.layers * sizes.kv_heads, 0
        if point.who.startswith("nexus"):
            window = 16 * sizes.layers * sizes.heads * sizes.dim * 4
        capacity = (values["bytes"] / point.batch - window) / (slot + ids / 32)
        assert capacity == int(capacity)
        assert capacity >= values["resident"]
        assert values["peak_bytes"] >= values["bytes"]
        if point.who.startswith("nexus"):
            assert capacity <= 192 + 32 + 64  # budget, a block, a chunk: whatever was seen


def test_evictions_are_counted(bench):
    made, _, _ = bench
    evictions = {run.point: run.values.get("evictions") for run in made.readings.runs}
    for who in ("nexus@192", "nexus+fixed@192"):
        assert evictions[Point("decode", who, 640)] == 1  # 32 tokens, at the budget
        assert evictions[Point("decode", who, 640, 2)] == 2
        assert evictions[Point("decode", who, 0)] == 0
        assert evictions[Point("prefill", who, 300)] == 2
    assert evictions[Point("decode", "dense", 640)] == 0
    for run in made.readings.runs:
        evicting = run.point.who.startswith("nexus") and run.point.tokens == 640
        assert ("eviction_ms" in run.values) == (evicting or run.values.get("evictions", 0) > 0)
        shares = {name: value for name, value in run.values.items() if name.endswith("_share")}
        # Where shapes are fixed, what is stored is stored inside the pass.
        nothing = {"storing_share"} if "+fixed" in run.point.who else set()
        assert {name for name, share in shares.items() if share <= 0} <= nothing
        assert sum(shares.values()) < 1


def test_reading_again_is_timed_but_not_its_writing(bench):
    made, _, _ = bench
    values = [run.values for run in made.readings.runs if run.point.who == "re-prefill"]
    assert [set(each) for each in values] == [
        {"first_token_s", "bytes", "resident", "peak_bytes"}
    ] * 4
    assert sorted(each["resident"] for each in values) == [62, 62, 702, 702]


def test_the_report_holds_every_run(bench, tmp_path):
    made, _, _ = bench
    origin = {"date": "", "command": "", "versions": {}, "processor": "", "cores": 1, "threads": 1}
    found = speed_report.data(made, {**origin, "load": []}, {})
    paths = [tmp_path / name for name in ("x.json", "x.csv", "x.md")]
    speed_report.write(paths[0], found, made, "dense", "words")
    assert set(tmp_path.iterdir()) == set(paths)
    runs = json.loads(paths[0].read_text())["runs"]
    assert len(runs) == len(made.readings.runs) == 2 * 22
    assert len(list(csv.DictReader(paths[1].open()))) == len(runs)
    decode = next(t for t in speed_report.tables(made.readings, "dense") if "behind" in t[0])
    for row in decode[2]:
        cells = dict(zip(decode[1], row, strict=True))
        assert (cells["x dense"] == "1.00") == (cells["method"] == "dense")
    assert "Broken off, or in part failed" in paths[2].read_text()


def test_breaking_off_keeps_what_is_measured():
    sides = contestants(tiny(), ["dense"], [])
    made = Bench(tiny(), sides, Request(prefill=(20, 30), repeats=2))

    def stop() -> None:
        if len(made.readings.runs) == 3:
            raise KeyboardInterrupt

    made.on_reading = stop
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert len(made.readings.runs) == 3
    assert not made.finished


def test_contexts_can_be_read_instead():
    sides = contestants(tiny(), ["nexus", "dynamic"], [192], changes={"prefill_eviction": "chunk"})
    request = Request(
        seen=(300,), context="read", observation=8, new_tokens=4, watched=0, chunk=64, repeats=2
    )
    made = Bench(tiny(), sides, request)
    made.run()
    held = {run.point.who: run.values["resident"] for run in made.readings.runs}
    assert held["dynamic"] == 300 + 8 + 2 + 4
    assert held["nexus@192"] < 192 + 32
    assert not made.failed


# -- turns ---------------------------------------------------------------------------------------


def test_turns_feed_what_their_protocol_says():
    config = preset("nexus", budget=BUDGET, prefill_eviction="chunk")
    sides = [Side("one", "true_eviction", config), Side("all", "full_context", config)]
    made = Turns(tiny(), sides, Script(5, 300, (50, 70), reply=4, chunk=64), repeats=2)
    made.run()
    assert [turn.who for turn in made.done[:4]] == ["all", "one", "one", "all"]
    of = {
        side.name: [t for t in made.done if (t.who, t.repeat) == (side.name, 0)] for side in sides
    }
    seen = [300 + 4, 358, 432, 486, 560]
    assert (
        [t.seen for t in of["one"]]
        == [t.seen for t in of["all"]]
        == [*seen[:1], *(304 + sum((50, 70, 50, 70)[:n]) + 4 * n for n in range(1, 5))]
    )
    # The last id of a reply is fed with the next turn's.
    assert [t.fed for t in of["one"]] == [300, 51, 71, 51, 71]
    assert [t.fed for t in of["all"]] == [t.seen - 4 for t in of["all"]]
    assert all(0 < t.first_token_s <= t.reply_s for t in made.done)
    assert len({t.peak_bytes for t in of["one"]}) == 1
    growth = made.growth("all", 5, 3)
    assert growth.count == 2
    pairs = [
        next(t.first_token_s for t in made.done if (t.who, t.repeat, t.turn) == ("all", r, n))
        for r in (0, 1)
        for n in (5, 3)
    ]
    assert growth.high == max(pairs[0] / pairs[1], pairs[2] / pairs[3])


# -- profiles ------------------------------------------------------------------------------------


def test_profiles_count_operations_of_the_step_alone(capfd: pytest.CaptureFixture[str]):
    changes = {"scope": "prefill+decode", "prefill_eviction": "chunk"}
    [side] = contestants(tiny(), ["nexus"], [192], changes=changes)
    decode, evict = (
        profiled(tiny(), side, what, seen=400, steps=1, chunk=64) for what in ("decode", "evict")
    )
    calls = {op.name: op.calls for op in decode.ops}
    # q, k, v, o, gate, up, down of 2 layers, and the output layer
    assert calls["aten::mm"] == 2 * 7 + 1
    assert decode.largest <= decode.taken
    # No step of decoding takes memory in the size of the cache (here at least 192 * 2 * 16 * 4).
    assert decode.largest < 192 * 2 * 16 * 4
    names = {op.name for op in evict.ops}
    assert "aten::mm" not in names  # no model in it
    assert "aten::_softmax" in names
    [dense] = contestants(tiny(), ["dense"], [])
    with pytest.raises(ValueError, match="dense evicts nothing"):
        profiled(tiny(), dense, "evict", seen=400, steps=1)
    assert capfd.readouterr().err == ""  # the profiler's own library is silenced


# -- the command ---------------------------------------------------------------------------------


def invoke(*args: str):
    return CliRunner().invoke(app, ["bench", *args])


def test_bench_commands_end_to_end(tmp_path):
    file = tmp_path / "s.json"
    common = ["--shape", "tiny", "--dtype", "float32", "--layers", "1", "-q", "--json", str(file)]
    done = invoke(
        *("speed", *common, "--methods", "dense,nexus", "--budget", "192,0.5", "--prefill", "64"),
        *("--seen", "300", "--observation", "8", "--new-tokens", "4", "--watched", "2"),
        *("--repeats", "1", "--chunk", "64"),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert found["complete"]
    assert {run["who"] for run in found["runs"]} == {"dense", "nexus@192", "nexus@0.5"}
    assert "nexus@192" in done.output
    assert re.search("load average .*, at the end ", file.with_suffix(".md").read_text())
    done = invoke("turns", *common, "--turns", "3", "--prompt", "64", "--budget", "192",
                  "--observations", "20", "--reply", "2")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "turn 3 over turn 3: 1.00" in done.output
    assert len(json.loads(file.read_text())["turns"]) == 9
    done = invoke("profile", *common, "--what", "evict", "--budget", "192", "--seen", "300",
                  "--steps", "1")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(file.read_text())["profiles"][0]["what"] == "evict"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("speed", "--seen", "4k"), "--seen takes whole numbers with commas between, not '4k'"),
        (("speed", "--budget", "1.5"), "--budget 1.5: a number of tokens, or a share up to 1.0"),
        (("speed", "--batch", "0"), "--prefill and --batch take numbers of at least 1"),
        (("speed", "--shape", "x"), "unknown shape 'x'; there are:"),
        (("speed", "--shape", "tiny", "--model", "y"), "--shape and --model exclude each other"),
        (("speed", "--shape", "tiny", "--methods", "no"), "unknown method 'no'"),
        (("profile", "--shape", "tiny", "--what", "all"), "--what 'all' is not one of decode"),
        (("turns", "--shape", "tiny", "--observations", "0"), "at least 1"),
    ],
)
def test_wrong_options_are_named(args, words):
    done = invoke(*args, "-q")
    assert done.exit_code == 2
    assert words in done.output


def test_not_here_is_no_failure_of_the_others(monkeypatch):
    def missing(*args, **kwargs):
        raise NotHere("no batches")

    monkeypatch.setattr("agent.bench.contestants.BatchDecoder", missing)
    made = Bench(
        tiny(),
        contestants(tiny(), ["dense"], []),
        Request(seen=(0,), batches=(1, 2), new_tokens=2, watched=0, observation=4, repeats=1),
    )
    made.run()
    assert [run.point.batch for run in made.readings.runs] == [1]
    assert made.failed == {Point("decode", "dense", 0, 2): "no batches"}
