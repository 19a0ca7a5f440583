"""bubblewrap where no control group can be made, and for a user who is not root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from environments import Limits, SandboxSpec, bubblewrap
from environments.bubblewrap import BubblewrapSandbox, why_unusable
from environments.cgroups import ControlGroup

pytestmark = pytest.mark.skipif(why_unusable() is not None, reason="bubblewrap does not work here")


@pytest.fixture
def box(monkeypatch):
    monkeypatch.setattr(bubblewrap, "make_group", lambda *_: ControlGroup(0))
    with BubblewrapSandbox(SandboxSpec(limits=Limits(memory_mb=256, pids=64))) as sandbox:
        yield sandbox


def test_what_is_not_enforced_is_said(box):
    said = " ".join(box.unenforced)
    for word in ("memory: 256 MiB", "CPU: 1 cores"):
        assert word in said
    assert ("processes" in said) == (os.getuid() == 0)


def test_everything_enforced_says_nothing():
    group = ControlGroup(1, {name: Path("/x") for name in ("memory", "pids", "cpu")})
    assert bubblewrap.fallbacks(Limits(), group) == ({}, None, ())


def test_memory_of_one_process_is_limited(box):
    result = box.run(["python3", "-c", "x = b'x' * 400_000_000"])
    assert result.exit_code == 1
    assert result.out_of_memory
    assert not box.run("echo MemoryError").out_of_memory  # said, but nothing failed


def test_cpu_affinity(box):
    code = "import os; print(len(os.sched_getaffinity(0)))"
    assert box.run(["python3", "-c", code]).text == "1\n"


def test_time_limit_and_files(box):
    assert box.run("setsid sleep 321 & sleep 321", timeout=0.5).timed_out
    assert box.run("ls -d /proc/[0-9]* | wc -l").text.strip() in {"2", "3", "4"}
    box.write_file("big", b"x" * 30_000_000)
    assert len(box.read_file("big", max_bytes=30_000_000)) == 30_000_000


def test_diff_within_little_memory(box):
    box.mark_base()
    box.write_file("new", b"1\n")
    assert box.diff().files == ("new",)


SCRIPT = """
import json, os
from environments import Limits, SandboxSpec, open_sandbox, probe
from environments.paths import cache_dir
box = open_sandbox(SandboxSpec(limits=Limits(pids=40)), "bubblewrap")
out = {"uid": box.run("id -u; touch f; stat -c %u f").text.split()}
out["bomb"] = box.run(":(){ :|:& };:", timeout=5).pids_exhausted
out["after"] = [box.run("echo ok").text for _ in range(2)][-1]
box.mark_base()
box.run("mkdir -p l/k; touch l/k/f; chmod 000 l/k l; echo 1 > y")
out["files"] = box.diff().files
box.close()
out["left"] = os.listdir(cache_dir("sandboxes"))
print(json.dumps(out))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_as_an_ordinary_user(tmp_path, tmp_path_factory):
    python = f"/usr/bin/python3.{sys.version_info[1]}"
    if not Path(python).exists() or not shutil.which("setpriv"):
        pytest.skip("needs setpriv and an interpreter of this version that every user can run")
    user = 65534
    library = tmp_path / "library"
    shutil.copytree(Path(bubblewrap.__file__).parent, library / "environments")
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", user, user)
    made = tmp_path_factory.getbasetemp(), Path(tempfile.gettempdir())
    for folder in (tmp_path, *tmp_path.parents):
        # pytest's own folders only, wherever it was told to have them
        if folder.is_relative_to(made[0]) or made[1] in folder.parents:
            folder.chmod(0o755)
    done = subprocess.run(
        [
            "setpriv",
            "--reuid",
            str(user),
            "--regid",
            str(user),
            "--clear-groups",
            python,
            "-c",
            SCRIPT,
        ],
        env={
            "PATH": "/usr/bin:/bin",
            "NEXUS_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": f"{library}:{sysconfig.get_path('purelib')}",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["uid"] == [str(user), str(user)]
    assert out["bomb"]
    assert out["after"] == "ok\n"
    assert out["files"] == ["l/k/f", "y"]
    assert out["left"] == []
