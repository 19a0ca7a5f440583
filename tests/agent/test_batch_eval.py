"""`agent eval` from the command line to its report, with scripted work on rows of a file."""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from agent import cli, eval_command, flags
from agent.batch.store import Store
from agent.cli_eval import evaluate
from tasks.predictions import read_predictions

HERE = Path(__file__).parent
app = typer.Typer()
app.command()(evaluate)


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCH_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(HERE))
    return tmp_path / "log"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [f"org__pkg-{n}" for n in range(5)])


def write_rows(file: Path, names: list[str], **changes: str) -> Path:
    lines = [
        {
            "instance_id": name,
            "repo": "org/pkg",
            "base_commit": "abc",
            "version": "1",
            "problem_statement": f"issue of {name}",
            "patch": "diff",
            "test_patch": "diff",
            "FAIL_TO_PASS": '["t"]',
            "PASS_TO_PASS": "[]",
            **changes,
        }
        for name in names
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def agent_eval(rows: Path, out: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app,
        ["--tasks", str(rows), "--out", str(out), "--work", "batch_work:run_item",
         "--sandbox", "docker", "--device", "cpu", "--dtype", "float32", *more],
    )  # fmt: skip
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def began(log: Path) -> list[str]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [entry["id"][-1] for entry in map(json.loads, lines) if entry["kind"] == "start"]


def report(out: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((out / "report.json").read_text())
    return data


def do(monkeypatch: pytest.MonkeyPatch, **script: object) -> None:
    monkeypatch.setenv("BATCH_DO", json.dumps({f"org__pkg-{n[1:]}": d for n, d in script.items()}))


def test_a_batch_from_rows_to_report(
    rows: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(monkeypatch, i1=["fail"], i3=["die", "resolve"])
    out = tmp_path / "out"
    code, text = agent_eval(rows, out, "--seed", "7", "--budget", "512", "--steps", "9")
    assert code == 0
    assert began(log) == ["0", "1", "2", "3", "4", "3"]
    assert "5 instances of" in text
    assert "4 of 5" in text
    assert "org__pkg-1  unresolved  4 steps, 2 evictions" in text
    data = report(out)
    assert (data["state"], data["seeds"], data["selection"]["seed"]) == ("finished", [7], 7)
    assert data["summary"][""]["resolved"] == 4
    assert data["summary"][""]["evicted"] == 5
    assert data["cache"]["budget"] == {"kind": "tokens", "tokens": 512}
    assert data["tool_set"]["limits"]["steps"] == 9
    assert data["options"]["method"] == "nexus"
    assert data["versions"]["torch"]
    assert data["hardware"]["torch_threads"] >= 1
    assert data["made_with"] == [{"versions": data["versions"], "git_commit": data["git_commit"]}]
    assert [row["resolved"] for row in data["runs"]] == [True, False, True, True, True]
    folder = out / data["runs"][3]["folder"]
    assert json.loads((folder / "result.json").read_text())["item"]["options"]["budget"] == 512
    predictions = read_predictions(out / "predictions.jsonl")
    assert predictions["org__pkg-1"].patch == b"patch of org__pkg-1\n"
    assert predictions["org__pkg-1"].model == "qwen2.5-coder-1.5b+nexus+true_eviction"
    assert len(Store(out).sessions()) == 1


def test_finished_runs_stay_and_what_was_changed_is_run(
    rows: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert agent_eval(rows, out, "--slice", "0:2")[0] == 0
    code, text = agent_eval(rows, out, "--slice", "0:3")
    assert code == 0
    assert "2 runs are finished already and stay" in text
    assert began(log) == ["0", "1", "2"]
    before = report(out)["runs"]

    code, text = agent_eval(rows, out, "--slice", "0:3")
    assert began(log) == ["0", "1", "2"]
    assert report(out)["runs"] == before

    agent_eval(rows, out, "--slice", "0:1", "--set", "cache.window=9")  # another config
    assert began(log)[3:] == ["0"]
    assert report(out)["summary"][""]["runs"] == 1
    write_rows(rows, ["org__pkg-0", "org__pkg-1"], test_patch="other")  # another row
    code, text = agent_eval(rows, out, "--slice", "0:1")
    assert began(log)[4:] == ["0"]
    assert "holds 4 results of other options or rows" in text
    moved = write_rows(tmp_path / "moved.jsonl", ["org__pkg-0"], test_patch="other")
    agent_eval(moved, out)  # the same row from another place
    assert began(log)[5:] == []


def test_errors_end_with_1_and_are_tried_by_the_next_call(
    rows: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(monkeypatch, i2=["error", "error", "resolve"])
    out = tmp_path / "out"
    code, text = agent_eval(rows, out)
    assert code == 1
    assert "ERROR ImageMissing: no image" in text
    assert "1 × ImageMissing" in text
    assert report(out)["summary"][""]["errors"] == {"ImageMissing": 1}
    assert report(out)["runs"][2]["error"] == "ImageMissing: no image"
    assert list(read_predictions(out / "predictions.jsonl")) == [
        f"org__pkg-{n}" for n in (0, 1, 3, 4)
    ]
    assert agent_eval(rows, out)[0] == 0
    assert began(log) == ["0", "1", "2", "3", "4", "2", "2"]
    assert report(out)["summary"][""]["resolved"] == 5


def test_which_instances_and_in_which_order(rows: Path, tmp_path: Path, log: Path) -> None:
    agent_eval(rows, tmp_path / "a", "--ids", "org__pkg-4,org__pkg-1", "--ids", "org__pkg-3")
    agent_eval(rows, tmp_path / "b", "--filter", "-[34]$")
    assert began(log) == ["1", "3", "4", "3", "4"]
    for number in (1, 1, 2):
        agent_eval(rows, tmp_path / f"c{len(began(log))}", "--shuffle", "--seed", str(number))
    orders = [began(log)[5:][at : at + 5] for at in (0, 5, 10)]
    assert sorted(orders[0]) == list("01234") != orders[0]
    assert orders[0] == orders[1] != orders[2]
    agent_eval(rows, tmp_path / "d", "--shuffle", "--shuffle-seed", "1", "--seed", "2")
    assert began(log)[20:] == orders[0]
    assert report(tmp_path / "d")["seeds"] == [2]


def test_attempts_are_seeded_runs_of_their_own(
    rows: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    code, text = agent_eval(rows, out, "--attempts", "2", "--slice", "0:2", "--seed", "3")
    assert code == 0
    assert began(log) == ["0", "1", "0", "1"]
    assert "pass@2: 2 of 2 instances resolved by any of 2 attempts" in text
    assert [row["seed"] for row in report(out)["runs"]] == [3, 3, 4, 4]
    assert (out / "predictions.attempt-2.jsonl").exists()
    agent_eval(rows, out, "--slice", "0:2", "--seed", "3")  # first attempts are there
    assert len(began(log)) == 4


def test_json_is_all_that_is_printed(rows: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["--tasks", str(rows), "--out", str(tmp_path / "out"), "--work", "batch_work:run_item",
         "--sandbox", "docker", "--slice", "0:1", "--json"],
    )  # fmt: skip
    assert json.loads(result.stdout) == report(tmp_path / "out")
    code, text = agent_eval(rows, tmp_path / "out", "--slice", "0:2", "--quiet")
    assert (code, text) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "100", "--density", "0.5"], "two ways"),
        (["--method", "magic"], "unknown method"),
        (["--set", "cache.window=0"], "window"),
        (["--set", "limits.stepz=1"], "limits.stepz"),
        (["--attempts", "2", "--temperature", "0"], "all the same"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--dtype", "half-ish"], "half-ish"),
        (["--sandbox", "chroot"], "unknown sandbox"),
        (["--tasks", "no-such.jsonl"], "no-such.jsonl"),
        (["--ids", "org__pkg-9"], "no such instance"),
        (["--slice", "9:"], "leaves none"),
        (["--work", "no_such_module:f"], "--work"),
        (["--engine", "no_such_module:F"], "--engine"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_what_cannot_begin_ends_with_2(
    rows: Path, tmp_path: Path, log: Path, arguments: list[str], said: str
) -> None:
    code, text = agent_eval(rows, tmp_path / "out", *arguments)
    assert code == 2
    assert said in " ".join(text.split())
    assert began(log) == []


def test_a_folder_in_use_is_refused_by_name(rows: Path, tmp_path: Path) -> None:
    with Store(tmp_path / "out").lock():
        code, text = agent_eval(rows, tmp_path / "out")
    assert code == 2
    assert f"process {os.getpid()}" in text


def test_an_interrupted_batch_says_how_to_go_on(
    rows: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(monkeypatch, i1=["patch so far", "resolve"])
    monkeypatch.setattr("sys.argv", ["agent", "eval", "--out", "some folder"])
    out = tmp_path / "out"

    def interrupt() -> None:
        while '"waits"' not in (log.read_text() if log.exists() else ""):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code, text = agent_eval(rows, out)
    thread.join()
    assert code == 130
    assert "interrupted: 1 of 5 runs are finished and stay" in text
    assert "agent eval --out 'some folder'" in text
    data = report(out)
    assert (data["state"], data["summary"][""]["open"]) == ("interrupted", 4)
    assert [row["state"] for row in data["runs"]] == ["finished", *["open"] * 4]
    assert list(read_predictions(out / "predictions.jsonl")) == ["org__pkg-0"]
    assert agent_eval(rows, out)[0] == 0
    assert began(log) == ["0", "1", "1", "2", "3", "4"]
    assert [entry["argv"] for entry in Store(out).sessions()] == [
        ["eval", "--out", "some folder"]
    ] * 2


def test_another_engine_and_what_is_prepared_once(
    rows: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "from agent.batch.engine import LocalEngine, Work\n"
        "from batch_work import run_item\n"
        "calls = []\n"
        "def Engine(store, **options):\n"
        "    calls.append(options['workers'])\n"
        "    return LocalEngine(store, **options)\n"
        "def prepare(options, progress):\n"
        "    calls.append(options.model)\n"
        "def work(*parts):\n"
        "    return run_item(*parts)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    elsewhere = importlib.import_module("elsewhere")
    more = ["--engine", "elsewhere:Engine", "--workers", "2", "--work", "elsewhere:work"]
    for _ in range(2):
        assert agent_eval(rows, tmp_path / "out", *more)[0] == 0
    # Nothing is prepared where nothing is left to do.
    assert elsewhere.calls == [2, "qwen2.5-coder-1.5b", 2]


def test_gpus_are_dealt_out_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert eval_command._devices("cpu") == eval_command._devices("cuda:1") == ()
    assert eval_command._devices("cuda") == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert eval_command._devices("cuda") == ["4", "6", "7"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert eval_command._devices("cuda") == ()


def test_run_and_eval_have_the_same_flags_for_what_decides() -> None:
    def options(function: Callable[..., Any]) -> dict[str, Any]:
        command = typer.Typer()
        command.command()(function)
        return {p.name: p for p in typer.main.get_command(command).params}

    run, batch = options(cli.run), options(evaluate)
    own = {"task", "instance", "repo", "issue", "image", "test_command", "apply", "until_resolved"}
    own |= {"env", "setup", "branch"}  # a user's own repository
    own |= {"parallel", "resume", "snapshot_turns", "snapshot_seconds"}  # how runs are made
    assert set(run) - own <= set(batch)
    for name in set(run) - own - {"seed", "attempts", "out"}:
        assert run[name].opts == batch[name].opts
        assert run[name].default == batch[name].default
        assert run[name].help == batch[name].help
    assert flags.overrides(
        steps=3, new_tokens=None, total_tokens=5, wall_time=None, set_=["limits.steps=4"]
    ) == ("limits.steps=3", "limits.total_tokens=5", "limits.steps=4")
