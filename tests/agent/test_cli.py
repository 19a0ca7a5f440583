"""The command `agent`: quick help, options that do not fit, whole runs with a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from commands import SOURCE, agent, only_run, report, run_repo
from scripted import xml
from typer.testing import CliRunner

from agent import attempt, run_command
from agent.cli import app
from agent.run_options import RunOptions, parse_options
from agent.trajectory import read_trajectory
from cache import preset_names
from environments import probe
from tasks import Verdict

FIX = xml("edit", "One too many.", path="calc.py", start="2", text="    return x + x")


def test_help_names_every_method() -> None:
    run = next(c for c in typer.main.get_command(app).commands.values() if c.name == "run")
    text = next(p.help for p in run.params if p.name == "method")
    assert "NAME-paper" in text
    own = {name.removesuffix("-paper") for name in preset_names()}
    assert set(re.findall(r"[a-z0-9_-]+", text)) >= own


def test_help_is_quick_and_without_torch() -> None:
    code = (
        "import sys, agent.cli; print([m for m in sys.modules if m in ('torch', 'transformers')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
    for command in ([], ["run"], ["models"], ["tasks"], ["doctor"], ["clean"]):
        status, text = agent(*command, "--help")
        assert status == 0
        assert "Usage" in text


def test_the_tasks_are_listed() -> None:
    status, text = agent("tasks", "list", "--json")
    rows = json.loads(text)
    assert status == 0
    assert len(rows) == 13
    assert {"id": "tinydb-4.8.2", "kind": "release_pair"}.items() <= rows[11].items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--instance", "a", "--repo", "."], "give one of them"),
        (["--repo", "."], "--repo needs --issue"),
        (["--issue", "text"], "belongs to --repo"),
        (["--apply"], "there is none"),
        (["--budget", "100", "--density", "0.5"], "two ways"),
        (["--attempts", "2", "--temperature", "0"], "all the same"),
        (["--budget", "0"], "--budget"),
        (["--protocol", "half"], "--protocol"),
        (["--task", "chess"], "--task"),
        (["--tools", "none"], "there is no tool set"),
        (["--set", "limits.stepz=1"], "limits.stepz"),
        (["--method", "magic"], "unknown method"),
        (["--method", "dense", "--budget", "100"], "method dense: budget"),
        (["--set", "cache.window=0"], "window"),
    ],
)
def test_options_that_do_not_fit_end_with_2(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    status, text = agent("run", "--out", tmp_path / "out", "--model", "none", *arguments)
    assert status == 2
    assert message in " ".join(text.split())
    assert not list(tmp_path.glob("out/*/trajectory.jsonl"))


def test_the_demo_has_a_seed_and_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[RunOptions] = []

    def execute(options: RunOptions, **_: object) -> tuple[dict[str, Any], int]:
        taken.append(options)
        return {}, 0

    monkeypatch.setattr(run_command, "execute", execute)
    for arguments in ([], ["--instance", "x"], ["--seed", "5", "--budget", "99"]):
        assert agent("run", *arguments)[0] == 0
    demo, other, given = taken
    assert (demo.first_seed, demo.cache_data(0)["budget"]["tokens"]) == (2, 768)
    assert (other.first_seed, other.cache_data(0)["budget"]["tokens"]) == (0, 8192)
    assert (given.first_seed, given.cache_data(0)["budget"]["tokens"]) == (5, 99)


@pytest.mark.parametrize("method", [n for n in preset_names() if n != "dense"])
def test_schedules_are_chunks_for_one_cache_and_ends_for_fresh_ones(method: str) -> None:
    paper = method.endswith("-paper")
    for protocol, schedule in (("true_eviction", "chunk"), ("full_context", "end")):
        options = parse_options({"method": method, "protocol": protocol})
        config = run_command.cache_config(options, 0)
        assert config.prefill_eviction == ("end" if paper else schedule)
        assert config.budget.kind == ("density" if paper else "tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--instance", "nothing-1.0"], "no such instance: nothing-1.0"),
        (["--repo", "/no/such", "--issue", "x"], "not a folder"),
        (["--sandbox", "chroot"], "unknown sandbox"),
    ],
)
def test_what_is_not_there_ends_with_1(arguments: list[str], message: str, tmp_path: Path) -> None:
    status, text = agent("run", "--out", tmp_path / "out", "--model", "none", *arguments)
    assert status == 1
    assert message in " ".join(text.split())


def test_a_run_with_a_random_model_is_reported(
    tiny_model: Path, repo: Path, tmp_path: Path
) -> None:
    status, text = run_repo(
        tiny_model, repo, tmp_path / "out", "--budget", "8192", "--max-new-tokens", "40",
        "--set", "example=[]", "--set", "cache.window=8",
    )  # fmt: skip
    assert status == 0
    data = report(only_run(tmp_path / "out"))
    assert data["exit"] == "format_errors"
    assert data["verdict"] is None
    assert data["patch"]["bytes"] == 0
    assert data["method"] == "nexus"
    assert data["cache"]["window"] == 8
    assert data["cache"]["budget"] == {"kind": "tokens", "tokens": 8192}
    assert data["evictions"].startswith("0 evictions: the budget was never exceeded")
    assert data["model"]["name"] == "tiny"
    assert len(data["model"]["sha256"]) == 64
    assert data["versions"]["torch"] == torch.__version__
    assert data["sandbox"]["unenforced"] == list(probe()["unenforced"])
    assert data["tool_set"]["limits"]["new_tokens"] == 40
    assert max(turn["sampled"] for turn in data["turns"]) == 40
    assert len(data["turns"]) == data["totals"]["steps"]
    assert all(turn["fed"] > 0 and turn["cache_bytes"] > 0 for turn in data["turns"])
    assert "no call:" in text
    assert "tokens, " in text


def test_the_same_run_evicts_under_a_small_budget(
    tiny_model: Path, repo: Path, tmp_path: Path
) -> None:
    status, _ = run_repo(
        tiny_model, repo, tmp_path / "out", "--budget", "256", "--max-new-tokens", "200",
        "--set", "example=[]", "--set", "system=Fix it.", "--set", "pin_user=false",
        "--issue", "double(2) is 5. " * 40,  # longer than the cache, whatever the model says
    )  # fmt: skip
    data = report(only_run(tmp_path / "out"))
    assert status == 0
    assert data["totals"]["evictions"] > 0
    assert data["evictions"] == (
        f"{data['totals']['evictions']} evictions of {data['totals']['evicted_tokens']} tokens"
    )
    # While it writes, a cache may pass its budget by less than a block before it evicts.
    assert all(turn["resident"] < 256 + 32 for turn in data["turns"])


def test_the_patch_is_shown_kept_and_applied_when_asked(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[str]]
) -> None:
    scripted.append([FIX, xml("submit")])
    status, text = run_repo(tiny_model, repo, tmp_path / "one")
    assert status == 0
    assert "+    return x + x" in text
    assert "ended: submitted" in text
    assert (repo / "calc.py").read_text() == SOURCE
    folder = only_run(tmp_path / "one")
    assert "+    return x + x" in (folder / "patch.diff").read_text()
    data = report(folder)
    assert (data["exit"], data["state"]) == ("submitted", "finished")
    assert data["patch"]["files"] == ["calc.py"]
    assert len([line for line in read_trajectory(folder) if line["kind"] == "step"]) == 2

    scripted.append([FIX, xml("submit")])
    run_repo(tiny_model, repo, tmp_path / "two", "--apply")
    assert (repo / "calc.py").read_text() == "def double(x):\n    return x + x\n"


def test_json_is_all_that_is_printed(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[str]]
) -> None:
    scripted.append([FIX, xml("submit")])
    arguments = [
        "run", "--repo", str(repo), "--issue", "double(2) is 5", "--model", str(tiny_model),
        "--out", str(tmp_path / "out"), "--sandbox", "bubblewrap", "--json",
        "--tools", "compact", "--set", "dialect=xml_calls",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert json.loads(result.stdout) == report(only_run(tmp_path / "out"))


def test_an_error_in_the_run_ends_with_1_and_is_reported(
    tiny_model: Path, repo: Path, tmp_path: Path
) -> None:
    # Turn 0 is pinned, and does not fit.
    status, _ = run_repo(tiny_model, repo, tmp_path / "out", "--budget", "64")
    data = report(only_run(tmp_path / "out"))
    assert status == 1
    assert data["exit"] == "error"
    assert "budget" in data["detail"]


# Attempts


class Graded:
    """A task whose hidden test is that the patch holds a text; notes when it was asked."""

    def __init__(self, task: Any, wanted: str, events: list[str]) -> None:
        self._task, self._wanted, self._events = task, wanted, events
        self.instance, self.tree, self.spec = task.instance, task.tree, task.spec

    def grade(self, patch: bytes) -> Verdict:
        self._events.append("graded")
        found = self._wanted.encode() in patch
        return Verdict(found, "resolved" if found else "unresolved", {"t": "passed"}, {})


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, scripted: list[list[str]]) -> list[str]:
    """What happened in which order: attempts and gradings."""
    seen: list[str] = []
    make, protocol = run_command.make_task, attempt.make_protocol

    def graded(options: RunOptions) -> Graded:
        return Graded(make(options), "+    return x + x\n", seen)

    def noted(*arguments: Any, **named: Any) -> Any:
        seen.append(f"attempt seed {named['sampling'].seed}")
        return protocol(*arguments, **named)

    monkeypatch.setattr(run_command, "make_task", graded)
    monkeypatch.setattr(attempt, "make_protocol", noted)
    return seen


OTHER = xml("edit", path="calc.py", start="2", text="    return 2 * x")


def test_attempts_are_all_made_before_any_is_graded(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[str]], events: list[str]
) -> None:
    scripted.extend([[FIX, xml("submit")], [OTHER, xml("submit")], [xml("submit")]])
    status, text = run_repo(tiny_model, repo, tmp_path / "out", "--attempts", "3", "--seed", "5")
    assert status == 0
    assert events == ["attempt seed 5", "attempt seed 6", "attempt seed 7", *["graded"] * 3]
    folder = only_run(tmp_path / "out")
    data = report(folder)
    assert data["pass_at_k"] == {
        "k": 3, "resolved": 1, "label": "pass@3: resolved by any of 3 attempts",
    }  # fmt: skip
    assert [entry["verdict"]["resolved"] for entry in data["attempts"]] == [True, False, False]
    assert data["sampling"]["temperature"] > 0
    assert "pass@3: resolved" in text
    for number in (1, 2, 3):
        kept = report(folder / f"attempt-{number}")
        assert kept["verdict"] == data["attempts"][number - 1]["verdict"]
        assert kept["seed"] == 4 + number
        assert list(read_trajectory(folder / f"attempt-{number}"))[-1]["kind"] == "end"


def test_until_resolved_stops_and_says_so(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[str]], events: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    scripted.extend([[OTHER, xml("submit")], [FIX, xml("submit")], [FIX]])
    options = parse_options(
        {"repo": str(repo), "issue": "double(2) is 5", "model": str(tiny_model), "attempts": 3,
         "sandbox": "bubblewrap", "tools": "compact", "overrides": ("dialect=xml_calls",)}
    )  # fmt: skip
    # The option is refused for --repo, whose tasks have no tests; here the task has one.
    options = options.model_copy(update={"until_resolved": True})
    from rich.console import Console

    data, code = run_command.execute(options, out=tmp_path, console=Console(quiet=True), quiet=True)
    assert code == 0
    assert [event for event in events if event == "graded"] == ["graded"] * 2
    assert data["pass_at_k"]["k"] == 2
    assert "--until-resolved" in data["pass_at_k"]["label"]


def test_an_interrupted_run_is_not_graded_and_ends_with_130(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[str]], events: list[str]
) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    scripted.extend([[FIX, interrupt], [FIX]])  # type: ignore[list-item]
    status, text = run_repo(tiny_model, repo, tmp_path / "out", "--attempts", "2")
    assert status == 130
    assert "graded" not in events
    assert "+    return x + x" in text
    folder = only_run(tmp_path / "out")
    assert "+    return x + x" in (folder / "attempt-1" / "patch.diff").read_text()
    assert report(folder)["attempts"][0]["exit"] == "interrupted"


SMALL = (
    "--budget", "256", "--max-new-tokens", "60", "--set", "example=[]", "--set", "system=Fix it.",
    "--set", "pin_user=false", "--issue", "double(2) is 5. " * 40,
)  # fmt: skip


def said(folder: Path) -> list[list[int]]:
    return [line["sampled"] for line in read_trajectory(folder) if line["kind"] == "step"]


@pytest.mark.parametrize("protocol", ["true_eviction", "full_context"])
def test_an_attempt_can_be_made_again_alone(
    protocol: str, tiny_model: Path, repo: Path, tmp_path: Path
) -> None:
    options = [*SMALL, "--protocol", protocol]
    status, text = run_repo(
        tiny_model, repo, tmp_path / "all", *options, "--attempts", "2", "--seed", "5"
    )
    assert status == 0
    folder = only_run(tmp_path / "all")
    again = ("--seed", "6", "--set", "cache.seed=5")
    run_repo(tiny_model, repo, tmp_path / "one", *options, *again)
    steps = said(folder / "attempt-2")
    assert steps == said(only_run(tmp_path / "one"))
    assert steps != said(folder / "attempt-1")

    data, alone = report(folder), report(only_run(tmp_path / "one"))
    first, second = data["attempts"]
    assert (first["seed"], second["seed"], alone["seed"]) == (5, 6, 6)
    assert first["cache"] == second["cache"] == alone["cache"]
    assert second["cache"]["seed"] == 5
    start, step, *_ = read_trajectory(folder / "attempt-2")
    prompt = start["ids"][1]
    assert data["shared_prompt"]["tokens"] == prompt
    assert data["shared_prompt"]["bytes"] > 0
    assert "shared_prompt" not in alone
    assert [turn["forked"] for turn in second["turns"]] == [prompt, *[0] * (len(steps) - 1)]
    assert (step["stats"]["forked"], step["stats"]["fed"]) == (prompt, 0)
    # One of them made the copy, and the last needs none.
    assert first["turns"][0]["fork_seconds"] > 0
    assert second["turns"][0]["fork_seconds"] == 0
    one, two, plain = (entry["totals"] for entry in (first, second, alone))
    assert (one["forked"], two["forked"], plain["forked"]) == (0, prompt, 0)
    assert two["fed"] + prompt == plain["fed"]
    for name in ("evictions", "evicted_tokens"):
        assert two[name] + two[f"forked_{name}"] == plain[name]
    assert two["forked_evictions"] > 0
    note = f", {two['forked_evictions']} of them in the prompt that attempts share"
    assert second["evictions"] == alone["evictions"] + note
    assert second["evictions"] in " ".join(text.split())


@pytest.mark.parametrize("attempts", ["1", "3"])
def test_interrupted_while_it_reads_the_first_prompt(
    attempts: str, tiny_model: Path, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache import EvictingCache

    def interrupt(self: EvictingCache, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EvictingCache, "evict", interrupt)  # after the first chunk
    status, _ = run_repo(tiny_model, repo, tmp_path / "out", *SMALL, "--attempts", attempts)
    assert status == 130
    data = report(only_run(tmp_path / "out"))
    entries = data.get("attempts", [data])
    assert [entry["exit"] for entry in entries] == ["interrupted"]
    assert entries[0]["totals"]["steps"] == 0


def test_one_attempt_copies_no_cache(
    tiny_model: Path, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache import EvictingCache

    monkeypatch.delattr(EvictingCache, "fork")
    run_repo(tiny_model, repo, tmp_path / "out", *SMALL)
    data = report(only_run(tmp_path / "out"))
    assert data["exit"] == "format_errors"
    assert (data["totals"]["forked"], data["totals"]["fork_seconds"]) == (0, 0)
