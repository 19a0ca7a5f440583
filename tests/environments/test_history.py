"""What a repository in the workspace knows of its future after `mark_base`: nothing."""

from __future__ import annotations

import subprocess

import pytest

from environments import SandboxError
from environments.history import scrub_history

# Secrets s1 ... s9 are each put where a model could look for the fix.
REPOSITORY = r"""
export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e@x GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e@x
git init -q -b main .
one() { echo "$1" > "$2"; git add -A; git commit -qm "commit $1"; }
one first f; one base f; one extra g
keep=$(git rev-parse HEAD)
git checkout -q -b fix; one s1 f; git tag v2; git tag -a -m s2 v3; git notes add -m s3
git checkout -q main
one s4 f; git reset -q --hard $keep                      # in the reflog only
one s5 f; git reset -q --hard $keep; git reflog expire --expire=now --all   # in no log, loose
git checkout -q --detach; one s6 f; git checkout -q main; git gc -q --prune=never  # packed
echo s7 > f; git stash -q
git remote add origin /nowhere/fix.git; git update-ref refs/remotes/origin/main fix
git config branch.main.remote origin; git config branch.main.merge refs/heads/main
git update-ref refs/replace/$keep fix; git update-ref refs/original/x fix
echo s8 | git hash-object -w --stdin >/dev/null
touch .git/objects/pack/$(basename $(ls .git/objects/pack/*.pack | head -1) .pack).keep
git rev-parse fix > .git/FETCH_HEAD; cp .git/FETCH_HEAD .git/ORIG_HEAD
git worktree add -q ../other fix
git commit-graph write --reachable 2>/dev/null
echo staged > staged; git add staged; echo changed > g
"""

# every object that git's files hold, whether anything names it or not
OBJECTS = "git cat-file --batch-all-objects --batch | grep -a -o 's[1-9]$' | sort -u"


@pytest.fixture
def future(shared_sandbox):
    """A sandbox whose workspace is a repository with a future."""
    made = shared_sandbox.run(["bash", "-ec", REPOSITORY.replace("../other", "/var/tmp/other")])
    assert made.exit_code == 0, made.text
    return shared_sandbox


def test_only_the_history_of_the_base_is_left(future):
    assert future.run(OBJECTS).text.split() == [f"s{n}" for n in range(1, 9)]
    work = "export GIT_NO_REPLACE_OBJECTS=1; git status --porcelain; git rev-parse HEAD"
    before = future.run(f"{work}; sha256sum .git/index").text
    future.mark_base()
    log = future.run("git log --all --format=%s").text
    assert log == "commit extra\ncommit base\ncommit first\n"
    assert future.run(OBJECTS).text == ""
    short = future.run("git rev-parse --short HEAD").text.strip()
    listed = future.run("git tag; git remote; git stash list; git notes; git worktree list").text
    assert listed.split() == [future.workdir, short, "[main]"]
    assert future.run("git for-each-ref --format='%(refname)'").text == "refs/heads/main\n"
    assert future.run("git reflog").text == ""
    assert future.run("git fsck --unreachable --lost-found --strict").text.strip() == ""
    assert "nowhere" not in future.run("git config --list; cat .git/config").text
    names = "find .git -name '*_HEAD' -o -name logs -o -name '*.keep' -o -name alternates"
    assert future.run(names).text == ""
    # nothing of the work is lost
    assert future.run(f"{work}; sha256sum .git/index").text == before
    assert future.run("git show :staged; cat g").text == "staged\nchanged\n"


def test_the_patch_is_against_the_state_at_start_not_head(future):
    future.mark_base()
    future.run("echo more >> f; git -c user.name=n -c user.email=e@x commit -qam mine")
    assert future.diff().files == ("f",)


def test_a_detached_head_and_a_repository_without_commits(one_sandbox):
    box = one_sandbox
    box.run(["bash", "-ec", REPOSITORY.split("git remote")[0]])
    box.run("git checkout -q --detach HEAD~1 && git init -q empty && echo x > empty/x")
    box.mark_base()
    assert box.run("git log --all --format=%s HEAD").text == "commit base\ncommit first\n"
    assert box.run("git for-each-ref").text == ""
    assert box.run("git -C empty log").exit_code != 0
    box.write_file("empty/y", b"y\n")
    assert box.diff().files == ("empty/y",)


def test_submodules_are_cut_and_edits_in_them_are_reported(one_sandbox):
    box = one_sandbox
    script = (
        "export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e@x GIT_COMMITTER_NAME=n "
        "GIT_COMMITTER_EMAIL=e@x; git init -q -b main /var/tmp/lib; cd /var/tmp/lib; "
        "echo 1 > a; git add a; git commit -qm old; echo s1 > a; git commit -qam s1; "
        "cd /workspace; git init -q -b main .; "
        "git -c protocol.file.allow=always submodule --quiet add /var/tmp/lib lib; "
        "git -C lib checkout -q HEAD~1; git add -A; git commit -qm top"
    )
    made = box.run(["bash", "-ec", script])
    assert made.exit_code == 0, made.text
    box.mark_base()
    assert box.run("git -C lib log --all --format=%s").text == "old\n"
    assert box.run(f"cd lib; {OBJECTS}").text == ""
    assert box.diff().submodules == ()
    box.run("echo 2 > lib/a; echo 3 > top.txt")
    patch = box.diff()
    assert patch.submodules == ("lib",)
    assert set(patch.files) == {"lib/a", "top.txt"}
    assert patch.problem == ""


def test_a_repository_elsewhere_is_not_reached_from_here(one_sandbox):
    box = one_sandbox
    box.run("git init -q /var/tmp/real; git -C /var/tmp/real config x.secret yes")
    box.write_file(".git", b"gitdir: /var/tmp/real/.git\n")
    assert box.run("git config x.secret").text == "yes\n"
    box.mark_base()
    assert box.run("git config x.secret").exit_code != 0


def test_a_history_that_cannot_be_cut_is_an_error(one_sandbox):
    box = one_sandbox
    box.run(["bash", "-ec", REPOSITORY.replace("../other", "/var/tmp/other")])
    box.run("rm -f $(find .git/objects -type f -name '*.pack')")  # HEAD's own objects are gone
    with pytest.raises(SandboxError, match="could not be cut at HEAD"):
        scrub_history(box, "/var/tmp/scratch")
    assert box.run("ls /var/tmp").text.split() == ["other"]


def test_the_oracle_sees_secrets(tmp_path):
    """Without the scrub the same look finds every secret, on an ordinary host."""
    script = REPOSITORY.replace("../other", str(tmp_path / "other"))
    (tmp_path / "repo").mkdir()
    subprocess.run(["bash", "-ec", script], cwd=tmp_path / "repo", check=True)
    found = subprocess.run(["bash", "-c", OBJECTS], cwd=tmp_path / "repo", stdout=-1, check=True)
    assert found.stdout.split() == [f"s{n}".encode() for n in range(1, 9)]
