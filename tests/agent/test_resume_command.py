"""`agent run --resume`: which runs it goes on with, which it refuses, and what is said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from commands import agent, only_run, report, run_repo
from scripted import xml

from agent.folder_lock import folder_lock
from agent.trajectory import read_trajectory, write_report

FIX = xml("edit", "One too many.", path="calc.py", start="2", text="    return x + x")
SUBMIT = xml("submit")


def stopped() -> NoReturn:
    raise KeyboardInterrupt("SIGINT")


def kinds(folder: Path) -> list[str]:
    return [line["kind"] for line in read_trajectory(folder)]


@pytest.fixture
def interrupted(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[object]]
) -> tuple[Path, Path]:
    """A run that was ended in its second step: where its folder is, and the folder."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    scripted.append([FIX, stopped])
    status, text = run_repo(model, repo, tmp_path / "out")
    assert status == 130
    folder = only_run(tmp_path / "out")
    assert f"agent run --resume {folder}" in "".join(text.split("\n"))
    assert report(folder)["state"] == "interrupted"
    return tmp_path / "out", folder


def test_it_goes_on_after_the_last_finished_step(
    interrupted: tuple[Path, Path], repo: Path, scripted: list[list[object]]
) -> None:
    out, folder = interrupted
    before = report(folder)
    (repo / "calc.py").write_text("the user worked on\n")  # and the run does not care
    scripted.append([SUBMIT])
    status, text = agent("run", "--resume", folder.name, "--out", out)
    assert status == 0, text
    assert "going on after step 1" in text
    assert kinds(folder) == ["start", "step", "resume", "step", "end"]
    after = report(folder)
    assert (after["state"], after["exit"], after["totals"]["steps"]) == ("finished", "submitted", 2)
    assert after["options"] == before["options"]
    assert after["seconds"] > before["seconds"]
    assert len(after["resumed"]) == 1
    assert "+    return x + x\n" in (folder / "patch.diff").read_text()
    assert not (folder / "state").exists()
    # what was cut off is kept: the end of the interrupted run
    assert '"exit": "interrupted"' in (folder / "trajectory.cut-1.jsonl").read_text()
    status, text = agent("run", "--resume", "last", "--out", out)
    assert status == 2
    assert "is finished (exit: submitted)" in " ".join(text.split())


def test_a_run_without_any_saved_turn_begins_again_on_the_tree_it_had(
    interrupted: tuple[Path, Path], repo: Path, scripted: list[list[object]]
) -> None:
    _, folder = interrupted
    for path in (folder / "state").glob("turn-*.json"):
        path.unlink()
    (repo / "calc.py").write_text("the user worked on\n")
    scripted.append([FIX, SUBMIT])
    status, text = agent("run", "--resume", folder)
    assert status == 0, text
    assert kinds(folder) == ["start", "step", "step", "end"]
    assert "-    return x + x + 1\n+    return x + x\n" in (folder / "patch.diff").read_text()


def test_zero_turns_keep_nothing_to_go_on_from(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[object]]
) -> None:
    scripted.append([FIX, stopped])
    status, text = run_repo(tiny_model, repo, tmp_path / "out", "--snapshot-turns", "0")
    assert status == 130
    assert "--resume" not in text
    assert not (only_run(tmp_path / "out") / "state").exists()


def test_another_model_or_tool_set_is_refused(
    interrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    _, folder = interrupted
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    status, text = agent("run", "--resume", folder)
    assert status == 2
    assert "model.sha256 was" in " ".join(text.split())
    assert kinds(folder) == ["start", "step", "end"]  # nothing was touched
    assert report(folder)["state"] == "interrupted"


def test_other_versions_are_named_and_do_not_stop_it(
    interrupted: tuple[Path, Path], scripted: list[list[object]]
) -> None:
    _, folder = interrupted
    data = report(folder)
    data["versions"]["torch"] = "0.1"
    write_report(folder, data)
    scripted.append([SUBMIT])
    status, text = agent("run", "--resume", folder)
    assert status == 0
    assert "other than before: versions.torch was '0.1'" in " ".join(text.split())


def test_a_tool_set_that_was_edited_is_refused(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[object]]
) -> None:
    from importlib import resources

    mine = tmp_path / "mine.yaml"
    mine.write_text((resources.files("agent") / "config" / "compact.yaml").read_text())
    scripted.append([stopped])
    assert run_repo(tiny_model, repo, tmp_path / "out", "--tools", str(mine))[0] == 130
    mine.write_text(mine.read_text().replace("view_lines: 60", "view_lines: 61"))
    status, text = agent("run", "--resume", "last", "--out", tmp_path / "out")
    assert status == 2
    assert "tool_set.limits.view_lines was 60, is 61" in " ".join(text.split())


def test_other_options_are_refused(interrupted: tuple[Path, Path]) -> None:
    _, folder = interrupted
    status, text = agent("run", "--resume", folder, "--budget", "99")
    assert status == 2
    assert "--budget cannot be given" in " ".join(text.split())


def test_a_run_that_is_made_now_is_refused(interrupted: tuple[Path, Path]) -> None:
    _, folder = interrupted
    with folder_lock(folder):
        status, text = agent("run", "--resume", folder)
    assert status == 1
    assert "another process works in" in " ".join(text.split())


def test_damaged_states_are_refused_and_the_older_one_is_used(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[object]]
) -> None:
    look = xml("view", path="calc.py")
    scripted.append([look, FIX, stopped])
    assert run_repo(tiny_model, repo, tmp_path / "out")[0] == 130
    folder = only_run(tmp_path / "out")
    newest, older = sorted((folder / "state").glob("turn-*.json"), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-9])
    kept = older.read_bytes()
    older.write_bytes(b"{}")
    status, text = agent("run", "--resume", folder)
    assert status == 1
    assert "cannot be gone on with" in " ".join(text.split())
    older.write_bytes(kept)
    scripted[:] = [[FIX, SUBMIT]]  # the step after the older state is made again
    assert agent("run", "--resume", folder)[0] == 0
    assert kinds(folder) == ["start", "step", "resume", "step", "step", "end"]
    assert report(folder)["totals"]["steps"] == 3


def test_attempts_that_are_over_stay(
    tiny_model: Path, repo: Path, tmp_path: Path, scripted: list[list[object]]
) -> None:
    scripted += [[FIX, SUBMIT], [FIX, stopped]]
    assert run_repo(tiny_model, repo, tmp_path / "out", "--attempts", "3")[0] == 130
    folder = only_run(tmp_path / "out")
    first = (folder / "attempt-1" / "trajectory.jsonl").read_bytes()
    scripted[:] = [[SUBMIT], [SUBMIT, SUBMIT, stopped]]
    status, _ = agent("run", "--resume", folder)
    assert status == 130
    assert (folder / "attempt-1" / "trajectory.jsonl").read_bytes() == first
    assert kinds(folder / "attempt-2")[-1] == "end"
    assert [a["exit"] for a in report(folder)["attempts"]] == ["submitted"] * 2 + ["interrupted"]
    scripted[:] = [[FIX, SUBMIT]]
    status, text = agent("run", "--resume", folder)
    assert status == 0, text
    data = report(folder)
    assert [a["exit"] for a in data["attempts"]] == ["submitted"] * 3
    assert data["pass_at_k"]["k"] == 3
    assert [a["patch"]["bytes"] > 0 for a in data["attempts"]] == [True] * 3
    assert not list(folder.glob("**/state"))


def test_a_part_of_a_name_is_enough_and_names_that_are_no_run_are_told(
    interrupted: tuple[Path, Path], scripted: list[list[object]], tmp_path: Path
) -> None:
    out, folder = interrupted
    status, text = agent("run", "--resume", "nothing", "--out", out)
    assert status == 2
    assert "--resume nothing: no run nothing in" in " ".join(text.split())
    for name, message in (("last", "there is no run in"), ("x", "another folder with --out")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        status, text = agent("run", "--resume", name, "--out", tmp_path / "empty")
        assert status == 2
        assert message in " ".join(text.split())
    scripted.append([SUBMIT])
    assert agent("run", "--resume", folder.name[:12], "--out", out)[0] == 0
    assert report(folder)["exit"] == "submitted"
