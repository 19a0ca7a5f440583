"""Which tests tell the fix from the fault, and do so every time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks.grading import ERROR, FAILED, MISSING, PASSED

Outcomes = Mapping[str, str]  # test id -> outcome, of one run

_FAILING = frozenset({FAILED, ERROR, MISSING})


@dataclass(frozen=True, slots=True)
class Split:
    """Tests by what they did before and after a fix, sorted; and those that cannot be used."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    failing: tuple[str, ...]  # before and after
    dropped: Mapping[str, str] = field(default_factory=dict)  # test id -> why


def split(before: Sequence[Outcomes], after: Sequence[Outcomes]) -> Split:
    """Sort tests by their outcomes in all runs before and all runs after.

    A test that fails in one run and does not in another of the same source is dropped; so is one
    that passed and then fails. What is skipped, or expected to fail, decides nothing. A test that
    has no result counts as failed.
    """
    names = sorted({test for run in (*before, *after) for test in run})
    to_pass: list[str] = []
    to_keep: list[str] = []
    failing: list[str] = []
    dropped: dict[str, str] = {}
    for test in names:
        was = [run.get(test, MISSING) for run in before]
        now = [run.get(test, MISSING) for run in after]
        unstable = [
            f"{source} source: {', '.join(outcomes)}"
            for source, outcomes in (("old", was), ("new", now))
            if len({_kind(outcome) for outcome in outcomes}) > 1
        ]
        kinds = _kind(was[0]), _kind(now[0])
        if unstable:
            dropped[test] = f"not stable, {'; '.join(unstable)}"
        elif kinds == (FAILED, PASSED):
            to_pass.append(test)
        elif kinds == (PASSED, PASSED):
            to_keep.append(test)
        elif kinds == (PASSED, FAILED):
            dropped[test] = f"passes with the old source and is {now[0]} with the new one"
        elif kinds == (FAILED, FAILED):
            failing.append(test)
    return Split(tuple(to_pass), tuple(to_keep), tuple(failing), dropped)


def without(found: Split, outcomes: Outcomes, why: str) -> Split:
    """The split without the tests that do not pass in one more run of what should pass them."""
    bad = {
        test: f"{why}: {outcomes.get(test, MISSING)}"
        for test in (*found.fail_to_pass, *found.pass_to_pass)
        if outcomes.get(test, MISSING) != PASSED
    }
    return Split(
        tuple(test for test in found.fail_to_pass if test not in bad),
        tuple(test for test in found.pass_to_pass if test not in bad),
        found.failing,
        {**found.dropped, **bad},
    )


def _kind(outcome: str) -> str:
    return FAILED if outcome in _FAILING else outcome
