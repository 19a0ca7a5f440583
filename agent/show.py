"""A run, as `agent show` replays it: what was said and done, what the cache held and let go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.text import Text

from agent.display import (
    call_text,
    ended_line,
    no_call_line,
    safe,
    shortened,
    show_patch,
    size,
    verdict_line,
)
from agent.exits import UNFINISHED
from agent.replay import Replay
from agent.run_entry import RUNNING, RunEntry
from agent.run_lines import number, section, text, whole
from agent.trajectory import PATCH

_BAR, _WIDTH = 20, 400  # of the fill; of lines that are not shown in full
_PATCH_LINES, _RULE = 200, 100
_LEVELS = "▁▂▃▄▅▆▇█"
_COLOURS = ("red", "yellow", "green")
_MOST_SHARES = 256


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
            self._print(Text.assemble((f"{label:<9} ", "dim"), safe(words)))

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
        if call := section(entry, "call"):
            name, arguments = text(call, "name"), section(call, "arguments")
            self._print(call_text(name, arguments, self._short))
        else:
            self._print(no_call_line(text(entry, "problem")))
        if entry.get("finish") == "length":
            self._print(Text("the reply was cut off at its limit", "yellow"))
        self._print(Text(self._short(text(entry, "observation")), "dim"))
        for line in turn(entry, replay.run.budget):
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
        self._print(ended_line(reason, text(report, "detail") or text(lines.end, "detail")))
        self._print(Text(_costs(replay)))
        if verdict := section(report, "verdict"):
            self._print(verdict_line(verdict))
        elif replay.run.state == RUNNING:
            self._print(Text("no verdict yet: the run goes on", "dim"))
        if replay.run.resumable and reason in UNFINISHED:
            self._stand(standing(replay.run))
        self._patch(replay.folder)

    def _start(self, entry: Mapping[str, Any]) -> None:
        ids = entry.get("ids")
        tokens = ids[-1] if isinstance(ids, list) and ids and isinstance(ids[-1], int) else 0
        words = f"turn 0: {tokens:,} tokens of instructions, issue and code"
        self._print(Text(words, "dim"))
        if self.full:
            for role in ("system", "user"):
                self._print(Text(f"{role}:", "cyan"))
                self._print(Text(safe(text(entry, role)).rstrip("\n")))

    def _short(self, words: str) -> str:
        words = safe(words).rstrip("\n")
        return words if self.full else shortened(words, _WIDTH)

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
    bar.append(f" · {size(whole(stats, 'cache_bytes'))}")
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
    words = run.state + (f": {safe(run.why)}" if run.why else "")
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
    for length, unit, small, part in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if total >= length:
            rest = total % length // small
            return f"{total // length} {unit}" + (f" {rest} {part}" if rest else "")
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
    words = [text(tools, "name") or text(options, "tools") or "?"]
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
    evictions = safe(text(replay.report, "evictions"))
    line = ", ".join(words)
    line += f" ({', '.join(phases)})" if phases else ""
    return line + (f"; {evictions}" if evictions else "")


_PHASES = (
    ("prefill", "prefill_seconds"),
    ("decode", "decode_seconds"),
    ("eviction", "eviction_seconds"),
    ("tools", "tool_seconds"),
)


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
