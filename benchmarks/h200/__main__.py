"""The command: see the package."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.h200.parts import PARTS, child, supervise
from benchmarks.h200.report import report
from benchmarks.h200.work import Work, add


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="A small shape; on a CPU unless --device says other.")
    ] = False,
    parts: Annotated[str, typer.Option(help="Some of: " + ", ".join(PARTS))] = ",".join(PARTS),
    device: Annotated[str, typer.Option(help="auto, cuda, cpu.")] = "auto",
    minutes: Annotated[float, typer.Option(min=0.1, help="All parts together.")] = 9.0,
    child_parts: Annotated[str, typer.Option("--child", hidden=True)] = "",
    deadline: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Measure what can be measured, part by part, and write it down as it comes."""
    names = [name.strip() for name in (child_parts or parts).split(",") if name.strip()]
    if unknown := [name for name in names if name not in PARTS]:
        raise typer.BadParameter(f"there is no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and not dry_run else "cpu"
    if device == "cpu" and not dry_run:
        raise typer.BadParameter("there is no CUDA here; --dry-run rehearses on a CPU")
    out.mkdir(parents=True, exist_ok=True)
    if child_parts:
        child(Work(out, dry_run, torch.device(device)), names, deadline)
        return
    for old in out.glob("h200.*"):
        old.unlink()
    command = ["python", "-m", "benchmarks.h200", *sys.argv[1:]]
    add(out, {"part": "", "kind": "command", "command": " ".join(command)})
    try:
        supervise(out, names, dry_run, device, time.time() + 60 * minutes)
    finally:
        report(out, dry_run)
    print((out / "h200.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
