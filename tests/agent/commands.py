"""The command `agent` called in this process, and what a run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from agent.cli import app

SOURCE = "def double(x):\n    return x + x + 1\n"


def agent(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def only_run(out: Path) -> Path:
    (folder,) = out.iterdir()
    return folder


def report(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return data


def run_repo(tiny: Path, repo: Path, out: Path, *more: str) -> tuple[int, str]:
    return agent(
        "run", "--repo", repo, "--issue", "double(2) is 5", "--model", tiny, "--out", out,
        "--sandbox", "bubblewrap", "--dtype", "float32", "--tools", "compact",
        "--set", "dialect=xml_calls", *more,
    )  # fmt: skip
