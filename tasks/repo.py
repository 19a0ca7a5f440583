"""Somebody's own repository and an issue: `--repo PATH --issue FILE-or-text`.

The agent works on a copy of the working tree as it is now: tracked files with uncommitted changes,
and untracked files that git does not ignore. The copy has no `.git`, so neither the history nor the
repository's hooks and settings go with it. The user's tree is read, and changed by `apply` only.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from environments.base import Sandbox, SandboxSpec
from environments.treearchive import TreeArchive
from environments.workspace import DISK_HOME
from tasks.host_env import host_env
from tasks.instance import Instance, Verdict
from tasks.patches import apply_to_folder
from tasks.project import (
    TEST_RUNNER,
    find_tests,
    guess_requirements,
    has_python_tests,
    is_python,
    ways_to_test,
)
from tasks.python_setup import PythonEnv, default_python_env, environment, sandbox_spec
from tasks.working_tree import MAX_BYTES, RepoError, archive_of, copy_tree


@dataclass(frozen=True, slots=True)
class Furnished:
    """What a command of the user's made of a tree: an image, or the tree and a home folder."""

    image: str | None = None
    tree: TreeArchive | None = None
    home: TreeArchive | None = None
    programs: tuple[str, ...] = ()  # folders inside that belong on PATH
    made: tuple[str, ...] = ()  # paths of the files that are new in the tree

    def close(self) -> None:
        """Free the archives."""
        for archive in (self.tree, self.home):
            if archive is not None:
                archive.close()


class RepoTask:
    """A user's folder as a `Task` without hidden tests. A context manager: it holds a copy.

    `test_command` and `requirements` are looked up in the project when they are None. A command
    that was guessed stands in `instance` until `prepare` has looked whether its program is there.
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
        host_prefix: str | None = None,
        set_up: bool = False,
    ) -> None:
        """`path`: a repository, a folder in one, or any folder. `copy_to`: where the copy goes; it
        must not exist yet and is kept (default: a temporary folder that `close` removes).
        `python_env` makes a folder of requirements (default: `environments.python_env`). `image`: a
        Docker image to work in; it has what the project needs, so no requirements are installed.
        `host_prefix`: an environment of the host (see `tasks.host_env`), with the same effect.
        `set_up`: a command of the user's will get what the project needs, so only a runner of tests
        is installed.
        RepoError if the path is no folder or the problem is empty, TaskError for the environment.
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
        self.host_env = None if host_prefix is None else host_env(host_prefix)
        self.notes: list[str] = []  # what the user should know of the start, as sentences
        self._archive: TreeArchive | None = None
        self._lock = threading.Lock()
        self._set_up: Furnished | None = None
        python = is_python(self.path)
        if (image is not None or self.host_env or not python) and requirements is None:
            requirements = ()
        tests = find_tests(self.path)
        self._guesses = [] if test_command else ways_to_test(self.path)
        if requirements is None:
            tested = has_python_tests(self.path)
            if set_up:
                requirements = (TEST_RUNNER,) if tested else ()
            else:
                requirements = guess_requirements(self.path, with_runner=tested)
        self.requirements = tuple(requirements)
        roots = ["src", "."] if (self.path / "src").is_dir() else ["."]
        named = self.host_env.variables if self.host_env else {}
        guess = self._guesses[0].command if self._guesses else None
        self.instance = Instance(
            instance_id=f"repo-{self.path.name}",
            problem=problem.strip(),
            package=self.path.name,
            test_command=test_command or guess,
            test_paths=tests,
            env={**(environment(roots) if python else {}), **named, **(env or {})},
            python=python,
        )

    def tree(self) -> Path | None:
        """The copy, made when first asked for; None where an image has it. RepoError if it is too
        large or a file is closed to the caller."""
        if self._set_up is not None and self._set_up.image is not None:
            return None
        if self._copy is None:
            if self._copy_to is None:
                self._temporary = Path(tempfile.mkdtemp(prefix="repo-"))
                target = self._temporary / "tree"
            else:
                target = self._copy_to
            copy_tree(self.path, target, self._max_bytes)
            self._copy = target
        return self._copy

    def archive(self) -> TreeArchive | None:
        """The working tree as it is when this is first asked for, to be put into sandboxes: faster
        than `tree`, and the same files. None where an image has it. RepoError as there."""
        if self._set_up is not None:
            return self._set_up.tree
        with self._lock:  # attempts side by side ask for the same one
            if self._archive is None:
                self._archive = archive_of(self.path, self._max_bytes)
            return self._archive

    def extras(self) -> Mapping[str, TreeArchive]:
        """What set-up left in the home folder."""
        made = self._set_up
        return {} if made is None or made.home is None else {DISK_HOME: made.home}

    def made(self) -> Sequence[str]:
        """Paths of the files that set-up made in the tree."""
        return self._set_up.made if self._set_up is not None else ()

    def furnish(self, made: Furnished) -> None:
        """Take what set-up left in place of the tree; it is closed with the task."""
        self._set_up = made

    def spec(self) -> SandboxSpec:
        """A sandbox with the requirements on the module path."""
        packages = None
        if self.requirements:
            packages = (self._python_env or default_python_env())(self.requirements)
        spec = sandbox_spec(self.instance.env, packages)
        if self.host_env is not None:
            mounts = {**spec.mounts, **self.host_env.mounts}
            own = f"{self.host_env.prefix}/bin"
            spec = spec.model_copy(update={"mounts": mounts, "python_path": own})
        made = self._set_up
        if made is not None:
            spec = spec.model_copy(update={"env": {**spec.env, "HOME": DISK_HOME}})
            if made.programs and self.host_env is None:
                path = ":".join([*made.programs, *filter(None, [spec.python_path])])
                spec = spec.model_copy(update={"python_path": path})
        image = self.image if made is None or made.image is None else made.image
        return spec if image is None else spec.model_copy(update={"image": image})

    def prepare(self, sandbox: Sandbox) -> None:
        """Look whether the environment runs inside and, of the guesses, which way to run tests can
        work there. Raises TaskError."""
        if self.host_env is not None:
            self.host_env.check(sandbox)
        for guess in self._guesses:
            if sandbox.run(guess.probe).exit_code == 0:
                self.instance = replace(self.instance, test_command=guess.command)
                break
        else:
            if self._guesses:
                tried = ", ".join(f"`{guess.command}`" for guess in self._guesses)
                self.instance = replace(self.instance, test_command=None)
                self.notes.append(f"no tests are run: nothing in the sandbox can do {tried}")
        self._guesses = []

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
        """Remove the temporary copy and the archive, if there are any."""
        if self._archive is not None:
            self._archive.close()
            self._archive = None
        if self._set_up is not None:
            self._set_up.close()
            self._set_up = None
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
