"""What is printed of a run, while it is made and when it is replayed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agent.display import call_text, ended_line, no_call_line, safe, shortened, show_end
from agent.exits import ExitReason
from agent.loop import Outcome
from environments import Patch
from tasks import Verdict

TRACE = "Traceback:\n  File x\nValueError: \x1b[2Jno\n"


@pytest.mark.parametrize(
    ("reason", "detail", "line"),
    [
        ("error", TRACE, "ended: error (ValueError: [2Jno)"),
        ("step_limit", "8 steps\nand more", "ended: step_limit (8 steps)"),
        ("submitted", " \n", "ended: submitted"),
        ("\x1b]0;x\x07", "", "ended: ]0;x"),
    ],
)
def test_why_a_run_ended(reason: str, detail: str, line: str) -> None:
    assert str(ended_line(reason, detail)) == line


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (None, None),
        (Verdict(True, "resolved", {"a": "passed"}), "verdict: RESOLVED"),
        (
            Verdict(False, "unresolved", {"a": "failed"}, {"b": "passed", "c": "passed"}, "why"),
            "verdict: unresolved (0 of 1 FAIL_TO_PASS pass; 2 of 2 PASS_TO_PASS pass)",
        ),
        (Verdict(False, "patch_failed", detail="hunk 1\nhunk 2"), "verdict: patch_failed (hunk 1)"),
        (Verdict(False, "ungraded"), "verdict: ungraded"),
    ],
)
def test_how_an_attempt_ended(verdict: Verdict | None, line: str | None) -> None:
    console = Console(file=io.StringIO(), width=200)
    outcome = Outcome(ExitReason.ERROR, TRACE, Patch(b"", ()), 3, 4000, 65.4, [], [])
    with console.capture() as printed:
        show_end(console, outcome, verdict, "7 evictions")
    assert printed.get().splitlines() == [
        "ended: error (ValueError: [2Jno)",
        "3 steps, 4,000 tokens, 65 s; 7 evictions",
        *([] if line is None else [line]),
    ]


def test_a_call_in_lines() -> None:
    arguments = {"path": "a.py", "\x1b[1mlines": 3, "text": "x\ny\x07", "why": "w" * 61}
    assert str(call_text("ed\x1bit", arguments)) == (
        f"edit path=a.py [1mlines=3\n  text:\nx\ny\n  why:\n{'w' * 61}"
    )
    assert str(call_text("", {"text": "\n" * 2 + "z"}, lambda words: words[-1])) == "?\n  text:\nz"
    assert str(no_call_line("\nThere is none.\nWrite one.")) == "no call: There is none."
    assert str(no_call_line("")) == "no call: nothing is known of it"


def test_texts_are_cut_in_the_middle_and_at_a_width() -> None:
    lines = [str(number) for number in range(25)]
    assert shortened("\n".join(lines[:24]) + "\n") == "\n".join(lines[:24])
    assert shortened("\n".join(lines)).split("\n") == [
        *lines[:12],
        "[... 1 lines ...]",
        *lines[13:],
    ]
    assert shortened("abcdef\nabc", 4) == "abcd [... 2 more]\nabc"


def test_what_cannot_be_printed_is_not() -> None:
    assert safe("a\udcffb\x9b\r\nc\td\r") == "a?b\nc    d"
