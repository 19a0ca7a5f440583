"""How fast it is: the paper's tables 4 and 5, batches, profiles, transformers' fastest way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from agent.bench.contestants import FIXED, NotHere, contestants
from agent.bench.profiles import profile_rows, profile_words, profiled
from agent.bench.readings import Reading
from agent.bench.speed import Bench, Request
from benchmarks.h200.work import Work

_METHODS = ("dense", "nexus", "snapkv", "morphkv")


def table4(work: Work) -> None:
    """The paper's tables 4 and 5: contexts are filled, so that every length is the far end."""
    scale = work.scale
    names = ["dense", "dynamic", "nexus", *(f"{name}{FIXED}" for name in _METHODS)]
    _bench(
        work,
        names,
        Request(
            prefill=(scale.prompt,),
            seen=tuple(scale.prompt + count for count in scale.decoded),
            observation=0,
            new_tokens=scale.new_tokens,
            watched=32,
            repeats=scale.repeats,
            chunk=scale.chunk,
        ),
    )


def read(work: Work) -> None:
    """The same without filling: the model reads the prompt and writes for longer."""
    scale = work.scale
    request = Request(
        seen=(scale.prompt,),
        context="read",
        observation=min(256, scale.prompt),
        new_tokens=5 * scale.new_tokens,
        watched=0,
        repeats=1,
        chunk=scale.chunk,
    )
    _bench(work, [f"nexus{FIXED}", f"dense{FIXED}"], request)


def batched(work: Work) -> None:
    """Many sessions as one batch; dense beside the smallest batch."""
    scale = work.scale
    request = Request(
        seen=(scale.prompt + scale.decoded[0],),
        observation=0,
        new_tokens=33,
        watched=0,
        repeats=min(2, scale.repeats),
        batches=(1, *scale.batches),
        chunk=scale.chunk,
    )
    _bench(work, [f"nexus{FIXED}"], request)
    _bench(
        work,
        ["nexus", f"dense{FIXED}", "dynamic"],
        replace(request, batches=scale.dense_batches, repeats=1),
    )


def profiles(work: Work) -> None:
    """What one decode step and one eviction step are made of."""
    scale = work.scale
    sides = _sides(work, ["nexus"])
    for what in ("decode", "evict", "prefill"):
        found = profiled(
            work.model,
            sides[0],
            what,
            seen=scale.prompt,
            steps=scale.steps,
            chunk=scale.chunk,
        )
        header, rows = profile_rows(found, 16)
        work.tell("profile", words=profile_words(found), header=header, rows=rows, **found.data(40))


def compiled(work: Work) -> None:
    """transformers' own fastest way: StaticCache and torch.compile with CUDA graphs."""
    if work.device.type != "cuda":
        raise NotHere("a compiled decode step is for CUDA")
    scale, model = work.scale, work.model
    plan = Request(seen=(scale.prompt,), observation=0, new_tokens=scale.new_tokens, watched=0)
    model.set_attn_implementation("sdpa")
    fast = torch.compile(model.forward, mode="reduce-overhead", fullgraph=False)
    with patch.object(model, "forward", fast):
        _bench(work, ["static"], replace(plan, repeats=2), label="static, compiled")


def _sides(work: Work, names: list[str]) -> Any:
    changes = {"scope": "prefill+decode", "prefill_eviction": "chunk"}
    return contestants(work.model, names, [work.scale.budget], changes=changes)


def _bench(work: Work, names: list[str], request: Request, label: str = "") -> None:
    bench = Bench(work.model, _sides(work, names), request)
    told = 0

    def tell() -> None:
        nonlocal told
        for run in bench.readings.runs[told:]:
            work.tell("reading", label=label, **_named(run))
        told = len(bench.readings.runs)

    bench.on_reading = tell
    try:
        bench.run()
    finally:
        tell()
        for point, why in bench.failed.items():
            what = f"{point.who}, {point.kind} at {point.tokens}, batch {point.batch}"
            work.tell("error", what=what, why=why)


def _named(run: Reading) -> dict[str, Any]:
    """As data; `kind` is taken by the record's own."""
    found = run.data()
    return {"what": found.pop("kind"), **found}
