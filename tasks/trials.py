"""Which tests tell the fix from the fault, and do so every time: they are run, and compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from environments.base import SandboxSpec
from tasks.grading import ERROR, FAILED, MISSING, PASSED, Exam, TestRun, observe
from tasks.instance import SandboxOpener, TaskError
from tasks.patches import PatchRefused

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


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sources: what its user calls it, and how its tests are run."""

    name: str
    exam: Exam
    patch: bytes = b""


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs the tests of a side, each time in a fresh sandbox."""

    spec: SandboxSpec
    open_sandbox: SandboxOpener
    say: Callable[[str], None] = lambda text: None

    def run(self, side: Side) -> TestRun:
        """One run. TaskError if it hit a limit or the patch does not apply; SandboxError."""
        try:
            run = observe(side.exam, side.patch, self.spec, self.open_sandbox)[0]
        except PatchRefused as error:
            raise TaskError(f"the reference patch cannot be applied: {error}") from error
        if run.trouble:
            raise TaskError(
                f"{side.name}: {run.trouble}; what hangs or runs out of a limit cannot be graded. "
                "--timeout gives a run more seconds, --tests fewer tests"
            )
        self.say(f"  {_counts(run)} in {run.seconds:.1f} s")
        return run


def try_out(old: Side, new: Side, runs: int, runner: Runner) -> tuple[Split, float, list[str]]:
    """Run both sides as often as asked: what is stable, seconds of the slowest run, and notes.

    TaskError if nothing can be graded by it.
    """
    seen: dict[str, list[TestRun]] = {new.name: [], old.name: []}
    for number in range(1, runs + 1):
        for side in (new, old):
            runner.say(f"run {number} of {runs}: the new tests with {side.name}")
            seen[side.name].append(runner.run(side))
            if number == 1:  # told at once, before time is spent on more runs
                _refuse_useless(seen[new.name], seen[old.name], old.name, new.name)
    found = split(*([run.outcomes for run in seen[side.name]] for side in (old, new)))
    if not found.fail_to_pass:
        raise TaskError(
            f"no test fails every time with {old.name} and passes every time with {new.name}: "
            f"{reasons(found)}"
        )
    first = seen[new.name][0]
    notes = [
        f"{name} cannot be collected with {new.name} and is left out{_missing_modules(first)}"
        for name in first.uncollected
    ]
    if any(not run.finished for run in seen[old.name]):
        notes.append(f"with {old.name} the test run ends early; what comes after has no result")
    return found, round(max(run.seconds for run in seen[new.name]), 1) or 0.1, notes


def _refuse_useless(
    new_runs: Sequence[TestRun], old_runs: Sequence[TestRun], before: str, after: str
) -> None:
    """TaskError if the first runs already show that no instance can come of it."""
    new = new_runs[0]
    hint = f"{_missing_modules(new)}. The tests said: {_indented(new.tail)}"
    if not new.started:
        raise TaskError(f"pytest does not start with {after}{hint}")
    if not new.finished:
        raise TaskError(f"with {after} the test run ends early{hint}")
    if not new.outcomes:
        failed = f": {', '.join(new.uncollected[:5])}" if new.uncollected else ""
        raise TaskError(f"no test of {after} can be collected{failed}{hint}")
    if PASSED not in new.outcomes.values():
        raise TaskError(f"no test passes with {after}{hint}")
    if not old_runs:
        return
    if not old_runs[0].started:  # then every attempt would be taken for trouble of the sandbox
        raise TaskError(f"pytest does not start with {before}: {_indented(old_runs[0].tail)}")
    found = split([old_runs[0].outcomes], [new.outcomes])
    if not found.fail_to_pass:
        lost = f"; not collected: {', '.join(new.uncollected[:5])}{_missing_modules(new)}"
        raise TaskError(
            f"no test fails with {before} and passes with {after}: {len(found.pass_to_pass)} pass "
            f"with both, {len(found.failing)} with neither, so nothing would show that a fault is "
            f"gone{lost if new.uncollected else ''}"
        )


def _missing_modules(run: TestRun) -> str:
    found = dict.fromkeys(re.findall(r"No module named '([\w.]+)'", run.tail))
    if not found:
        return ""
    return f" (there is no module {', '.join(found)}: --requires adds the package that has it)"


def _indented(text: str) -> str:
    return "".join(f"\n    {line}" for line in text.strip().splitlines())


def reasons(found: Split) -> str:
    """Tests that were dropped, with their reasons, some of them."""
    items = [f"{test} ({why})" for test, why in found.dropped.items()]
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return "; ".join(items[:5]) + more


def _counts(run: TestRun) -> str:
    tally = Counter(run.outcomes.values())
    parts = [f"{number} {outcome}" for outcome, number in sorted(tally.items())]
    parts += [f"{len(run.uncollected)} not collected"] if run.uncollected else []
    return ", ".join(parts) or "no test ran"
