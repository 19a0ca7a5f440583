"""Where a Python project keeps its tests and its modules, as far as its files show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from environments.patchfile import is_test_file

_TOP = ("tests", "test", "testing")  # `testing` inside a package is more often a module of it
_INNER = ("tests", "test")
_DEPTH = 4
_TEST_FILE = re.compile(r"(?:test_.*|.*_test|tests?)\.py")
_NO_TESTS = frozenset(
    {".git", ".tox", ".nox", "build", "dist", "node_modules", "venv", ".venv", "site-packages"}
)
_NO_MODULES = frozenset(
    {"setup", "conftest", "noxfile", "tasks", "fabfile", "versioneer", "test", "tests", "docs"}
    | {"testing", "examples", "example", "benchmarks", "scripts", "tools", "doc", "build", "dist"}
)
_TELLS_VERSION = re.compile(  # VERSION = "1.0", __version_tuple__ = version_tuple = (1, 0)
    rb"""\s*
    (?:_*(?:version|release|date|commit_id)\w*\s*(?::[^=]*)?=\s*)+
    (?:[\[(]?\s*(?:None|"[^"]*"|'[^']*'|\d[\d.]*)\s*,?\s*)+[\])]?\s*(?:\#.*)?$
    """,
    re.IGNORECASE | re.VERBOSE,
)


def test_places(tree: Path) -> tuple[str, ...]:
    """Folders and files that hold a project's tests; empty if none are seen.

    A folder is one by its name, so that what lies there can be replaced as a whole; tests that lie
    beside modules are named one by one.
    """
    top = [name for name in _TOP if _holds_tests(tree / name)]
    top += sorted(path.name for path in tree.glob("*.py") if _TEST_FILE.fullmatch(path.name))
    if top:
        return tuple(top)
    inner: list[PurePosixPath] = []
    for folder in _folders(tree, _DEPTH):
        inside = any(folder.is_relative_to(found) for found in inner)
        if folder.name in _INNER and not inside and _holds_tests(tree / folder):
            inner.append(folder)
    if inner:
        return tuple(map(str, inner))
    beside = (
        folder / path.name
        for folder in _folders(tree, _DEPTH)
        for path in sorted((tree / folder).glob("*.py"))
        if _TEST_FILE.fullmatch(path.name)
    )
    return tuple(map(str, beside))


test_places.__test__ = False  # type: ignore[attr-defined]  # no test, whatever its name says


def _holds_tests(folder: Path) -> bool:
    if not folder.is_dir() or folder.is_symlink():
        return False
    return any(_TEST_FILE.fullmatch(path.name) for path in folder.rglob("*.py"))


def _folders(tree: Path, depth: int) -> list[PurePosixPath]:
    """Folders of a tree as relative paths, outer ones first, links left out."""
    found: list[PurePosixPath] = []
    level = [PurePosixPath()]
    for _ in range(depth):
        level = [
            at / path.name
            for at in level
            for path in sorted((tree / at).iterdir())
            if path.is_dir() and not path.is_symlink() and path.name not in _NO_TESTS
        ]
        found += level
    return found


def import_root(tree: Path, package: str) -> str:
    """The folder that has to be on the module path, relative to the tree: `src` or the like, or
    `.` for the tree itself."""
    names = {package.lower().replace("-", "_"), *_declared(tree)}
    for root in (".", "src", "lib", "python"):
        if any(_is_module(tree / root / name) for name in names):
            return root
    for root in ("src", "lib"):
        if (tree / root).is_dir() and own_modules(tree, root):
            return root
    return "."


def own_modules(tree: Path, root: str) -> frozenset[str]:
    """Names of the top-level modules below an import root."""
    declared = {name for name in _declared(tree) if _is_module(tree / root / name)}
    if declared:
        return frozenset(declared)
    found = {path.stem for path in (tree / root).glob("*.py")}
    found |= {path.parent.name for path in (tree / root).glob("*/__init__.py")}
    return frozenset(found - _NO_MODULES)


def _is_module(path: Path) -> bool:
    holds = path.is_dir() and any(path.rglob("*.py"))
    return holds or path.with_name(f"{path.name}.py").is_file()


def _declared(tree: Path) -> frozenset[str]:
    """Top-level modules that a source distribution of setuptools lists."""
    lists = [path for at in ("", "*/") for path in tree.glob(f"{at}*.egg-info/top_level.txt")]
    words = {word for path in lists for word in path.read_text("utf-8", "replace").split()}
    return frozenset(words - _NO_MODULES)


def changed_paths(old: Path, new: Path) -> tuple[str, ...]:
    """Files and links that differ between two trees, or are in one only."""
    sides = [_contents(old), _contents(new)]
    names = sorted(sides[0].keys() | sides[1].keys())
    return tuple(name for name in names if sides[0].get(name) != sides[1].get(name))


def _contents(tree: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in tree.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(tree))] = str(path.readlink())
        elif path.is_file():
            found[str(path.relative_to(tree))] = path.read_bytes()
    return found


def module_changes(
    old: Path, new: Path, root: str, test_paths: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What a release changed in its own modules, and what of that is left out and why.

    Tests are left out, and so is what does nothing but tell the version: nobody who mends the old
    release would know it.
    """
    modules = own_modules(old, root) | own_modules(new, root)
    kept: list[str] = []
    left_out: list[str] = []
    for name in changed_paths(old, new):
        path = PurePosixPath(name)
        if not path.is_relative_to(root) or is_test_file(name, test_paths):
            continue
        if path.relative_to(root).parts[0].removesuffix(".py") not in modules:
            continue
        sides = [side / name for side in (old, new)]
        if any(side.is_symlink() for side in sides):
            left_out.append(f"{name} (a link)")
        elif any(b"\0" in side.read_bytes() for side in sides if side.is_file()):
            left_out.append(f"{name} (not text)")
        elif _only_the_version(*sides):
            left_out.append(f"{name} (tells the version)")
        else:
            kept.append(name)
    return kept, left_out


def _only_the_version(old: Path, new: Path) -> bool:
    """Whether the lines that differ are a few that give the version a value."""
    if not (old.is_file() and new.is_file()):
        return False
    lines = [side.read_bytes().splitlines() for side in (old, new)]
    changed = set(lines[0]) ^ set(lines[1])
    return 0 < len(changed) <= 6 and all(map(_TELLS_VERSION.match, changed))


def counts(patch_section: bytes) -> dict[str, int]:
    """Lines added and removed by one file's part of a patch."""
    body = patch_section.partition(b"\n@@")[2].splitlines()
    return {
        "added": sum(line.startswith(b"+") for line in body),
        "removed": sum(line.startswith(b"-") for line in body),
    }


def is_inside(tree: Path, path: str) -> bool:
    """Whether a path names something of the tree, and not the tree itself."""
    parts = PurePosixPath(path)
    proper = bool(parts.parts) and not parts.is_absolute() and ".." not in parts.parts
    return proper and (tree / path).exists()


def below(path: str, places: Iterable[str]) -> bool:
    """Whether a path is one of the places or lies in one."""
    return any(PurePosixPath(path).is_relative_to(place) for place in places)


def outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """The paths without those that lie below another of them, in their order."""
    distinct = dict.fromkeys(paths)
    return tuple(
        path for path in distinct if not below(path, (other for other in distinct if other != path))
    )
