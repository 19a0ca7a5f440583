"""A run, as `agent show` replays it: what was said and done, what the cache held and let go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.text import Text

from agent.display import safe, show_patch
from agent.run_index import (
    INTERRUPTED,
    RUNNING,
    RunEntry,
    attempt_folders,
    read_run,
)
from agent.run_lines import Lines, number, read_object, section, text, whole
from agent.trajectory import PATCH, REPORT

_BAR, _LINES, _WIDTH = 20, 24, 400  # of the fill; of a text that is not shown in full
_PATCH_LINES, _RULE = 200, 100
_LEVELS = "▁▂▃▄▅▆▇█"
_COLOURS = ("red", "yellow", "green")
_MOST_SHARES = 256


class NoSuchStep(Exception):
    """Steps or attempts that the run does not have; the text says which there are."""


@dataclass(slots=True)
class Replay:
    """One attempt of a run: what its reports and its trajectory say."""

    run: RunEntry
    folder: Path
    report: Mapping[str, Any]
    lines: Lines
    attempt: int
    attempts: int

    @property
    def budget(self) -> int | None:
        """Tokens that the cache holds, if it has such a limit."""
        return self.run.budget

    def data(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As plain data, with these steps."""
        try:
            patch = (self.folder / PATCH).read_text(encoding="utf-8", errors="replace")
        except OSError:
            patch = None
        return {
            "attempt": self.attempt,
            "folder": str(self.folder),
            "start": self.lines.start or None,
            "steps": list(steps),
            "resumed": self.lines.of("resume"),
            "end": self.lines.end,
            "patch": patch,
            "damaged_lines": self.lines.damaged,
            "torn": self.lines.torn,
        }


def load(folder: Path, attempt: int | None = None) -> list[Replay]:
    """The attempts of a run, or the one asked for. Raises NoSuchStep."""
    run, report = read_run(folder), read_object(folder / REPORT) or {}
    folders = attempt_folders(folder)
    count = len(folders)
    if run.state == RUNNING:  # others may follow
        count = max(count, whole(section(report, "options"), "attempts"))
    wanted = range(1, len(folders) + 1)
    if attempt is not None:
        if attempt not in wanted:
            raise NoSuchStep(f"--attempt {attempt}: {folder.name} has {_count(len(folders))}")
        wanted = range(attempt, attempt + 1)
    return [
        Replay(
            run=run,
            folder=folders[n - 1],
            report={**report, **_own_report(folder, folders[n - 1], report, n)},
            lines=Lines.read(folders[n - 1]),
            attempt=n,
            attempts=count,
        )
        for n in wanted
    ]


def chosen(replay: Replay, steps: str | None) -> list[dict[str, Any]]:
    """Steps `N`, `A:B` (both included), `A:` or `:B` of a run; negative ones count from the end.

    Raises NoSuchStep for another form, and where there is none of them.
    """
    found = replay.lines.steps
    if steps is None:
        return found
    first, colon, last = steps.partition(":")
    try:
        begin = _step(first or "1", len(found))
        end = _step(last or "-1", len(found)) if colon else begin
    except ValueError:
        raise NoSuchStep(f"--steps {steps}: give N, A:B, A: or :B") from None
    picked = found[max(begin, 1) - 1 : max(end, 0)]
    if not picked:
        raise NoSuchStep(f"no step {steps}: {replay.run.name} has {len(found)}")
    return picked


class Show:
    """Prints parts of a replay. full: nothing is shortened."""

    def __init__(self, console: Console, *, full: bool = False) -> None:
        self.console, self.full = console, full

    def all(self, replay: Replay) -> None:
        """From the first prompt to the end."""
        self.head(replay)
        for entry in replay.lines.entries:
            self.entry(replay, entry)
        self.end(replay)

    def head(self, replay: Replay) -> None:
        """What the run is."""
        for label, words in _facts(replay):
            self._print(Text.assemble((f"{label:<9} ", "dim"), _clean(words)))

    def entry(self, replay: Replay, entry: Mapping[str, Any]) -> None:
        """A line of the trajectory; those that have a place elsewhere, and unknown ones, are
        passed over."""
        kind = entry["kind"]
        if kind == "start":
            self._start(entry)
        elif kind == "step":
            self.step(replay, entry)
        elif kind == "resume":
            words = f"taken up again after step {whole(entry, 'step')}"
            if replayed := whole(entry, "replayed"):
                words += f", {replayed:,} tokens read again"
            self._rule(Text(words, "magenta"), "magenta")

    def step(self, replay: Replay, entry: Mapping[str, Any]) -> None:
        """A turn: thought, call, observation, and what it did to the cache."""
        title = f"step {whole(entry, 'step')}"
        began = number(replay.lines.start, "time")
        if began is not None and (at := number(entry, "time")) is not None:
            title += f" · {duration(at - began)} after the start"
        self._rule(Text(title, "bold"), "dim")
        if thought := text(entry, "thought"):
            self._print(Text(self._short(thought)))
        call = section(entry, "call")
        if call:
            self._print(self._call(call))
        else:
            problem = _clean(text(entry, "problem")).strip().partition("\n")[0]
            self._print(Text(f"no call: {problem or 'nothing is known of it'}", "yellow"))
        if entry.get("finish") == "length":
            self._print(Text("the reply was cut off at its limit", "yellow"))
        self._print(Text(self._short(text(entry, "observation")), "dim"))
        for line in turn(entry, replay.budget):
            self._print(line)

    def end(self, replay: Replay) -> None:
        """How it ended, or how it stands; the verdict and the patch."""
        lines, report = replay.lines, replay.report
        if lines.damaged:
            some = ", ".join(map(str, lines.damaged[:9]))
            self._print(Text(f"damaged lines of the trajectory were left out: {some}", "red"))
        self._rule(Text("end", "bold"), "dim")
        reason = text(report, "exit") or text(lines.end, "exit")
        if not reason:
            self._stand(standing(replay.run, torn=lines.torn))
            return
        detail = _clean(text(report, "detail") or text(lines.end, "detail")).strip()
        # The last line of a trace says what it was; of any other detail the first does.
        why = detail.splitlines()[-1 if reason == "error" else 0] if detail else ""
        self._print(Text(f"ended: {_clean(reason)}" + (f" ({why})" if why else "")))
        self._print(Text(_costs(replay)))
        verdict = section(report, "verdict")
        if verdict:
            self._print(_verdict(verdict))
        elif replay.run.state == RUNNING:
            self._print(Text("no verdict yet: the run goes on", "dim"))
        if replay.run.resumable and reason in (INTERRUPTED, "error", "sandbox_lost"):
            self._stand(standing(replay.run))
        self._patch(replay.folder)

    def _start(self, entry: Mapping[str, Any]) -> None:
        ids = entry.get("ids")
        size = ids[-1] if isinstance(ids, list) and ids and isinstance(ids[-1], int) else 0
        words = f"turn 0: {size:,} tokens of instructions, issue and code"
        self._print(Text(words, "dim"))
        if self.full:
            for role in ("system", "user"):
                self._print(Text(f"{role}:", "cyan"))
                self._print(Text(_clean(text(entry, role)).rstrip("\n")))

    def _call(self, call: Mapping[str, Any]) -> Text:
        shown = Text(_clean(text(call, "name") or "?"), "bold cyan")
        long = {}
        for key, value in section(call, "arguments").items():
            words = _clean(value if isinstance(value, str) else repr(value))
            if "\n" in words or len(words) > 60:
                long[key] = words
            else:
                shown.append(f" {_clean(key)}=", "cyan").append(words, "default not bold")
        for key, words in long.items():
            shown.append(f"\n  {_clean(key)}:\n", "cyan")
            shown.append(self._short(words), "default not bold")
        return shown

    def _short(self, words: str) -> str:
        """A text without its middle, and without the rest of very long lines."""
        lines = _clean(words).rstrip("\n").split("\n")
        if self.full:
            return "\n".join(lines)
        if len(lines) > _LINES:
            half = _LINES // 2
            left = f"[... {len(lines) - 2 * half} lines ...]"
            lines = [*lines[:half], left, *lines[-half:]]
        return "\n".join(
            line if len(line) <= _WIDTH else f"{line[:_WIDTH]} [... {len(line) - _WIDTH} more]"
            for line in lines
        )

    def _patch(self, folder: Path) -> None:
        try:
            patch = (folder / PATCH).read_bytes()
        except OSError:
            return
        lines = patch.split(b"\n")
        if len(lines) > _PATCH_LINES and not self.full:
            left = len(lines) - _PATCH_LINES
            patch = b"\n".join(lines[:_PATCH_LINES]) + b"\n[... %d lines ...]\n" % left
        show_patch(self.console, patch)

    def _stand(self, words: Text) -> None:
        self.console.print(words, highlight=False, soft_wrap=True)  # it may hold a command to copy

    def _rule(self, title: Text, style: str) -> None:
        rule = Rule(title, align="left", style=style)
        self.console.print(rule, width=min(self.console.width, _RULE))

    def _print(self, what: RenderableType) -> None:
        self.console.print(what, highlight=False)


def turn(entry: Mapping[str, Any], budget: int | None) -> list[Text]:
    """What a turn did to the cache: its fill, what went in and out, the time by phase."""
    stats = section(entry, "stats")
    if not stats:
        return [Text("cache     nothing is known of this turn", "blue")]
    resident, seen = whole(stats, "resident"), whole(stats, "seen")
    of, what = (budget, "tokens") if budget else (seen, "seen")
    share = resident / of if of else 0.0
    bar = Text(f"cache     {_bar(share)} {resident:,} of {of:,} {what} ", "blue")
    bar.append(f"({share:.0%})", "bold yellow" if budget and share > 1 else "blue")
    bar.append(f" · {_bytes(whole(stats, 'cache_bytes'))}")
    bar.append(f" · peak {whole(stats, 'peak_tokens'):,}")
    parts = []
    if forked := whole(stats, "forked"):
        gone = whole(stats, "forked_evicted_tokens")
        words = f"took over {forked:,} in {_seconds(stats, 'fork_seconds')}"
        parts.append(words + (f", {gone:,} of them evicted" if gone else ""))
    if whole(stats, "fed") or not forked:
        parts.append("fed " + _work(whole(stats, "fed"), number(stats, "prefill_seconds")))
    wrote = "wrote " + _work(whole(stats, "sampled"), number(stats, "decode_seconds"))
    if thought := whole(entry, "thought_tokens"):
        wrote += f", {thought:,} of them thought"
    parts += [wrote, f"tool {_seconds(entry, 'tool_seconds')}"]
    evicted, times = whole(stats, "evicted_tokens"), whole(stats, "evictions")
    if times:
        word = "eviction" if times == 1 else "evictions"
        lost = f"{evicted:,} tokens in {times:,} {word}, {_seconds(stats, 'eviction_seconds')}"
    else:
        lost = "nothing"
    lines = [
        bar,
        Text(f"turn      {' · '.join(parts)}", "blue"),
        Text(f"evicted   {lost} · seen {seen:,}, held {_share(resident, seen)}", "blue"),
    ]
    if (held := held_bar(entry.get("held"))) is not None:
        lines.append(Text.assemble(("held      ", "blue"), held, (f" 0 … {seen:,}", "blue")))
    if entry.get("changed") is True:
        lines.append(Text("patch     changed", "green"))
    return lines


def held_bar(shares: object) -> Text | None:
    """Shares 0..1 of equal parts of the stream, oldest first, as a line of blocks; a dot is a part
    of which nothing is left. None for anything else."""
    if not isinstance(shares, list) or not 0 < len(shares) <= _MOST_SHARES:
        return None
    bar = Text()
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            return None
        level = min(int(share * len(_LEVELS)), len(_LEVELS) - 1)
        colour = _COLOURS[min(int(share * len(_COLOURS)), len(_COLOURS) - 1)]
        bar.append(_LEVELS[level] if share else "·", colour)
    return bar


def standing(run: RunEntry, *, torn: bool = False) -> Text:
    """How a run stands that did not end, and what can be done."""
    words = f"{run.state}" + (f": {_clean(run.why)}" if run.why else "")
    if torn:
        words += "; its last line is not whole"
    if run.state == RUNNING:
        words += f"; `agent show {run.handle} --follow` watches it"
    elif run.resumable:
        words += f"; `agent run --resume {run.folder}` goes on"
    return Text(words, "yellow")


def duration(seconds: float) -> str:
    """So many seconds, in the two largest units."""
    total = max(0, round(seconds))
    for size, unit, small, part in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if total >= size:
            rest = total % size // small
            return f"{total // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{total} s"


def _facts(replay: Replay) -> Iterator[tuple[str, str]]:
    run, report = replay.run, replay.report
    state = run.state + (f" ({run.why})" if run.why else "")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    spent = f", {duration(run.seconds)}" if run.seconds is not None else ""
    yield "run", f"{run.name}: {state}; began {began}{spent}"
    if replay.attempts > 1:
        seed = f", seed {whole(report, 'seed')}" if "seed" in report else ""
        yield "attempt", f"{replay.attempt} of {replay.attempts}{seed}"
    problem = text(section(report, "task"), "problem").strip().partition("\n")[0]
    yield "task", (run.task or "?") + (f": {problem}" if problem else "")
    model = section(report, "model")
    parts = [run.model or "?", text(model, "precision"), text(model, "device")]
    if sha := text(model, "sha256"):
        parts.append(f"sha256 {sha[:10]}")
    yield "model", ", ".join(filter(None, parts))
    yield "cache", ", ".join(filter(None, [run.method or "?", run.protocol, *_config(replay)]))
    options, tools = section(report, "options"), section(report, "tool_set")
    limits, sampling = section(tools, "limits"), section(report, "sampling")
    words = [f"{text(tools, 'name') or text(options, 'tools') or '?'}"]
    words += [f"{whole(limits, name):,} {unit}" for name, unit in _LIMITS if name in limits]
    words += [f"{name} {sampling[name]}" for name in ("temperature", "top_p") if name in sampling]
    yield "tools", ", ".join(words)
    if kind := text(section(report, "sandbox"), "kind"):
        yield "sandbox", kind
    versions = section(report, "versions")
    commit = text(report, "git_commit")[:10]
    named = [f"{name} {found}" for name, found in versions.items() if found is not None]
    if named or commit:
        yield "versions", ", ".join([*([f"commit {commit}"] if commit else []), *named])


_LIMITS = (("steps", "steps"), ("total_tokens", "tokens"), ("wall_time", "s"))


def _config(replay: Replay) -> list[str]:
    run, config = replay.run, section(replay.report, "cache")
    words = [text(config, "scope") or text(section(replay.report, "options"), "scope")]
    if run.budget:
        words.append(f"a budget of {run.budget:,} tokens")
    elif run.density:
        words.append(f"{run.density:.0%} of the tokens stay")
    elif config:
        words.append("no budget")
    return words


def _own_report(run: Path, own: Path, report: Mapping[str, Any], attempt: int) -> dict[str, Any]:
    if own == run:
        return {}
    told = report.get("attempts")
    if isinstance(told, list) and attempt <= len(told) and isinstance(told[attempt - 1], dict):
        return told[attempt - 1]
    return read_object(own / REPORT) or {}


def _costs(replay: Replay) -> str:
    totals, end = section(replay.report, "totals"), replay.lines.end
    words = [
        f"{whole(totals or end, 'steps'):,} steps",
        f"{whole(totals or end, 'tokens'):,} tokens",
        duration(number(totals or end, "seconds") or 0),
    ]
    phases = [
        f"{name} {_seconds(totals, key)}"
        for name, key in _PHASES
        if number(totals, key) is not None
    ]
    evictions = _clean(text(replay.report, "evictions"))
    line = ", ".join(words)
    line += f" ({', '.join(phases)})" if phases else ""
    return line + (f"; {evictions}" if evictions else "")


_PHASES = (
    ("prefill", "prefill_seconds"),
    ("decode", "decode_seconds"),
    ("eviction", "eviction_seconds"),
    ("tools", "tool_seconds"),
)


def _verdict(verdict: Mapping[str, Any]) -> Text:
    if verdict.get("resolved") is True:
        return Text("verdict: RESOLVED", "bold green")
    counts = []
    for name in ("fail_to_pass", "pass_to_pass"):
        tests = section(verdict, name)
        if tests:
            passed = sum(outcome == "passed" for outcome in tests.values())
            counts.append(f"{passed} of {len(tests)} {name.upper()} pass")
    why = "; ".join(counts) or _clean(text(verdict, "detail")).strip().partition("\n")[0][:200]
    status = _clean(text(verdict, "status") or "?")
    return Text(f"verdict: {status}" + (f" ({why})" if why else ""), "bold red")


def _clean(words: str) -> str:
    """Text that can be printed whatever it holds, and steers nothing."""
    return safe(words.encode("utf-8", errors="replace").decode("utf-8"))


def _step(word: str, count: int) -> int:
    at = int(word)
    return at if at > 0 else count + 1 + at


def _count(attempts: int) -> str:
    return "one attempt" if attempts == 1 else f"{attempts} attempts"


def _bar(share: float) -> str:
    filled = min(_BAR, round(share * _BAR))
    return "█" * filled + "░" * (_BAR - filled)


def _share(part: int, of: int) -> str:
    return f"{part / of:.0%}" if of else "-"


def _work(count: int, seconds: float | None) -> str:
    if not count:
        return "nothing"
    if not seconds:
        return f"{count:,}"
    return f"{count:,} in {seconds:.1f} s ({count / seconds:,.1f} tok/s)"


def _seconds(data: object, key: str) -> str:
    seconds = number(data, key)
    return "? s" if seconds is None else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
