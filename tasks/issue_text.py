"""The issue of an instance that a user makes: given, or made of what is known without the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.instance import TaskError
from tasks.repo import read_issue

NAMED = 20  # tests that an issue made of them names
COMMIT = "commit message"


@dataclass(frozen=True, slots=True)
class Issue:
    """Title and text, and where they come from."""

    title: str
    text: str
    source: str


def given(issue: str) -> Issue:
    """An issue that the user gave, as text or as the name of a file."""
    return _parted(read_issue(issue), "given")


def told_by_tests(
    package: str, version: str, tests: Sequence[str], log: tuple[str, str] | None
) -> Issue:
    """An issue made of which tests fail, and of the project's notes on the release if there are
    any (text and file). Never of what was changed."""
    number = "one test" if len(tests) == 1 else f"{len(tests)} tests"
    verb = "fails" if len(tests) == 1 else "fail"
    parts = []
    if log:
        parts.append(f"The project's notes on what changed since {version} say:\n\n{log[0]}")
    named = "\n".join(f"- {test}" for test in tests[:NAMED])
    if len(tests) > NAMED:
        named += f"\n- and {len(tests) - NAMED} more"
    parts.append(f"With the present source {number} of the next release {verb}:\n\n{named}")
    return Issue(
        f"{package} {version}: {number} of the next release {verb}",
        "\n\n".join(parts),
        f"names of failing tests and {log[1]}" if log else "names of failing tests",
    )


def told_by_commit(message: str) -> Issue:
    """The message of the fix. It may say how the fault is mended."""
    if not message.strip():
        raise TaskError("the commit of the fix has no message; give the issue with --issue")
    return _parted(message, COMMIT)


def _parted(text: str, source: str) -> Issue:
    """The first line, and the rest. TaskError if there is no text."""
    head, _, rest = text.strip().partition("\n")
    if not head:
        raise TaskError("--issue is empty; give the text of the issue or a file that holds it")
    return Issue(head.strip().lstrip("#").strip() or head, rest.strip(), source)
