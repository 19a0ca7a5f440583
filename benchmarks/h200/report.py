"""What it says: every finding as JSON and as Markdown, beside the paper's numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.bench.contestants import FIXED
from agent.bench.origin import markdown, origin_lines, save
from agent.bench.readings import Spread, show, spread
from benchmarks.h200.work import DRY, REAL, Scale, records_of

# Tables 4 and 5 of "Nexus Sampling" (arXiv 2606.23961): Llama-3.1-8B in bfloat16, one H200, batch
# 1, a prompt of 8K; tokens/s and GiB of cache by the number of tokens decoded.
PAPER_SPEED = {
    4096: {"dense": 35.1, "snapkv": 40.2, "morphkv": 31.4, "nexus": 45.5},
    8192: {"dense": 35.0, "snapkv": 34.2, "morphkv": 29.2, "nexus": 45.2},
    16384: {"dense": 36.0, "snapkv": 35.0, "morphkv": 32.8, "nexus": 43.8},
}
PAPER_GIB = {
    4096: {"dense": 1.5, "nexus": 0.3},
    8192: {"dense": 2.0, "nexus": 0.3},
    16384: {"dense": 3.0, "nexus": 0.4},
}
TARGET_SPEED, TARGET_GIB = 150, 0.35
_HEADER = ["method", "seen", "batch", "tokens/s", "ms a step", "GiB", "peak GiB", "eviction %"]
_HEADER += ["noting %", "runs"]
_RIGHT = ["what", "first logits off by", "all logits off by", "same cuts", "right"]


def report(out: Path, dry: bool) -> None:
    """h200.json and h200.md from all findings."""
    records = records_of(out)
    save(out / "h200.json", json.dumps(records, indent=1))
    save(out / "h200.md", "\n\n".join(lines_of(records, dry)))


def lines_of(records: list[dict[str, Any]], dry: bool) -> list[str]:
    """The report as paragraphs of Markdown."""
    scale = DRY if dry else REAL
    lines = ["# Nexus on one GPU"]
    if dry:
        lines = [
            "# benchmarks.h200: a dry run on a CPU",
            "**A rehearsal with a tiny model on a CPU that other work shares: it shows that every "
            "part runs and what the report looks like. Its times say nothing of speed, on this "
            "machine or any other; the paper's numbers beside them are of an H200.**",
        ]
    for record in _kind(records, "origin"):
        command = _kind(records, "command")[0]["command"]  # of all parts, not of their processes
        lines += origin_lines({**record, "command": command})
    lines += _machine_lines(records)
    lines += _correct_lines(records)
    lines += _table4_lines(records, scale, dry)
    lines += _batch_lines(records)
    for part, title in (("read", "Read and written for longer"), ("compiled", "StaticCache")):
        rows = _rows(records, part)
        if rows:
            lines += [f"## {title}", markdown(_HEADER, rows)]
    for record in _kind(records, "profile"):
        lines += [f"## One step: {record['what']}", record["words"]]
        lines.append(markdown(record["header"], record["rows"]))
    problems = [r for r in records if r["kind"] in ("error", "missing")]
    if problems:
        lines += ["## Not measured", *(f"- {r['part']}: {r['what']}: {r['why']}" for r in problems)]
    seconds = ", ".join(f"{r['part']} {r['seconds']:.0f} s" for r in _kind(records, "end"))
    return [*lines, f"Time taken: {seconds}."] if seconds else lines


def _kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def _machine_lines(records: list[dict[str, Any]]) -> list[str]:
    lines = []
    for record in _kind(records, "copy"):
        lines.append(f"Copy on the device: {record['gb_per_s']:,.0f} GB/s, read and written.")
    for record in _kind(records, "gemv"):
        lines.append(f"Matrix times vector: {record['gb_per_s']:,.0f} GB/s of weights read.")
    for record in _kind(records, "bound"):
        lines.append(
            f"{record['shape']}: {record['weight_gib']:.2f} GiB of weights, "
            f"{record['read_gib_per_token']:.2f} GiB of them read for each token: at that rate "
            f"at most {record['tokens_per_s']:,.0f} tokens/s in batches of 1 (the weight-reading "
            "bound)."
        )
    return lines


def _correct_lines(records: list[dict[str, Any]]) -> list[str]:
    found = _kind(records, "same")
    if not found:
        return []
    rows = [
        [
            record["what"],
            f"{record['first']:.1e}",
            f"{record['distance']:.1e}",
            f"{record['same_cuts']} of {record['cuts']}",
            "yes" if record["ok"] else "**no**",
        ]
        for record in found
    ]
    return ["## Right?", markdown(_RIGHT, rows)]


def _table4_lines(records: list[dict[str, Any]], scale: Scale, dry: bool) -> list[str]:
    runs = [r for r in _kind(records, "reading") if r["part"] == "table4" and r["what"] == "decode"]
    if not runs:
        return []
    bound = next((r["tokens_per_s"] for r in _kind(records, "bound")), None)
    header = ["decoded", "method", "tokens/s", "of the bound", "ms a step", "GiB", "peak GiB"]
    header += ["eviction %", "noting %", "paper tokens/s", "paper GiB"]

    def of_bound(speed: float) -> str:
        return f"{speed / bound:.0%}"

    rows = []
    for decoded, printed in zip(scale.decoded, PAPER_SPEED, strict=True):
        for who in dict.fromkeys(r["who"] for r in runs):
            mine = [r for r in runs if (r["who"], r["tokens"]) == (who, scale.prompt + decoded)]
            if not mine:
                continue
            plain = who.partition("@")[0].removesuffix(FIXED)
            name = {"dynamic": "dense"}.get(plain, plain)
            rows.append(
                [
                    f"{decoded:,}",
                    who,
                    _speed(mine),
                    _median(mine, "tokens_per_s", of_bound) if bound else "–",
                    *_costs(mine),
                    f"{PAPER_SPEED[printed].get(name, '–')} ({printed:,})",
                    f"{PAPER_GIB[printed].get(name, '–')}",
                ]
            )
    lines = [
        "## Tables 4 and 5 of the paper",
        f"{scale.shape}, {str(scale.dtype).removeprefix('torch.')}, batch 1, "
        f"{scale.prompt:,} tokens of prompt and then `decoded` ones behind every run; budget "
        f"{scale.budget:,} tokens, all methods under prefill+decode; contexts are filled with "
        "random keys and values. `dense` is our store, `dynamic` transformers' DynamicCache with "
        "SDPA; `+fixed` decodes by static shapes, one graph on CUDA; the paper's dense is "
        "FlashAttention 2, and its numbers are averages over the "
        "tokens decoded.",
        markdown(header, rows),
    ]
    if not dry:
        lines.append(f"Aimed at: {TARGET_SPEED} tokens/s and {TARGET_GIB} GiB at every length.")
    prompts = _rows(records, "table4", "prefill")
    return [*lines, "Reading the prompt from nothing:", markdown(_HEADER, prompts)]


def _batch_lines(records: list[dict[str, Any]]) -> list[str]:
    rows = _rows(records, "batched")
    return ["## Many sessions on one model", markdown(_HEADER, rows)] if rows else []


def _rows(records: list[dict[str, Any]], part: str, what: str = "decode") -> list[list[str]]:
    """One row a point of a part."""
    runs = [r for r in _kind(records, "reading") if (r["part"], r["what"]) == (part, what)]
    points = dict.fromkeys((r["label"], r["who"], r["tokens"], r["batch"]) for r in runs)
    rows = []
    for point in points:
        mine = [r for r in runs if (r["label"], r["who"], r["tokens"], r["batch"]) == point]
        label, who, tokens, batch = point
        place = [label or who, f"{tokens:,}", str(batch)]
        rows.append([*place, _speed(mine), *_costs(mine), str(len(mine))])
    return rows


def _spread(runs: list[dict[str, Any]], name: str) -> Spread | None:
    return spread([run[name] for run in runs if name in run])


def _median(runs: list[dict[str, Any]], name: str, text: Callable[[float], str]) -> str:
    found = _spread(runs, name)
    return "–" if found is None else text(found.median)


def _speed(runs: list[dict[str, Any]]) -> str:
    return show(_spread(runs, "tokens_per_s"), "{:,.1f}".format)


def _costs(runs: list[dict[str, Any]]) -> list[str]:
    """Milliseconds, bytes and shares: what both kinds of table say of a point."""
    return [
        _median(runs, "step_ms", "{:.2f}".format),
        _median(runs, "bytes", _gib),
        _median(runs, "peak_bytes", _gib),
        _median(runs, "evicting_share", "{:.1%}".format),
        _median(runs, "noting_share", "{:.1%}".format),
    ]


def _gib(count: float) -> str:
    return f"{count / 2**30:.4g}"
