"""Instances made from small projects: what is kept, dropped and refused, and that rows work."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import git
import pytest
from typer import Typer
from typer.testing import CliRunner

from agent import cli_tasks_make
from environments.base import Sandbox, SandboxError, SandboxSpec
from tasks import made, make, needs, release_pair, releases, sources, trials
from tasks.grading import TestRun
from tasks.image import place_tree
from tasks.instance import SandboxOpener, Task, TaskError
from tasks.made import MadeRow, MadeTask
from tasks.make import Wishes, Workbench, from_commits, from_releases, write
from tasks.package_index import IndexSettings
from tasks.release_pair import ReleasePair
from tasks.source import open_source

PINS = ("pytest==8.0",)  # only a name here: the folder of packages is a shared one
OLD = "def double(x):\n    return x\n\n\ndef half(x):\n    return x / 2\n"
NEW = OLD.replace("return x\n", "return 2 * x\n")
TESTS = """
import os
import random

import pytest

import gadget
from gadget.version import VERSION

TRIAL = int(os.environ["TRIAL"])

def test_double(): assert gadget.double(3) == 6
def test_half(): assert gadget.half(4) == 2
def test_both(): assert gadget.half(1) == gadget.double(1)
def test_flaky_fix(): assert gadget.double(2) == 4 and TRIAL != 3
def test_flaky_keep(): assert TRIAL != 4
def test_version(): assert VERSION == "1.1"
def test_broken(): assert gadget.double(2) == 2
@pytest.mark.skip
def test_skipped(): ...
"""
PAIR = "tests/test_gadget.py::test_"


def project(version: str, source: str, tests: str) -> dict[str, str]:
    return {
        "gadget/__init__.py": source,
        "gadget/version.py": f'VERSION = "{version}"\n',
        "tests/test_gadget.py": tests,
        "PKG-INFO": f"Metadata-Version: 2.1\nName: gadget\nVersion: {version}\n",
        "CHANGES.md": "# 1.1\n- double() doubles\n\n# 1.0\n- all is new\n",
        "setup.py": "raise SystemExit('the build was run')\n",
    }


def sdist(folder: Path, version: str, files: dict[str, str]) -> Path:
    path = folder / f"gadget-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"gadget-{version}/{name}")
            member.size, member.mode = len(text.encode()), 0o644
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def never(spec: SandboxSpec) -> Sandbox:
    raise SandboxError("no sandbox should be opened")


@pytest.fixture(scope="session")
def packages() -> Path:
    spec = release_pair.load("jsonpointer-3.1.1", open_sandbox=never).spec()
    return Path(next(iter(spec.mounts)))


@pytest.fixture(autouse=True)
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip would settle is not what is tried here."""
    monkeypatch.setattr(needs, "settle", lambda requirements: PINS)


class Counting:
    """Opens sandboxes that are told how many there were, so that a test can be flaky on purpose."""

    def __init__(self, opener: SandboxOpener) -> None:
        self._opener, self._numbers = opener, itertools.count(1)

    def __call__(self, spec: SandboxSpec) -> Sandbox:
        env = {**spec.env, "TRIAL": str(next(self._numbers))}
        return self._opener(spec.model_copy(update={"env": env}))


@pytest.fixture
def bench(any_kind: SandboxOpener, packages: Path) -> Workbench:
    return Workbench(Counting(any_kind), lambda requirements: packages)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: Path) -> Path:
    """A folder of source distributions that is all there is to find."""
    folder = tmp_path / "sdists"
    folder.mkdir()
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))
    for module in (releases, sources):  # asking pip takes half a second, each time
        monkeypatch.setattr(module, "pip_settings", lambda: IndexSettings((), (str(folder),)))
    sdist(folder, "1.0", project("1.0", OLD, "def test_old(): ...\n"))
    sdist(folder, "1.1", project("1.1", NEW, TESTS))
    return folder


@pytest.fixture
def repo(tmp_path: Path) -> git.Repo:
    """A repository whose second commit mends `double`, and adds tests and a helper for them."""
    made_repo = git.Repo.init(tmp_path / "gadgets", initial_branch="main")
    with made_repo.config_writer() as config:
        config.set_value("user", "name", "A").set_value("user", "email", "a@b")
    base = {"gadget/__init__.py": OLD, "tests/test_old.py": "def test_gone(): ...\n"}
    commit(made_repo, base | {"pyproject.toml": '[project]\nname = "gadget"\n'}, "first")
    (Path(str(made_repo.working_tree_dir)) / "tests" / "test_old.py").unlink()
    tests = TESTS.replace("from gadget.version import VERSION\n", "from helper import VERSION\n")
    fix = {
        "gadget/__init__.py": NEW,
        "tests/test_gadget.py": tests,
        "tests/helper.py": 'VERSION = "1.1"\n',
        "gadget/test_inner.py": "def test_inner(): ...\n",
        "NEWS": "mended\n",
    }
    commit(made_repo, fix, "double() returns its argument\n\nIt should double it.\n")
    return made_repo


def commit(made_repo: git.Repo, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        path = Path(str(made_repo.working_tree_dir)) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made_repo.git.add("--all")
    made_repo.git.commit("-qm", message)


def root(made_repo: git.Repo) -> Path:
    return Path(str(made_repo.working_tree_dir))


# --- from releases, for real


def test_two_releases_make_a_pair_that_its_reference_resolves(
    index: Path, bench: Workbench, packages: Path, tmp_path: Path, any_kind: SandboxOpener
) -> None:
    result = from_releases("Gadget", "1.0", "1.1", Wishes(requires=("later>=1",)), bench)
    row = result.row
    assert isinstance(row, ReleasePair)
    assert row.fail_to_pass == (f"{PAIR}double",)
    assert row.pass_to_pass == (f"{PAIR}half",)
    assert result.about["failing_before_and_after"] == [f"{PAIR}both"]
    # sandboxes: 1 new, 2 old, 3 new, 4 old, 5 old with the changed modules
    assert dict(result.split.dropped) == {
        f"{PAIR}flaky_fix": "not stable, new source: passed, failed",
        f"{PAIR}flaky_keep": "not stable, old source: passed, failed",
        f"{PAIR}version": "needs more than the changed modules: failed",
        f"{PAIR}broken": "passes with the old source and is failed with the new one",
    }
    assert set(row.changed_files) == {"gadget/__init__.py"}
    assert row.changed_files["gadget/__init__.py"] == {"added": 1, "removed": 1}
    assert row.resolved == PINS
    assert row.test_dependencies == ("later>=1", "pytest<9")
    assert result.issue.source == "names of failing tests and CHANGES.md"
    assert "double() doubles" in row.issue_text
    assert "all is new" not in row.issue_text
    assert f"{PAIR}double" in row.issue_text
    assert "2 * x" not in row.issue_title + row.issue_text
    assert any("version.py (tells the version)" in note for note in result.notes)

    out = tmp_path / "out" / "pairs.jsonl"
    write(result, out)
    asked: list[Sequence[str]] = []

    def python_env(requirements: Sequence[str]) -> Path:
        asked.append(requirements)
        return packages

    task = release_pair.load(
        "Gadget-1.1", out, open_sandbox=Counting(any_kind), python_env=python_env
    )
    verdict = task.grade(release_pair.reference_patch("Gadget-1.1", out))
    assert verdict.status == "resolved", verdict.detail
    assert asked == [PINS]  # exactly what it was made with
    assert not (index.parent / "the build was run").exists()


def test_releases_that_cannot_be_had_are_named(index: Path, bench: Workbench) -> None:
    (index / "gadget-1.2-py3-none-any.whl").write_bytes(b"")
    (index / "gadget_more-3.0.tar.gz").write_bytes(b"")
    for old, new, told in (
        ("1.0", "1.2", r"gadget 1\.2, only other files; .*: 1\.0, 1\.1$"),
        ("1.0", "3.0", r"gadget 3\.0; the newest that there are: 1\.0, 1\.1$"),
        ("1.1", "1.0", "must be an older version"),
        ("1.0", "1.0", "must be an older version"),
        ("1.0", "latest", "'latest' is no version"),
    ):
        with pytest.raises(TaskError, match=told):
            from_releases("gadget", old, new, Wishes(), bench)


@pytest.mark.parametrize(
    ("files", "wishes", "told"),
    [
        ({"tests/test_gadget.py": None}, Wishes(), "no tests for pytest are seen in gadget 1.1"),
        (
            {"gadget/__init__.py": OLD},
            Wishes(),
            "changes nothing in its modules.*left out: gadget/v",
        ),
        ({}, Wishes(tests=("../x",)), r"--tests \.\./x: no file or folder inside"),
        ({}, Wishes(test_command="make check"), "only pytest can be graded so far"),
        ({}, Wishes(requires=("x @ file:///x",)), "not an address"),
        ({}, Wishes(extras=("docs",)), "no extra or dependency group docs"),
        ({}, Wishes(instance_id="../x"), "--id"),
        ({}, Wishes(issue=" "), "--issue is empty"),
    ],
)
def test_what_can_be_refused_without_a_run_is(
    index: Path, packages: Path, files: dict[str, str | None], wishes: Wishes, told: str
) -> None:
    content = project("1.1", NEW, TESTS) | files
    sdist(index, "1.1", {name: text for name, text in content.items() if text is not None})
    with pytest.raises(TaskError, match=told):
        from_releases("gadget", "1.0", "1.1", wishes, Workbench(never, lambda _: packages))


def test_a_copy_of_the_package_among_what_tests_need_is_refused(
    index: Path, tmp_path: Path
) -> None:
    (tmp_path / "packages" / "gadget").mkdir(parents=True)
    bench = Workbench(never, lambda requirements: tmp_path / "packages")
    with pytest.raises(TaskError, match="a copy of the package under test"):
        from_releases("gadget", "1.0", "1.1", Wishes(), bench)


# --- from commits, for real


def test_two_commits_make_an_instance_that_works_elsewhere(
    repo: git.Repo, bench: Workbench, packages: Path, tmp_path: Path, any_kind: SandboxOpener
) -> None:
    result = from_commits(root(repo), "HEAD~1", "main", Wishes(), bench)
    row = result.row
    assert isinstance(row, MadeRow)
    fix, base = repo.head.commit.hexsha, repo.commit("HEAD~1").hexsha
    assert (row.made_from.repo, row.made_from.base, row.made_from.fix) == ("gadgets", base, fix)
    assert row.instance_id == f"gadget-{fix[:10]}"
    assert row.fail_to_pass == (f"{PAIR}double",)
    assert f"{PAIR}half" in row.pass_to_pass
    assert f"{PAIR}version" in row.pass_to_pass
    assert set(row.dropped) == {f"{PAIR}flaky_fix", f"{PAIR}flaky_keep", f"{PAIR}broken"}
    assert row.test_paths == ("tests", "gadget/test_inner.py")
    assert set(row.changed_files) == {"NEWS", "gadget/__init__.py"}
    assert (row.issue_title, row.issue_text) == (
        "double() returns its argument",
        "It should double it.",
    )
    assert row.modules == {"gadget"}
    assert row.issue_from == "commit message"
    assert any("may give the fix away" in note for note in result.notes)

    write(result, tmp_path / "here" / make.ROWS)
    assert sorted(str(p.relative_to(tmp_path / "here")) for p in (tmp_path / "here").rglob("*.*"))[
        -4:
    ] == [
        f"{row.instance_id}/base.tar.gz",
        f"{row.instance_id}/fix-tests.tar.gz",
        f"{row.instance_id}/reference.patch",
        make.ROWS,
    ]
    shutil.rmtree(root(repo))
    moved = (tmp_path / "here").rename(tmp_path / "there")
    (again,) = made.read(moved / make.ROWS)
    assert again.model_copy(update={"folder": None}) == row
    (entry,) = open_source(str(moved / make.ROWS)).entries
    assert (entry.kind, entry.repo, entry.title) == ("made", "gadgets", row.issue_title)
    assert entry.reference_patch() == made.reference_patch(again)
    shutil.copytree(moved, tmp_path / "copy")
    assert open_source(str(tmp_path / "copy" / make.ROWS)).entries[0].digest == entry.digest
    task = MadeTask(again, Counting(any_kind), lambda requirements: packages)
    assert isinstance(task, Task)
    assert "2 * x" not in repr(task) + repr(task.instance)
    assert task.grade(b"").status == "empty_patch"
    reference = made.reference_patch(again)
    assert b"test_gadget" not in reference
    verdict = task.grade(reference)
    assert verdict.status == "resolved", verdict.detail
    # what an agent does: its tree, an edit in its sandbox, the patch of that
    with any_kind(task.spec()) as box:
        place_tree(task, box)
        assert box.run("ls tests").text.split() == ["test_old.py"]
        assert "fix" not in box.run("ls -A; cat gadget/__init__.py").text
        box.run("sed -i 's/return x$/return x * 3/' gadget/__init__.py")
        wrong = box.diff().data
        box.run("sed -i 's/return x . 3$/return x + x/' gadget/__init__.py")
        right = box.diff().data
    assert task.grade(right).status == "resolved"
    verdict = task.grade(wrong)
    assert (verdict.status, dict(verdict.fail_to_pass)) == (
        "unresolved",
        {f"{PAIR}double": "failed"},
    )


def test_files_of_an_instance_that_are_gone_or_changed_are_refused(
    repo: git.Repo, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "observe", scripted(OUTCOMES))
    bench = Workbench(never, lambda requirements: packages)
    result = from_commits(root(repo), "HEAD~1", "HEAD", Wishes(), bench)
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / make.ROWS
    write(result, out)
    (row,) = made.read(out)
    assert row.pass_to_pass == ("b",)
    assert row.patch.encode() == result.files[row.reference.file]
    for stored in (row.base, row.tests, row.reference):
        (tmp_path / stored.file).write_bytes(b"changed")
        with pytest.raises(TaskError, match="was changed: its sha256"):
            row.stored(stored)
        (tmp_path / stored.file).unlink()
        with pytest.raises(TaskError, match="cannot be read"):
            row.stored(stored)
    with pytest.raises(TaskError, match="cannot be read"):
        MadeTask(row, never, lambda requirements: packages).tree()
    with pytest.raises(TaskError, match="in which folder"):
        MadeTask(row.model_copy(update={"folder": None}), never).tree()


@pytest.mark.parametrize("bad", ["/etc/passwd", "../x.tar.gz", ""])
def test_rows_that_point_outside_are_refused(tmp_path: Path, bad: str) -> None:
    stored = {"file": "a.tar.gz", "sha256": "0" * 64}
    fields: dict[str, Any] = dict.fromkeys(("package", "issue_title", "issue_text"), "x")
    fields |= {"instance_id": "x", "issue_from": "x", "test_command": "pytest", "test_seconds": 1}
    fields |= {"made_from": {"repo": "x", "base": "x", "fix": "x"}, "changed_files": {"a": {}}}
    fields |= {"fail_to_pass": ["a"], "pass_to_pass": [], "test_paths": ["t"]}
    fields |= {
        "own_modules": ["x"],
        "requirements": [],
        "resolved": [],
        "base": stored,
        "tests": stored,
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(fields | {"reference": stored}) + "\n")
    assert len(made.read(file)) == 1
    file.write_text("\n" + json.dumps(fields | {"reference": stored | {"file": bad}}) + "\n")
    with pytest.raises(TaskError, match=r"rows\.jsonl, line 2 is no made instance: reference"):
        made.read(file)
    file.write_text(json.dumps(fields | {"reference": stored, "test_paths": ["../t"]}) + "\n")
    with pytest.raises(TaskError, match="inside the source tree"):
        made.read(file)


def test_a_fix_of_tests_alone_is_refused(repo: git.Repo, packages: Path) -> None:
    commit(repo, {"tests/test_gadget.py": "def test_x(): ...\n"}, "tests only")
    bench = Workbench(never, lambda requirements: packages)
    for base, fix, told in (
        ("HEAD~1", "HEAD", "changes nothing but tests"),
        ("HEAD", "main", "the same commit"),
    ):
        with pytest.raises(TaskError, match=told):
            from_commits(root(repo), base, fix, Wishes(), bench)


# --- what runs say

OUTCOMES = {"old": {"a": "failed", "b": "passed"}, "new": {"a": "passed", "b": "passed"}}


def scripted(outcomes: dict[str, dict[str, str]], **facts: Any) -> Callable[..., Any]:
    """Stands in for a run in a sandbox: with a patch it is the new side."""

    def observe(exam: Any, patch: bytes, spec: Any, opener: Any) -> Any:
        side = "new" if patch or "fix" in str(exam.tree) else "old"
        fields = {"started": True, "finished": True, "tampered": False, "tail": "the tail"}
        fields |= {"uncollected": (), "seconds": 1.0} | facts.get(side, {})
        return TestRun(outcomes=outcomes[side], **fields), ()

    return observe


@pytest.mark.parametrize(
    ("old", "new", "facts", "told"),
    [
        ({}, {}, {"new": {"started": False}}, "pytest does not start with commit"),
        ({}, {"a": "passed"}, {"new": {"finished": False}}, "the test run ends early"),
        (
            {},
            {},
            {"new": {"uncollected": ("t.py",), "tail": "No module named 'yaml.x'"}},
            r"can be collected: t\.py \(there is no module yaml\.x: --requires",
        ),
        ({}, {"a": "failed", "b": "skipped"}, {}, "no test passes with commit"),
        (
            {"a": "passed", "b": "failed"},
            {"a": "passed", "b": "failed"},
            {},
            "1 pass with both, 1 ",
        ),
        ({"a": "skipped"}, {"a": "passed"}, {}, "no test fails with commit"),
        ({}, {"a": "passed"}, {"old": {"started": False}}, "pytest does not start with commit"),
        ({}, {"a": "passed"}, {"old": {"trouble": "ran longer"}}, "ran longer; what hangs"),
    ],
)
def test_what_runs_show_to_be_useless_is_refused(
    repo: git.Repo,
    packages: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: dict[str, str],
    new: dict[str, str],
    facts: dict[str, Any],
    told: str,
) -> None:
    monkeypatch.setattr(trials, "observe", scripted({"old": old, "new": new}, **facts))
    bench = Workbench(never, lambda requirements: packages)
    with pytest.raises(TaskError, match=told):
        from_commits(root(repo), "HEAD~1", "HEAD", Wishes(), bench)


def test_what_is_flaky_throughout_is_refused_by_name(
    repo: git.Repo, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: Iterator[str] = itertools.cycle(["passed", "failed", "failed", "failed"])

    def observe(*_: Any) -> Any:
        run = TestRun({"a": next(runs), "b": "passed"}, True, True, False, "", ())
        return run, ()

    monkeypatch.setattr(trials, "observe", observe)
    bench = Workbench(never, lambda requirements: packages)
    told = r"no test fails every time .*: a \(not stable, new source: passed, failed\)"
    with pytest.raises(TaskError, match=told):
        from_commits(root(repo), "HEAD~1", "HEAD", Wishes(), bench)


def test_chance_is_found_with_more_runs(
    repo: git.Repo, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, calls = random.Random(7), itertools.count()

    def observe(exam: Any, patch: bytes, *_: Any) -> Any:
        next(calls)
        random_tests = {f"r{n}": chance.choice(["passed", "failed"]) for n in range(30)}
        real = {"real": "passed" if patch else "failed"}
        return TestRun(random_tests | real, True, True, False, "", ()), ()

    monkeypatch.setattr(trials, "observe", observe)
    bench = Workbench(never, lambda requirements: packages)
    result = from_commits(root(repo), "HEAD~1", "HEAD", Wishes(runs=8), bench)
    assert next(calls) == 16
    assert result.row.fail_to_pass == ("real",)
    assert len(result.split.dropped) == 30


# --- files of rows, and the command


def pair(number: int) -> make.Made:
    fields = release_pair.find("jsonpointer-3.1.1").model_dump() | {"instance_id": f"p-{number}"}
    issue = make.Issue("t", "x", "given")
    return make.Made(
        ReleasePair.model_validate(fields), issue, trials.split([], []), (), {"runs": 2}
    )


def test_rows_are_added_and_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "new" / "pairs.jsonl"
    for number in range(3):
        write(pair(number), out)
    assert release_pair.list_ids(out) == ["p-0", "p-1", "p-2"]
    before = out.read_bytes()
    with pytest.raises(TaskError, match=r"has an instance p-1; --force replaces it"):
        write(pair(1), out)
    assert out.read_bytes() == before
    write(pair(1), out, force=True)
    assert out.read_bytes() == before
    assert json.loads(before.splitlines()[0])["runs"] == 2
    assert [path.name for path in out.parent.iterdir()] == ["pairs.jsonl"]
    for force in (False, True):
        with pytest.raises(TaskError, match=r"NAME\.jsonl"):
            write(pair(1), tmp_path / "pairs.json", force=force)
    out.write_text("{}\n")
    with pytest.raises(TaskError, match="line 1 is no release pair"):
        write(pair(1), out)


@pytest.fixture
def command() -> Typer:
    app = Typer()
    app.command("make")(cli_tasks_make.make)
    return app


def test_the_command_makes_an_instance(
    command: Typer,
    repo: git.Repo,
    packages: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "observe", scripted(OUTCOMES))
    monkeypatch.setattr("environments.choose", lambda kind: type("Choice", (), {"kind": kind}))
    monkeypatch.setattr("environments.python_env.python_env", lambda requirements: packages)
    out = tmp_path / "mine"
    options = ["--repo", str(root(repo)), "--base", "HEAD~1", "--fix", "HEAD", "--out", str(out)]
    done = CliRunner().invoke(command, [*options, "--id", "mine-1"])
    assert done.exit_code == 0, done.output
    assert "to be fixed: a" in done.stdout
    assert "note: the issue is the message of the fix" in done.stdout
    assert f"agent run --instance mine-1@{out}/{make.ROWS}" in done.stdout
    again = CliRunner().invoke(command, [*options, "--id", "mine-1"])
    assert again.exit_code == 1
    assert "has an instance mine-1" in re.sub(r"\s+", " ", again.stderr)
    shown = CliRunner().invoke(command, [*options, "--id", "mine-1", "--force", "--json"])
    assert json.loads(shown.stdout)["fail_to_pass"] == ["a"]
    assert [row.instance_id for row in made.read(out / make.ROWS)] == ["mine-1"]


def test_refusals_end_with_one_and_leave_nothing(
    command: Typer, repo: git.Repo, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = {"old": {"a": "passed"}, "new": {"a": "passed"}}
    monkeypatch.setattr(trials, "observe", scripted(same))
    monkeypatch.setattr("environments.choose", lambda kind: type("Choice", (), {"kind": kind}))
    monkeypatch.setattr("environments.python_env.python_env", lambda requirements: packages)
    out = tmp_path / "mine"
    options = ["--repo", str(root(repo)), "--base", "HEAD~1", "--fix", "HEAD", "--out", str(out)]
    done = CliRunner().invoke(command, options)
    assert done.exit_code == 1
    assert "no test fails with" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "give --package"),
        (["--package", "x", "--from", "1"], "--to must be given"),
        (["--repo", "x", "--base", "1"], "--fix must be given"),
        (["--package", "x", "--from", "1", "--to", "2", "--base", "1"], "not both"),
        (["--package", "x", "--from", "1", "--to", "2", "--runs", "1"], "--runs"),
        (["--package", "x", "--from", "1", "--to", "2", "--out", "y"], "it is a FILE.jsonl, not y"),
    ],
)
def test_options_that_do_not_fit_end_with_two(
    command: Typer, options: list[str], told: str
) -> None:
    done = CliRunner().invoke(command, ["--out", "x.jsonl", *options])
    assert done.exit_code == 2
    assert told in re.sub(r"[\s│]+", " ", done.stderr)


# --- real packages


@pytest.mark.slow
@pytest.mark.parametrize("instance_id", ["tinydb-4.8.2", "cachetools-7.1.8", "jsonpointer-3.1.1"])
def test_known_pairs_come_out_as_they_are_shipped(
    instance_id: str, any_kind: SandboxOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    known = release_pair.find(instance_id)
    wishes = Wishes(requires=("pyyaml",) if known.package == "tinydb" else ())
    row = from_releases(
        known.package, known.old_version, known.new_version, wishes, Workbench(any_kind)
    ).row
    assert isinstance(row, ReleasePair)
    assert set(row.fail_to_pass) == set(known.fail_to_pass)
    assert set(row.pass_to_pass) == set(known.pass_to_pass)
    assert (row.old, row.new) == (known.old, known.new)


@pytest.mark.slow
def test_releases_whose_tests_tell_nothing_apart_are_refused(
    any_kind: SandboxOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    wishes = Wishes(requires=("freezegun",))
    with pytest.raises(TaskError, match=r"no test fails with itsdangerous 2\.1\.1 and passes"):
        from_releases("itsdangerous", "2.1.1", "2.1.2", wishes, Workbench(any_kind))
