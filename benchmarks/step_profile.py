"""Where the time of a decode step and of an eviction step goes, now and in an older version.

Both versions' `cache` packages run the same script in processes of their own, in turn, with the
same model (float32) behind the same code that it reads. A decode step is a token drawn (temperature
0.7, top-p 0.8) and fed; evictions are taken apart from it.

git worktree add BEFORE a4accbe^
python -m benchmarks.step_profile --before BEFORE --save
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_READ = ROOT / "environments"  # code that the model reads, this version's for both
_SEEN, _BUDGET, _TOP, _PROFILED = 2560, 2048, 12, 8


def child(folder: Path, tokens: int, threads: int) -> dict[str, Any]:
    """Measure the `cache` package that is imported here."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cache import EvictingCache, Sampling, decode, prefill, preset

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(_READ.glob("*.py")))
    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids[:_SEEN]
    cache = EvictingCache(model, preset("nexus", budget={"kind": "tokens", "tokens": _BUDGET}))
    logits = prefill(model, cache, ids)
    sampling = Sampling(temperature=0.7, top_p=0.8, seed=1)
    evict, parts = cache.evict, dict[str, list[float]](decode=[], evict=[])
    profiles: dict[str, list[Any]] = {"decode": [], "evict": []}
    profiled = False

    def around(name: str, do: Any) -> Any:
        """`do`, timed, or under the profiler."""
        if not profiled:
            began = time.perf_counter()
            result = do()
            parts[name].append(time.perf_counter() - began)
            return result
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            result = do()
        profiles[name].append(found)
        return result

    def step(*_: Any, **__: Any) -> Any:
        """In the place of `evict`, which is looked at by itself, after the step."""

    stream = decode(model, cache, logits, sampling=sampling)
    next(stream)
    block = cache.config.block_size
    for number in range(tokens + block):
        cache.evict = step  # type: ignore[method-assign]  # until the token is fed
        profiled = tokens <= number < tokens + _PROFILED
        around("decode", lambda: next(stream))
        del cache.evict
        profiled = number >= tokens
        if cache.seen % block == 0:
            around("evict", lambda: evict("decode"))
    return {
        "ms": {name: [1e3 * t for t in times] for name, times in parts.items()},
        "profiles": {name: _table(found) for name, found in profiles.items()},
        "torch": torch.__version__,
    }


def _table(found: list[Any]) -> dict[str, Any]:
    """Per step: operations, bytes allocated, and the costliest operations."""
    ops: dict[str, list[float]] = {}
    for one in found:
        for event in one.key_averages():
            into = ops.setdefault(event.key, [0.0] * 3)
            into[0] += event.count / len(found)
            into[1] += event.self_cpu_time_total / 1e3 / len(found)
            into[2] += max(0, event.self_cpu_memory_usage) / len(found)
    rows = sorted(ops.items(), key=lambda item: -item[1][1])
    return {
        "steps": len(found),
        "operations": sum(v[0] for name, v in rows if name.startswith("aten::")),
        "allocated": sum(v[2] for _, v in rows),
        "rows": [[name, *values] for name, values in rows[:_TOP]],
    }


def measure(place: Path, folder: Path, tokens: int, threads: int) -> dict[str, Any]:
    """One process with the `cache` package of `place`."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child"]
    command += ["--model", str(folder), "--tokens", str(tokens), "--threads", str(threads)]
    env = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(command, env=env, cwd=place, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{place}: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _commit(place: Path) -> str:
    git = ["git", "-C", str(place), "log", "-1", "--format=%h, %cd", "--date=format:%Y-%m-%d %H:%M"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def report(sides: dict[str, list[dict[str, Any]]], names: dict[str, str]) -> list[str]:
    """Medians with their ratios, then the tables of the first round."""
    from benchmarks.reporting import markdown

    lines, rows = list[str](), []
    for part in ("decode", "evict"):
        medians = {
            side: [statistics.median(run["ms"][part]) for run in runs]
            for side, runs in sides.items()
        }
        rows.append(
            [part]
            + [
                f"{statistics.median(m):.1f} ({min(m):.1f} to {max(m):.1f})"
                for m in medians.values()
            ]
        )
        if len(medians) == 2:
            old, new = medians.values()
            ratios = sorted(a / b for a, b in zip(old, new, strict=True))
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            rows[-1].append(f"{statistics.median(ratios):.2f} ({spread})")
    header = ["step", *(f"{side}: {names[side]}, ms" for side in sides)]
    header += ["before / now"] if len(sides) == 2 else []
    lines += ["Without the profiler, the median of each round's steps and over the rounds:\n"]
    lines += [markdown(header, rows), ""]
    for part in ("decode", "evict"):
        for side, runs in sides.items():
            found = runs[0]["profiles"][part]
            lines += [f"## One {part} step, {side}\n"]
            lines += [
                f"{found['operations']:,.0f} operations, "
                f"{found['allocated'] / 2**20:.2f} MiB allocated a step ({found['steps']} steps).\n"
            ]
            table = [
                [name, f"{calls:,.1f}", f"{ms:.3f}", f"{size / 1024:,.1f}"]
                for name, calls, ms, size in found["rows"]
            ]
            lines += [markdown(["operation", "calls", "own ms", "allocates KiB"], table), ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of the older version")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b", help="as `agent run --model`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="timed before the profiler looks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(Path(given.model), given.tokens, given.threads)))
        return
    from agent.models import pull, resolve
    from benchmarks import reporting

    folder = pull(resolve(given.model)).folder

    origin = reporting.Origin()
    places = {"before": given.before, "now": ROOT} if given.before else {"now": ROOT}
    sides: dict[str, list[dict[str, Any]]] = {side: [] for side in places}
    try:
        for number in range(given.rounds):
            for side in list(places)[:: 1 if number % 2 else -1]:
                print(f"round {number + 1} of {given.rounds}, {side}", file=sys.stderr)
                sides[side].append(measure(places[side], folder, given.tokens, given.threads))
    except KeyboardInterrupt:  # whole rounds stay
        whole = min(map(len, sides.values()))
        if not whole:
            raise
        sides = {side: runs[:whole] for side, runs in sides.items()}
    names = {side: _commit(place) for side, place in places.items()}
    text = "\n".join(
        [
            "# The decode step and the eviction step, before and after\n",
            f"{given.model}, float32, nexus at {_BUDGET} tokens behind {_SEEN} of code, blocks of "
            "32. The profiler itself slows small operations down.\n",
            *origin.lines(),
            *report(sides, names),
        ]
    )
    print(text)
    if given.save:
        reporting.save(reporting.RESULTS / "step_profile.md", text)


if __name__ == "__main__":
    main()
