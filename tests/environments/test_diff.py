"""The patch is exactly what changed: applied to the original tree, it gives the workspace."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from environments import SandboxError, SandboxSpec, open_sandbox
from tests.environments.plain_image import KIND

# Every file, link and mode of a tree, `.git` and caches aside: what a patch can carry.
LISTING = """
import hashlib, json, os, stat, sys
found = {}
top = os.fsencode(sys.argv[1])
for folder, subfolders, files in os.walk(top):
    subfolders[:] = [d for d in subfolders if d not in (b".git", b"__pycache__")]
    for name in files + [d for d in subfolders if os.path.islink(os.path.join(folder, d))]:
        path = os.path.join(folder, name)
        info = os.lstat(path)
        if name == b".git":
            continue
        if stat.S_ISLNK(info.st_mode):
            value = ["link", os.fsdecode(os.readlink(path))]
        else:
            digest = hashlib.sha256(open(path, "rb").read()).hexdigest()
            value = [bool(info.st_mode & 0o100), digest]
        found[os.fsdecode(os.path.relpath(path, top))] = value
json.dump(found, sys.stdout)
"""


@pytest.fixture
def sandbox(shared_sandbox):
    return shared_sandbox


def original(folder: Path) -> Path:
    """A tree with one of everything."""
    files = {
        "plain.py": b"def f():\n    return 1\n",
        "no-newline.txt": b"one\ntwo",
        "crlf.txt": b"a\r\nb\r\nc\r\n",
        "mixed.txt": b"a\r\nb\nc\r",
        "trailing.txt": b"x  \n\n \n\t\nend  \n",
        "latin1.txt": b"caf\xe9\n",
        "binary.bin": bytes(range(256)) * 20,
        "empty.txt": b"",
        "tool.sh": b"#!/bin/sh\n",
        "with space/and ünï文.txt": b"text\n",
        'quo"te\\back\ttab.txt': b"odd\n",
        "pkg/__init__.py": b"",
        "pkg/deep/er/mod.py": b"x = 1\n" * 100,
        "ignored.log": b"tracked although ignored\n",
        ".gitignore": b"*.log\nsecret/\n",
        "ident.txt": b"$Id$\n",
    }
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "tool.sh").chmod(0o755)
    (folder / "link").symlink_to("plain.py")
    (folder / "dirlink").symlink_to("pkg")
    return folder


CHANGES = {
    "nothing": ("true", set()),
    "edit": ("sed -i 's/1/2/' plain.py", {"plain.py"}),
    "new file": ("mkdir new; echo hi > new/file.txt", {"new/file.txt"}),
    "new file without final newline": ("printf 'a\\nb' > new.txt", {"new.txt"}),
    "new empty file": ("touch new.txt", {"new.txt"}),
    "delete": ("rm pkg/deep/er/mod.py", {"pkg/deep/er/mod.py"}),
    "delete everything": ("find . -mindepth 1 -delete", None),
    "rename": ("mv pkg/deep/er/mod.py moved.py", {"pkg/deep/er/mod.py", "moved.py"}),
    "final newline added": ("echo >> no-newline.txt", {"no-newline.txt"}),
    "final newline still missing": ("printf x >> no-newline.txt", {"no-newline.txt"}),
    "final newline removed": ("printf 'def f():\\n    return 1' > plain.py", {"plain.py"}),
    "emptied": ("> plain.py", {"plain.py"}),
    "crlf kept": ("sed -i 's/b/B/' crlf.txt", {"crlf.txt"}),
    "crlf to lf": ("sed -i 's/\\r//' crlf.txt mixed.txt", {"crlf.txt", "mixed.txt"}),
    "lf to crlf": ("sed -i 's/$/\\r/' plain.py", {"plain.py"}),
    "blank lines": ("sed -i '2d' trailing.txt", {"trailing.txt"}),
    "latin1": ("printf 'caf\\xe9 \\xff\\n' > latin1.txt", {"latin1.txt"}),
    "binary changed": ("printf x >> binary.bin", {"binary.bin"}),
    "binary new": ("head -c 3000 /dev/urandom > new.bin", {"new.bin"}),
    "text becomes binary": ("printf '\\0\\0' > plain.py", {"plain.py"}),
    "mode on": ("chmod +x plain.py", {"plain.py"}),
    "mode off and edit": ("chmod -x tool.sh; echo x >> tool.sh", {"tool.sh"}),
    "link changed": ("ln -sfn tool.sh link", {"link"}),
    "link becomes file": ("rm link; echo x > link", {"link"}),
    "file becomes link": ("rm plain.py; ln -s tool.sh plain.py", {"plain.py"}),
    "new link out of the tree": ("ln -s /etc/passwd out", {"out"}),
    "dangling link": ("ln -s nowhere dangling", {"dangling"}),
    "file becomes folder": ("rm plain.py; mkdir plain.py; echo x > plain.py/a", None),
    "folder becomes file": ("rm -r pkg; echo x > pkg", None),
    "odd names": (
        "echo x >> 'with space/and ünï文.txt'; echo x >> $'quo\"te\\\\back\\ttab.txt'; "
        "echo x > $'new\\nline'; echo x > ' lead'; echo x > -dash",
        None,
    ),
    "name that is not utf-8": ("echo x > $'\\xff\\xfe.txt'", {"\udcff\udcfe.txt"}),
    "tracked although ignored": ("echo more >> ignored.log", {"ignored.log"}),
    "ignore rules changed": ("echo '*.py' >> .gitignore; echo x >> plain.py", None),
    "ident": ("echo '$Id: abc $' >> ident.txt", {"ident.txt"}),
    "time only": ("touch plain.py", set()),
    "same size and time": (
        "touch -r plain.py /tmp/t; sed -i 's/1/7/' plain.py; touch -r /tmp/t plain.py",
        {"plain.py"},
    ),
    "unreadable": ("echo x >> plain.py; chmod 000 plain.py pkg/deep pkg", {"plain.py"}),
}


def check(sandbox, tree: Path, scratch: Path) -> set[str]:
    """Apply the patch to the original and compare every byte. Returns the files it names."""
    patch = sandbox.diff()
    subprocess.run(["cp", "-a", f"{tree}/.", scratch], check=True)
    if patch.data:
        subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            input=patch.data,
            cwd=scratch,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(scratch.parent)},
            check=True,
        )
    sandbox.run("chmod u+rwX -R .", cwd=sandbox.workdir)
    copy = scratch.parent / "copy"
    copy.mkdir()
    whole = sandbox.run("tar -cf - .", output_cap=50_000_000)
    subprocess.run(["tar", "-xf", "-", "-C", copy], input=whole.output, check=True)
    inside, outside = (
        json.loads(subprocess.run(["python3", "-c", LISTING, top], stdout=-1, check=True).stdout)
        for top in (copy, scratch)
    )
    assert outside == inside
    assert patch.skipped == ()
    assert patch.problem == ""
    return set(patch.files)


@pytest.mark.parametrize("name", CHANGES)
def test_patch_is_byte_exact(one_sandbox, tmp_path, name):
    command, expected = CHANGES[name]
    tree = original(tmp_path / "tree")
    (tmp_path / "scratch").mkdir()
    one_sandbox.put_tree(tree)
    one_sandbox.mark_base()
    changed = one_sandbox.run(command)
    assert changed.exit_code == 0, changed.text
    files = check(one_sandbox, tree, tmp_path / "scratch")
    if expected is not None:
        assert files == expected


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.parametrize("name", CHANGES)
def test_patch_is_byte_exact_without_python(tmp_path, name):
    with open_sandbox(SandboxSpec(), KIND) as box:
        test_patch_is_byte_exact(box, tmp_path, name)


# those that can be made one after the other
TOGETHER = [
    "edit",
    "new file",
    "new file without final newline",
    "rename",
    "final newline still missing",
    "crlf kept",
    "blank lines",
    "latin1",
    "binary changed",
    "binary new",
    "mode off and edit",
    "link becomes file",
    "odd names",
    "name that is not utf-8",
    "tracked although ignored",
    "ident",
    "dangling link",
    "file becomes folder",
]


def test_many_changes_at_once(sandbox, tmp_path):
    tree = original(tmp_path / "tree")
    (tmp_path / "scratch").mkdir()
    sandbox.put_tree(tree)
    sandbox.mark_base()
    for name in TOGETHER:
        changed = sandbox.run(CHANGES[name][0])
        assert changed.exit_code == 0, changed.text
    assert len(check(sandbox, tree, tmp_path / "scratch")) > len(TOGETHER)


def test_modes_of_folders_are_as_they_were(sandbox):
    sandbox.run("mkdir -p a/b; echo x > a/b/f; chmod 000 a/b/f a/b; chmod 100 a")
    sandbox.mark_base()
    assert not sandbox.diff()
    assert sandbox.run("stat -c %a a; chmod 700 a; stat -c %a a/b").text == "100\n0\n"
    assert sandbox.run("chmod 700 a/b; stat -c %a a/b/f").text == "0\n"


def test_patch_is_empty_after_all_is_undone(one_sandbox, tmp_path):
    one_sandbox.put_tree(original(tmp_path))
    one_sandbox.mark_base()
    one_sandbox.run("cp plain.py /tmp/p; echo x > plain.py; echo y > new; chmod +x crlf.txt")
    assert len(one_sandbox.diff().files) == 3
    one_sandbox.run("cp /tmp/p plain.py; rm new; chmod -x crlf.txt")
    assert one_sandbox.diff().data == b""


def test_a_second_base_replaces_the_first(one_sandbox):
    one_sandbox.write_file("a", b"1\n")
    one_sandbox.mark_base()
    one_sandbox.write_file("b", b"2\n")
    one_sandbox.mark_base()
    one_sandbox.write_file("c", b"3\n")
    assert one_sandbox.diff().files == ("c",)


def test_no_base(open_box):
    with pytest.raises(SandboxError, match="mark_base"):
        open_box().diff()


def test_base_of_an_empty_workspace(one_sandbox):
    one_sandbox.mark_base()
    assert not one_sandbox.diff()
    one_sandbox.write_file("a", b"1\n")
    assert one_sandbox.diff().files == ("a",)


def test_by_products_stay_out(one_sandbox):
    one_sandbox.write_file("mod.py", b"x = 1\n")
    one_sandbox.write_file("kept.egg-info/PKG-INFO", b"1\n")
    one_sandbox.write_file(".gitignore", b"*.log\n/out/\n")
    one_sandbox.mark_base()
    one_sandbox.run(
        "PYTHONDONTWRITEBYTECODE= python3 -c 'import mod'; "
        "mkdir -p .pytest_cache .hypothesis build/lib dist x.egg-info out "
        "pkg/build pkg/__pycache__; touch .pytest_cache/a .hypothesis/b build/lib/c dist/d "
        "x.egg-info/e out/f g.log h.pyc pkg/__pycache__/i; echo 2 > kept.egg-info/PKG-INFO; "
        "echo 3 > pkg/build/real.py"
    )
    assert one_sandbox.run("ls __pycache__").exit_code == 0
    assert set(one_sandbox.diff().files) == {"kept.egg-info/PKG-INFO", "pkg/build/real.py"}


def test_folders_named_build_count_where_they_were_there(one_sandbox):
    one_sandbox.write_file("build/rules.mk", b"a\n")
    one_sandbox.mark_base()
    one_sandbox.write_file("build/new.mk", b"b\n")
    one_sandbox.write_file("dist/wheel", b"c\n")
    assert one_sandbox.diff().files == ("build/new.mk",)


def test_the_users_repository_is_untouched(one_sandbox):
    one_sandbox.run(
        "git init -q . && git config user.name n && git config user.email e@x && echo 1 > a && "
        "git add a && git commit -qm one && echo 2 > b && git add b && echo 3 > c && echo 4 > a"
    )
    visible = "git status --porcelain; git log --oneline; sha256sum .git/index"
    first = one_sandbox.run(visible).text
    one_sandbox.mark_base()  # may write the objects in another form
    assert one_sandbox.run(visible).text == first
    state = visible + "; find .git | sort"
    before = one_sandbox.run(state).text
    one_sandbox.run("echo 5 > a")
    assert one_sandbox.diff().files == ("a",)
    after = one_sandbox.run("echo 4 > a; " + state).text
    assert after == before


def test_nested_repositories_and_commits_of_the_agent(sandbox):
    git = "git -c user.name=n -c user.email=e@x"
    sandbox.run("git init -q . && mkdir -p lib && echo 1 > lib/a.py && git init -q lib")
    sandbox.mark_base()
    sandbox.run(
        f"cd lib && echo 2 > a.py && echo 3 > b.py && git add -A && {git} commit -qm inner; cd ..; "
        f"echo 4 > top.py; git add -A 2>/dev/null; {git} commit -qm outer; git init -q fresh; "
        "echo 5 > fresh/x.py; echo 'gitdir: /nowhere' > fresh/.git-not; git tag evil"
    )
    files = {"lib/a.py", "lib/b.py", "top.py", "fresh/x.py", "fresh/.git-not"}
    assert set(sandbox.diff().files) == files


def test_special_files_do_not_hang(sandbox):
    sandbox.mark_base()
    sandbox.run("mkfifo pipe; ln -s pipe link; echo x > f")
    assert sandbox.diff().files == ("f", "link")


def test_enormous_files_are_left_out_and_named(sandbox):
    sandbox.write_file("small", b"1\n")
    sandbox.mark_base()
    sandbox.run("truncate -s 60M big; echo 2 > small; truncate -s 3T sparse")
    patch = sandbox.diff()
    assert patch.files == ("small",)
    assert set(patch.skipped) == {"big", "sparse"}


def test_many_files(one_sandbox):
    one_sandbox.run("mkdir d; for i in $(seq 3000); do echo $i > d/$i; done")
    one_sandbox.mark_base()
    one_sandbox.run("for i in $(seq 1 3 3000); do echo x$i > d/$i; done")
    assert len(one_sandbox.diff().files) == 1000


# a base that commands cannot reach

TAMPERING = {
    "removed": "rm -rf /var/tmp/* /tmp/* /home/agent/* /home/agent/.[a-z]*",
    "git variables": "export GIT_DIR=/workspace/.git GIT_INDEX_FILE=/tmp/i; git init -q .",
    "configured": "git config --global core.autocrlf input; git config --global diff.noprefix true",
}


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_changes_no_patch(one_sandbox, tmp_path, name):
    one_sandbox.put_tree(original(tmp_path))
    one_sandbox.mark_base()
    one_sandbox.run(TAMPERING[name], cwd="/")
    one_sandbox.run("sed -i 's/1/2/' plain.py")
    patch = one_sandbox.diff()
    assert patch.files == ("plain.py",)
    assert b"-    return 1\n+    return 2\n" in patch.data


def test_a_process_that_destroys_the_base_while_it_is_used_is_noticed(open_box, tmp_path):
    box = open_box()
    box.put_tree(original(tmp_path))
    box.mark_base()
    box.run(
        "(while :; do for p in /var/tmp/nexus-*/objects/pack/*.pack /var/tmp/nexus-*/refs/heads/*;"
        " do [ -f $p ] && chmod u+w $p && : > $p; done; done) >/dev/null 2>&1 & sleep 0.1; "
        "sed -i 's/1/2/' plain.py"
    )
    # The race may be won or lost; lost, it is said, and no false patch comes.
    with contextlib.suppress(SandboxError):
        assert box.diff().files == ("plain.py",)
