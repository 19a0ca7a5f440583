"""Release pairs: an old release of a package, and the tests of the next one that it fails.

The agent gets the old source distribution as it is, its own tests included. The hidden tests come
from the new one; nothing else of the new release goes into any sandbox. Thirteen pairs ship as
package data; a JSON-lines file of the same form can be named instead (`ID@FILE`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from environments.base import SandboxSpec
from tasks import sources
from tasks.grading import Exam, grade
from tasks.instance import Instance, SandboxOpener, TaskError, Verdict
from tasks.python_setup import PythonEnv, default_python_env, environment, sandbox_spec
from tasks.sources import Sdist


class ReleasePair(BaseModel):
    """One record of the data file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: str = Field(min_length=1)
    package: str
    difficulty: str = ""  # how hard it is thought to be; for display only
    old_version: str
    new_version: str
    issue_title: str
    issue_text: str
    changed_files: dict[str, Any] = Field(min_length=1)
    fail_to_pass: tuple[str, ...] = Field(min_length=1)
    pass_to_pass: tuple[str, ...]
    test_paths: tuple[str, ...] = Field(min_length=1)
    pythonpath: str = "."
    test_command: str
    test_seconds: float = Field(gt=0)
    runtime_dependencies: tuple[str, ...] = ()
    test_dependencies: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()  # NAME==VERSION of all that was there when the row was made
    sdist_old: dict[str, Any]
    sdist_new: dict[str, Any]

    @field_validator("test_paths", "changed_files", "pythonpath")
    @classmethod
    def _inside(cls, value: Any) -> Any:
        return inside_tree(value)

    @property
    def old(self) -> Sdist:
        """The release that the agent works on."""
        return Sdist(project=self.package, **self.sdist_old)

    @property
    def new(self) -> Sdist:
        """The release whose tests decide."""
        return Sdist(project=self.package, **self.sdist_new)

    @property
    def modules(self) -> frozenset[str]:
        """Top-level modules that the reference changes: the package under test."""
        return top_modules(self.pythonpath, self.changed_files)


def inside_tree(value: Any) -> Any:
    """One path or several, as they are. ValueError if one lies outside the tree, or if several name
    the tree itself."""
    for path in [value] if isinstance(value, str) else value:
        parts = PurePosixPath(path)
        whole = not parts.parts and not isinstance(value, str)
        if parts.is_absolute() or ".." in parts.parts or whole:
            raise ValueError(f"{path!r} must be a path inside the source tree")
    return value


class UnderTest(Protocol):
    """What is needed to tell a copy of the package under test."""

    @property
    def instance_id(self) -> str: ...

    @property
    def package(self) -> str: ...

    @property
    def modules(self) -> frozenset[str]: ...


def top_modules(root: str, paths: Iterable[str]) -> frozenset[str]:
    """Top-level modules that files below the import root `root` belong to."""
    inside = [PurePosixPath(path) for path in paths]
    tops = {p.relative_to(root).parts[0] for p in inside if p.is_relative_to(root)}
    return frozenset(top.removesuffix(".py") for top in tops)


def parse_ref(ref: str) -> tuple[str, Path | None]:
    """`ID` or `ID@FILE` as instance id and file."""
    instance_id, at, file = ref.partition("@")
    if not instance_id or (at and not file):
        raise TaskError(f"{ref!r} names no instance; write ID or ID@FILE")
    return instance_id, Path(file).expanduser() if at else None


def list_ids(file: Path | None = None) -> list[str]:
    """The ids of all instances, in the order of the file."""
    return [pair.instance_id for pair in read(file)]


def read(file: Path | None = None) -> list[ReleasePair]:
    """All records, of the package's own file or of `file`. TaskError names the line at fault."""
    try:
        data = file or resources.files("tasks") / "data" / "release_pairs.jsonl"
        text = data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read instances from {file}: {error}") from error
    pairs: list[ReleasePair] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            pairs.append(ReleasePair.model_validate_json(line))
            _ = pairs[-1].old, pairs[-1].new
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise TaskError(
                f"{file}, line {number} is no release pair: {where}: {first['msg']}"
            ) from error
    return pairs


def find(instance_id: str, file: Path | None = None) -> ReleasePair:
    """The record of an id. TaskError lists the ids there are."""
    pairs = {pair.instance_id: pair for pair in read(file)}
    if instance_id not in pairs:
        raise TaskError(f"no instance {instance_id!r}; there are: {', '.join(pairs)}")
    return pairs[instance_id]


def load(
    instance_id: str,
    file: Path | None = None,
    *,
    open_sandbox: SandboxOpener | None = None,
    python_env: PythonEnv | None = None,
) -> ReleasePairTask:
    """The task of an id, ready to be worked on and graded.

    `open_sandbox` opens the sandbox of the grading (default: `environments.open_sandbox`);
    `python_env` makes a folder of requirements (default: `environments.python_env`).
    Nothing is fetched yet. Raises TaskError.
    """
    pair = find(instance_id, file)
    return task_of(pair, read(file), open_sandbox=open_sandbox, python_env=python_env)


def task_of(
    pair: ReleasePair,
    peers: Iterable[ReleasePair],
    *,
    open_sandbox: SandboxOpener | None = None,
    python_env: PythonEnv | None = None,
) -> ReleasePairTask:
    """The task of a record. One environment, built and mounted once, serves all its peers; a record
    that says what it was made with gets that and nothing else."""
    needs = pair.resolved or sorted(requirements([pair, *peers]))
    return ReleasePairTask(
        _instance(pair),
        pair,
        tuple(needs),
        open_sandbox or _opener(),
        python_env or default_python_env(),
    )


def requirements(pairs: Iterable[ReleasePair]) -> set[str]:
    """What the tests of the pairs need, the packages under test themselves left out."""
    return {
        need for pair in pairs for need in (*pair.runtime_dependencies, *pair.test_dependencies)
    }


@dataclass(frozen=True, slots=True)
class ReleasePairTask:
    """A release pair as a `Task`."""

    instance: Instance
    _pair: ReleasePair = field(repr=False)
    _requirements: tuple[str, ...]
    _open_sandbox: SandboxOpener = field(repr=False)
    _python_env: PythonEnv = field(repr=False)

    def tree(self) -> Path:
        """The old release, unpacked. Raises FetchError."""
        return sources.tree(self._pair.old)

    def spec(self) -> SandboxSpec:
        """A sandbox with the test dependencies on the module path. TaskError if these hold a copy
        of the package under test."""
        packages = self._python_env(self._requirements)
        refuse_copies(packages, self._pair)
        return sandbox_spec(self.instance.env, packages)

    def grade(self, patch: bytes) -> Verdict:
        """Grade in a sandbox of its own. Raises FetchError if the new release cannot be had."""
        pair = self._pair
        exam = Exam(
            tree=self.tree(),
            hidden=sources.tree(pair.new),
            test_paths=pair.test_paths,
            test_command=_command(pair),
            fail_to_pass=pair.fail_to_pass,
            pass_to_pass=pair.pass_to_pass,
            timeout=pair.test_seconds * 10 + 60,
            import_roots=tuple({".", pair.pythonpath}),
        )
        return grade(exam, patch, self.spec(), self._open_sandbox)


def reference_patch(instance_id: str, file: Path | None = None) -> bytes:
    """What the new release changed, for validation. Never to be shown to an agent."""
    return reference_of(find(instance_id, file))


def reference_of(pair: ReleasePair) -> bytes:
    """The same, of a record."""
    patch = difference(sources.tree(pair.old), sources.tree(pair.new), pair.changed_files)
    if not patch:
        raise TaskError(f"{pair.instance_id}: no reference patch: the releases have equal files")
    return patch


def difference(old: Path, new: Path, names: Iterable[str]) -> bytes:
    """A patch that makes the files `names` of one tree those of another; empty if they are equal.

    No setting of the user, the machine or the trees has a say. TaskError if git fails.
    """
    with tempfile.TemporaryDirectory(prefix="reference-") as folder:
        for side, source in (("a", old), ("b", new)):
            Path(folder, side).mkdir()
            for name in names:
                if (source / name).exists():
                    target = Path(folder, side, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source / name, target)
        done = subprocess.run(
            ["git", "diff", "--no-index", "--no-prefix", "--no-ext-diff", "--no-color", "a", "b"],
            cwd=folder,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "GIT_CONFIG_GLOBAL": "/dev/null",
                "GIT_CONFIG_NOSYSTEM": "1",
            },
            capture_output=True,
            check=False,
        )
    if done.returncode not in (0, 1):  # 1: there are differences
        raise TaskError(f"git cannot compare the trees: {done.stderr.decode(errors='replace')}")
    return done.stdout


def refuse_copies(packages: Path, pair: UnderTest) -> None:
    """TaskError if a folder of packages holds the package under test, as module or distribution."""
    plain = pair.package.lower().replace("-", "_")
    for entry in sorted(packages.iterdir()):
        name = entry.name.partition(".")[0]
        distribution = entry.name.lower().partition("-")[0].replace(".", "_")
        packed = entry.suffix in (".dist-info", ".egg-info")
        if (packed and distribution == plain) or (not packed and name in pair.modules):
            raise TaskError(
                f"{pair.instance_id}: the test dependencies hold {entry.name}, a copy of the "
                "package under test; take the requirement that brings it out of the instance file"
            )


def _instance(pair: ReleasePair) -> Instance:
    return Instance(
        instance_id=pair.instance_id,
        problem=f"{pair.issue_title}\n\n{pair.issue_text}",
        package=pair.package,
        test_command=_command(pair),
        test_paths=pair.test_paths,
        env=environment([pair.pythonpath]),
    )


def _command(pair: ReleasePair) -> str:
    """The record's command without its own PYTHONPATH, which would hide the environment's."""
    return pair.test_command.removeprefix(f"PYTHONPATH={pair.pythonpath} ")


def _opener() -> SandboxOpener:
    from environments import open_sandbox

    return open_sandbox
