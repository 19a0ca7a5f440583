"""What the benches share: which methods they measure, and how a result says what produced it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from agent.bench.origin import at_end, markdown, origin, origin_lines, save
from cache import preset, preset_names

__all__ = ["RESULTS", "ROOT", "Origin", "bar", "chosen", "markdown", "mib", "own_presets", "save"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

_FIRST = ("dense", "nexus", "topk")


def own_presets() -> list[str]:
    """Presets in the order in which tables show them, those with the paper's settings left out."""
    names = [name for name in preset_names() if not name.endswith("-paper")]
    rest = sorted((name for name in names if name not in _FIRST), key=lambda n: preset(n).ragged)
    return [*_FIRST, *rest]


def chosen(names: Sequence[str]) -> list[str]:
    """The presets that a command line names, all of `own_presets` for none. Raises ValueError."""
    unknown = [name for name in names if name not in preset_names()]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; there are: {', '.join(preset_names())}")
    return list(names) or own_presets()


class Origin:
    """What produced a result, as it is when the bench starts."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._found = origin(torch.device(device))

    def lines(self) -> list[str]:
        """Paragraphs for the result file."""
        return [f"{line}\n" for line in origin_lines(at_end(self._found))]


def bar() -> Progress:
    """A progress bar on stderr, so that stdout holds results only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def mib(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.1f}"
