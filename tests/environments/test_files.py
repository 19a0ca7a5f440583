"""Files in and out, on both kinds of sandbox."""

from __future__ import annotations

import os
import time

import pytest

from environments import SandboxFileError


@pytest.fixture
def sandbox(shared_sandbox):
    return shared_sandbox


def test_two_hundred_kilobytes_there_and_back(sandbox):
    data = os.urandom(200_000)
    sandbox.write_file("a/b/c.bin", data)
    assert sandbox.read_file("a/b/c.bin") == data
    assert sandbox.read_file(f"{sandbox.workdir}/a/b/c.bin") == data


@pytest.mark.parametrize(
    "name", ["with space.txt", "ünï-文.txt", "-dash", "a'\"$(x)`.txt", "new\nline"]
)
def test_names(sandbox, name):
    sandbox.write_file(name, b"content")
    assert sandbox.read_file(name) == b"content"
    assert sandbox.run(["cat", "--", name]).output == b"content"


def test_empty_file(sandbox):
    sandbox.write_file("empty", b"")
    assert sandbox.read_file("empty") == b""


def test_modes(sandbox):
    sandbox.write_file("plain", b"")
    sandbox.write_file("script", b"#!/bin/sh\necho ran\n", executable=True)
    assert sandbox.run("./script").text == "ran\n"
    assert sandbox.run("stat -c %a plain script").text == "644\n755\n"
    sandbox.write_file("script", b"#!/bin/sh\necho again\n")  # an edit keeps the mode
    assert sandbox.run("./script").text == "again\n"


def test_writing_through_a_link_changes_its_target(sandbox):
    sandbox.run("echo old > target; ln -s target link")
    sandbox.write_file("link", b"new")
    assert sandbox.run("cat target; readlink link").text == "newtarget\n"


def test_what_cannot_be_read_is_named(sandbox):
    sandbox.run("mkdir folder; mkfifo pipe; ln -s nowhere dangling; head -c 5000 /dev/zero > big")
    for path, reason in {
        "missing": "No such file",
        "folder": "folder",
        "pipe": "not a regular file",
        "dangling": "No such file",
        "/dev/zero": "not a regular file",
        "nul\0": "NUL",
    }.items():
        with pytest.raises(SandboxFileError, match=reason) as caught:
            sandbox.read_file(path)
        assert path.split("\0")[0] in str(caught.value)
    with pytest.raises(SandboxFileError, match="larger than 4999 bytes"):
        sandbox.read_file("big", max_bytes=4999)
    assert len(sandbox.read_file("big", max_bytes=5000)) == 5000


def test_what_cannot_be_written_is_named_and_nothing_is_left(sandbox):
    sandbox.run("mkdir folder; echo x > file")
    for path in ("folder", "file/below", "/proc/new", "/sys/new"):
        with pytest.raises(SandboxFileError, match=path):
            sandbox.write_file(path, b"data" * 100_000)
    assert sandbox.run("ls -A").text == "file\nfolder\n"
    assert sandbox.read_file("file") == b"x\n"


def test_a_full_disk_keeps_the_old_content(sandbox):
    sandbox.run("echo old > ~/file; head -c 5G /dev/zero > ~/fill", timeout=30)
    with pytest.raises(SandboxFileError, match="No space left"):
        sandbox.write_file("/home/agent/file", b"x" * 1_000_000)
    assert sandbox.read_file("/home/agent/file") == b"old\n"
    assert sandbox.run("ls -A ~").text == "file\nfill\n"


def test_tree_in(sandbox, tmp_path):
    (tmp_path / "sub dir").mkdir()
    (tmp_path / "sub dir" / "ü.txt").write_bytes(b"\xff\x00")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("sub dir")
    (tmp_path / "dangling").symlink_to("/nowhere")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ("n" * 200)).write_text("long name")
    sandbox.put_tree(tmp_path)
    assert sandbox.read_file("sub dir/ü.txt") == b"\xff\x00"
    assert sandbox.run("readlink link dangling; stat -c %a run.sh; ls -d empty").text == (
        "sub dir\n/nowhere\n755\nempty\n"
    )
    assert sandbox.run("test -e pipe").exit_code == 1
    assert sandbox.read_file("n" * 200) == b"long name"
    sandbox.put_tree(tmp_path / "sub dir", "elsewhere/deep")
    assert sandbox.read_file("elsewhere/deep/ü.txt") == b"\xff\x00"


def test_tree_errors(sandbox, tmp_path):
    with pytest.raises(SandboxFileError, match="not a folder"):
        sandbox.put_tree(tmp_path / "missing")
    (tmp_path / "f").write_text("x")
    with pytest.raises(SandboxFileError, match="/proc/tree"):
        sandbox.put_tree(tmp_path, "/proc/tree")


def test_twenty_megabytes_take_about_a_second(sandbox, tmp_path):
    for number in range(400):
        (tmp_path / f"f{number}").write_bytes(os.urandom(50_000))
    started = time.monotonic()
    sandbox.put_tree(tmp_path)
    sandbox.run("cat f* > all")
    assert len(sandbox.read_file("all", max_bytes=20_000_000)) == 20_000_000
    assert time.monotonic() - started < 5
    sandbox.write_file("all", b"x" * 20_000_000)
    assert time.monotonic() - started < 6
    assert sandbox.run("wc -c < all").text.strip() == "20000000"
