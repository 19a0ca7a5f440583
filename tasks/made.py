"""Instances that a user made from two commits: rows, and the trees that lie beside them.

A row names its files by sum and by a path relative to the file of rows, so that a folder of
instances can be moved to another machine. `tasks.make` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from environments.base import SandboxSpec
from tasks import sources
from tasks.commits import sha256
from tasks.grading import Exam, grade
from tasks.instance import Instance, SandboxOpener, TaskError, Verdict
from tasks.package_index import FetchError
from tasks.python_setup import PythonEnv, default_python_env, environment, sandbox_spec
from tasks.release_pair import inside_tree, refuse_copies
from tasks.sources import Sdist


class Stored(BaseModel):
    """A file of an instance."""

    model_config = ConfigDict(frozen=True)

    file: str  # relative to the file of rows
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @field_validator("file")
    @classmethod
    def _beside(cls, value: str) -> str:
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"{value!r} must be a path below the folder of the file of rows")
        return value

    def read(self, folder: Path) -> bytes:
        """Its bytes. FetchError if it is not there or not what it was."""
        try:
            data = (folder / self.file).read_bytes()
        except OSError as error:
            raise FetchError(
                f"{folder / self.file} belongs to the instance and cannot be read: {error}"
            ) from error
        if sha256(data) != self.sha256:
            raise FetchError(
                f"{folder / self.file} was changed: its sha256 should be {self.sha256}, and is "
                f"{sha256(data)}; make the instance again"
            )
        return data


class Origin(BaseModel):
    """Where an instance comes from."""

    model_config = ConfigDict(frozen=True)

    repo: str  # name of the repository's folder
    base: str  # commits
    fix: str


class MadeRow(BaseModel):
    """One instance made from two commits."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["made"] = "made"
    instance_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    package: str
    issue_title: str
    issue_text: str
    issue_from: str  # who wrote it, or what it was made of
    made_from: Origin
    changed_files: dict[str, Any] = Field(min_length=1)
    fail_to_pass: tuple[str, ...] = Field(min_length=1)
    pass_to_pass: tuple[str, ...]
    dropped: dict[str, str] = Field(default_factory=dict)  # tests left out, and why
    test_paths: tuple[str, ...] = Field(min_length=1)
    pythonpath: str = "."
    own_modules: tuple[str, ...]  # top-level modules of the project
    test_command: str
    test_seconds: float = Field(gt=0)
    requirements: tuple[str, ...]  # as they were asked for
    resolved: tuple[str, ...]  # NAME==VERSION of what was installed for them
    base: Stored
    tests: Stored
    reference: Stored
    folder: Path | None = Field(None, exclude=True)  # where the file of rows lies; not in the file

    @field_validator("test_paths", "changed_files", "pythonpath")
    @classmethod
    def _inside(cls, value: Any) -> Any:
        return inside_tree(value)

    @property
    def modules(self) -> frozenset[str]:
        """What must not be among the packages that are installed."""
        return frozenset(self.own_modules)

    @property
    def repo(self) -> str:
        """Name of the repository."""
        return self.made_from.repo

    @property
    def problem_statement(self) -> str:
        """Title and text of the issue."""
        return f"{self.issue_title}\n\n{self.issue_text}".strip()

    @property
    def patch(self) -> str:
        """What the fix changed besides tests. Never to be shown to an agent. Raises FetchError."""
        return self.stored(self.reference).decode("utf-8", "surrogateescape")

    def stored(self, file: Stored) -> bytes:
        """The bytes of one of the instance's files. FetchError if they are not what they were."""
        if self.folder is None:
            raise FetchError(f"{self.instance_id}: it is not known in which folder its files lie")
        return file.read(self.folder)

    def unpacked(self, file: Stored) -> Path:
        """One of the instance's trees, unpacked in the cache. Raises FetchError."""
        name = PurePosixPath(file.file).name
        packed = Sdist(project=self.package, file=name, sha256=file.sha256)
        return sources.tree(packed, lambda _: [self.stored(file)])


@dataclass(frozen=True, slots=True)
class MadeTask:
    """A row as a `Task`."""

    row: MadeRow = field(repr=False)
    open_sandbox: SandboxOpener | None = field(default=None, repr=False)
    python_env: PythonEnv | None = field(default=None, repr=False)

    @property
    def instance(self) -> Instance:
        """What the agent may know."""
        row = self.row
        return Instance(
            instance_id=row.instance_id,
            problem=row.problem_statement,
            package=row.package,
            test_command=row.test_command,
            test_paths=row.test_paths,
            env=environment([row.pythonpath]),
        )

    def tree(self) -> Path:
        """The tree at the base commit, unpacked in the cache. Raises FetchError."""
        return self.row.unpacked(self.row.base)

    def spec(self) -> SandboxSpec:
        """A sandbox with exactly the packages that the instance was made with. TaskError if they
        hold a copy of the package under test."""
        packages = None
        if self.row.resolved:
            packages = (self.python_env or default_python_env())(self.row.resolved)
            refuse_copies(packages, self.row)
        return sandbox_spec(self.instance.env, packages)

    def grade(self, patch: bytes) -> Verdict:
        """Grade in a sandbox of its own. Raises FetchError if a file of the instance is gone."""
        row = self.row
        exam = exam_of(row, self.tree(), row.unpacked(row.tests))
        return grade(exam, patch, self.spec(), self.open_sandbox or _opener())


def exam_of(row: MadeRow, tree: Path, hidden: Path) -> Exam:
    """All that decides about a patch for a row whose trees are unpacked."""
    return Exam(
        tree=tree,
        hidden=hidden,
        test_paths=row.test_paths,
        test_command=row.test_command,
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        timeout=row.test_seconds * 10 + 60,
        import_roots=tuple({".", row.pythonpath}),
    )


def reference_patch(row: MadeRow) -> bytes:
    """What the fix changed besides tests, for validation. Never to be shown to an agent."""
    return row.stored(row.reference)


def read(file: Path) -> list[MadeRow]:
    """All rows of a JSON-lines file. TaskError names the line at fault."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read instances from {file}: {error}") from error
    rows: list[MadeRow] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = MadeRow.model_validate_json(line)
            rows.append(row.model_copy(update={"folder": file.resolve().parent}))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise TaskError(
                f"{file}, line {number} is no made instance: {where}: {first['msg']}"
            ) from error
    return rows


def dump(rows: Iterable[MadeRow]) -> str:
    """The rows as JSON lines."""
    return "".join(
        json.dumps(row.model_dump(mode="json"), ensure_ascii=False) + "\n" for row in rows
    )


def _opener() -> SandboxOpener:
    from environments import open_sandbox

    return open_sandbox
