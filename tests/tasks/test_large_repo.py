"""A repository of 100,000 files: from the command to the agent's first turn, and each patch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from environments import open_sandbox
from tasks.image import place_tree
from tasks.repo import RepoTask

COUNT = 100_000
# CPU seconds of this process; the clock is the machine's affair, and the sandbox's work is bounded
# by what it may take of it. Measured: 2.5 to 3.5 s, and 0.3 s for a patch.
START_SECONDS, PATCH_SECONDS = 8.0, 2.0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("large") / "repo"
    for number in range(COUNT):
        folder = top / f"pkg{number // 2000:03}" / f"mod{number // 50 % 40:02}"
        if number % 50 == 0:
            folder.mkdir(parents=True, exist_ok=True)
        text = f"def function_{number}(a, b):\n    return a * {number} + b\n" * (1 + number % 40)
        (folder / f"file{number:06}.py").write_text(text)
    subprocess.run(["git", "init", "-q", top], check=True)
    subprocess.run(["git", "-C", top, "add", "-A"], check=True)
    return top


@pytest.mark.slow
def test_a_hundred_thousand_files(large: Path, sandbox_kind: str) -> None:
    if sandbox_kind not in ("docker", "bubblewrap"):
        pytest.skip("a sandbox without Python copies all files out for each patch")
    began, used = time.monotonic(), time.process_time()
    with RepoTask(large, "wrong", requirements=()) as task:
        with open_sandbox(task.spec(), sandbox_kind) as box:
            place_tree(task, box)
            print(f"{sandbox_kind}: start {time.monotonic() - began:.1f} s")
            assert time.process_time() - used < START_SECONDS
            sums = "find . -type f -name '*.py' -print0 | sort -z | xargs -0 cat | sha256sum"
            whole = hashlib.sha256()
            for path in sorted(large.rglob("*.py"), key=lambda path: os.fsencode(path)):
                whole.update(path.read_bytes())
            assert (
                box.run(f"export LC_ALL=C; {sums}", timeout=300).text.split()[0]
                == whole.hexdigest()
            )
            assert not box.diff()
            changed = "pkg000/mod00/file000001.py"
            box.run(f"echo x >> {changed}; echo n > new.py; rm pkg001/mod01/file002050.py")
            began, used = time.monotonic(), time.process_time()
            patch = box.diff()
            print(f"{sandbox_kind}: patch {time.monotonic() - began:.1f} s")
            assert time.process_time() - used < PATCH_SECONDS
            assert set(patch.files) == {changed, "new.py", "pkg001/mod01/file002050.py"}
            assert patch.problem == ""
