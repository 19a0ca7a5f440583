"""What `agent tasks make` reads from files: tests, modules, requirements, notes on releases."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from tasks import changelog, issue_text, layout, needs, release_pair
from tasks.instance import TaskError
from tasks.trials import split, without


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


# --- tests and modules


@pytest.mark.parametrize(
    ("files", "places"),
    [
        (["tests/test_a.py", "tests/data/x.txt", "a.py"], ("tests",)),
        (["test/a_test.py", "testing/test_b.py", "test_c.py"], ("test", "testing", "test_c.py")),
        (["tests.py", "mod.py"], ("tests.py",)),
        (["pkg/__init__.py", "pkg/tests/tests.py"], ("pkg/tests",)),
        (["src/pkg/tests/unit/test_a.py", "src/pkg/tests/test_b.py"], ("src/pkg/tests",)),
        (["pkg/testing/test_a.py", "pkg/mod.py"], ("pkg/testing/test_a.py",)),
        (
            ["pkg/mod.py", "pkg/test_mod.py", "pkg/mod_test.py"],
            ("pkg/mod_test.py", "pkg/test_mod.py"),
        ),
        (["tests/data.txt", "tests/helpers.py", "a.py"], ()),
        (["build/lib/tests/test_a.py", ".tox/x/test_a.py"], ()),
    ],
)
def test_where_tests_are(tmp_path: Path, files: list[str], places: tuple[str, ...]) -> None:
    write(tmp_path, dict.fromkeys(files, ""))
    assert layout.test_places(tmp_path) == places


def test_links_are_no_places(tmp_path: Path) -> None:
    write(tmp_path, {"real/test_a.py": ""})
    (tmp_path / "tests").symlink_to("real")
    assert layout.test_places(tmp_path) == ("real/test_a.py",)


@pytest.mark.parametrize(
    ("files", "package", "root"),
    [
        (["my_pkg/__init__.py"], "My-Pkg", "."),
        (["src/my_pkg/__init__.py", "docs/conf.py"], "my-pkg", "src"),
        (["mod.py"], "mod", "."),
        (["src/mod.py"], "mod", "src"),
        (["src/other/__init__.py"], "named-differently", "src"),
        (["other/__init__.py"], "named-differently", "."),
        (["src/x.egg-info/top_level.txt", "lib/other/a.py"], "x", "."),
    ],
)
def test_where_modules_are(tmp_path: Path, files: list[str], package: str, root: str) -> None:
    write(tmp_path, dict.fromkeys(files, ""))
    assert layout.import_root(tmp_path, package) == root


def test_a_list_of_top_level_modules_counts(tmp_path: Path) -> None:
    files = {"x.egg-info/top_level.txt": "real\ntests\n", "real/a.py": "", "examples.py": ""}
    write(tmp_path, files | {"extra/__init__.py": ""})
    assert layout.own_modules(tmp_path, ".") == {"real"}


def test_what_a_release_changed_in_its_modules(tmp_path: Path) -> None:
    common: dict[str, str | bytes] = {
        "pkg/__init__.py": "__version__ = '1.0'\nx = 1\n",
        "pkg/a.py": "x = 1\n",
        "pkg/same.py": "x = 1\n",
        "pkg/gone.py": "x = 1\n",
        "pkg/version.py": "VERSION = (1, 0)\n",
        "pkg/_version.py": "def parse(x): return 1\n",
        "pkg/data.bin": b"\0\1",
        "tests/test_a.py": "old",
        "pkg/suite/b.py": "old",
        "pkg/test_c.py": "old",
        "setup.py": "version='1.0'",
        "docs/conf.py": "x",
        "README.md": "1.0",
        "PKG-INFO": "1.0",
    }
    changed: dict[str, str | bytes] = {
        "pkg/__init__.py": "__version__ = '1.1'\nx = 1\n",
        "pkg/a.py": "x = 2\n",
        "pkg/new.json": "{}",
        "pkg/version.py": "VERSION = (1, 1)\n",
        "pkg/_version.py": "def parse(x): return 2\n",
        "pkg/data.bin": b"\0\2",
        "tests/test_a.py": "new",
        "pkg/suite/b.py": "new",
        "pkg/test_c.py": "new",
        "setup.py": "version='1.1'",
        "docs/conf.py": "y",
        "README.md": "1.1",
        "PKG-INFO": "1.1",
    }
    old, new = write(tmp_path / "old", common), write(tmp_path / "new", common | changed)
    (new / "pkg" / "gone.py").unlink()
    kept, left_out = layout.module_changes(old, new, ".", ["tests", "pkg/suite"])
    assert kept == ["pkg/_version.py", "pkg/a.py", "pkg/gone.py", "pkg/new.json"]
    assert left_out == [
        "pkg/__init__.py (tells the version)",
        "pkg/data.bin (not text)",
        "pkg/version.py (tells the version)",
    ]
    patch = release_pair.difference(old, new, kept)
    assert b"deleted file" in patch
    assert b"__init__" not in patch


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("__version__ = '1.0'", "__version__ = '1.1'", False),
        ("version_info: tuple = (1, 0)", "version_info: tuple = (1, 1)", False),
        ("__version__ = '1.0'\ndef f(): return 1", "__version__ = '1.1'\ndef f(): return 2", True),
        ("if sys.version_info < (3, 8): x", "if sys.version_info < (3, 9): x", True),
        ("__version__ = version = '1.0rc1'", "__version__ = version = '1.0'  # done", False),
        ("VERSION = [1, 'x']\n__date__ = 'May 1'", "VERSION = [2, 'x']\n__date__ = 'May 2'", False),
        ("version = read(1)", "version = read(2)", True),
        ("version = 1 if x else 2", "version = 1 if y else 2", True),
    ],
)
def test_only_what_gives_the_version_a_value_is_left_out(
    tmp_path: Path, old: str, new: str, kept: bool
) -> None:
    trees = [
        write(tmp_path / side, {"m.py": f"{text}\n"}) for side, text in (("a", old), ("b", new))
    ]
    assert layout.module_changes(*trees, ".", [])[0] == (["m.py"] if kept else [])


def test_the_shipped_pairs_are_laid_out_as_they_say() -> None:
    from tasks import sources

    pair = release_pair.find("jsonpointer-3.1.1")
    old, new = sources.tree(pair.old), sources.tree(pair.new)
    places = layout.test_places(new)
    assert places == pair.test_paths
    root = layout.import_root(new, pair.package)
    assert root == pair.pythonpath
    assert layout.module_changes(old, new, root, places)[0] == list(pair.changed_files)


def test_outermost_and_inside(tmp_path: Path) -> None:
    assert layout.outermost(["b/c.py", "a", "a/x", "b/c.py", "ab"]) == ("b/c.py", "a", "ab")
    write(tmp_path / "tree", {"a/b.py": ""})
    write(tmp_path, {"out.py": ""})
    inside = [
        p
        for p in ("a", "a/b.py", ".", "..", "../out.py", "/etc", "no")
        if layout.is_inside(tmp_path / "tree", p)
    ]
    assert inside == ["a", "a/b.py"]


# --- requirements

PKG_INFO = """Metadata-Version: 2.1
Name: My-Pkg
Version: 1.0
Requires-Dist: one>=1
Requires-Dist: two; python_version < "3"
Requires-Dist: three[fast]==2; python_version >= "3"
Requires-Dist: away @ https://example.invalid/away.tar.gz
Requires-Dist: not a requirement
Requires-Dist: checker; extra == "test"
Requires-Dist: old-checker; python_version < "3" and extra == "test"
Requires-Dist: my_pkg[fast]; extra == "test"
Requires-Dist: speed; extra == "fast"
Requires-Dist: linter; extra == "dev"
Provides-Extra: test
Provides-Extra: dev
Provides-Extra: fast

Requires-Dist: this stands in the description
"""


def test_requirements_of_pkg_info(tmp_path: Path) -> None:
    write(tmp_path, {"PKG-INFO": PKG_INFO, "setup.py": "raise SystemExit('run')"})
    found = needs.declared(tmp_path, own="my-pkg")
    assert found.runtime == ("one>=1", "three[fast]==2")
    assert found.extras == ("test",)
    assert found.for_tests == ("checker", "speed")
    assert found.source == "PKG-INFO"
    away, wrong = found.left_out
    assert away.startswith("away")
    assert away.endswith("(an address, not a package of the index)")
    assert wrong == "not a requirement (not understood)"
    assert needs.declared(tmp_path, ["Dev"]).for_tests == ("linter",)
    assert needs.declared(tmp_path, []).for_tests == ()
    with pytest.raises(TaskError, match=r"no extra or dependency group docs; there are: dev, fast"):
        needs.declared(tmp_path, ["docs"])
    assert needs.project_name(tmp_path) == "My-Pkg"


def test_requirements_of_older_and_newer_trees(tmp_path: Path) -> None:
    text = 'plain\n\n[:python_version < "3"]\nold\n\n[tests]\nchecker\n'
    text += '[tests:python_version>="3"]\nnew\n'
    old = write(tmp_path / "old", {"PKG-INFO": "Name: x\n", "src/x.egg-info/requires.txt": text})
    found = needs.declared(old)
    assert (found.runtime, found.for_tests) == (("plain",), ("checker", "new"))
    pyproject = """
[project]
name = "x"
dependencies = ["plain>=1"]
[project.optional-dependencies]
tests = ["checker", "x[more]"]
more = ["further"]
[dependency-groups]
test = ["grouped", {include-group = "base"}]
base = ["basic", {include-group = "test"}]
"""
    new = write(tmp_path / "new", {"pyproject.toml": pyproject})
    found = needs.declared(new, own="x")
    assert found.runtime == ("plain>=1",)
    assert set(found.for_tests) == {"checker", "further", "grouped", "basic"}
    for broken in ("[project", "project = 3\n", "[project]\ndependencies = 'x'\n"):
        tree = write(tmp_path / "broken", {"pyproject.toml": broken})
        assert needs.declared(tree).runtime == ()


def test_what_a_user_may_name() -> None:
    assert needs.checked(["a>=1", "b[c]"], "--requires") == ("a>=1", "b[c]")
    for bad in ("a @ https://example.invalid/a.whl", "-r file", "./folder", "--pre", ""):
        with pytest.raises(TaskError, match="--requires"):
            needs.checked([bad], "--requires")


def test_pytest_is_there_once_and_held_back_unless_named() -> None:
    assert needs.with_runner(["a", "pytest>=7", "a"], []) == ("a", "pytest>=7", "pytest<9")
    assert needs.with_runner(["a"], ["PyTest==8.0"]) == ("a", "PyTest==8.0")
    assert needs.with_runner(["a"], ["pytest-mock"]) == ("a", "pytest-mock", "pytest<9")


# --- notes on releases

MARKDOWN = """# Changelog

Since 2.0 we follow semver.

## [2.2.0] - 2024-01-02
- future

## [2.1.1] (2023-05-05)

### Fixed
- `f` no longer needs 1.5 of anything

## v2.1.0
- middle

## 2.0.0
- old
"""
UNDERLINED = """
Version 1.2.0
-------------

Released 2022-03-09

-   Second thing.

Version 1.1.0
=============
-   First thing.
"""
PLAIN = """v3.1.1 (2026-03-29)
  Leading zeros are refused.
3.1.0
  Nothing.
"""


def test_notes_between_two_versions(tmp_path: Path) -> None:
    text = changelog.notes(MARKDOWN, Version("2.0.0"), Version("2.1.1"))
    assert text == "### Fixed\n- `f` no longer needs 1.5 of anything\n\n- middle"
    text = changelog.notes(UNDERLINED, Version("1.1"), Version("1.2"))
    assert text == "Released 2022-03-09\n\n-   Second thing."
    assert "zeros" in changelog.notes(PLAIN, Version("3.1.0"), Version("3.1.1"))
    assert changelog.notes(MARKDOWN, Version("2.2.0"), Version("3")) == ""
    long = "# 1.1\n" + "a line of notes\n" * 1000
    assert len(changelog.notes(long, Version("1"), Version("1.1"))) <= changelog.MOST + 10
    write(tmp_path, {"docs/changes.rst": UNDERLINED, "README.md": MARKDOWN})
    found = changelog.between(tmp_path, Version("1.1"), Version("1.2"))
    assert found is not None
    assert found[1] == "docs/changes.rst"
    assert changelog.between(tmp_path, Version("5"), Version("6")) is None


def test_an_issue_made_of_tests_says_so_and_has_at_most_twenty() -> None:
    issue = issue_text.told_by_tests("pkg", "1.0", ["t::a"], None)
    assert (issue.title, issue.source) == (
        "pkg 1.0: one test of the next release fails",
        "names of failing tests",
    )
    issue = issue_text.told_by_tests("pkg", "1.0", [f"t::{n}" for n in range(25)], ("N", "NEWS"))
    assert issue.source == "names of failing tests and NEWS"
    assert issue.text.count("- t::") == 20
    assert "and 5 more" in issue.text
    assert "N\n" in issue.text


def test_a_given_issue(tmp_path: Path) -> None:
    file = write(tmp_path, {"issue.md": "# It breaks\n\nHere is how.\n"}) / "issue.md"
    for source in (str(file), file.read_text()):
        issue = issue_text.given(source)
        assert (issue.title, issue.text, issue.source) == ("It breaks", "Here is how.", "given")
    with pytest.raises(TaskError, match="empty"):
        issue_text.given("  ")
    with pytest.raises(TaskError, match="no message"):
        issue_text.told_by_commit("")


# --- which tests decide


def test_tests_are_sorted_by_what_they_do_every_time() -> None:
    p, f, e, s, x = "passed", "failed", "error", "skipped", "xfailed"
    old = [
        {"fixed": f, "kept": p, "both": f, "flaky": f, "broken": p, "skip": s, "x": x, "unskip": s},
        {"fixed": e, "kept": p, "both": e, "flaky": p, "broken": p, "skip": s, "x": x, "unskip": s},
    ]
    new = [
        {"fixed": p, "kept": p, "both": f, "flaky": p, "broken": f, "skip": s, "x": x, "unskip": p},
        {"fixed": p, "kept": p, "both": f, "flaky": p, "broken": f, "skip": s, "x": x, "unskip": p},
    ]
    new[0] |= {"new": p, "sometimes": p}
    new[1] |= {"new": p}
    found = split(old, new)
    assert found.fail_to_pass == ("fixed", "new")
    assert found.pass_to_pass == ("kept",)
    assert found.failing == ("both",)
    assert dict(found.dropped) == {
        "broken": "passes with the old source and is failed with the new one",
        "flaky": "not stable, old source: failed, passed",
        "sometimes": "not stable, new source: passed, missing",
    }


def test_an_xpass_is_no_pass() -> None:
    found = split([{"a": "xpassed", "b": "failed"}], [{"a": "xpassed", "b": "xpassed"}])
    assert (found.fail_to_pass, found.pass_to_pass) == ((), ())


def test_what_the_reference_alone_does_not_mend_is_dropped() -> None:
    found = split([{"a": "failed", "b": "failed", "c": "passed"}], [dict.fromkeys("abc", "passed")])
    left = without(found, {"a": "passed", "b": "failed"}, "why")
    assert (left.fail_to_pass, left.pass_to_pass) == (("a",), ())
    assert dict(left.dropped) == {"b": "why: failed", "c": "why: missing"}
