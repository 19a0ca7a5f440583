"""What the person at the terminal sees of a run: thought, call, observation, the cache's fill."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.status import Status
from rich.syntax import Syntax
from rich.text import Text

from agent import run_lines
from agent.exits import ExitReason

if TYPE_CHECKING:
    from pathlib import Path

    from agent.checks import Checks
    from agent.loop import Outcome, Step
    from agent.session import TurnStats
    from agent.take import Taken
    from environments import Patch
    from tasks.instance import Verdict

# Control characters, which a model or a command could use to repaint the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_OBSERVATION_LINES = 24


def safe(text: str) -> str:
    """Text of a model or a command without what would steer the terminal or cannot be printed."""
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\t", "    "))


def fill(stats: TurnStats, budget: int | None) -> str:
    """The cache after a turn, in one line."""
    held = f"{stats.resident:,}" + (f"/{budget:,}" if budget else "")
    parts = [
        f"cache {held} tokens, {size(stats.cache_bytes)}",
        f"{stats.evictions} evictions",
        f"seen {stats.seen:,}",
        f"took over {stats.forked:,}"
        if stats.forked
        else f"fed {stats.fed:,} at {_rate(stats.fed, stats.prefill_seconds)}",
        f"wrote {stats.sampled:,} at {_rate(stats.sampled, stats.decode_seconds)}",
    ]
    return " · ".join(parts)


class TerminalWatcher:
    """Shows a run on a terminal, with a status line that moves where the terminal can do so."""

    def __init__(self, console: Console, *, budget: int | None, quiet: bool = False) -> None:
        self._console, self._budget, self._quiet = console, budget, quiet
        self._status: Status | None = None
        self._steps = 0
        self._fill = "cache empty"

    def opened(self, system: str, user: str, tokens: int) -> None:
        self._print(Text(f"turn 0: {tokens:,} tokens of instructions, issue and code", "dim"))

    def resumed(self, steps: int, tokens: int) -> None:
        self._steps = steps
        self._print(Text(f"going on after step {steps}, with {tokens:,} tokens in the log", "dim"))

    def prefill(self, fed: int, total: int) -> None:
        self._say(f"step {self._steps + 1}: reading {fed:,} of {total:,} tokens · {self._fill}")

    def text(self, reply_so_far: str) -> None:
        last = safe(reply_so_far).rstrip().rpartition("\n")[2][-50:]
        self._say(f"step {self._steps + 1}: writing · {self._fill} · {last}")

    def step(self, step: Step) -> None:
        self._steps = step.number
        self._fill = fill(step.reply.stats, self._budget)
        self._print(Rule(f"step {step.number}", align="left", style="dim"))
        if step.thought:
            self._print(Text(safe(step.thought)))
        if step.call is not None:
            self._print(call_text(step.call.name, step.call.arguments))
        else:
            self._print(no_call_line(step.problem or ""))
        self._print(Text(shortened(safe(step.observation)), "dim"))
        self._print(Text(f"{self._fill} · tool {step.tool_seconds:.1f} s", "blue"))

    def start(self) -> None:
        """Show the status line from now on."""
        if not self._quiet and self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()

    def stop(self) -> None:
        """Take the status line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _say(self, text: str) -> None:
        if self._status is not None:
            width = max(20, self._console.width - 4)
            self._status.update(Text(text[:width]))

    def _print(self, what: Text | Rule) -> None:
        if not self._quiet:
            self._console.print(what, highlight=False)


def show_patch(console: Console, patch: bytes) -> None:
    """The patch in colour."""
    if not patch.strip():
        console.print(Text("The tree was not changed: there is no patch.", "yellow"))
        return
    text = safe(patch.decode("utf-8", errors="replace")).rstrip("\n")
    console.print(Syntax(text, "diff", theme="ansi_dark", background_color="default"))


def show_end(console: Console, outcome: Outcome, verdict: Verdict | None, evictions: str) -> None:
    """Exit, verdict and costs of one attempt."""
    from agent.report import verdict_data  # imports what loads models

    console.print(ended_line(outcome.reason, outcome.detail), highlight=False)
    cost = f"{outcome.steps} steps, {outcome.tokens:,} tokens, {outcome.seconds:.0f} s"
    console.print(Text(f"{cost}; {evictions}"), highlight=False)
    if verdict is not None:
        console.print(verdict_line(verdict_data(verdict)), highlight=False)


def show_checks(console: Console, checks: Checks) -> None:
    """What ran on the tree as the patch leaves it."""
    if checks.changed_at is None:
        return
    if not checks.ran:
        console.print(Text("Nothing was run after the last change: look at it yourself.", "yellow"))
        return
    console.print(Text(f"run after the last change (step {checks.changed_at}):"), highlight=False)
    for check in checks.ran:
        style = {True: "green", False: "red", None: "yellow"}[check.passed]
        line = Text("  ").append(f"{check.outcome:<13} ", style)
        line.append(safe(one_line(check.command, 70)))
        line.append(f"  (step {check.step}{', the tests' if check.tests else ''})", "dim")
        console.print(line, highlight=False)
    tests = [check.passed for check in checks.ran if check.tests]
    if tests and tests[-1] is False:
        said = "The project's tests fail with this patch (whether they did before is not known)."
        console.print(Text(said, "bold red"), highlight=False)


def show_left_out(console: Console, patch: Patch) -> None:
    """What the patch does not have, or has in a place of its own."""
    if patch.skipped:
        names = one_line(", ".join(patch.skipped), 200)
        console.print(
            Text(f"not in the patch (unreadable, or above 50 MB): {safe(names)}", "yellow")
        )
    if patch.submodules:
        names = one_line(", ".join(patch.submodules), 200)
        console.print(
            Text(
                f"changed inside repositories of their own (apply it there): {safe(names)}",
                "yellow",
            )
        )
    if patch.problem:
        why = safe(patch.problem.partition("\n")[0])
        console.print(Text(f"git apply may refuse this patch: {why}", "yellow"))


def show_taken(console: Console, taken: Taken, path: Path) -> None:
    """What became of the patch, and what to do next."""
    if taken.commit is not None:
        done = f"commit {taken.commit[:12]} on the new branch {taken.branch} of {path}"
        console.print(Text(done, "green"), highlight=False)
    if taken.applied:
        console.print(Text(f"applied to {path}", "green"), highlight=False)
    if taken.error:
        console.print(Text(f"error: {safe(taken.error)}", "red"), highlight=False, soft_wrap=True)
    for line in taken.next:
        console.print(Text(line), highlight=False, soft_wrap=True)


def one_line(text: str, width: int) -> str:
    """A text in one line, cut where it is longer."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def ended_line(reason: str, detail: str) -> Text:
    """Why a run ended."""
    lines = safe(detail).strip().splitlines()
    # The last line of a trace says what it was; of any other detail the first does.
    why = lines[-1 if reason == ExitReason.ERROR else 0] if lines else ""
    return Text(f"ended: {safe(reason)}" + (f" ({why})" if why else ""))


def verdict_line(verdict: Mapping[str, Any]) -> Text:
    """RESOLVED or not, and by how much: of a verdict as reports have it, read without trust."""
    if verdict.get("resolved") is True:
        return Text("verdict: RESOLVED", "bold green")
    counts = []
    for name in ("fail_to_pass", "pass_to_pass"):
        if tests := run_lines.section(verdict, name):
            passed = sum(outcome == "passed" for outcome in tests.values())
            counts.append(f"{passed} of {len(tests)} {name.upper()} pass")
    detail = safe(run_lines.text(verdict, "detail")).strip().partition("\n")[0][:200]
    why = "; ".join(counts) or detail
    status = safe(run_lines.text(verdict, "status")) or "?"
    return Text(f"verdict: {status}" + (f" ({why})" if why else ""), "bold red")


def shortened(text: str, width: int | None = None) -> str:
    """A text without its middle, and without what lines have beyond a width."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) > _OBSERVATION_LINES:
        half = _OBSERVATION_LINES // 2
        left = f"[... {len(lines) - 2 * half} lines ...]"
        lines = [*lines[:half], left, *lines[-half:]]
    if width is not None:
        lines = [
            line if len(line) <= width else f"{line[:width]} [... {len(line) - width} more]"
            for line in lines
        ]
    return "\n".join(lines)


def call_text(
    name: str, arguments: Mapping[str, object], shorten: Callable[[str], str] = shortened
) -> Text:
    """A call: its name, short arguments beside it, long ones below it. Values of any kind."""
    shown = Text(safe(name) or "?", "bold cyan")
    long = {}
    for key, value in arguments.items():
        words = safe(value if isinstance(value, str) else repr(value))
        if "\n" in words or len(words) > 60:
            long[key] = words
        else:
            shown.append(f" {safe(key)}=", "cyan").append(words, "default not bold")
    for key, words in long.items():
        shown.append(f"\n  {safe(key)}:\n", "cyan")
        shown.append(shorten(words), "default not bold")
    return shown


def no_call_line(problem: str) -> Text:
    """Why a reply was no call."""
    words = safe(problem).strip().partition("\n")[0]
    return Text(f"no call: {words or 'nothing is known of it'}", "yellow")


def size(count: int) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tok/s" if seconds > 0 else "-"
