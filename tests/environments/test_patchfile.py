"""Patches taken apart by file, and which files count as tests."""

from __future__ import annotations

import subprocess

import pytest

from environments import Patch
from environments.patchfile import is_test_file, sections

# content that looks like heads of a patch, names that git quotes, binary data, changes of type
SCRIPT = r"""
git init -q .
printf 'diff --git a/x b/x\nindex 1..2\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n' > fake.txt
head -c 3000 /dev/zero > zero.bin; echo 1 > 'two words.txt'; echo 1 > b; echo 1 > ünï.txt
echo 1 > $'quo"te\\back\ttab\nline'; ln -s b link; echo 1 > $'\xff.txt'
git add -A; git -c user.name=n -c user.email=e@x commit -qm base
sed -i 's/^/x/; s/^xdiff/diff/' fake.txt; head -c 5000 /dev/urandom > zero.bin
rm link; echo file > link; mkdir d; echo 2 > 'd/a b.txt'; echo 2 > ünï.txt
echo 2 > 'two words.txt'; rm $'quo"te\\back\ttab\nline'; echo 2 > $'\xff.txt'; printf 'no end' > n
git add -A
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A repository with a staged change of everything, the patch, and the names git lists."""
    folder = tmp_path_factory.mktemp("repo")
    subprocess.run(["bash", "-ec", SCRIPT], cwd=folder, check=True)
    diff = ["git", "diff", "--cached", "--no-renames"]
    data = subprocess.run([*diff, "--binary"], cwd=folder, check=True, stdout=-1).stdout
    listed = subprocess.run([*diff, "--name-only", "-z"], cwd=folder, check=True, stdout=-1).stdout
    names = [name.decode("utf-8", "surrogateescape") for name in listed.split(b"\0") if name]
    return folder, Patch(data, tuple(names))


def test_sections_are_the_files_that_git_names(made):
    _, patch = made
    parts = sections(patch.data)
    assert b"".join(text for _, text in parts) == patch.data
    assert sorted({path for path, _ in parts}) == sorted(patch.files)
    assert len(patch.files) == 9


def test_what_is_left_out_is_missing_and_the_rest_applies(made, tmp_path):
    folder, patch = made
    for path in patch.files:
        left = patch.without([path])
        assert left.files == tuple(name for name in patch.files if name != path)
        target = tmp_path / str(patch.files.index(path))
        subprocess.run(["git", "clone", "-q", folder, target], check=True)
        subprocess.run(["git", "apply", "--index", "-"], cwd=target, input=left.data, check=True)
        diff = ["git", "diff", "--cached", "--no-renames", "--name-only", "-z"]
        names = subprocess.run(diff, cwd=target, check=True, stdout=-1).stdout
        found = names.decode("utf-8", "surrogateescape").split("\0")[:-1]
        assert sorted(found) == sorted(left.files)
    assert patch.without(patch.files).data == b""
    assert patch.without([]) == patch
    assert Patch(b"").without(["x"]) == Patch(b"")


TESTS = """tests/x.py a/test/data.json test_a.py pkg/a_test.go src/a.test.ts src/a.spec.js
a_spec.rb __tests__/x.js FooTest.java TestFoo.java FooTests.cs conftest.py tests.py Test/x.c
spec/models/user.rb e2e/run.js lib/testing/helper.py foo-test.el FooIT.java"""
OTHERS = """src/a.py contest.py latest.py testament.py attest/x.py greatest.go protest.js
Testimony.md src/inspector.py manifest.json fastest/x.rs README.md respect.rb testify.py UNIT.md"""


@pytest.mark.parametrize("path", TESTS.split())
def test_names_of_tests(path):
    assert is_test_file(path)


@pytest.mark.parametrize("path", OTHERS.split())
def test_names_that_only_look_like_tests(path):
    assert not is_test_file(path)


def test_paths_of_the_instance_are_tests_whatever_their_name():
    patch = Patch(b"", ("checks/a.py", "checks.py", "src/a.py", "tests/b.py"))
    assert patch.tests() == ("tests/b.py",)
    assert patch.tests(["checks", "src/a.py"]) == ("checks/a.py", "src/a.py", "tests/b.py")
