"""What the benches share: how a result says what produced it, and how it gets to the disk."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cache import preset, preset_names

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


def hardware() -> str:
    """CPU, threads and load, in words."""
    load = " / ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{_cpu_name()}, {os.cpu_count()} CPUs of which torch uses {torch.get_num_threads()}, "
        f"load {load} (1 / 5 / 15 minutes)"
    )


def versions() -> str:
    """Releases that the numbers depend on, and this repository's commit."""
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, commit {_commit()}"
    )


class Origin:
    """What produced a result, as it is when the bench starts."""

    def __init__(self, module: str) -> None:
        self.date = time.strftime("%-d %B %Y, %H:%M")
        self.command = " ".join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])
        self.hardware = hardware()
        self.versions = versions()

    def lines(self) -> list[str]:
        """Paragraphs for the result file."""
        load = " / ".join(f"{value:.1f}" for value in os.getloadavg())
        return [
            f"{self.date}. `{self.command}`\n",
            f"{self.versions}. {self.hardware}; at the end {load}.\n",
        ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(path: Path, text: str) -> None:
    """Replace a file in one step: whoever breaks off leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    part.replace(path)


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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "CPU")


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    # Only what the numbers depend on: a result file or the README is being written itself.
    changed = git("status", "--porcelain", "--", "cache", "agent/models.py", "agent/int8_linear.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")
