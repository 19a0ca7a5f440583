"""What a project's tests need: read from its metadata as data, and settled to exact versions.

Nothing of the project is built or run: a build would run its code on the host. For the same reason
only wheels are taken for what it needs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from tasks.instance import TaskError

TEST_RUNNER = "pytest<9"
TEST_EXTRAS = ("test", "tests", "testing")  # taken without being named, where a project has them
_SECONDS = 300.0
_Lists = dict[str, list[str]]  # extra or group ("" for what is always needed) -> requirements


@dataclass(frozen=True, slots=True)
class Declared:
    """What metadata says."""

    runtime: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()  # those taken
    for_tests: tuple[str, ...] = ()  # what they bring
    source: str = "no metadata"
    left_out: tuple[str, ...] = ()  # requirements that cannot be taken, and why


def declared(tree: Path, extras: Sequence[str] | None = None, *, own: str = "") -> Declared:
    """The requirements of a source tree: `PKG-INFO`, `requires.txt`, then `pyproject.toml`.

    `extras`: names of extras and dependency groups to take; None: the usual ones for tests, those
    that there are. `own`: the project's name; where it asks for itself with an extra, that extra
    is taken instead. TaskError if one that is named does not exist.
    """
    lists, groups, source = _metadata(tree)
    there = lists.keys() | groups.keys()
    wanted = [canonicalize_name(name) for name in (TEST_EXTRAS if extras is None else extras)]
    if extras is not None and (missing := [name for name in wanted if name not in there]):
        raise TaskError(
            f"there is no extra or dependency group {', '.join(missing)}; there are: "
            f"{', '.join(sorted(name for name in there if name)) or 'none'}"
        )
    taken = tuple(name for name in wanted if name in there)
    left_out: list[str] = []
    runtime = _plain(lists.get("", ()), left_out)
    tests = _plain(_brought(taken, lists, groups, canonicalize_name(own)), left_out)
    return Declared(runtime, taken, tests, source, tuple(left_out))


def settle(requirements: Sequence[str]) -> tuple[str, ...]:
    """`NAME==VERSION` of everything that pip would install for the requirements, from wheels.

    TaskError with what pip said if that cannot be had.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--ignore-installed", "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--report", "-", "--", *requirements],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TaskError(f"pip could not settle {', '.join(requirements)}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise TaskError(
            f"pip cannot have {', '.join(requirements)} from wheels (nothing is built on this "
            f"machine): {' '.join(lines[-6:])[-900:]}"
        )
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return tuple(sorted(f"{canonicalize_name(m['name'])}=={m['version']}" for m in found))


def checked(requirements: Iterable[str], option: str) -> tuple[str, ...]:
    """Requirements that a user named. TaskError unless each is a name with versions."""
    for text in requirements:
        try:
            parsed = Requirement(text)
        except InvalidRequirement as error:
            raise TaskError(f"{option} {text!r}: {error}".replace("\n", " ")) from error
        if parsed.url:
            raise TaskError(f"{option} {text!r}: name a package and versions, not an address")
    return tuple(requirements)


def with_runner(requirements: Iterable[str], named: Iterable[str]) -> tuple[str, ...]:
    """The requirements with pytest, below its next major version unless it is among `named`."""
    own = any(canonicalize_name(Requirement(need).name) == "pytest" for need in named)
    return tuple(dict.fromkeys([*requirements, *named, *(() if own else (TEST_RUNNER,))]))


def project_name(tree: Path) -> str | None:
    """The name that `pyproject.toml` or `PKG-INFO` gives a project."""
    name = _table(_pyproject(tree).get("project")).get("name")
    if isinstance(name, str):
        return name
    info = _pkg_info(tree)
    return info.get("Name") if info is not None else None


def _brought(names: Iterable[str], lists: _Lists, groups: _Lists, own: str) -> Iterator[str]:
    """The requirements of extras and groups, and of the extras that they name in turn."""
    todo, seen = list(names), set[str]()
    while todo:
        name = todo.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for text in (*lists.get(name, ()), *groups.get(name, ())):
            match = re.match(r"([\w.-]+)\s*\[([^]]*)\]", text)
            if match and canonicalize_name(match[1]) == own:
                todo += [canonicalize_name(extra.strip()) for extra in match[2].split(",")]
            else:
                yield text


def _metadata(tree: Path) -> tuple[_Lists, _Lists, str]:
    """Requirements by extra, those of dependency groups, and where they were found."""
    pyproject = _pyproject(tree)
    groups = _groups(_table(pyproject.get("dependency-groups")))
    info = _pkg_info(tree)
    if info is not None and (info.get_all("Requires-Dist") or info.get_all("Provides-Extra")):
        return _from_pkg_info(info), groups, "PKG-INFO"
    lists = [path for at in ("", "*/") for path in tree.glob(f"{at}*.egg-info/requires.txt")]
    if lists:
        return _from_egg_info(lists[0].read_text("utf-8", "replace")), groups, "requires.txt"
    project = _table(pyproject.get("project"))
    if project:
        found: _Lists = {"": _strings(project.get("dependencies"))}
        for name, needs in _table(project.get("optional-dependencies")).items():
            found[canonicalize_name(name)] = _strings(needs)
        return found, groups, "pyproject.toml"
    return {}, groups, "PKG-INFO" if info is not None else "no metadata"


def _pkg_info(tree: Path) -> Any:
    try:
        return HeaderParser().parsestr((tree / "PKG-INFO").read_text("utf-8", "replace"))
    except OSError:
        return None


def _from_pkg_info(info: Any) -> _Lists:
    """Each requirement under the extras whose marker lets it in."""
    extras = [canonicalize_name(name) for name in info.get_all("Provides-Extra") or ()]
    found: _Lists = {name: [] for name in ("", *extras)}
    for text in info.get_all("Requires-Dist") or ():
        try:
            need = Requirement(text)
        except InvalidRequirement:
            found[""].append(text)  # named later as left out
            continue
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            found[""].append(_bare(need))
            continue
        for name in extras:
            if need.marker.evaluate({"extra": name}):
                found[name].append(_bare(need))
    return found


def _from_egg_info(text: str) -> _Lists:
    """Sections `[extra]` or `[extra:marker]` of setuptools' `requires.txt`."""
    found: _Lists = {"": []}
    extra, marker = "", ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            name, _, marker = line.strip("[]").partition(":")
            extra = canonicalize_name(name) if name else ""
            found.setdefault(extra, [])
        elif line:
            found[extra].append(f"{line}; {marker}" if marker else line)
    return found


def _groups(table: dict[str, Any]) -> _Lists:
    """Dependency groups, with those that they include."""

    def needs(name: str, above: tuple[str, ...]) -> list[str]:
        found: list[str] = []
        items = next((v for k, v in table.items() if canonicalize_name(k) == name), None)
        for item in items if isinstance(items, list) and name not in above else ():
            if isinstance(item, str):
                found.append(item)
            elif isinstance(item, dict) and isinstance(item.get("include-group"), str):
                found += needs(canonicalize_name(item["include-group"]), (*above, name))
        return found

    return {canonicalize_name(name): needs(canonicalize_name(name), ()) for name in table}


def _plain(texts: Iterable[str], left_out: list[str]) -> tuple[str, ...]:
    """Requirements that hold for this Python, without their markers; the others are told."""
    found: list[str] = []
    for text in texts:
        try:
            need = Requirement(text)
        except InvalidRequirement:
            left_out.append(f"{text} (not understood)")
            continue
        if need.url:
            left_out.append(f"{text} (an address, not a package of the index)")
        elif need.marker is None or need.marker.evaluate({"extra": ""}):
            found.append(_bare(need))
    return tuple(dict.fromkeys(found))


def _bare(need: Requirement) -> str:
    """A requirement without its marker."""
    without = copy(need)
    without.marker = None
    return str(without)


def _pyproject(tree: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
