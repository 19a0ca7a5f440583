"""`agent doctor`: what it says of this machine, and of one that lacks things."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import environments
from agent import doctor

NOTHING: dict[str, Any] = {
    "docker": None,
    "docker_error": "no engine at unix:///var/run/docker.sock",
    "bubblewrap": None,
    "bubblewrap_error": "user namespaces are off",
    "cgroup": 0,
    "unenforced": [],
    "choice": None,
    "reason": "no sandbox can be opened here",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(doctor.doctor)
    return CliRunner().invoke(app, list(arguments))


def rows_of(result: Any) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in json.loads(result.stdout)["rows"]}


def test_it_tells_what_is_here() -> None:
    result = run("--json")
    rows = rows_of(result)
    assert platform.python_version() in rows["python"]["found"]
    assert torch.__version__ in rows["torch"]["found"]
    facts = environments.probe()
    assert (rows["docker"]["state"] == "ok") == bool(facts["docker"])
    assert (rows["bubblewrap"]["state"] == "ok") == bool(facts["bubblewrap"])
    assert result.exit_code == (0 if facts["choice"] else 1)


def test_every_lack_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "probe", lambda: NOTHING)
    rows = rows_of(run("--json"))
    lacks = [row for row in rows.values() if row["state"] != "ok"]
    assert {"docker", "bubblewrap", "sandbox", "smollm2-135m"} <= {row["name"] for row in lacks}
    assert all(row["remedy"] for row in lacks)
    assert rows["smollm2-135m"]["remedy"] == "agent models pull smollm2-135m"
    assert "user namespaces are off" in rows["bubblewrap"]["found"]


def test_without_any_sandbox_it_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "probe", lambda: NOTHING)
    result = run()
    assert result.exit_code == 1
    assert "missing" in result.stdout


@pytest.mark.parametrize("kind", ["docker", "bubblewrap"])
def test_one_sandbox_is_enough(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    found = {"docker": {"version": "28.1", "cgroup": 2}, "bubblewrap": "/opt/bwrap"}[kind]
    weak = ["The memory limit is not enforced."]
    facts = {**NOTHING, kind: found, "choice": kind, "reason": f"{kind} works", "unenforced": weak}
    monkeypatch.setattr(environments, "probe", lambda: facts)
    result = run("--json")
    rows = rows_of(result)
    assert result.exit_code == 0
    assert rows["sandbox"]["found"] == f"{kind} is used: {kind} works"
    assert ("limits" in rows) == (kind == "bubblewrap")


def test_little_disk_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2_000_000_000))
    row = rows_of(run("--json"))["cache"]
    assert row["found"].startswith("2.0 GB free")
    assert "NEXUS_CACHE" in row["remedy"]


def test_the_table_fits_a_terminal_and_keeps_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {**NOTHING, "docker_error": "proxy [red] refused"}
    monkeypatch.setattr(environments, "probe", lambda: facts)
    shown = run().stdout
    assert "proxy [red] refused" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
