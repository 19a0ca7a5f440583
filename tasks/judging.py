"""The rule that turns outcomes of tests into a verdict, and what a reader should know of a patch.

Resolved means: every FAIL_TO_PASS test passes, and every PASS_TO_PASS test passes, is an expected
failure, or is skipped. A test without a result counts as failed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from tasks.instance import Verdict

PASSED, XPASSED, XFAILED, SKIPPED, FAILED, ERROR = (
    "passed",
    "xpassed",
    "xfailed",
    "skipped",
    "failed",
    "error",
)
MISSING = "missing"  # no result: not collected, or the run ended before
_WORSE = (PASSED, XPASSED, XFAILED, SKIPPED, FAILED, ERROR, MISSING)
MENDED = frozenset({PASSED})  # fine for FAIL_TO_PASS
KEPT = frozenset({PASSED, XFAILED, SKIPPED})  # fine for PASS_TO_PASS

# files that pytest or Python reads by itself
_MACHINERY = {"conftest.py", "sitecustomize.py", "usercustomize.py", "entry_points.txt"}
_SETTINGS = {"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
_STEERING = frozenset(_MACHINERY | _SETTINGS | {"pyproject.toml"})


def worst(outcomes: Iterable[str]) -> str:
    """Of several outcomes of one test the worst counts."""
    return max(outcomes, key=_WORSE.index)


def judge(
    to_pass: Mapping[str, str],
    to_keep: Mapping[str, str],
    *,
    mended: Collection[str] = MENDED,
    cut_short: str = "",
    trouble: str = "",
    remarks: Sequence[str] = (),
    notes: Sequence[str] = (),
    seconds: float = 0.0,
) -> Verdict:
    """The verdict on a run, from the outcome of every FAIL_TO_PASS and PASS_TO_PASS test.

    `cut_short` says how the run ended early: it is then never resolved, even if all that is asked
    for had passed by then. `trouble` says why the run shows nothing about the patch: status
    `error`. `remarks` go with the counts in the verdict's detail, `notes` come after them.
    """
    failing = [test for test, outcome in to_pass.items() if outcome not in mended]
    broken = [test for test, outcome in to_keep.items() if outcome not in KEPT]
    if trouble:
        detail = ". ".join([trouble, *notes])
        return Verdict(False, "error", to_pass, to_keep, detail, seconds)
    resolved = not failing and not broken and not cut_short
    counts = (
        f"{len(to_pass) - len(failing)} of {len(to_pass)} FAIL_TO_PASS and "
        f"{len(to_keep) - len(broken)} of {len(to_keep)} PASS_TO_PASS are as they should be"
    )
    bad = [f"{test} {(to_pass if test in to_pass else to_keep)[test]}" for test in failing + broken]
    said = "; ".join([counts, *filter(None, [cut_short]), *remarks, *bad[:5]])
    status = "resolved" if resolved else "unresolved"
    return Verdict(resolved, status, to_pass, to_keep, ". ".join([said, *notes]), seconds)


def flags(
    touched: Iterable[str], replaced_paths: Sequence[str], import_roots: Sequence[str] = (".",)
) -> list[str]:
    """What a reader should know about the files of a patch.

    touched: paths that the patch changed; replaced_paths: files and folders that the hidden tests
    replaced; import_roots: folders of the tree on the module path.
    """
    tests = tuple(PurePosixPath(path) for path in replaced_paths)
    replaced: list[str] = []
    machinery: list[str] = []
    others: list[str] = []
    for name in touched:
        path = PurePosixPath(name)
        if any(path.is_relative_to(test) for test in tests):
            replaced.append(name)
        elif _steers_tests(path, import_roots):
            machinery.append(name)
        elif _looks_like_test(path):
            others.append(name)
    notes = []
    if machinery:
        notes.append(f"FLAGGED, the patch touches what steers the tests: {some(machinery)}")
    if others:
        notes.append(f"FLAGGED, the patch touches test files: {some(others)}")
    if replaced:
        notes.append(f"changes to test files were replaced by the hidden tests: {some(replaced)}")
    return notes


def _steers_tests(path: PurePosixPath, roots: Sequence[str]) -> bool:
    if path.name in _STEERING or path.suffix == ".pth":
        return True
    for root in map(PurePosixPath, roots):
        if path.is_relative_to(root):  # does it put a module before pytest's or Python's own?
            top = path.relative_to(root).parts[0].partition(".")[0]
            if top in sys.stdlib_module_names or top.startswith(("pytest", "_pytest", "pluggy")):
                return True
    return False


def _looks_like_test(path: PurePosixPath) -> bool:
    folders = {"test", "tests", "testing"} & set(path.parts[:-1])
    stem = path.stem
    named = stem.startswith("test_") or stem.endswith("_test") or stem in ("test", "tests")
    return path.suffix == ".py" and (bool(folders) or named)


def some(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
