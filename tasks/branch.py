"""A patch as one commit on a new branch of the user's repository: `--branch NAME`.

Made from HEAD by git's plumbing with an index of its own: the working tree, the index, the current
branch and the stash stay as they are, and no hook runs.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import git

from tasks.instance import TaskError
from tasks.patches import whole

_OPTIONS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.quotePath=off",
    "apply.whitespace=nowarn",
    "apply.ignoreWhitespace=no",
    "gc.auto=0",
    "commit.gpgSign=false",
)
# Where the user has told git no name of his own.
_NAME, _EMAIL = "nexus-agent", "nexus-agent@localhost"


class BranchRefused(TaskError):
    """The commit cannot be made; nothing was changed."""


@dataclass(frozen=True, slots=True)
class NewBranch:
    """A branch that does not exist yet, checked. Raises BranchRefused when made."""

    git_dir: Path
    top: Path  # of the working tree
    below: str  # where the agent's folder lies in it: "" or "packages/a/"
    name: str
    head: str  # id of the commit it starts from

    def commit(self, patch: bytes, message: str) -> str:
        """Make the commit and then the branch; returns the commit's id. Raises BranchRefused."""
        with tempfile.TemporaryDirectory(prefix="branch-") as own:
            index = {"GIT_INDEX_FILE": str(Path(own) / "index")}
            _must(self, ["read-tree", self.head], env=index)
            argv = ["apply", "--cached"]
            if self.below:
                argv.append(f"--directory={self.below.rstrip('/')}")
            done = _git(self, [*argv, "-"], stdin=whole(patch), env=index)
            if done.returncode:
                raise BranchRefused(self._why(done.stdout.decode("utf-8", "replace")))
            tree = _must(self, ["write-tree"], env=index)
        commit = _must(
            self,
            ["commit-tree", tree, "-p", self.head, "-F", "-"],
            stdin=message.encode("utf-8", "replace"),
            env=self._who(),
        )
        zeros = "0" * len(commit)
        _must(self, ["update-ref", "-m", "nexus-agent", f"refs/heads/{self.name}", commit, zeros])
        return commit

    def dirty(self) -> bool:
        """Whether the tree that the agent was given differs from HEAD."""
        argv = ["status", "--porcelain", "--untracked-files=normal", "--", self.below or "."]
        return bool(_must(self, argv))

    def _who(self) -> dict[str, str]:
        """A name for the commit where git has none."""
        if _git(self, ["var", "GIT_COMMITTER_IDENT"]).returncode == 0:
            return {}
        kinds = ("AUTHOR", "COMMITTER")
        names = {f"GIT_{kind}_NAME": _NAME for kind in kinds}
        return names | {f"GIT_{kind}_EMAIL": _EMAIL for kind in kinds}

    def _why(self, said: str) -> str:
        lines = [line for line in said.splitlines() if line.startswith(("error:", "fatal:"))]
        reason = "; ".join(lines[:3]) or said.strip()[-300:]
        listed = _git(self, ["ls-tree", "-r", "-z", self.head]).stdout.split(b"\0")
        modules = [os.fsdecode(r.split(b"\t")[1]) for r in listed if r.startswith(b"160000 ")]
        if any(f" {module}/" in said for module in modules):
            remedy = "it changes files of a submodule, which has commits of its own"
        elif self.dirty():
            remedy = (
                "the agent worked on uncommitted changes, which HEAD does not have: commit them and"
            )
            remedy += f" apply the patch to a branch (`git switch -c {self.name} && git apply ...`)"
        else:
            remedy = "files in the tree are not those git has (line ends, filters)"
        return (
            f"--branch {self.name}: the patch does not fit on HEAD ({reason}): {remedy}. Nothing "
            "was changed; the patch is in the run folder, and `git apply` or --apply puts it into "
            "the working tree"
        )


def new_branch(folder: Path, name: str) -> NewBranch:
    """Check that a branch can be made. Raises BranchRefused with the reason and a remedy."""
    said = f"--branch {name}: "
    try:
        with git.Repo(folder, search_parent_directories=True) as repo:
            if repo.working_tree_dir is None:
                raise BranchRefused(f"{said}{folder} is a bare repository")
            places = Path(repo.git_dir), Path(repo.working_tree_dir)
    except (git.InvalidGitRepositoryError, git.NoSuchPathError):
        raise BranchRefused(
            f"{said}{folder} is in no git repository; use --apply, or `git init` and commit first"
        ) from None
    top = places[1].resolve()
    inner = folder.resolve().relative_to(top).as_posix()
    found = NewBranch(places[0], top, "" if inner == "." else f"{inner}/", name, "")
    if _git(found, ["check-ref-format", f"refs/heads/{name}"]).returncode or name.startswith("-"):
        raise BranchRefused(f"{said}git takes no such name; try fix/{folder.name}")
    if _git(found, ["rev-parse", "--verify", "-q", f"refs/heads/{name}"]).returncode == 0:
        raise BranchRefused(f"{said}there is one; give another name, or `git branch -D {name}`")
    head = _git(found, ["rev-parse", "--verify", "-q", "HEAD^{commit}"])
    if head.returncode:
        raise BranchRefused(f"{said}the repository has no commit to start from; make one first")
    return NewBranch(found.git_dir, top, found.below, name, head.stdout.decode().strip())


def message_of(problem: str, signed: str) -> str:
    """A commit's message: the issue's first line, then `signed`."""
    title = " ".join(problem.strip().partition("\n")[0].lstrip("# ").split())
    if len(title) > 72:
        title = title[:72].rpartition(" ")[0] or title[:72]
    return f"{title}\n\n{signed}\n"


def _must(
    branch: NewBranch,
    argv: list[str],
    *,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
) -> str:
    done = _git(branch, argv, stdin=stdin, env=env)
    if done.returncode:
        said = done.stdout.decode("utf-8", "replace").strip()[-500:]
        raise BranchRefused(f"--branch {branch.name}: git {argv[0]} failed: {said}")
    return done.stdout.decode("utf-8", "replace").strip()


def _git(
    branch: NewBranch,
    argv: list[str],
    *,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(("GIT_AUTHOR_", "GIT_COMMITTER_"))
    }
    kept |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    options = [word for option in _OPTIONS for word in ("-c", option)]
    places = [f"--git-dir={branch.git_dir}", f"--work-tree={branch.top}"]
    return subprocess.run(
        ["git", *places, *options, *argv],
        cwd=branch.top,
        env=kept | (env or {}),
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
