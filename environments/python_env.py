"""Folders of pip packages for sandboxes, made once on the host and mounted read-only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from environments.base import SandboxError
from environments.paths import cache_dir

RECIPE = 2
INSTALL_SECONDS = 900.0
PLACE = "/opt/env"  # what tracebacks say for the folder, wherever it is mounted


def python_env(
    requirements: Sequence[str],
    python: str | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """A host folder with the packages installed by pip, cached under its content's name.

    `requirements` are pip's requirement strings; pin them, for the name of the folder comes from
    them. `python` is the version of the interpreter inside the sandbox as "3.11" (None: the one
    that runs this, which is the one inside bubblewrap; Docker's is
    `sandbox.python_version`). For another version than the running one only wheels are taken.

    Mount it read-only (`SandboxSpec.mounts={str(folder): "/opt/env"}`), then put "/opt/env" on
    PYTHONPATH and "/opt/env/bin" on PATH (`SandboxSpec.python_path`); scripts in `bin` run by the
    `python3` that PATH finds. Everybody may read the folder, and nobody should write to it: it is
    made whole or not at all, and shared by all sandboxes.

    Raises SandboxError with pip's last lines when pip fails.
    """
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    version = python or running
    key = json.dumps([RECIPE, version, sorted(requirements)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    target = cache_dir("python-envs") / f"py{version}-{digest}"
    if target.is_dir():
        return target
    progress(f"installing {len(requirements)} packages for Python {version}")
    temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        if requirements:
            _install(requirements, version if version != running else None, temporary)
        if requirements and version == running:
            _compile(temporary)
        _mend_scripts(temporary / "bin")
        _open_to_all(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _install(requirements: Sequence[str], version: str | None, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-warn-script-location"]
    command += ["--no-compile", "--target", str(target)]
    if version is not None:
        command += ["--python-version", version, "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--", *requirements],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=INSTALL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"pip could not install {', '.join(requirements)}: {error}") from error
    if done.returncode:
        raise SandboxError(
            f"pip could not install {', '.join(requirements)}: {done.stdout.strip()[-1500:]}"
        )


def _compile(folder: Path) -> None:
    """Bytecode for the interpreter inside, which has this one's version. Nobody can write it there
    later: without it every start of pytest would compile all its modules.

    Bytecode that does not look at times of files: a copy or an image may change them.
    """
    command = [sys.executable, "-m", "compileall", "-q", "-j", "1"]
    command += ["--invalidation-mode", "unchecked-hash", "-s", str(folder), "-p", PLACE]
    # packages may ship files that are no valid Python; then the status is 1
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [*command, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=INSTALL_SECONDS,
        )


def _mend_scripts(folder: Path) -> None:
    """Scripts name the host's interpreter, which is not there inside."""
    for script in folder.iterdir() if folder.is_dir() else ():
        data = script.read_bytes()
        if data.startswith(b"#!") and b"python" in data.split(b"\n", 1)[0]:
            script.write_bytes(b"#!/usr/bin/env python3\n" + data.split(b"\n", 1)[1])


def _open_to_all(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        Path(root).chmod(0o755)
        for name in files:
            path = Path(root) / name
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o777 | 0o444)
