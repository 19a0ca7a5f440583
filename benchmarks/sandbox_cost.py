"""What a sandbox costs: to open, for one command, for many, and for a tree in and out.

    python benchmarks/sandbox_cost.py [--repeat 5] [--commands 1000] [KIND ...]

KIND is docker, bubblewrap, or docker:IMAGE (an image without Python shows the cost of plain execs).
Every line is a median with the smallest and the largest of the repeats, so that a busy machine
shows. Goals: at most 10 ms a command by the resident way, a start under 1 s.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from environments import Sandbox, SandboxError, SandboxSpec, open_sandbox, probe

TREE_FILES, FILE_BYTES = 400, 50_000  # 20 MB


def spread(seconds: list[float], unit: float = 1e3, name: str = "ms") -> str:
    """Median and extremes of the repeats."""
    scaled = [value * unit for value in seconds]
    middle, low, high = statistics.median(scaled), min(scaled), max(scaled)
    return f"{middle:9.2f} {name}   ({low:.2f} to {high:.2f}, {len(scaled)} times)"


def timed(work: Callable[[], object], repeat: int) -> list[float]:
    """Seconds of each repeat."""
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


def opened(kind: str) -> Sandbox:
    """A sandbox of a kind as the command line names it."""
    name, _, image = kind.partition(":")
    return open_sandbox(SandboxSpec(image=image or None), name)


def measure(kind: str, repeat: int, commands: int, tree: Path) -> None:
    """Print the lines of one kind."""
    opened(kind).close()  # makes the image where it is missing; not part of a start
    starts, ends = [], []
    for _ in range(repeat):
        began = time.perf_counter()
        box = opened(kind)
        starts.append(time.perf_counter() - began)
        began = time.perf_counter()
        box.close()
        ends.append(time.perf_counter() - began)
    with opened(kind) as box:
        way = getattr(box, "way", "resident")
        print(f"\n{kind} ({way} commands)")
        print(f"  open                       {spread(starts)}")
        print(f"  close                      {spread(ends)}")
        ones = timed(lambda: box.run(["true"]), max(20, repeat))
        print(f"  one `true`                 {spread(ones)}")
        shells = timed(lambda: box.run("true"), max(20, repeat))
        print(f"  one `true` by bash         {spread(shells)}")

        def many() -> None:
            for _ in range(commands):
                box.run(["true"])

        series = timed(many, min(repeat, 3))
        print(f"  {commands} commands, each{'':<{12 - len(str(commands))}}", end="")
        print(spread([value / commands for value in series]))
        print(f"  20 MB tree in              {spread(timed(lambda: box.put_tree(tree), repeat))}")
        box.run("cat f* > all")
        out = timed(lambda: box.read_file("all", max_bytes=1 << 30), repeat)
        print(f"  20 MB file out             {spread(out)}")
        box.run("rm all")
        print(f"  mark the base of the tree  {spread(timed(box.mark_base, repeat))}")
        box.write_file("f0", b"changed\n")
        print(f"  take the patch             {spread(timed(box.diff, repeat))}")


def main() -> None:
    """Measure the kinds that the command line names, or those that work here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--commands", type=int, default=1000)
    options = parser.parse_args()
    facts = probe()
    kinds = options.kinds or [kind for kind in ("docker", "bubblewrap") if facts[kind]]
    load = os.getloadavg()[0]
    engine = facts["docker"]["version"] if facts["docker"] else "none"
    print(f"command: python {' '.join(sys.argv)}")
    print(
        f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs, load {load:.1f}, "
        f"Python {platform.python_version()}, Docker engine {engine}, cgroup v{facts['cgroup']}"
    )
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for number in range(TREE_FILES):
            (tree / f"f{number}").write_bytes(os.urandom(FILE_BYTES))
        for kind in kinds:
            try:
                measure(kind, options.repeat, options.commands, tree)
            except SandboxError as error:
                print(f"\n{kind}: {error}")


if __name__ == "__main__":
    main()
