"""What `agent bench turns` says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.bench.origin import at_end, markdown, origin_lines, save_all
from agent.bench.readings import show
from agent.bench.turns import Turns

_EARLY = 3


def rows(turns: Turns) -> tuple[list[str], list[list[str]]]:
    """Seconds until the first token of each turn, the tokens fed for it, and those held."""
    header = ["turn"]
    for side in turns.sides:
        header += [f"{side.name}: first token s", "fed", "held"]
    found = []
    for number in range(1, turns.script.turns + 1):
        row = [str(number)]
        for side in turns.sides:
            of_turn = [t for t in turns.done if (t.who, t.turn) == (side.name, number)]
            median = turns.first_token(side.name, number)
            if median is None:
                row += ["–"] * 3
                continue
            row += [f"{median.median:.2f}", f"{of_turn[0].fed:,}", f"{of_turn[0].resident:,}"]
        if any(cell != "–" for cell in row[1:]):
            found.append(row)
    return header, found


def words(turns: Turns) -> list[str]:
    """How much longer the last turn takes than an early one, and the most bytes, of each side."""
    late = turns.script.turns
    lines = []
    for side in turns.sides:
        growth = turns.growth(side.name, late, _EARLY)
        peak = max((t.peak_bytes for t in turns.done if t.who == side.name), default=0)
        evictions = sum(t.evictions for t in turns.done if t.who == side.name)
        lines.append(
            f"{side.name}: turn {late} over turn {_EARLY}: {show(growth, '{:.2f}'.format)}; at "
            f"most {peak / 2**20:,.1f} MiB of cache; {evictions:,} evictions."
        )
    return lines


def data(turns: Turns, origin: dict[str, Any], model: str) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "origin": at_end(origin),
        "settings": {"model": model, "repeats": turns.repeats, **asdict(turns.script)},
        "sides": {side.name: side.config.model_dump(mode="json") for side in turns.sides},
        "complete": turns.finished,
        "turns": turns.data(),
    }


def write(path: Path, found: dict[str, Any], turns: Turns) -> None:
    """The JSON file, and beside it the same as CSV and Markdown."""
    script, model = turns.script, found["settings"]["model"]
    lengths = ", ".join(str(length) for length in script.observations)
    lines = [
        "# Time to the first token, turn by turn",
        *origin_lines(found["origin"]),
        f"{model[0].upper()}{model[1:]}. A first prompt of {script.prompt:,} tokens, then "
        f"observations of {lengths}; replies of {script.reply} tokens, greedy; chunks of "
        f"{script.chunk}; random ids. All sides play a turn before any plays the next; medians of "
        f"{turns.repeats}. full_context cuts once after reading (`end`), as its protocol says.",
    ]
    if not found["complete"]:
        lines.append("**Broken off: not every turn was played.**")
    lines += words(turns)
    lines.append(markdown(*rows(turns)))
    save_all(path, found, found["turns"], lines)
