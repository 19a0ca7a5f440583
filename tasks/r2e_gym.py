"""R2E-Gym: rows, and their grading inside the image of each row.

An image has the project in /testbed with its environment (.venv), a script `run_tests.sh` in it,
and the hidden tests in /r2e_tests. What the reference commit made of these tests is the row's
`expected_output_json`; a patch resolves the row if the tests come out exactly so, those that are
expected to fail included.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from environments.base import Sandbox, SandboxError, SandboxSpec
from tasks.instance import Instance, SandboxOpener, TaskError, Verdict
from tasks.judging import MISSING, flags
from tasks.patches import PatchRefused, apply_in_sandbox
from tasks.swe_bench_rows import ID_PATTERN

TESTS, SCRIPT = "r2e_tests", "run_tests.sh"
SECONDS = 900.0  # for the test run; the images' own tests take seconds to a few minutes
_OUTPUT_CAP = 50_000_000  # bytes
_SUMMARY = "short test summary info"  # pytest's heading of what -rA lists
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class _Range(BaseModel):
    start: int
    length: int | None = None

    def __str__(self) -> str:
        return str(self.start) if self.length is None else f"{self.start},{self.length}"


class _Line(BaseModel):
    content: str
    type: str  # context, added, deleted, or note: the file ends without a newline


class _Lines(BaseModel):
    all_lines: tuple[_Line, ...] = ()


class _Place(BaseModel):
    old_range: _Range
    new_range: _Range
    section: str = ""


class _Hunk(BaseModel):
    descriptor: _Place
    line_group: _Lines


class _File(BaseModel):
    path: str


class _Header(BaseModel):
    file: _File
    misc_line: str | None = None  # "new file mode 100644" and the like


class _FileDiff(BaseModel):
    header: _Header
    is_binary_file: bool = False
    minus_file: _File | None = None
    plus_file: _File | None = None
    hunks: tuple[_Hunk, ...] = ()


class _Commit(BaseModel):
    file_diffs: tuple[_FileDiff, ...]


class R2eRow(BaseModel):
    """One instance. Of its large fields only what grading and validation need is kept."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    repo_name: str = Field(pattern=ID_PATTERN)
    commit_hash: str = Field(pattern=r"^[0-9A-Za-z]+$")  # of the reference
    docker_image: str = Field(min_length=1)
    problem_statement: str = Field(min_length=1)
    expected: dict[str, str] = Field(validation_alias="expected_output_json")
    # what the tests did before the reference; empty if the row does not say
    before: dict[str, str] = Field({}, validation_alias="execution_result_content")
    patch: str = Field("", validation_alias="parsed_commit_content")  # the reference

    @property
    def instance_id(self) -> str:
        """Rows have no id of their own."""
        return instance_id(self.repo_name, self.commit_hash)

    @property
    def problem(self) -> str:
        """The issue, without the marks around it."""
        found = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", self.problem_statement, re.DOTALL)
        return (found.group(1) if found else self.problem_statement).strip()

    @field_validator("expected", mode="before")
    @classmethod
    def _table(cls, value: Any) -> Any:
        return _json(value) if isinstance(value, str) else value

    @field_validator("before", mode="before")
    @classmethod
    def _earlier(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return value
        ran = _json(value) if value else {}
        return outcomes(str(ran.get("old_commit_res_stdout") or "")) if ran else {}

    @field_validator("patch", mode="before")
    @classmethod
    def _diff(cls, value: Any) -> Any:
        if not isinstance(value, str) or not value.lstrip().startswith("{"):
            return value or ""
        try:
            return source_patch(_Commit.model_validate_json(value))
        except ValidationError as error:
            raise ValueError(f"no parsed commit: {error.errors()[0]['msg']}") from error


def instance_id(repo_name: str, commit_hash: str) -> str:
    """The id of a row: rows of one repository differ by their commit only."""
    return f"{repo_name}__{commit_hash}"


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON text: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("not the JSON text of an object")
    return value


def source_patch(commit: _Commit) -> str:
    """The commit's changes to Python files that are no tests, as R2E takes its reference."""
    return "".join(_section(diff) for diff in commit.file_diffs if _is_source(diff))


def _is_source(diff: _FileDiff) -> bool:
    path = PurePosixPath(diff.header.file.path)
    in_tests = {"test", "tests", "Test", "Tests"} & set(path.parts)
    named = path.name.startswith("test_") or path.name.endswith("_test.py")
    return path.suffix == ".py" and not diff.is_binary_file and not in_tests and not named


def _section(diff: _FileDiff) -> str:
    path = diff.header.file.path
    old = "/dev/null" if diff.minus_file and diff.minus_file.path == "/dev/null" else f"a/{path}"
    new = "/dev/null" if diff.plus_file and diff.plus_file.path == "/dev/null" else f"b/{path}"
    lines = [f"diff --git a/{path} b/{path}"]
    if diff.header.misc_line:
        lines.append(diff.header.misc_line)
    if diff.hunks:
        lines += [f"--- {old}", f"+++ {new}"]
    signs = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}
    for hunk in diff.hunks:
        at = hunk.descriptor
        section = f" {at.section}" if at.section else ""
        lines.append(f"@@ -{at.old_range} +{at.new_range} @@{section}")
        lines += [signs[line.type] + line.content for line in hunk.line_group.all_lines]
    return "\n".join(lines) + "\n"


def outcomes(log: str) -> dict[str, str]:
    """Test -> PASSED, FAILED or ERROR, by the short summary that `pytest -rA` ends with.

    A test is named by what follows its file, joined by dots: `Class.test`. Skipped tests and
    expected failures are not listed. The rows' own tables were made in this way.
    """
    parts = _COLOUR.sub("", log).replace("\r", "").split(_SUMMARY)
    found: dict[str, str] = {}
    for line in parts[1].strip().split("\n") if len(parts) > 1 else ():
        status = next((word for word in ("PASSED", "FAILED", "ERROR") if word in line), None)
        if status is not None:
            name = ".".join(line.split("::")[1:])
            found[name if status == "PASSED" else name.split(" - ")[0]] = status
    return found


def normal(table: Mapping[str, str]) -> dict[str, str]:
    """A table as both sides are compared: no colours, no messages behind ` - `."""
    plain = {_COLOUR.sub("", name): status for name, status in table.items()}
    return {name.split(" - ")[0]: plain[name] for name in sorted(plain)}


def as_expected(found: Mapping[str, str], expected: Mapping[str, str]) -> bool:
    """R2E's rule: as many tests, and each with the status that is expected of it."""
    mine, theirs = normal(found), normal(expected)
    return len(mine) == len(theirs) and all(
        theirs.get(name) == status for name, status in mine.items() if name
    )


@dataclass(frozen=True, slots=True)
class R2eTask:
    """A row as a `Task`."""

    row: R2eRow = field(repr=False)
    _open_sandbox: SandboxOpener = field(repr=False)

    @property
    def instance(self) -> Instance:
        """What the agent may know."""
        row = self.row
        return Instance(
            instance_id=row.instance_id,
            problem=row.problem,
            package=row.repo_name,
            test_command="python -m pytest -q",
        )

    def tree(self) -> None:
        """None: it is in the image."""
        return

    def spec(self) -> SandboxSpec:
        """A sandbox of the row's image."""
        return SandboxSpec.model_validate({"image": self.row.docker_image})

    def prepare(self, sandbox: Sandbox) -> None:
        """Remove the hidden tests and their script. TaskError if that fails."""
        gone = [f"/{TESTS}", f"{sandbox.workdir}/{TESTS}", f"{sandbox.workdir}/{SCRIPT}"]
        done = sandbox.run(["rm", "-rf", "--", *gone])
        if done.exit_code != 0:
            raise TaskError(
                f"cannot take the hidden tests out of {self.row.docker_image}: {done.text[-300:]}"
            )

    def grade(self, patch: bytes) -> Verdict:
        """Grade in a fresh sandbox. Status `error`: the patch was not judged."""
        if not patch.strip():
            return Verdict(False, "empty_patch", detail="the patch is empty")
        begun = time.monotonic()
        try:
            with self._open_sandbox(self.spec()) as box:
                verdict = self._judged(box, patch)
        except PatchRefused as error:
            verdict = Verdict(False, "patch_failed", detail=str(error))
        except SandboxError as error:
            verdict = Verdict(False, "error", detail=f"{type(error).__name__}: {error}")
        return replace(verdict, seconds=time.monotonic() - begun)

    def _judged(self, box: Sandbox, patch: bytes) -> Verdict:
        """The image's tests are set aside before the patch comes and put back after it, so that
        what the patch did in their place does not count."""
        aside, here = f"/tmp/{secrets.token_hex(12)}", shlex.quote(box.workdir)
        self._must(
            box,
            f"mkdir -m 700 {aside} && cd {here} && cp -a {SCRIPT} {aside} && "
            f"cp -a $([ -d /{TESTS} ] && echo /{TESTS} || echo {TESTS}) {aside} && "
            f"rm -rf {TESTS} {SCRIPT}",
            f"has no /{TESTS} and {SCRIPT}, which images of R2E-Gym have",
        )
        touched = apply_in_sandbox(box, patch, f"/tmp/{secrets.token_hex(12)}")
        self._must(
            box,
            f"cd {here} && rm -rf {TESTS} {SCRIPT} && mv {aside}/{TESTS} {aside}/{SCRIPT} .",
            "does not take its tests back",
        )
        done = box.run(f"bash {SCRIPT}", timeout=SECONDS, output_cap=_OUTPUT_CAP)
        if done.timed_out:
            return Verdict(False, "error", detail=f"the tests ran longer than {SECONDS:.0f} s")
        found, expected = normal(outcomes(done.text)), normal(self.row.expected)
        if not found and done.out_of_memory:
            detail = "the tests used more memory than the sandbox has"
            return Verdict(False, "error", detail=detail)
        resolved = as_expected(found, expected)
        return Verdict(
            resolved,
            "resolved" if resolved else "unresolved",
            *_tables(found, expected, normal(self.row.before)),
            ". ".join(_notes(found, expected, touched, done.text)),
        )

    def _must(self, box: Sandbox, command: str, otherwise: str) -> None:
        done = box.run(command, timeout=300.0)
        if done.exit_code != 0:
            raise SandboxError(f"image {self.row.docker_image} {otherwise}: {done.text[-300:]}")


def _tables(
    found: Mapping[str, str], expected: Mapping[str, str], before: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What became of the tests that should pass: those that did not before, and the others."""
    to_pass: dict[str, str] = {}
    to_keep: dict[str, str] = {}
    for name, status in expected.items():
        if status == "PASSED" and name:
            table = to_keep if before.get(name) == "PASSED" else to_pass
            table[name] = found.get(name, MISSING).lower()
    return to_pass, to_keep


def _notes(
    found: Mapping[str, str], expected: Mapping[str, str], touched: tuple[str, ...], log: str
) -> Iterator[str]:
    right = sum(found.get(name) == status for name, status in expected.items())
    wrong = [
        f"{name} {found.get(name, MISSING).lower()} instead of {status.lower()}"
        for name, status in expected.items()
        if found.get(name) != status
    ]
    more = [name for name in found if name not in expected]
    counted = f"{right} of {len(expected)} tests are as expected"
    yield "; ".join([counted, *wrong[:5], *(f"{name} is not expected" for name in more[:5])])
    if not found:
        yield f"no summary of tests was printed: {log.strip()[-300:]}"
    yield from flags(touched, (TESTS, SCRIPT), (".", "src"))
