"""What the logs of SWE-bench's test runs say of each test.

A row names its parser as the official harness's registry (5.0.2) does; classic rows, which name
none, take the one of their repository. Every parser reads a log line by line and yields what it
finds, an id and a status, as often as it is found. How ids look is the data sets' convention: most
parsers cut them at the first blank, so that lists of tests hold ids with an open bracket.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from tasks.instance import TaskError
from tasks.judging import ERROR, FAILED, MISSING, PASSED, SKIPPED, XFAILED, worst

Found = Iterator[tuple[str, str]]  # test id, status as the log has it
Parser = Callable[[str], Found]

_STATUSES: Mapping[str, str] = {
    "PASSED": PASSED,
    "FAILED": FAILED,
    "SKIPPED": SKIPPED,
    "ERROR": ERROR,
    "XFAIL": XFAILED,
}
_FOLDED = re.compile(r"SKIPPED \[\d+\]")  # so many tests skipped at one place; no ids
_COLOUR = re.compile(r"\x1b\[\d+m")
_CONTROL = dict.fromkeys(range(1, 32))


def _first_word(line: str, statuses: Iterable[str] = _STATUSES) -> tuple[str, str] | None:
    """Status and id of a line of pytest's summary; what follows a blank in the id is lost."""
    words = line.split(maxsplit=2)
    if len(words) < 2 or words[0] not in statuses or not line.startswith(words[0]):
        return None
    return None if _FOLDED.match(line) else (words[1], words[0])


def _pytest(log: str) -> Found:
    """`STATUS id`, for failures also ` - why`, in the summary that -rA writes."""
    for line in log.split("\n"):
        if found := _first_word(line):
            yield found


def _pytest_options(log: str) -> Found:
    """The same; parameters end at the last bracket, absolute paths count by their last part."""
    for test, status in _pytest(log):
        name, bracket, rest = test.partition("[")
        option, closing, _ = rest.rpartition("]")
        if option.startswith("/") and not option.startswith("//") and "*" not in option:
            option = f"/{option.rpartition('/')[2]}"
        yield (f"{name}[{option}]" if bracket and closing else test), status


def _pytest_whole(log: str) -> Found:
    """Ids with their blanks, in the summary or (older pytest, -v) before the status; colours and
    control characters are not part of it."""
    for raw in log.split("\n"):
        line = _COLOUR.sub("", raw).translate(_CONTROL)
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith(words[0]) and words[0] in _STATUSES:
            status, test = words[0], line[len(words[0]) :]
            if _FOLDED.match(line):
                continue
            if status == "FAILED":
                test = test.partition(" - ")[0]
            yield " ".join(test.split()), status
        elif words[-1] in _STATUSES and line.endswith(words[-1]):
            yield " ".join(words[:-1]), words[-1]


def _seaborn(log: str) -> Found:
    """Failures from the summary; passes from it or from the lines of -v."""
    for line in log.split("\n"):
        words = line.split()
        if found := _first_word(line, ("FAILED",)):
            yield found
        elif " PASSED " in line:
            if words[1:2] == ["PASSED"]:
                yield words[0], "PASSED"
        elif found := _first_word(line, ("PASSED",)):
            yield found


def _matplotlib(log: str) -> Found:
    """Mouse buttons by their numbers, as older Pythons print the members of an enumeration."""
    return _pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


_DJANGO_ENDS = {" ... ok": "PASSED", " ... OK": "PASSED", " ...  OK": "PASSED"} | {
    " ... FAIL": "FAILED",
    " ... ERROR": "ERROR",
}
_DJANGO_TEST = "test_no_migrations"  # a migration's line comes before its own
_DJANGO_MIGRATION = "Applying sites.0002_alter_domain_unique..."
_DJANGO_DOTTED = "--version is equivalent to version"  # a test whose output comes before its result


def _django(log: str) -> Found:
    """unittest's `name ... result`. A test that prints has its `ok` on a line of its own, after the
    last `name ...`. The name is the test's, or the first line of its docstring."""
    started = ""
    for raw in log.split("\n"):
        line = raw.strip()
        if _DJANGO_DOTTED in line:
            yield _DJANGO_DOTTED, "PASSED"
        if " ... " in line:
            started = line.partition(" ... ")[0]
        end = next((end for end in _DJANGO_ENDS if line.endswith(end)), "")
        words = line.split()
        if end and len(line) > len(end):
            name = line.removesuffix(end)
            if _DJANGO_ENDS[end] == "PASSED" and name.startswith(_DJANGO_MIGRATION + _DJANGO_TEST):
                name = name.removeprefix(_DJANGO_MIGRATION)
            yield name, _DJANGO_ENDS[end]
        elif " ... skipped" in line:
            yield line.partition(" ... skipped")[0], "SKIPPED"
        elif len(words) > 1 and words[0] in ("FAIL:", "ERROR:"):
            yield words[1], "FAILED" if words[0] == "FAIL:" else "ERROR"
        elif line == "ok" and started:
            yield started, "PASSED"


_SYMPY_ENDS = {"ok": "PASSED", "F": "FAILED", "E": "ERROR"}
_SYMPY_TITLE = re.compile(r"_+ (\S.*\.py:.*) _+$")  # above a failure's traceback


def _sympy(log: str) -> Found:
    """`test_name result` of its own runner, and the titles of failures with their files."""
    for raw in log.split("\n"):
        line = raw.strip()
        words = line.split()
        if line.startswith("test_") and len(words) > 1 and words[-1] in _SYMPY_ENDS:
            yield words[0], _SYMPY_ENDS[words[-1]]
        elif title := _SYMPY_TITLE.match(line):
            yield title[1], "FAILED"


PARSERS: Mapping[str, Parser] = {
    "parse_log_pytest": _pytest,
    "parse_log_pytest_options": _pytest_options,
    "parse_log_pytest_v2": _pytest_whole,
    "parse_log_django": _django,
    "parse_log_matplotlib": _matplotlib,
    "parse_log_seaborn": _seaborn,
    "parse_log_sympy": _sympy,
    # other names that the registry has for them
    "parse_log_astroid": _pytest,
    "parse_log_flask": _pytest,
    "parse_log_marshmallow": _pytest,
    "parse_log_pvlib": _pytest,
    "parse_log_pyvista": _pytest,
    "parse_log_sqlfluff": _pytest,
    "parse_log_xarray": _pytest,
    "parse_log_pydicom": _pytest_options,
    "parse_log_pylint": _pytest_options,
    "parse_log_requests": _pytest_options,
    "parse_log_astropy": _pytest_whole,
    "parse_log_scikit": _pytest_whole,
    "parse_log_sphinx": _pytest_whole,
}

REPOSITORIES: Mapping[str, str] = {
    "astropy/astropy": "parse_log_pytest_v2",
    "django/django": "parse_log_django",
    "marshmallow-code/marshmallow": "parse_log_pytest",
    "matplotlib/matplotlib": "parse_log_matplotlib",
    "mwaskom/seaborn": "parse_log_seaborn",
    "pallets/flask": "parse_log_pytest",
    "psf/requests": "parse_log_pytest_options",
    "pvlib/pvlib-python": "parse_log_pytest",
    "pydata/xarray": "parse_log_pytest",
    "pydicom/pydicom": "parse_log_pytest_options",
    "pylint-dev/astroid": "parse_log_pytest",
    "pylint-dev/pylint": "parse_log_pytest_options",
    "pytest-dev/pytest": "parse_log_pytest",
    "pyvista/pyvista": "parse_log_pytest",
    "scikit-learn/scikit-learn": "parse_log_pytest_v2",
    "sphinx-doc/sphinx": "parse_log_pytest_v2",
    "sqlfluff/sqlfluff": "parse_log_pytest",
    "sympy/sympy": "parse_log_sympy",
}


def parser_of(repo: str, name: str | None = None) -> Parser:
    """The parser that a row names, or else its repository's. TaskError if there is none."""
    if name is None:
        if repo not in REPOSITORIES:
            raise TaskError(
                f"no log parser is known for {repo}; a row of another repository must name one in "
                f"its field log_parser: {', '.join(sorted(PARSERS))}"
            )
        name = REPOSITORIES[repo]
    if name not in PARSERS:
        raise TaskError(
            f"log parser {name!r} is not among those that can be used: {', '.join(sorted(PARSERS))}"
        )
    return PARSERS[name]


def outcomes(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Outcome by test id; of several statuses of one id the worst counts."""
    seen: dict[str, str] = {}
    for test, status in found:
        seen[test] = worst([seen.get(test, PASSED), _STATUSES[status]])
    return seen


def outcome_of(test: str, seen: Mapping[str, str]) -> str:
    """The outcome of an id of a row's lists.

    An id that was cut inside its parameters (more `[` than `]`) stands for all ids that begin with
    it, if these agree on whether they passed.
    """
    if test in seen:
        return seen[test]
    if test.count("[") > test.count("]"):
        like = [outcome for name, outcome in seen.items() if name.startswith(test)]
        if like and len({outcome in (PASSED, XFAILED) for outcome in like}) == 1:
            return like[0]
    return MISSING
