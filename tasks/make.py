"""Instances of your own: from two releases of a package, or from two commits of a repository.

The tests of the newer side run against the old source and against the new one, each time in a fresh
sandbox, and more than once. What comes out the same every time decides: tests that fail before and
pass after are to be fixed, tests that pass both times are to be kept. What cannot be graded by such
tests is refused with the reason, and nothing is written.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from environments.patchfile import is_test_file, sections
from environments.paths import cache_dir, locked
from tasks import changelog, commits, issue_text, layout, made, needs, release_pair, sources
from tasks.commits import Commits, sha256
from tasks.grading import Exam
from tasks.instance import SandboxOpener, TaskError
from tasks.issue_text import Issue
from tasks.made import MadeRow
from tasks.predictions import write_whole
from tasks.python_setup import PythonEnv, default_python_env, environment, sandbox_spec
from tasks.release_pair import ReleasePair, difference, refuse_copies, top_modules
from tasks.releases import find_sdists, version
from tasks.trials import Runner, Side, Split, reasons, try_out, without

ROWS = "instances.jsonl"  # in the folder of instances that are made from commits
_RUNNER = "python -m pytest -q -o addopts= -o filterwarnings= -p no:cacheprovider"
Row = TypeVar("Row", ReleasePair, MadeRow)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user may say about an instance; what is left out is looked up."""

    issue: str | None = None  # text, or a file that holds it
    requires: tuple[str, ...] = ()  # beside what the metadata says
    extras: tuple[str, ...] | None = None  # None: those for tests that there are
    tests: tuple[str, ...] = ()  # files and folders of tests
    test_command: str | None = None
    pythonpath: str | None = None  # folder of the modules
    instance_id: str | None = None
    runs: int = 2  # of each source
    seconds: float = 900.0  # for one run


@dataclass(frozen=True, slots=True)
class Workbench:
    """What the work is done with."""

    open_sandbox: SandboxOpener
    python_env: PythonEnv = field(default_factory=default_python_env)
    say: Callable[[str], None] = lambda text: None
    check_id: Callable[[str], None] = lambda name: None  # called before the work that takes time


@dataclass(frozen=True, slots=True)
class Made:
    """An instance, ready to be written."""

    row: ReleasePair | MadeRow
    issue: Issue
    split: Split
    notes: tuple[str, ...]  # what a reader should know: what was left out, and why
    about: Mapping[str, Any]  # how it was made: fields of the row beside those of its model
    files: Mapping[str, bytes] = field(default_factory=dict)  # to lie beside the file of rows


def from_releases(package: str, old: str, new: str, wishes: Wishes, bench: Workbench) -> Made:
    """An instance whose source is a release of a package and whose tests are a later one's.

    Raises TaskError (FetchError for what cannot be fetched) and SandboxError.
    """
    versions = version(old), version(new)
    if not versions[0] < versions[1]:
        raise TaskError(f"--from {old} must be an older version than --to {new}")
    issue = issue_text.given(wishes.issue) if wishes.issue is not None else None
    bench.say(f"fetching {package} {old} and {new}")
    sdists = find_sdists(package, *versions)
    before, after = (sources.tree(sdist) for sdist in sdists)
    names = f"{package} {old}", f"{package} {new}"
    places = _places(after, wishes, names[1])
    root = wishes.pythonpath or layout.import_root(after, package)
    changed, left_out = layout.module_changes(before, after, root, places)
    if not changed:
        raise TaskError(
            f"{names[1]} changes nothing in its modules (below {root!r}) that a fix could be"
            f"{_listed('; left out', left_out)}. --pythonpath names the folder of the modules"
        )
    patch = difference(before, after, changed)
    modules = top_modules(root, changed)
    subject = _Subject(_instance_id(wishes, f"{package}-{new}", bench), package, modules)
    declared, requirements, pins, runner = _prepared(subject, root, after, wishes, bench)
    command = _command(wishes, places)
    sides = [
        Side(name, _exam(tree, after, places, command, wishes))
        for name, tree in zip(names, (before, after), strict=True)
    ]
    found, seconds, notes = try_out(sides[0], sides[1], wishes.runs, runner)
    bench.say(f"last run: the new tests with {names[0]} and the changed modules of {new}")
    last = runner.run(Side(f"{names[0]} with the changed modules", sides[0].exam, patch))
    found = without(found, last.outcomes, "needs more than the changed modules")
    if not found.fail_to_pass:
        raise TaskError(
            f"what fails with {names[0]} and passes with {names[1]} does not pass with the changes "
            f"to {', '.join(changed)} alone{_listed('; left out', left_out)}: {reasons(found)}"
        )
    notes += [f"{item} is no part of the reference patch" for item in left_out]
    notes += [f"the requirement {item} of the metadata is left out" for item in declared.left_out]
    issue = issue or issue_text.told_by_tests(
        package, old, found.fail_to_pass, changelog.between(after, *versions)
    )
    row = _valid(
        ReleasePair,
        instance_id=subject.instance_id,
        package=package,
        old_version=old,
        new_version=new,
        issue_title=issue.title,
        issue_text=issue.text,
        changed_files=_counted(patch, changed),
        fail_to_pass=found.fail_to_pass,
        pass_to_pass=found.pass_to_pass,
        test_paths=places,
        pythonpath=root,
        test_command=command,
        test_seconds=seconds,
        runtime_dependencies=declared.runtime,
        test_dependencies=[need for need in requirements if need not in declared.runtime],
        resolved=pins,
        sdist_old={"file": sdists[0].file, "sha256": sdists[0].sha256},
        sdist_new={"file": sdists[1].file, "sha256": sdists[1].sha256},
    )
    about = {"issue_from": issue.source, "dropped": dict(found.dropped)}
    return Made(row, issue, found, tuple(notes), about | _about(found, wishes))


def from_commits(repo: Path, base: str, fix: str, wishes: Wishes, bench: Workbench) -> Made:
    """An instance whose source is one commit of a repository and whose tests are another's.

    Raises TaskError and SandboxError. The repository is read only, and none of its programs run.
    """
    with commits.opened(repo, base, fix) as (history, (old, new)):
        if old == new:
            raise TaskError(f"--base {base} and --fix {fix} are the same commit")
        with tempfile.TemporaryDirectory(prefix="make-") as place:
            return _from_commits(history, old, new, repo, Path(place), wishes, bench)


def _from_commits(
    history: Commits, old: str, new: str, repo: Path, place: Path, wishes: Wishes, bench: Workbench
) -> Made:
    if wishes.issue is not None:
        issue = issue_text.given(wishes.issue)
    else:
        issue = issue_text.told_by_commit(history.message(new))
    bench.say(f"reading commits {old[:10]} and {new[:10]}")
    folder = repo.expanduser().resolve().name
    packed, left_out = history.archive(old, lambda path: True)
    before = sources.unpack(packed, place / "base", f"commit {old[:10]}")
    after = sources.unpack(
        history.archive(new, lambda path: True)[0], place / "fix", f"commit {new[:10]}"
    )
    places = _places(after, wishes, f"commit {new[:10]}")
    # a conftest.py or a deleted test that lies elsewhere: what the fix did to it is the tests' too
    others = (path for path in history.changed(old, new) if is_test_file(path, places))
    places = layout.outermost([*places, *others])
    parts = [
        part for part in sections(history.patch(old, new)) if not is_test_file(part[0], places)
    ]
    patch, changed = b"".join(text for _, text in parts), tuple(path for path, _ in parts)
    if not changed:
        raise TaskError(f"commit {new[:10]} changes nothing but tests since {old[:10]}")
    name = needs.project_name(before) or folder
    root = wishes.pythonpath or layout.import_root(after, name)
    modules = layout.own_modules(before, root) | layout.own_modules(after, root)
    subject = _Subject(_instance_id(wishes, f"{_slug(name)}-{new[:10]}", bench), name, modules)
    declared, requirements, pins, runner = _prepared(subject, root, before, wishes, bench)
    command = _command(wishes, places)
    tests = history.archive(new, lambda path: layout.below(path, places))[0]
    hidden = sources.unpack(tests, place / "tests", f"tests of {new[:10]}")
    exam = _exam(before, hidden, places, command, wishes)
    sides = Side(f"commit {old[:10]}", exam), Side(f"commit {new[:10]}", exam, patch)
    found, seconds, notes = try_out(sides[0], sides[1], wishes.runs, runner)
    notes += [f"{item} is no part of the tree" for item in left_out]
    notes += [f"the requirement {item} of the metadata is left out" for item in declared.left_out]
    if issue.source == issue_text.COMMIT:
        notes.append(
            "the issue is the message of the fix, which may give the fix away; --issue replaces it"
        )
    files = {
        f"{subject.instance_id}/base.tar.gz": packed,
        f"{subject.instance_id}/fix-tests.tar.gz": tests,
        f"{subject.instance_id}/reference.patch": patch,
    }
    stored = [{"file": file, "sha256": sha256(data)} for file, data in files.items()]
    row = _valid(
        MadeRow,
        instance_id=subject.instance_id,
        package=name,
        issue_title=issue.title,
        issue_text=issue.text,
        issue_from=issue.source,
        made_from={"repo": folder, "base": old, "fix": new},
        changed_files=_counted(patch, changed),
        fail_to_pass=found.fail_to_pass,
        pass_to_pass=found.pass_to_pass,
        dropped=dict(found.dropped),
        test_paths=places,
        pythonpath=root,
        own_modules=sorted(modules),
        test_command=command,
        test_seconds=seconds,
        requirements=requirements,
        resolved=pins,
        base=stored[0],
        tests=stored[1],
        reference=stored[2],
    )
    return Made(row, issue, found, tuple(notes), _about(found, wishes), files)


def refuse_taken(
    out: Path,
    instance_id: str,
    kind: type[ReleasePair] | type[MadeRow],
    *,
    force: bool = False,
) -> None:
    """TaskError if a file of rows cannot take an instance, or (not `force`) has one of that id."""
    if out.suffix != ".jsonl":
        raise TaskError(f"{out}: a file of rows is named NAME.jsonl")
    if instance_id in _rows(out, kind) and not force:
        raise TaskError(f"{out} has an instance {instance_id}; --force replaces it, --id renames")


def write(instance: Made, out: Path, *, force: bool = False) -> None:
    """Add an instance to the file of rows `out`, after the files that lie beside it.

    The file is whole at any time, also when two processes add to it. TaskError if it holds rows of
    another kind, or one of this id and not `force`.
    """
    row = instance.row
    fields = row.model_dump(mode="json") | dict(instance.about)
    try:
        text = json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise TaskError(f"{row.instance_id}: a name of a file or test is not UTF-8") from error
    try:
        with locked(cache_dir("locks") / f"rows-{sha256(str(out.resolve()).encode())[:16]}"):
            refuse_taken(out, row.instance_id, type(row), force=force)
            rows = _rows(out, type(row)) | {row.instance_id: text}
            for name, data in instance.files.items():
                write_whole(out.parent / name, data)
            write_whole(out, b"".join(line + b"\n" for line in rows.values()))
    except OSError as error:
        raise TaskError(f"cannot write {out}: {error}") from error


def _rows(out: Path, kind: type[ReleasePair] | type[MadeRow]) -> dict[str, bytes]:
    """The lines of a file of rows by id; none if there is no file. TaskError for other rows."""
    if not out.exists():
        return {}
    reader = release_pair.read if kind is ReleasePair else made.read
    names = [row.instance_id for row in reader(out)]
    lines = [line for line in out.read_bytes().splitlines() if line.strip()]
    return dict(zip(names, lines, strict=True))


@dataclass(frozen=True, slots=True)
class _Subject:
    """The package under test, as far as `refuse_copies` has to know it."""

    instance_id: str
    package: str
    modules: frozenset[str]


def _prepared(
    subject: _Subject, root: str, tree: Path, wishes: Wishes, bench: Workbench
) -> tuple[needs.Declared, tuple[str, ...], tuple[str, ...], Runner]:
    """What the tests need: as declared, as asked for, in exact versions, and in a sandbox."""
    declared = needs.declared(tree, wishes.extras, own=subject.package)
    named = needs.checked(wishes.requires, "--requires")
    requirements = needs.with_runner([*declared.runtime, *declared.for_tests], named)
    bench.say(f"settling what the tests need: {', '.join(requirements)}")
    pins = needs.settle(requirements)
    bench.say(f"installing {', '.join(pins)}")
    packages = bench.python_env(pins)
    refuse_copies(packages, subject)
    spec = sandbox_spec(environment([root]), packages)
    return declared, requirements, pins, Runner(spec, bench.open_sandbox, bench.say)


def _places(tree: Path, wishes: Wishes, what: str) -> tuple[str, ...]:
    """Where the tests are. TaskError if none are seen."""
    if wishes.tests:
        places = tuple(str(Path(path)) for path in wishes.tests)
        inside = [path for path in places if layout.is_inside(tree, path)]
        if absent := [path for path in places if path not in inside]:
            raise TaskError(f"--tests {', '.join(absent)}: no file or folder inside {what}")
        return places
    found = layout.test_places(tree)
    if not found:
        raise TaskError(
            f"no tests for pytest are seen in {what} (a source distribution may leave them out); "
            "name them with --tests, or make the instance from the repository with --repo"
        )
    return found


def _command(wishes: Wishes, places: Sequence[str]) -> str:
    """The command that grades. One module that cannot be imported must not stop the others."""
    command = wishes.test_command
    if command is None:
        files = " ".join(map(shlex.quote, places))
        return f"{_RUNNER} --continue-on-collection-errors {files}"
    if not re.search(r"(?<![\w-])(?:pytest|py\.test)(?![\w-])", command):
        raise TaskError(
            f"--test-cmd {command!r}: only pytest can be graded so far, for results are read test "
            "by test from inside it; pytest also runs tests that are written for unittest"
        )
    return command.strip()


def _instance_id(wishes: Wishes, otherwise: str, bench: Workbench) -> str:
    name = wishes.instance_id or otherwise
    if not _ID.fullmatch(name):
        raise TaskError(
            f"--id {name!r}: an id names folders; it takes letters, digits and . _ + - only"
        )
    bench.check_id(name)
    return name


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "repo"


def _exam(tree: Path, hidden: Path, places: tuple[str, ...], command: str, wishes: Wishes) -> Exam:
    return Exam(tree, hidden, places, command, (), (), wishes.seconds)


def _counted(patch: bytes, changed: Sequence[str]) -> dict[str, dict[str, int]]:
    parts = dict(sections(patch))
    return {name: layout.counts(parts.get(name, b"")) for name in changed}


def _about(found: Split, wishes: Wishes) -> dict[str, Any]:
    return {"failing_before_and_after": list(found.failing), "runs": wishes.runs}


def _listed(what: str, items: Sequence[str]) -> str:
    return f"{what}: {', '.join(items)}" if items else ""


def _valid(model: type[Row], **fields: Any) -> Row:
    """The row. TaskError where a user's --tests or --pythonpath makes it one that is none."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise TaskError(
            f"this gives no instance: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
