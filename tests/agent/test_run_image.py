"""`agent run --image NAME --issue TEXT`: the project and its Python are those of the image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import agent, only_run, report

from tests.environments.project_images import project_image

CONDA = "/opt/miniconda3/envs/testbed"
FIX = "```bash\nsed -i 's/ + 1//' calc.py\n```"
LOOK = "python -c 'import os, calc; print(calc.double(21), os.environ)'; git log --all"
TEST = f"```bash\n{LOOK}\n```"
SUBMIT = "```submit\n```"


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    with project_image("nexus-agent/test-run:1") as name:
        yield name


@pytest.mark.docker
def test_a_project_in_an_image_is_worked_on_by_name(
    image: str,
    tiny_model: Path,
    tmp_path: Path,
    scripted: list[list[str]],
) -> None:
    scripted.append([FIX, TEST, SUBMIT])
    status, text = agent(
        "run", "--image", image, "--issue", "double(2) is 5", "--model", tiny_model,
        "--tools", "compact", "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 0, text
    folder = only_run(tmp_path / "out")
    data = report(folder)
    assert data["exit"] == "submitted"
    assert data["sandbox"]["kind"] == "docker"
    assert data["sandbox"]["image"] == image
    assert data["patch"]["files"] == ["calc.py"]
    assert "-    return x + x + 1\n+    return x + x\n" in (folder / "patch.diff").read_text()
    said = (folder / "trajectory.jsonl").read_text()
    assert "42 environ" in said
    assert f"'PROJECT_ENVIRONMENT': '{CONDA}'" in said
    assert "the fix" not in said  # it is on a branch of the image


@pytest.mark.docker
def test_an_image_without_a_project_is_refused(
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    from environments.engine import connect
    from environments.images import base_image

    client = connect()
    name = base_image(client).name
    client.close()
    status, text = agent(
        "run", "--image", name, "--issue", "x", "--model", tiny_model, "--out", tmp_path / "out"
    )
    assert status == 1
    assert "has no project in /workspace" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "x"], "--image needs --issue"),
        (["--image", "x", "--issue", "y", "--sandbox", "bubblewrap"], "--image needs Docker"),
        (["--image", "x", "--issue", "y", "--instance", "z"], "two different tasks"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str) -> None:
    status, text = agent("run", *arguments)
    assert status == 2
    assert message in " ".join(text.split())
