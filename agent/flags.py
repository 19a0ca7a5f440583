"""Flags that several commands have, each defined once."""

from __future__ import annotations

from typing import Annotated

import typer

from agent.run_options import DEFAULT_BUDGET, DEMO_BUDGET

CACHE, LIMITS, OUTPUT = "Model and cache", "Limits and attempts", "Output"

# Model and cache

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A name of `agent models list`, hub id, folder or GGUF file.",
        rich_help_panel=CACHE,
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16, float32, int8.", rich_help_panel=CACHE)
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=CACHE)]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Spread a model over several GPUs: auto, balanced, sequential, or a JSON file of "
        "modules and devices. The cache lies beside its layers.",
        rich_help_panel=CACHE,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Hold linear layers in fewer bits: 4bit or 8bit (bitsandbytes), or a JSON file with a "
        "quantization_config of transformers. Checkpoints that have one need no flag.",
        rich_help_panel=CACHE,
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        help="What to evict: nexus, topk, snapkv, h2o, morphkv, streaming_llm, random; with "
        "budgets by layer or head: pyramidkv, ada-nexus, ada-snapkv, ada-pyramidkv. NAME-paper "
        "runs one as the Nexus paper does. dense evicts nothing.",
        rich_help_panel=CACHE,
    ),
]
ProtocolName = Annotated[
    str,
    typer.Option(
        help="true_eviction: one cache for the whole run. full_context: a fresh one each turn.",
        rich_help_panel=CACHE,
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help=f"Tokens the cache holds: {DEFAULT_BUDGET}, for the demo {DEMO_BUDGET}.",
        rich_help_panel=CACHE,
    ),
]
CacheGib = Annotated[
    float | None,
    typer.Option(
        metavar="GIB",
        help="Bytes the cache takes at most, in GiB, instead of --budget: as many tokens as fit.",
        rich_help_panel=CACHE,
    ),
]
Density = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="Share of the tokens seen that stays.", rich_help_panel=CACHE
    ),
]
Scope = Annotated[
    str | None,
    typer.Option(help="When to evict: prefill, prefill+decode.", rich_help_panel=CACHE),
]
PrefillEviction = Annotated[
    str | None,
    typer.Option(
        help="chunk: after each chunk of a prompt. end: after the last.", rich_help_panel=CACHE
    ),
]
Chunk = Annotated[int, typer.Option(help="Tokens of one prefill chunk.", rich_help_panel=CACHE)]

# Limits and attempts

Steps = Annotated[int | None, typer.Option(help="Replies at most.", rich_help_panel=LIMITS)]
NewTokens = Annotated[int | None, typer.Option(help="Tokens of one reply.", rich_help_panel=LIMITS)]
TotalTokens = Annotated[
    int | None, typer.Option(help="Tokens of the whole run.", rich_help_panel=LIMITS)
]
WallTime = Annotated[
    float | None, typer.Option(help="Seconds of one attempt.", rich_help_panel=LIMITS)
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy. Default: the tool set's.", rich_help_panel=LIMITS),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Mass of the tokens drawn from. Default: the tool set's.", rich_help_panel=LIMITS
    ),
]
SandboxKind = Annotated[
    str,
    typer.Option(
        help="docker, bubblewrap, or auto: Docker where an engine answers.", rich_help_panel=LIMITS
    ),
]
ToolSet = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="Tool set (prompts, tools, limits, sampling): compact, r2e, bash, native, or auto, "
        "which goes by the model.",
        rich_help_panel=LIMITS,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value of the tool set (limits.steps=9) or cache (cache.window=32).",
        rich_help_panel=LIMITS,
    ),
]

# Output

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing.", rich_help_panel=OUTPUT)]


def overrides(
    *,
    steps: int | None,
    new_tokens: int | None,
    total_tokens: int | None,
    wall_time: float | None,
    set_: list[str] | None,
) -> tuple[str, ...]:
    """Limits with flags of their own, and what `--set` says, which comes later and wins."""
    limits = {
        "limits.steps": steps,
        "limits.new_tokens": new_tokens,
        "limits.total_tokens": total_tokens,
        "limits.wall_time": wall_time,
    }
    given = [f"{key}={value}" for key, value in limits.items() if value is not None]
    return (*given, *(set_ or ()))
