"""Somebody's own repository and an issue: `--repo PATH --issue FILE-or-text`.

The agent works on a copy of the working tree as it is now: tracked files with uncommitted changes,
and untracked files that git does not ignore. The copy has no `.git`, so neither the history nor the
repository's hooks and settings go with it. The user's tree is read, and changed by `apply` only.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import git

from environments.base import SandboxSpec
from tasks.instance import Instance, TaskError, Verdict
from tasks.patches import apply_to_folder
from tasks.python_setup import PythonEnv, default_python_env, environment, sandbox_spec

MAX_BYTES = 4 << 30  # a copy larger than this is more likely a wrong path than a repository
_TEST_RUNNER = "pytest<9"
_SKIPPED_FOLDERS = frozenset(
    {".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv", "venv"}
)


class RepoError(TaskError):
    """The repository or the issue that was named cannot be used."""


class RepoTask:
    """A user's folder as a `Task` without hidden tests. A context manager: it holds a copy.

    `test_command` and `requirements` are looked up in the project when they are None.
    """

    def __init__(
        self,
        path: Path,
        problem: str,
        *,
        test_command: str | None = None,
        requirements: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        copy_to: Path | None = None,
        max_bytes: int = MAX_BYTES,
        python_env: PythonEnv | None = None,
        image: str | None = None,
    ) -> None:
        """`path`: a repository, a folder in one, or any folder. `copy_to`: where the copy goes; it
        must not exist yet and is kept (default: a temporary folder that `close` removes).
        `python_env` makes a folder of requirements (default: `environments.python_env`). `image`: a
        Docker image to work in; it has what the project needs, so no requirements are installed.
        RepoError if the path is no folder or the problem is empty.
        """
        self.path = Path(path).expanduser().resolve()
        if not self.path.is_dir():
            raise RepoError(f"--repo {path}: not a folder")
        if not problem.strip():
            raise RepoError("--issue is empty; give the text of the issue or a file that holds it")
        self._copy_to = copy_to
        self._copy: Path | None = None
        self._temporary: Path | None = None
        self._max_bytes = max_bytes
        self._python_env = python_env
        self.image = image
        if image is not None and requirements is None:
            requirements = ()
        tests = find_tests(self.path)
        if requirements is None:
            requirements = guess_requirements(self.path, with_runner=bool(tests))
        self.requirements = tuple(requirements)
        roots = ["src", "."] if (self.path / "src").is_dir() else ["."]
        self.instance = Instance(
            instance_id=f"repo-{self.path.name}",
            problem=problem.strip(),
            package=self.path.name,
            test_command=test_command or ("python -m pytest -q" if tests else None),
            test_paths=tests,
            env={**environment(roots), **(env or {})},
        )

    def tree(self) -> Path:
        """The copy, made when first asked for. RepoError if it is too large or a file is closed
        to the caller."""
        if self._copy is None:
            if self._copy_to is None:
                self._temporary = Path(tempfile.mkdtemp(prefix="repo-"))
                target = self._temporary / "tree"
            else:
                target = self._copy_to
            copy_tree(self.path, target, self._max_bytes)
            self._copy = target
        return self._copy

    def spec(self) -> SandboxSpec:
        """A sandbox with the requirements on the module path."""
        packages = None
        if self.requirements:
            packages = (self._python_env or default_python_env())(self.requirements)
        spec = sandbox_spec(self.instance.env, packages)
        return spec if self.image is None else spec.model_copy(update={"image": self.image})

    def grade(self, patch: bytes) -> Verdict | None:
        """None: there are no hidden tests, the user decides."""
        return None

    def apply(self, patch: bytes) -> None:
        """Apply the agent's patch to the user's working tree (index and history stay as they are).

        PatchRefused if any part does not fit, or names a path in `.git` or outside; the tree is
        then untouched.
        """
        if patch.strip():
            apply_to_folder(patch, self.path)

    def close(self) -> None:
        """Remove the temporary copy, if there is one."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = self._copy = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_issue(issue: str) -> str:
    """The text of an issue: that of the file `issue` names if there is one, else `issue` itself.

    RepoError if it looks like a path but there is no such file, or the file is not UTF-8 text.
    """
    path = os.path.expanduser(issue)  # noqa: PTH111 (Path's raises where a text begins with ~)
    if os.path.isfile(path):  # noqa: PTH113 (Path's raises for a long text)
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RepoError(f"--issue {issue}: {error}") from error
    one_word = issue.strip() and not any(c.isspace() for c in issue.strip())
    if one_word and (os.sep in issue or issue.endswith((".md", ".txt", ".rst"))):
        raise RepoError(f"--issue {issue}: no such file (a text of one word is taken for a path)")
    return issue


def copy_tree(source: Path, target: Path, max_bytes: int = MAX_BYTES) -> None:
    """Copy a working tree as `files` lists it: bytes, modes and links, without `.git`.

    Whole or not at all. RepoError if it is larger than `max_bytes` or cannot be read or written.
    """
    try:
        names = list(files(source))
        size = sum((source / name).lstat().st_size for name in names)
    except OSError as error:  # closed to the caller, or gone since it was listed
        raise RepoError(f"cannot read {source}: {error}") from error
    if size > max_bytes:
        raise RepoError(
            f"{source} holds {size / 2**20:.0f} MiB in {len(names)} files, more than the limit of "
            f"{max_bytes / 2**20:.0f} MiB; name a smaller folder, or let .gitignore leave data out"
        )
    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise RepoError(f"cannot make {target} for the copy, which must be new: {error}") from error
    try:
        for name in names:
            into = target / name
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, into, follow_symlinks=False)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise RepoError(f"cannot copy {source}: {error}") from error


def files(folder: Path) -> Iterator[str]:
    """Relative paths of the files and links of a working tree that are there now.

    In a repository (worktrees and submodules included, and folders inside one): what is tracked,
    and what is untracked and not ignored. Elsewhere: everything. Never what is below a `.git`.
    """
    listed = _listed(folder)
    if not listed:  # no repository, or one that ignores this folder of it
        yield from _walked(folder)
        return
    for name in sorted(listed):
        path = folder / name
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue  # tracked, but deleted or replaced in the working tree
        if stat.S_ISDIR(mode):  # a submodule, or a repository that lies in this one
            yield from (f"{name.rstrip('/')}/{inner}" for inner in files(path))
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            yield name


def _listed(folder: Path) -> set[str] | None:
    """What git lists of a folder, relative to it; None if no repository holds the folder."""
    try:
        repo = git.Repo(folder, search_parent_directories=True)
    except (git.InvalidGitRepositoryError, git.NoSuchPathError):
        return None
    with repo:
        if repo.working_tree_dir is None:
            raise RepoError(f"{folder} is a bare repository; name a clone that has files")
        # named, so that a GIT_DIR of the caller's environment (in a hook) does not redirect it
        places = [f"--git-dir={repo.git_dir}", f"--work-tree={repo.working_tree_dir}"]
    command = ["git", *places, "-c", "core.fsmonitor=false", "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    try:
        output = git.Git(folder).execute(
            command, stdout_as_string=False, strip_newline_in_stdout=False
        )
    except git.GitCommandError as error:
        raise RepoError(f"git cannot list {folder}: {error.stderr.strip()}") from error
    return {os.fsdecode(name) for name in output.split(b"\0") if name}


def _walked(folder: Path) -> Iterator[str]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(folders)
        links = [name for name in folders if Path(here, name).is_symlink()]
        folders[:] = [
            name for name in folders if name not in links and name not in _SKIPPED_FOLDERS
        ]
        for name in sorted([*names, *links]):
            path = Path(here, name)
            if name != ".git" and (path.is_symlink() or path.is_file()):
                yield str(path.relative_to(folder))


def find_tests(folder: Path) -> tuple[str, ...]:
    """Files and folders of a project that hold tests for pytest; empty if none are seen."""
    found = [name for name in ("tests", "test", "testing") if (folder / name).is_dir()]
    found += sorted(
        path.name
        for path in folder.glob("*.py")
        if path.stem in ("test", "tests") or path.name.startswith("test_")
    )
    if not found:  # tests that lie beside the modules, or in a package
        inner = (
            path for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}/test_*.py")
        )
        found = sorted({str(path.parent.relative_to(folder)) for path in inner})
    return tuple(found)


def guess_requirements(folder: Path, *, with_runner: bool) -> tuple[str, ...]:
    """What `pyproject.toml` says in plain words: `project.dependencies`, and the extra or group of
    dependencies named `test` or `tests`. With `with_runner` pytest is among them."""
    try:
        data: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    except (OSError, ValueError):  # there is none, or it is broken: perhaps that is the issue
        data = {}
    project = data.get("project", {})
    needs = list(_strings(project.get("dependencies")))
    for table in (project.get("optional-dependencies", {}), data.get("dependency-groups", {})):
        for name in ("test", "tests"):
            needs += _strings(table.get(name))
    own = str(project.get("name", folder.name)).lower()
    needs = [need for need in needs if not need.lower().replace("_", "-").startswith(f"{own}[")]
    if with_runner and not any(
        need.lower().startswith("pytest") and need[6:7] in "<>=~! [;" for need in needs
    ):
        needs.append(_TEST_RUNNER)
    return tuple(dict.fromkeys(needs))


def _strings(value: Any) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
