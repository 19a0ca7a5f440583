"""What a base trusts without reading, and what is in no patch."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from environments import treescan
from environments.treearchive import TreeArchive, everything


@pytest.fixture
def sandbox(shared_sandbox):
    return shared_sandbox


def tree(folder: Path) -> Path:
    files = {"a.txt": "one\n", "pkg/b.txt": "two\n", "pkg/c.txt": "three\n"}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_file_that_something_wrote_before_the_base_is_read(one_sandbox, tmp_path):
    """Same size and time as the one that was put there: only that a command ran tells them."""
    one_sandbox.put_tree(tree(tmp_path))
    one_sandbox.run("touch -r a.txt /tmp/t; printf 'ONE\\n' > a.txt; touch -r /tmp/t a.txt")
    one_sandbox.mark_base()
    assert not one_sandbox.diff()
    one_sandbox.run("printf 'new\\n' > a.txt")
    assert b"-ONE\n+new\n" in one_sandbox.diff().data


def test_a_file_that_a_tool_wrote_before_the_base_is_read(one_sandbox, tmp_path):
    one_sandbox.put_tree(tree(tmp_path))
    one_sandbox.write_file("a.txt", b"ONE\n")
    one_sandbox.mark_base()
    one_sandbox.write_file("a.txt", b"new\n")
    assert b"-ONE\n+new\n" in one_sandbox.diff().data


def test_only_files_that_are_as_they_were_put_there_are_taken_unread(tmp_path):
    """The list of what was put there gives false contents, so that it shows which were read."""
    top = tmp_path / "tree"
    top.mkdir()
    for name in ("same", "later", "longer"):
        (top / name).write_bytes(b"1")
    (top / "link").symlink_to("1")
    for name, time_ns in {"same": 0, "longer": 0, "link": 0, "later": 1}.items():
        os.utime(top / name, ns=(0, 5_000_000_000 + time_ns), follow_symlinks=False)
    put = {b"same": 1, b"later": 1, b"longer": 2, b"link": 1}
    records = b"\0".join(b"%d 5 %b %b" % (size, b"0" * 40, name) for name, size in put.items())
    space = treescan.Workspace(os.fsencode(top))
    space.scan()
    treescan.base(space, str(tmp_path / "git"), 0, io.BytesIO(b"0 0\n" + records))
    lines = (tmp_path / "git" / "manifest").read_bytes().split(b"\0")[:-1]
    ids = {line.split(b"\t")[1]: line.split(b" ")[1] for line in lines}
    true = treescan.blob_id(b"1").hex().encode()
    assert ids == {b"same": b"0" * 40, b"later": true, b"longer": true, b"link": true}


def test_only_its_time_of_change_tells_a_file(one_sandbox):
    """Size, time and inode are those it had when the base was marked, long after it was written."""
    one_sandbox.run("echo one > a; cp -p a b; sleep 0.2")
    one_sandbox.mark_base()
    one_sandbox.run("touch -r a /tmp/t; printf 'ONE\\n' > a; touch -r /tmp/t a")
    assert one_sandbox.diff().files == ("a",)
    one_sandbox.run("printf 'one\\n' > a; ln -f b c; mv c a")
    assert not one_sandbox.diff()


def test_changes_long_after_the_base_are_told_by_any_sign(one_sandbox):
    """Another file with the old size and time, another mode, a link with another target."""
    one_sandbox.run(
        "for f in replaced mode group; do echo one > $f; done; ln -s one link; sleep 0.2"
    )
    one_sandbox.mark_base()
    assert not one_sandbox.diff()
    changed = one_sandbox.run(
        "cp -p replaced new; printf 'ONE\\n' > new; touch -r replaced new; mv new replaced; "
        "chmod +x mode; chmod g+w group; "  # git knows nothing of the second
        "cp -dp link /tmp/l; ln -sfn two link; touch -h -r /tmp/l link"
    )
    assert changed.exit_code == 0, changed.text
    assert one_sandbox.diff().files == ("link", "mode", "replaced")


def test_a_file_is_read_where_one_mark_of_its_state_is_another(tmp_path):
    """The base gives it a false content, so that it shows whether it was read."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_bytes(b"1")
    info = (tmp_path / "tree" / "a").stat()
    states = [[info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]]
    states += [[mark + (at == n) for n, mark in enumerate(states[0])] for at in range(4)]
    seen = []
    for number, state in enumerate(states):
        argv = [sys.executable, treescan.__file__, "changes", tmp_path / "tree"]
        manifest = f"100644 {'0' * 40} {' '.join(map(str, state))}\ta\0".encode()
        argv.append(tmp_path / f"git{number}")
        done = subprocess.run(argv, input=manifest, check=True, stdout=subprocess.PIPE)
        seen.append(json.loads(done.stdout)["old"])
    assert seen == [[], ["a"], ["a"], ["a"], ["a"]]


def test_a_file_that_is_no_longer_as_long_is_read_whole_or_not_at_all(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    path = os.fsencode(tmp_path / "a")
    assert [treescan.read_whole(path, size) for size in (1, 10, 20)] == [b"0123456789"] * 3
    assert [treescan.read_whole(path, 1, most) for most in (10, 9, 1)] == [
        b"0123456789",
        None,
        None,
    ]


def test_a_folder_that_cannot_be_looked_into_is_named_and_what_it_holds_is_not_gone(
    tmp_path, monkeypatch
):
    def listed(self: treescan.Workspace, folder: bytes) -> list[os.DirEntry[bytes]]:
        if folder.endswith(b"/shut"):
            raise PermissionError
        with os.scandir(folder) as entries:
            return list(entries)

    monkeypatch.setattr(treescan.Workspace, "listed", listed)
    (tmp_path / "tree" / "shut").mkdir(parents=True)
    space = treescan.Workspace(os.fsencode(tmp_path / "tree"))
    space.scan()
    manifest = b"".join(b"100644 %b ?\t%b\0" % (b"0" * 40, path) for path in (b"shut/a", b"gone"))
    found = treescan.changes(space, str(tmp_path / "git"), io.BytesIO(manifest))
    assert found == {"old": ["gone"], "now": 0, "skipped": ["shut"], "nested": []}


def test_a_file_changed_in_the_tick_of_the_base_is_always_read(tmp_path):
    """What was written just before could be written again within the same tick."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_bytes(b"1")
    info = (tmp_path / "tree" / "a").stat()
    space, folder = treescan.Workspace(os.fsencode(tmp_path / "tree")), str(tmp_path / "git")
    space.scan()

    def state() -> bytes:
        manifest = (tmp_path / "git" / "manifest").read_bytes()
        return manifest.split(b" ", 2)[2].split(b"\t")[0]

    states = []
    for since in (0, treescan.TICK, treescan.TICK + 1):
        treescan.base(space, folder, info.st_ctime_ns + since, io.BytesIO(b"0 0\n"))
        states.append(state())
    time.sleep(0.2)
    argv = [sys.executable, treescan.__file__, "base", tmp_path / "tree", folder]
    subprocess.run(argv, input=b"0 0\n", check=True, stdout=subprocess.DEVNULL)
    known = f"1 {info.st_mtime_ns} {info.st_ctime_ns} {info.st_ino}".encode()
    assert [*states, state()] == [b"?", b"?", known, known]


def test_a_second_tree_over_the_first(one_sandbox, tmp_path):
    """The old contents of files of both are those that were there when the base was marked."""
    one_sandbox.put_tree(tree(tmp_path / "first"))
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "a.txt").write_text("ONE\n")
    one_sandbox.put_tree(tmp_path / "second")
    one_sandbox.mark_base()
    one_sandbox.run("echo 1 >> a.txt; echo 2 >> pkg/b.txt; rm pkg/c.txt")
    patch = one_sandbox.diff()
    assert b" ONE\n+1\n" in patch.data
    assert b" two\n+2\n" in patch.data
    assert b"-three\n" in patch.data


def test_an_archive_goes_in_like_its_folder(sandbox, tmp_path):
    archive = TreeArchive.of(tree(tmp_path), everything(tmp_path))
    sandbox.put_archive(archive)
    sandbox.put_archive(archive, "/var/tmp/elsewhere")
    assert sandbox.run("find . -type f | sort | xargs cat").text == "one\ntwo\nthree\n"
    assert sandbox.run("cat pkg/c.txt", cwd="/var/tmp/elsewhere").text == "three\n"
    sandbox.mark_base()
    sandbox.run("rm -r pkg; echo x > new")
    patch = sandbox.diff()
    assert patch.files == ("new", "pkg/b.txt", "pkg/c.txt")
    assert patch.problem == ""
    sandbox.run("rm -rf /var/tmp/elsewhere")
    archive.close()


def test_what_is_left_out_is_there_and_in_no_patch(sandbox, tmp_path):
    sandbox.put_tree(tree(tmp_path))
    sandbox.run("mkdir -p lib/in pkg/gen; echo 1 > lib/in/x; echo 1 > pkg/gen/y; echo 1 > prog")
    sandbox.leave_out(["lib/in/x", "pkg/gen/y", "prog"])
    sandbox.mark_base()
    sandbox.run(
        "echo 2 > prog; rm pkg/gen/y; echo 2 > lib/in/z; echo 2 > lib/w; echo 2 > pkg/gen/n"
    )
    assert not sandbox.diff()
    sandbox.run("echo 2 > pkg/own; echo 2 > a.txt")
    assert sandbox.diff().files == ("a.txt", "pkg/own")
    sandbox.leave_out([])


def test_a_file_too_large_for_a_patch_is_named_once_it_changed(one_sandbox):
    one_sandbox.run("truncate -s 60M big; echo 1 > small; sleep 0.2")
    one_sandbox.mark_base()
    one_sandbox.run("echo 2 > small")
    patch = one_sandbox.diff()
    assert (patch.files, patch.skipped) == (("small",), ())
    one_sandbox.run("truncate -s 61M big")
    assert one_sandbox.diff().skipped == ("big",)
    one_sandbox.run("rm big")
    assert one_sandbox.diff().skipped == ("big",)


def test_a_tree_is_saved_as_a_tar(one_sandbox, tmp_path):
    one_sandbox.put_tree(tree(tmp_path))
    one_sandbox.run("ln -s a.txt l; chmod 755 a.txt")
    with (tmp_path / "saved.tar").open("wb") as sink:
        one_sandbox.save_folder(one_sandbox.workdir, sink, limit=1_000_000)
    archive = TreeArchive.opened(tmp_path / "saved.tar")
    one_sandbox.run("rm -r *")
    one_sandbox.put_archive(archive)
    assert (
        one_sandbox.run("stat -c %a a.txt; readlink l; cat pkg/b.txt").text == "755\na.txt\ntwo\n"
    )
    archive.close()
