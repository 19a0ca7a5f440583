"""Replays: what is printed of a run, in which parts, while it goes on, and from damaged files."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from commands import agent, report
from kept_runs import (
    at_width,
    copied,
    finished_run,
    going_on,
    golden,
    kept,
    plain,
    rewrite,
    tell,
    two_attempts,
)
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from agent import cli_runs, run_lines, show
from agent.folder_lock import LOCK, folder_lock
from agent.held import held_shares
from agent.show import duration, held_bar, turn
from agent.trajectory import Trajectory
from cache import EvictingCache, preset
from cache import prefill as fed

NAME = "20270115-080000-shop-1-00a1"

made, several = kept(finished_run), kept(two_attempts)


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    at_width(monkeypatch, 100)
    yield
    monkeypatch.undo()
    time.tzset()


def shown(*arguments: object) -> str:
    status, text = agent("show", *arguments)
    assert status == 0, text
    return plain(text)


# What is printed


def test_a_run_looks_like_this(made: Path, tmp_path: Path) -> None:
    place = copied(
        made, tmp_path, NAME,
        verdict={"resolved": False, "status": "unresolved", "fail_to_pass": {"a": "failed"},
                 "pass_to_pass": {"b": "passed", "c": "passed"}},
    )  # fmt: skip
    rewrite(place, lambda number, line: {**line, "held": [1.0, 0.0, number / 5, 1]})
    text = shown(place)
    assert text == golden("show.txt")
    # The same as to a terminal that knows colours, which only the program itself gives.
    assert "\x1b" not in text


def test_in_full_nothing_is_left_out(made: Path) -> None:
    text = shown(made, "--full")
    assert all(f"\n{number}\n" in text for number in range(1, 61))
    assert "lines ...]" not in text
    start = json.loads((made / "trajectory.jsonl").read_text().splitlines()[0])
    for part in (start["system"], start["user"]):
        assert part.strip().splitlines()[-1].strip()[:90] in text


def test_long_lines_and_patches_are_shortened(made: Path, tmp_path: Path) -> None:
    place = copied(made, tmp_path, NAME)
    rewrite(place, lambda _, line: {**line, "observation": "x" * 1000})
    (place / "patch.diff").write_text("".join(f"+line {number}\n" for number in range(300)))
    text = shown(place)
    assert "[... 600 more]" in text.replace("\n", "")
    assert "+line 199\n[... 101 lines ...]" in text
    full = shown(place, "--full")
    assert "x" * 1000 in full.replace("\n", "")
    assert "+line 299" in full


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--step", "2"], [2]),
        (["--step", "-1"], [4]),
        (["--steps", "2:3"], [2, 3]),
        (["--steps", "3:"], [3, 4]),
        (["--steps", ":2"], [1, 2]),
        (["--steps", "-2:"], [3, 4]),
        (["--steps", "1:9"], [1, 2, 3, 4]),
        (["--steps", "4"], [4]),
    ],
)
def test_some_steps(made: Path, flags: list[str], steps: list[int]) -> None:
    text = shown(made, *flags)
    titles = [line.split()[1] for line in text.splitlines() if line.startswith("step ")]
    assert titles == [str(number) for number in steps]
    assert "model" not in text
    data = json.loads(shown(made, *flags, "--json"))
    assert [step["step"] for step in data["attempts"][0]["steps"]] == steps


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", "9"], "no step 9: .* has 4"),
        (["--step", "0"], "no step 0"),
        (["--steps", "3:2"], "no step 3:2"),
        (["--steps", "a:b"], "give N, A:B"),
        (["--step", "1", "--steps", "2"], "two ways"),
        (["--json", "-i"], "exclude each other"),
        (["--follow", "--step", "1"], "--follow shows all"),
        (["--attempt", "2"], "has one attempt"),
        (["-i"], "needs a terminal"),
    ],
)
def test_what_does_not_fit_ends_with_2(made: Path, flags: list[str], message: str) -> None:
    status, text = agent("show", made, *flags)
    assert status == 2
    assert re.search(message, " ".join(text.split()))


def test_json_has_all(made: Path) -> None:
    data = json.loads(shown(made, "--json"))
    assert data["run"]["state"] == "finished"
    assert data["report"] == report(made)
    (attempt,) = data["attempts"]
    lines = [json.loads(line) for line in (made / "trajectory.jsonl").read_text().splitlines()]
    assert [attempt["start"], *attempt["steps"], attempt["end"]] == lines
    assert attempt["patch"] == (made / "patch.diff").read_text()
    assert (attempt["damaged_lines"], attempt["torn"]) == ([], False)


def test_attempts(several: Path) -> None:
    text = shown(several)
    assert text.count("\nstep 1 ") == 2
    assert "attempt   1 of 2, seed 0" in text
    assert "attempt   2 of 2, seed 1" in text
    second = shown(several, "--attempt", "2")
    assert second == shown(several / "attempt-2")
    assert "attempt   1" not in second
    assert second.count("\nstep ") == 2
    assert "2 steps" in second
    data = json.loads(shown(several, "--json"))
    assert [len(attempt["steps"]) for attempt in data["attempts"]] == [4, 2]


def test_the_newest_by_its_name(made: Path) -> None:
    assert shown("last", "--dir", made.parent) == shown(made)


# Files as they may be


def test_a_damaged_trajectory_is_shown_as_far_as_it_goes(made: Path, tmp_path: Path) -> None:
    place = copied(made, tmp_path, NAME)
    file = place / "trajectory.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lines[2] = "{broken\n"
    file.write_text("".join(lines)[:-20])
    (place / "report.json").unlink()
    text = shown(place)
    titles = [line.split()[1] for line in text.splitlines() if line.startswith("step ")]
    assert titles == ["1", "3", "4"]
    assert "damaged lines of the trajectory were left out: 3" in text
    assert "damaged: there is no report.json; its last line is not whole" in text
    data = json.loads(shown(place, "--json"))
    assert (data["attempts"][0]["damaged_lines"], data["attempts"][0]["torn"]) == ([3], True)


@pytest.mark.parametrize("value", [None, "x", [[]], {"a": {}}, True, -1, 1e400])
def test_values_of_any_kind_are_survived(made: Path, tmp_path: Path, value: object) -> None:
    place = copied(made, tmp_path, NAME)
    names = json.loads((made / "trajectory.jsonl").read_text().splitlines()[1])
    stats = dict.fromkeys(names["stats"], value)
    calls = [{"name": value, "arguments": value}, {"name": "x", "arguments": {"k": value}}]

    def change(number: int, line: dict[str, Any]) -> dict[str, Any]:
        odd = {**dict.fromkeys(line, value), "held": value, "kind": line["kind"]}
        return odd if number % 2 else {**odd, "stats": stats, "call": calls[number % 4 // 2]}

    rewrite(place, change)
    told = report(place)
    for part in (dict.fromkeys(told, value), {**told, "totals": {"steps": value}}):
        (place / "report.json").write_text(json.dumps(part))
        assert "end ──" in shown(place)
        agent("runs", tmp_path)


def test_what_a_model_wrote_steers_nothing(made: Path, tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;title\x07\x9b1m\rover\udcff [bold]b[/bold]"
    place = copied(made, tmp_path, NAME, exit=evil, detail=evil, evictions=evil)
    (place / "patch.diff").write_text(f"+{evil}\n", errors="surrogateescape")

    def change(number: int, line: dict[str, Any]) -> dict[str, Any]:
        if number == 2:
            return {**line, "call": None, "problem": evil, "thought": evil, "observation": evil}
        return {**line, "thought": evil, "call": {"name": evil, "arguments": {evil: evil}}}

    rewrite(place, change)
    for flags in ([], ["--full"]):
        text = shown(place, *flags)
        assert not set(text) & set("\x1b\x07\x9b\r\udcff")
        assert "[2J]0;title1mover? [bold]b[/bold]" in text


def test_what_stands_of_a_run_without_an_end(made: Path, tmp_path: Path) -> None:
    place = going_on(made, tmp_path, NAME, steps=2)
    (place / LOCK).touch()
    assert "died: its process is gone\n" in shown(place)
    (place / "state").mkdir()
    (place / "state/turn-000002.json").touch()
    assert f"; `agent run --resume {place}` goes on\n" in shown(place)
    with folder_lock(place):
        text = shown(place)
        assert "running; `agent show 20270115-080000 --follow` watches it" in text
    assert "ended" not in text


def test_an_end_that_is_none_says_how_to_go_on(made: Path, tmp_path: Path) -> None:
    place = copied(made, tmp_path, NAME, state="interrupted", exit="interrupted", detail="SIGINT")
    assert "ended: interrupted (SIGINT)" in shown(place)
    assert "--resume" not in shown(place)
    (place / "state").mkdir()
    (place / "state/turn-000002.json").touch()
    assert f"interrupted; `agent run --resume {place}` goes on\n" in shown(place)
    tell(place, exit="step_limit")  # of several attempts this one is over
    assert "--resume" not in shown(place)


def test_a_run_that_was_taken_up_again(made: Path, tmp_path: Path) -> None:
    place = copied(made, tmp_path, NAME)
    file = place / "trajectory.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    stopped = json.dumps({"kind": "end", "exit": "interrupted", "detail": "SIGINT"}) + "\n"
    resumed = json.dumps({"kind": "resume", "step": 2, "replayed": 340}) + "\n"
    file.write_text("".join([*lines[:3], stopped, resumed, *lines[3:]]))
    text = shown(place)
    assert "taken up again after step 2, 340 tokens read again" in text
    assert "ended: submitted" in text
    assert "interrupted" not in text
    file.write_text("".join([*lines[:3], stopped, resumed]))
    (place / "report.json").unlink()
    assert json.loads(shown(place, "--json"))["attempts"][0]["end"] is None


# One turn


def test_a_turn_in_lines() -> None:
    stats = {
        "fed": 0, "sampled": 30, "seen": 900, "resident": 450, "peak_tokens": 700,
        "cache_bytes": 3 * 2**30, "evictions": 0, "evicted_tokens": 0, "prefill_seconds": 0.0,
        "decode_seconds": 3.0, "forked": 800, "fork_seconds": 0.125, "forked_evicted_tokens": 20,
    }  # fmt: skip
    entry = {"stats": stats, "tool_seconds": 12.3, "thought_tokens": 7}
    lines = [str(line) for line in turn(entry, None)]
    assert lines == [
        "cache     ██████████░░░░░░░░░░ 450 of 900 seen (50%) · 3.00 GiB · peak 700",
        "turn      took over 800 in 0.12 s, 20 of them evicted · wrote 30 in 3.0 s (10.0 tok/s),"
        " 7 of them thought · tool 12 s",
        "evicted   nothing · seen 900, held 50%",
    ]
    full = str(turn({"stats": {**stats, "resident": 1000}}, 900)[0])
    assert "█" * 20 + " 1,000 of 900 tokens (111%)" in full
    assert [str(line) for line in turn({}, 5)] == ["cache     nothing is known of this turn"]


@pytest.mark.parametrize(
    ("shares", "bar"),
    [
        ([0, 0.001, 0.124, 0.125, 0.5, 0.99, 1.0, 1], "·▁▁▂▅███"),
        ([], None),
        ([0.5, 2], None),
        ([0.5, -0.1], None),
        ([True], None),
        ([float("nan")], None),
        (["1"], None),
        ("111", None),
        ([1] * 1000, None),
        (None, None),
    ],
)
def test_shares_as_a_bar(shares: object, bar: str | None) -> None:
    drawn = held_bar(shares)
    assert (None if drawn is None else str(drawn)) == bar


@pytest.mark.parametrize("tokens", [0, 20, 300, 1200])
@pytest.mark.parametrize("method", ["nexus", "ada-snapkv", "dense"])
def test_shares_are_those_of_the_blocks_held(tokens: int, method: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    small = {} if method == "dense" else {"budget": {"kind": "tokens", "tokens": 256}}
    cache = EvictingCache(model, preset(method, **small))
    if tokens:
        fed(model, cache, torch.randint(64, (tokens,)).tolist(), chunk=100)
    shares = held_shares(cache, parts=8)
    size = cache.pool.block_size
    blocks = -(-tokens // size)
    of: dict[int, list[float]] = {}
    held = cache.block_ids.flatten(0, 1).tolist()
    for block in range(blocks):
        part = block * min(8, blocks) // blocks
        of.setdefault(part, []).append(sum(block in head for head in held) / len(held))
    assert shares == pytest.approx([sum(own) / len(own) for own in of.values()], abs=6e-4)
    assert len(shares) == min(8, blocks)
    assert held_bar(shares) is not None or not tokens
    if method == "dense" or tokens <= 256:
        assert shares == [1.0] * len(shares)
    else:
        assert min(shares) < 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"),
        (7_260, "2 h 1 min"), (90_000, "1 d 1 h"), (-5, "0 s"),
    ],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


# Step by step


CLEARED = "\x1b[2J\x1b[H"


def pages(monkeypatch: pytest.MonkeyPatch, keys: str | list[str], *arguments: object) -> list[str]:
    """What was on the screen before each key."""
    screens: list[str] = []
    console = Console(width=100, force_terminal=True, color_system=None, file=sys.stderr)
    pressed = iter(keys)

    def key() -> str:
        screens.append(plain(recorded.export_text().removeprefix(CLEARED)))
        found = next(pressed)
        if found == "EOF":
            raise EOFError
        if found == "INT":
            raise KeyboardInterrupt
        return found

    recorded = console
    recorded.record = True
    monkeypatch.setattr(cli_runs, "_console", lambda: recorded)
    monkeypatch.setattr(cli_runs, "_at_a_terminal", lambda _: True)
    monkeypatch.setattr(typer, "getchar", key)
    status, _ = agent("show", *arguments, "-i")
    assert status == 0
    assert next(pressed, None) is None
    return screens


def titles(screens: list[str]) -> list[str]:
    """The first words of each screen."""
    return [" ".join(screen.replace("─", "").split()[:2]) for screen in screens]


def test_one_step_at_a_time(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["p", "n", " ", "\x1b[C", "x", "p", "\x1b[D", "e", "n", "g", "q"]
    name = f"run {made.name}:"
    assert titles(pages(monkeypatch, keys, made)) == [
        name, name, "step 1", "step 2", "step 3", "step 3", "step 2", "step 1",
        "end ended:", "end ended:", name,
    ]  # fmt: skip


def test_the_pages_are_those_asked_for(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screens = pages(monkeypatch, "nnq", made, "--steps", "2:3")
    assert titles(screens) == ["step 2", "step 3", "step 3"]
    assert "1 of 2 · n next, p back" in screens[0]


def test_in_full_while_it_is_read(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screens = pages(monkeypatch, "ffq", made, "--step", "1")
    assert ["[... " in screen for screen in screens] == [True, False, True]


@pytest.mark.parametrize("end", ["q", "INT", "EOF", "\x1b", "\x03"])
def test_ways_out(made: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    assert len(pages(monkeypatch, ["n", end], made)) == 2


# A run that goes on


def test_following_a_run_to_its_end(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = going_on(made, tmp_path, NAME, steps=0)
    lines = (made / "trajectory.jsonl").read_text().splitlines(keepends=True)[1:]
    seen: list[str] = []
    read: list[str] = []
    step, entry_of = show.Show.step, run_lines._entry

    def noted(self: show.Show, replay: Any, entry: Any) -> None:
        seen.append(entry["step"])
        step(self, replay, entry)

    def noted_read(line: bytes) -> dict[str, Any] | None:
        read.append(line.decode() + "\n")
        return entry_of(line)

    monkeypatch.setattr(show.Show, "step", noted)
    monkeypatch.setattr(run_lines, "_entry", noted_read)
    lock = ExitStack()
    lock.enter_context(folder_lock(place))

    pieces = iter([piece for line in lines for piece in (line[:30], line[30:])])
    counts: list[int] = []

    def later(_: float) -> None:
        counts.append(len(seen))
        if (piece := next(pieces, None)) is not None:
            with (place / "trajectory.jsonl").open("a") as file:
                file.write(piece)
            return
        tell(place, **report(made))
        lock.close()

    monkeypatch.setattr(time, "sleep", later)
    text = shown(place, "--follow")
    assert counts == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4]  # half a line is no line
    assert [line for line in read if line in lines] == lines  # each is read once
    body = text.partition("turn 0")[2]
    assert body == shown(made).partition("turn 0")[2]


def test_following_over_a_resumption(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were cut off and are made again are shown again; others are not."""
    place = going_on(made, tmp_path, NAME, steps=3)
    lock = ExitStack()
    lock.enter_context(folder_lock(place))
    lines = (made / "trajectory.jsonl").read_text().splitlines(keepends=True)
    size = len("".join(lines[:3]))  # turn 0 and two steps
    looks = iter(range(4))

    def later(_: float) -> None:
        match next(looks):
            case 0:
                with Trajectory.reopen(place, size) as trajectory:
                    trajectory.append("resume", {"step": 2})
            case 1:
                with (place / "trajectory.jsonl").open("a") as file:
                    file.write(lines[3].replace("One too many.", "Another thought."))
            case 2:
                with (place / "trajectory.jsonl").open("a") as file:
                    file.write("".join(lines[4:]))
            case 3:
                tell(place, **report(made))
                lock.close()

    monkeypatch.setattr(time, "sleep", later)
    text = shown(place, "--follow")
    told = [line for line in text.splitlines() if line.startswith(("step ", "taken up", "end "))]
    assert [line.split(" ·")[0].split(" ─")[0] for line in told] == [
        "step 1", "step 2", "step 3", "taken up again after step 2", "step 3", "step 4", "end",
    ]  # fmt: skip
    assert text.index("One too many.") < text.index("Another thought.")


def test_following_attempts(several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = copied(several, tmp_path, NAME)
    tell(place, "attempts", state="running")
    second = (place / "attempt-2").rename(tmp_path / "later")
    lock = ExitStack()
    lock.enter_context(folder_lock(place))
    looks = iter(range(2))

    def later(_: float) -> None:
        if next(looks) == 0:
            second.rename(place / "attempt-2")
        else:
            tell(place, **report(several))
            lock.close()

    monkeypatch.setattr(time, "sleep", later)
    text = shown(place, "--follow")
    told = [line.split()[:2] for line in text.splitlines() if line.startswith(("step", "attempt"))]
    assert [" ".join(words) for words in told] == [
        "attempt 1", "step 1", "step 2", "step 3", "step 4", "attempt 2", "step 1", "step 2",
    ]  # fmt: skip
    assert text.count("ended: submitted") == 2


def test_following_ends_when_nobody_works_on(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = going_on(made, tmp_path, NAME, steps=2)
    (place / LOCK).touch()
    status, text = agent("show", place, "--follow")
    assert (status, "died: its process is gone" in text) == (1, True)
    assert shown(made, "--follow") == shown(made)

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", stop)
    with folder_lock(place):
        status, text = agent("show", place, "--follow")
    assert (status, "Traceback" in text, "\nstep 2" in text) == (130, False, True)
