"""`agent run --repo` with set-up, an environment and a branch, as it is typed; a scripted model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import agent, only_run, report, run_repo
from scripted import xml

from tests.tasks.test_repo import commit, write

FIX = xml("edit", "One too many.", path="calc.py", start="2", text="    return x + x")
LOOK = xml("run", "Look.", command="python -c 'import calc; print(calc.double(2))'; cat made")


@pytest.fixture(autouse=True)
def _own_setups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cache_dir(*parts: str) -> Path:
        folder = tmp_path.joinpath("cache", *parts)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    monkeypatch.setattr("agent.setup_step.cache_dir", cache_dir)


def test_set_up_run_checked_and_on_a_branch(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[str]]
) -> None:
    commit(repo)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    scripted.append([FIX, LOOK, xml("submit")])
    status, text = run_repo(
        tiny_model, repo, tmp_path / "out",
        "--setup", "echo by set-up > made", "--env", str(tmp_path / "env"),
        "--test-cmd", "python -c 'import calc; assert calc.double(2) == 4'",
        "--branch", "fix/double",
    )  # fmt: skip
    assert status == 0, text
    data = report(only_run(tmp_path / "out"))
    assert data["setup"]["command"] == "echo by set-up > made"
    assert not data["setup"]["cached"]
    assert data["patch"]["files"] == ["calc.py"]
    assert [check["passed"] for check in data["checks"]["ran"]][-1] is True
    assert data["taken"]["branch"] == "fix/double"
    assert data["options"]["env"] == str(tmp_path / "env")
    names = ["git", "-C", repo, "diff", "--name-only", "main", "fix/double"]
    assert subprocess.run(names, capture_output=True, text=True, check=True).stdout == "calc.py\n"
    assert not (repo / "made").exists()
    assert "run after the last change (step 1):" in text
    assert f"on the new branch fix/double of {repo}" in " ".join(text.split())

    # the same tree again: set-up was done, and the branch is there
    status, text = run_repo(tiny_model, repo, tmp_path / "two", "--branch", "fix/double")
    assert status == 1
    assert "there is one; give another name" in " ".join(text.split())
    scripted.append([xml("submit")] * 3)
    status, text = run_repo(
        tiny_model, repo, tmp_path / "three", "--setup", "echo by set-up > made",
        "--env", str(tmp_path / "env"),
        "--test-cmd", "python -c 'import calc; assert calc.double(2) == 4'",
    )  # fmt: skip
    assert report(only_run(tmp_path / "three"))["setup"]["cached"]


def test_a_set_up_that_fails_ends_the_run_before_a_model_is_loaded(
    repo: Path, tmp_path: Path
) -> None:
    status, text = run_repo(Path("/no/such/model"), repo, tmp_path / "out", "--setup", "exit 7")
    assert status == 1
    assert "exit code 7" in " ".join(text.split())


def test_the_json_says_what_became_of_the_patch(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[str]]
) -> None:
    scripted.append([FIX, xml("submit")])
    write(repo, {"calc.py": "def double(x):\n    return x + x + 1\n"})
    status, text = agent(
        "run", "--repo", str(repo), "--issue", "double(2) is 5", "--model", str(tiny_model),
        "--out", str(tmp_path / "out"), "--sandbox", "bubblewrap", "--json", "--quiet",
        "--tools", "compact", "--set", "dialect=xml_calls",
    )  # fmt: skip
    data = json.loads(text[text.index("{") :])
    assert status == 0
    assert data["taken"]["next"][0].startswith(f"to take the patch: cd {repo}")
    assert data["checks"]["changed_at"] == 1
