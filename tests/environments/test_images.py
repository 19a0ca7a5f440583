"""Images that are made here, and folders of packages for sandboxes."""

from __future__ import annotations

import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

from environments import ImageMissing, SandboxError, SandboxSpec, hostfiles, images, open_sandbox
from environments.engine import connect
from environments.python_env import python_env


@pytest.fixture
def client(monkeypatch):
    """An engine, and a name for images that are removed again."""
    engine = connect()
    monkeypatch.setattr(images, "REPOSITORY", f"nexus-agent/test-{os.getpid()}")
    # no registry in these tests, whatever the host can reach
    monkeypatch.setattr(images, "PYTHON_IMAGE", "no.such.registry.invalid/python:3")
    yield engine
    for image in engine.images.list(images.REPOSITORY):
        engine.images.remove(image.id, force=True)
    engine.close()


def works(expected: str) -> None:
    with open_sandbox(SandboxSpec(), "docker") as box:
        assert box.image.startswith(expected)
        script = (
            "git --version && python --version && make --version && patch --version"
            "; python -c 'import ssl, sqlite3, zoneinfo; zoneinfo.ZoneInfo(\"Asia/Tokyo\")'"
        )
        result = box.run(script)
        assert result.exit_code == 0, result.text
        box.mark_base()
        box.write_file("f", b"1\n")
        assert box.diff().files == ("f",)


@pytest.mark.docker
@pytest.mark.skipif(bool(hostfiles.missing_packages()), reason="no Debian host")
def test_base_from_host_files_is_made_once(client):
    said: list[str] = []
    first = images.base_image(client, said.append)
    assert any("cannot be pulled" in line for line in said)
    assert any("this machine's files" in line for line in said)
    said.clear()
    assert images.base_image(client, said.append) == first
    assert said == []
    works(f"{images.REPOSITORY}:host-")


@pytest.mark.docker
@pytest.mark.skipif(not Path("/bin").is_symlink(), reason="/usr is not merged")
def test_base_that_mounts_usr(client, monkeypatch):
    monkeypatch.setattr(hostfiles, "missing_packages", lambda: ["git"])
    works(f"{images.REPOSITORY}:usr-")


@pytest.mark.docker
def test_no_way_to_a_base_names_every_reason(client, monkeypatch):
    monkeypatch.setattr(hostfiles, "missing_packages", lambda: ["git"])
    monkeypatch.setattr(hostfiles, "usr_python", lambda: None)
    with pytest.raises(ImageMissing, match=r"git.*no\.such\.registry"):
        images.base_image(client)


@pytest.mark.docker
@pytest.mark.skipif(bool(hostfiles.missing_packages()), reason="no Debian host")
def test_a_failure_while_writing_leaves_no_image(client, monkeypatch):
    def broken(sink) -> None:
        hostfiles.write_empty_rootfs(sink)
        raise OSError("disk on fire")

    monkeypatch.setattr(hostfiles, "write_debian_rootfs", broken)
    monkeypatch.setattr(hostfiles, "usr_python", lambda: None)
    with pytest.raises(ImageMissing, match="disk on fire"):
        images.base_image(client)
    assert client.images.list(images.REPOSITORY) == []


@pytest.mark.skipif(bool(hostfiles.missing_packages()), reason="no Debian host")
def test_the_name_changes_with_the_recipe(monkeypatch):
    before = hostfiles.fingerprint()
    assert hostfiles.fingerprint() == before
    monkeypatch.setattr(hostfiles, "RECIPE", hostfiles.RECIPE + 1)
    assert hostfiles.fingerprint() != before


def test_empty_rootfs_has_no_path_twice_and_no_secrets():
    sink = io.BytesIO()
    hostfiles.write_empty_rootfs(sink)
    sink.seek(0)
    with tarfile.open(fileobj=sink) as archive:
        names = archive.getnames()
    assert len(names) == len(set(names))
    assert not {"etc/shadow", "root/.ssh"} & set(names)


# packages


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with one small wheel, and pip kept off every index."""
    import zipfile

    wheel = tmp_path / "index" / "tinything-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "tinything-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinything.py", "def main():\n    print('tiny runs')\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/entry_points.txt", "[console_scripts]\ntiny = tinything:main\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_packages_run_inside(index, open_box, sandbox_kind):
    if "plain" in sandbox_kind:
        pytest.skip("no Python inside")
    folder = python_env(["tinything==1.0"])
    assert oct(folder.stat().st_mode & 0o777) == "0o755"
    box = open_box(
        mounts={str(folder): "/opt/env"},
        env={"PYTHONPATH": "/opt/env"},
        python_path="/opt/env/bin",
    )
    assert box.run("tiny && python -m tinything; python -c 'import tinything'").exit_code == 0
    assert box.run("tiny").text == "tiny runs\n"


def test_packages_are_installed_once(index):
    said: list[str] = []
    first = python_env(["tinything==1.0"], progress=said.append)
    stamp = (first / "tinything.py").stat().st_mtime_ns
    again = python_env(["tinything==1.0"], progress=said.append)
    assert (again, len(said)) == (first, 1)
    assert (first / "tinything.py").stat().st_mtime_ns == stamp
    assert python_env([]) != first


def test_packages_are_compiled_for_the_interpreter_inside(index, open_box):
    folder = python_env(["tinything==1.0"])
    compiled = list(folder.glob("__pycache__/tinything.cpython-*.pyc"))
    assert len(compiled) == 1
    (folder / "tinything.py").touch()  # a copy may have other times
    box = open_box(mounts={str(folder): "/opt/env"}, env={"PYTHONPATH": "/opt/env"})
    if getattr(box, "way", "resident") == "plain":
        pytest.skip("no Python inside")
    if box.run("python3 -c 'import sys; print(sys.version_info[:2])'").text.strip() != str(
        sys.version_info[:2]
    ):
        pytest.skip("another version inside")
    said = box.run("python3 -v -c 'import tinything' 2>&1 | grep tinything").text
    assert "matches /opt/env/tinything.py" in said
    assert (
        "code object from /opt/env/__pycache__" in said or "code object from '/opt/env/__py" in said
    )


def test_a_failed_install_leaves_nothing(index, tmp_path):
    with pytest.raises(SandboxError, match="not-there-at-all"):
        python_env(["tinything", "not-there-at-all==9"])
    assert list((tmp_path / "cache" / "python-envs").iterdir()) == []


def test_packages_for_another_version(index):
    folder = python_env(["tinything==1.0"], "3.9")
    assert folder.name.startswith("py3.9-")
    assert (folder / "tinything.py").exists()
