"""A repository can name programs that git runs. Taking the patch runs none of them on the host.

Each case is first shown to be dangerous: an ordinary git on the host, in a copy of the tree, runs
the program. Inside the sandbox it must not even change the patch.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TEXT = b"first line\nsecond line\n"
CHANGED = b"first line\nanother line\n"

# name -> (configuration, files, what an ordinary user would type)
CASES = {
    "fsmonitor": ("[core]\n\tfsmonitor = {program}\n", {}, "git status; git diff"),
    "filter": (
        '[filter "x"]\n\tclean = {program}\n\tsmudge = {program}\n\trequired = true\n',
        {".gitattributes": b"* filter=x\n"},
        "git add -A; git diff --cached",
    ),
    "filter process": (
        '[filter "x"]\n\tprocess = {program}\n',
        {".gitattributes": b"* filter=x\n"},
        "git add -A",
    ),
    "textconv": (
        '[diff "x"]\n\ttextconv = {program}\n',
        {".gitattributes": b"* diff=x\n"},
        "git diff",
    ),
    "external diff": ("[diff]\n\texternal = {program}\n", {}, "git diff"),
    "external diff by attribute": (
        '[diff "x"]\n\tcommand = {program}\n',
        {".gitattributes": b"* diff=x\n"},
        "git diff",
    ),
    "hooks": ("[core]\n\thooksPath = hooks\n", {}, "git add -A; git commit -m x"),
}


def plant(folder: Path, name: str, marker: Path) -> None:
    """A repository whose configuration runs a program that makes the marker."""
    config, files, _ = CASES[name]
    program = folder / "program"
    script = f"#!/bin/sh\ntouch {marker}\necho CHANGED BY PROGRAM\ncat 2>/dev/null\nexit 0\n"
    run = {"cwd": folder, "check": True, "stdout": subprocess.DEVNULL}
    for file, data in files.items():
        (folder / file).write_bytes(data)
    subprocess.run(["git", "init", "-q", "."], **run)
    identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run(["git", "add", "-A"], **run)
    subprocess.run(["git", *identity, "commit", "-qm", "base"], **run)
    program.write_text(script)
    program.chmod(0o755)
    (folder / "hooks").mkdir()
    for hook in ("pre-commit", "post-index-change", "post-checkout", "reference-transaction"):
        (folder / "hooks" / hook).write_text(script)
        (folder / "hooks" / hook).chmod(0o755)
    with (folder / ".git" / "config").open("a") as handle:
        handle.write("[user]\n\tname = n\n\temail = e@x\n" + config.format(program="./program"))


@pytest.mark.parametrize("name", CASES)
def test_program_named_by_the_repository(one_sandbox, tmp_path, name):
    marker = tmp_path / "marker" / "ran"
    marker.parent.mkdir()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file.txt").write_bytes(TEXT)
    plant(tree, name, marker)

    # dangerous: this is what happens to somebody who is not careful
    control = tmp_path / "control"
    subprocess.run(["cp", "-a", tree, control], check=True)
    (control / "file.txt").write_bytes(CHANGED)
    env = {**os.environ, "GIT_PAGER": "cat", "GIT_CONFIG_GLOBAL": "/dev/null"}
    quiet = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    subprocess.run(["sh", "-c", CASES[name][2]], cwd=control, env=env, **quiet)
    assert marker.exists()
    marker.unlink()

    box = one_sandbox
    box.put_tree(tree)
    box.mark_base()
    box.write_file("file.txt", CHANGED)
    patch = box.diff()
    assert not marker.exists()
    assert patch.files == ("file.txt",)
    assert b"-second line\n+another line\n" in patch.data
    assert b"CHANGED" not in patch.data


ATTRIBUTES = {
    "eol": b"* text=auto eol=lf\n",
    "working tree encoding": b"* working-tree-encoding=UTF-16\n",
    "binary": b"* -diff\n",
    "ident": b"* ident\n",
    "export and merge": b"* merge=union export-subst\n",
    "whitespace": b"* whitespace=fix,trailing-space text\n",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_change_no_byte(one_sandbox, name):
    one_sandbox.write_file("f", b"$Id$\r\nold\r\n")
    one_sandbox.mark_base()
    one_sandbox.write_file(".gitattributes", ATTRIBUTES[name])
    one_sandbox.write_file("f", b"$Id$\r\nnew \r\n")
    patch = one_sandbox.diff()
    assert b" $Id$\r\n-old\r\n+new \r\n" in patch.data
