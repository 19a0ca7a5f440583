"""An environment of the host inside: its python, its packages, and what is said where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.host_env import host_env
from tasks.image import place_tree
from tasks.instance import SandboxOpener, TaskError
from tasks.repo import RepoTask
from tests.tasks.test_repo import write


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with a module and a script of its own."""
    folder = tmp_path_factory.mktemp("env") / "my env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    write(packages, {"only_there.py": "VALUE = 42\n"})
    script = folder / "bin" / "tool"
    script.write_text(
        f"#!/bin/sh\nexec '{folder}/bin/python' -c 'import only_there as o; print(o.VALUE)'\n"
    )
    script.chmod(0o755)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write(tmp_path / "project", {"pkg/a.py": "x = 1\n", "only_here.py": "y = 2\n"})


def inside(sandbox_kind: str, venv: Path, base: Path) -> None:
    if sandbox_kind != "bubblewrap" and base.is_relative_to("/usr"):
        pytest.skip("the image has another python than this machine's /usr")


def test_its_python_is_first_and_read_only(
    project: Path, venv: Path, each_kind: SandboxOpener, sandbox_kind: str
) -> None:
    inside(sandbox_kind, venv, Path(sys.base_prefix))
    with RepoTask(project, "wrong", host_prefix=str(venv)) as task, each_kind(task.spec()) as box:
        place_tree(task, box)
        asked = (
            "import only_there, only_here, sys; print(only_there.VALUE, only_here.y, sys.prefix)"
        )
        assert box.run(["python", "-c", asked]).text == f"42 2 {venv}\n"
        assert box.run("tool; echo $VIRTUAL_ENV").text == f"42\n{venv}\n"
        assert box.run(["touch", f"{venv}/new"]).exit_code != 0
        assert task.requirements == ()


def test_an_environment_that_cannot_run_inside_is_said_to(
    project: Path, venv: Path, any_kind: SandboxOpener, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    subprocess.run(["cp", "-a", venv, other], check=True)
    (other / "bin" / "python").unlink()
    hidden = write(tmp_path / "elsewhere", {"python": "#!/bin/sh\necho hello\n"}) / "python"
    hidden.chmod(0o755)
    # a real file as `python`, so that no installation is found behind it
    (other / "bin" / "python").write_text(f"#!{hidden}\n")
    (other / "bin" / "python").chmod(0o755)
    with RepoTask(project, "wrong", host_prefix=str(other)) as task, any_kind(task.spec()) as box:
        with pytest.raises(
            TaskError, match=r"does not run in the .* sandbox .*--sandbox bubblewrap"
        ):
            place_tree(task, box)


@pytest.mark.docker
def test_an_interpreter_that_is_not_mounted_is_named(
    project: Path, venv: Path, docker: SandboxOpener
) -> None:
    with RepoTask(project, "wrong", host_prefix=str(venv)) as task:
        spec = task.spec().model_copy(update={"mounts": {str(venv): str(venv)}})
        target = (venv / "bin" / "python").resolve()
        with docker(spec) as box:
            if box.run(["test", "-e", str(target)]).exit_code == 0:
                pytest.skip("the image has this interpreter anyway")
            with pytest.raises(TaskError, match="which is not in the docker sandbox"):
                place_tree(task, box)


def test_what_is_no_environment_is_refused_at_once(tmp_path: Path, venv: Path) -> None:
    cases = {
        str(tmp_path / "absent"): "not a folder",
        str(write(tmp_path / "plain", {"a": ""})): "no .*/bin/python",
        "/usr": "belongs to the system",
    }
    broken = tmp_path / "broken"
    (broken / "bin").mkdir(parents=True)
    (broken / "bin" / "python").symlink_to("/nonexistent/python3")
    cases[str(broken)] = "a link to nothing"
    odd = tmp_path / "odd"
    (odd / "bin").mkdir(parents=True)
    (odd / "bin" / "python").symlink_to(sys.executable)
    cases[str(odd)] = "neither a virtual environment"
    for prefix, told in cases.items():
        with pytest.raises(TaskError, match=told):
            host_env(prefix)


def test_the_installation_behind_it_is_mounted_too(tmp_path: Path) -> None:
    """As uv and pyenv have it: a link to a link to an installation outside /usr."""
    real = write(tmp_path / "pythons" / "3.12.1", {"bin/python3.12": "x", "lib/x.so": "x"})
    (tmp_path / "pythons" / "3.12").symlink_to("3.12.1")
    env = write(
        tmp_path / "env", {"pyvenv.cfg": f"home = {tmp_path}/pythons/3.12/bin\n", "bin/tool": ""}
    )
    (env / "bin" / "python").symlink_to("python3")
    (env / "bin" / "python3").symlink_to(f"{tmp_path}/pythons/3.12/bin/python3.12")
    found = host_env(str(env))
    assert found.prefix == env
    assert set(found.mounts) == {str(env), f"{tmp_path}/pythons/3.12", str(real)}
    assert found.variables == {"VIRTUAL_ENV": str(env)}
    conda = write(tmp_path / "conda", {"bin/python": "x", "conda-meta/history": ""})
    assert host_env(str(conda)).variables["CONDA_PREFIX"] == str(conda)
    assert set(host_env(str(conda)).mounts) == {str(conda)}
    (tmp_path / "link").symlink_to("conda")
    assert host_env(os.fspath(tmp_path / "link")).prefix == conda
