"""Run folders as `agent run` leaves them, made once by a scripted model, and copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import SOURCE, only_run, report, run_repo
from rich.console import Console
from scripted import ScriptedProtocol, xml

from agent import attempt, cli_runs
from agent.protocol import Reply

BEGAN = 1_800_000_000  # 2027-01-15 08:00:00 UTC
FIX = xml("edit", "One too many.", path="calc.py", start="2", text="    return x + x")
LONG = xml("run", command="seq 1 60; printf '\\033[2J[red]not red[/red]'")
SCRIPT = [LONG, "no call at all", FIX, xml("submit")]


class Evicting(ScriptedProtocol):
    """A scripted model with a cache of 512 tokens, as its numbers say."""

    def reply(self, *arguments: Any, **named: Any) -> Reply:
        said = super().reply(*arguments, **named)
        stats = replace(
            said.stats,
            fed=100 * self.calls,
            sampled=10 * self.calls,
            seen=400 * self.calls,
            resident=[400, 552, 512, 512][min(self.calls, 4) - 1],
            peak_tokens=600,
            cache_bytes=3 * 2**20,
            peak_bytes=4 * 2**20,
            evictions=self.calls - 1,
            evicted_tokens=100 * (self.calls - 1),
            prefill_seconds=2.0,
            decode_seconds=20.0,
            eviction_seconds=0.5,
        )
        return replace(said, stats=stats)


@cache
def finished_run(base: Path, model: Path) -> Path:
    """One of four steps. Not to be changed: copies are."""
    return make_run(base / "kept-run", model)


@cache
def two_attempts(base: Path, model: Path) -> Path:
    """A run of two attempts, of four steps and of two. Not to be changed."""
    scripts = [SCRIPT, [FIX, xml("submit")]]
    return make_run(base / "kept-attempts", model, "--attempts", "2", scripts=scripts)


def kept(make: Callable[[Path, Path], Path]) -> Any:
    """A fixture of one of these, called as the name that it is given in a module of tests."""

    @pytest.fixture
    def fixture(
        tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, bubblewrap_works: None
    ) -> Path:
        return make(tmp_path_factory.getbasetemp(), tiny_model)

    return fixture


def make_run(
    parent: Path, model: Path, *more: str, scripts: Iterable[list[str]] = (SCRIPT,)
) -> Path:
    """A run of `agent run` with a script in the place of a model, its clock times made the same."""
    (parent / "calc").mkdir(parents=True)
    (parent / "calc/calc.py").write_text(SOURCE)
    said = iter(scripts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attempt, "make_protocol", lambda _, __, chat, *___, **____: Evicting(chat, next(said))
        )
        status, text = run_repo(
            model, parent / "calc", parent / "made", "--budget", "512", "--steps", "8",
            "--max-tokens", "12000", "--wall-time", "600", "--temperature", "0.6", "--top-p",
            "0.95", "--quiet", *more,
        )  # fmt: skip
    assert status == 0, text
    return settled(only_run(parent / "made"))


def settled(folder: Path) -> Path:
    """The run without what differs from one making to the next."""
    for path in [folder, *folder.glob("attempt-*")]:
        data = report(path)
        for part in (data, *data.get("attempts", [])):
            part.get("totals", {}).update(seconds=75.0, tool_seconds=0.5, tokens=1601)
        known = {"started": "2027-01-15T08:00:00Z", "seconds": 90.0, "git_commit": "0123456789ab"}
        data.update({key: value for key, value in known.items() if key in data})
        for key in ("pid", "host"):
            data.pop(key, None)
        (path / ".lock").unlink(missing_ok=True)
        if "versions" in data:
            data["versions"] = {"python": "3.11.7", "nexus-agent": None, "torch": "2.0"}
            data["model"]["sha256"] = "ab" * 32
        (path / "report.json").write_text(json.dumps(data))
        if (path / "trajectory.jsonl").exists():
            rewrite(path, _same)
    return folder


def _same(number: int, line: dict[str, Any]) -> dict[str, Any]:
    """Also without what a tool set may come to word in another way."""
    own: dict[str, Any] = {
        "start": {"ids": [0, 400]},
        "step": {"tool_seconds": 0.25},
        "end": {"seconds": 75.0, "tokens": 1601},
    }.get(line["kind"], {})
    if line.get("problem"):
        own["problem"] = "There is no call.\nWrite one."
    if line["kind"] == "step":
        head, sign, _ = line["observation"].partition("[red]not red[/red]")
        own["observation"] = head + sign if sign else f"What came of step {line['step']}.\n"
    return {**line, "time": BEGAN + 15 * number, **own}


def rewrite(folder: Path, change: Any) -> None:
    """Replace each line of a trajectory by what `change` makes of its number and data."""
    file = folder / "trajectory.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(n, line)) + "\n" for n, line in enumerate(lines)))


def copied(folder: Path, parent: Path, name: str, /, **told: Any) -> Path:
    """A copy of a run under another name, with other values in its report."""
    place = parent / name
    shutil.copytree(folder, place)
    tell(place, **told)
    return place


def tell(folder: Path, /, *without: str, **told: Any) -> None:
    """Give a report other values, and take some away."""
    data = {key: value for key, value in report(folder).items() if key not in without}
    (folder / "report.json").write_text(json.dumps({**data, **told}))


def going_on(folder: Path, parent: Path, name: str, /, *, steps: int, **told: Any) -> Path:
    """The same, as it was after so many steps."""
    place = copied(folder, parent, name)
    ends = ("exit", "detail", "verdict", "patch", "totals", "turns", "evictions", "prediction")
    tell(place, *ends, **{"state": "running", **told})
    lines = (place / "trajectory.jsonl").read_text().splitlines(keepends=True)
    (place / "trajectory.jsonl").write_text("".join(lines[: 1 + steps]))
    return place


def at_width(patch: pytest.MonkeyPatch, width: int, **more: Any) -> None:
    """Let the commands print as to a terminal of that width."""
    patch.setattr(cli_runs, "_console", lambda: Console(width=width, **more))


def plain(text: str) -> str:
    """Without blanks at the ends of lines."""
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def golden(name: str) -> str:
    """What was printed once, and looked at."""
    return (Path(__file__).parent / "golden_runs" / name).read_text(encoding="utf-8")
