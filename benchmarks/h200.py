"""One script for a machine with an H200: are the results right on CUDA, and how fast is it?

    python -m benchmarks.h200 --out DIR            at most ten minutes
    python -m benchmarks.h200 --dry-run --out DIR  the same on a CPU with a small shape: no speeds

It needs torch and transformers, pydantic, rich and typer; no network, no model files (weights are
random). Parts run in a process of their own, each under a time limit: what a part has found is on
the disk at once, a part that fails or hangs is noted, and the next ones go on. DIR then holds
h200.jsonl (everything, as it came), h200.json and h200.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from agent.bench.contestants import FIXED, NotHere, batch_decoder, contestants, synchronize
from agent.bench.origin import markdown, origin, origin_lines, save
from agent.bench.profiles import profile_rows, profile_words, profiled
from agent.bench.readings import Reading, Spread, spread
from agent.bench.shapes import bytes_read_per_token, shaped_model, weight_bytes
from agent.bench.speed import Bench, Request
from cache import EvictingCache, make_pool, prefill, preset, preset_names
from cache.generate import forward

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
_METHODS = ("dense", "nexus", "snapkv", "morphkv")
TARGET_SPEED, TARGET_GIB = 150, 0.35
_KILL_AFTER = 20.0  # seconds beyond its limit that a part has to stop by itself


@dataclass(frozen=True)
class Scale:
    """Sizes of a run: those of the paper, or small ones that a CPU gets through."""

    shape: str = "llama-3.1-8b"
    dtype: torch.dtype = torch.bfloat16
    prompt: int = 8192
    decoded: tuple[int, ...] = (4096, 8192, 16384)
    budget: int = 1638
    batches: tuple[int, ...] = (16, 64, 128)
    dense_batches: tuple[int, ...] = (16,)
    new_tokens: int = 96
    repeats: int = 3
    copied: int = 4 << 30  # bytes of the copy that measures bandwidth
    steps: int = 4  # that the profiler looks at
    chunk: int = 512


REAL = Scale()
DRY = Scale(
    shape="tiny",
    dtype=torch.float32,
    prompt=256,
    decoded=(128, 256, 512),
    budget=160,
    batches=(2, 4),
    dense_batches=(2,),
    new_tokens=33,
    repeats=2,
    copied=16 << 20,
    steps=2,
    chunk=64,
)


class OverTime(BaseException):
    """A part's time is up. No Exception, so that nobody takes it for an error of a run."""


@dataclass
class Work:
    """What parts share: the device, the sizes, the model, and where results go."""

    out: Path
    dry: bool
    device: torch.device
    part: str = ""
    found: list[dict[str, Any]] = field(default_factory=list)

    @property
    def scale(self) -> Scale:
        return DRY if self.dry else REAL

    @cached_property
    def model(self) -> PreTrainedModel:
        """The big one: made when it is first asked for."""
        scale = self.scale
        return shaped_model(scale.shape, dtype=scale.dtype, device=self.device)

    def tell(self, kind: str, **values: Any) -> None:
        """Put one finding on the disk."""
        record = {"part": self.part, "kind": kind, "at": time.time(), **values}
        with (self.out / "h200.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if kind not in ("begin", "reading"):
            print(json.dumps(record)[:400], flush=True)


# -- the machine ---------------------------------------------------------------------------------


def machine(work: Work) -> None:
    """What it is, and how fast it reads: copies, and products of a matrix and a vector."""
    device, scale = work.device, work.scale
    work.tell("origin", **origin(device))
    half = scale.copied // 2
    seconds = _copying(device, half)
    work.tell("copy", gb_per_s=2 * half / seconds.median / 1e9, best=2 * half / seconds.low / 1e9)
    side = 256 if work.dry else 8192
    count = 2 if work.dry else 16  # together far beyond any cache
    weights = [torch.randn(side, side, device=device).to(scale.dtype) for _ in range(count)]
    vector = torch.randn(side, 1, device=device).to(scale.dtype)

    def products() -> None:
        for weight in weights:
            weight @ vector

    seconds = _timed(device, products, 10)
    read = sum(weight.nbytes for weight in weights)
    work.tell("gemv", gb_per_s=read / seconds.median / 1e9, best=read / seconds.low / 1e9)
    model = work.model
    per_token = bytes_read_per_token(model)
    work.tell(
        "bound",
        shape=scale.shape,
        weight_gib=weight_bytes(model) / 2**30,
        read_gib_per_token=per_token / 2**30,
        tokens_per_s=read / seconds.median / per_token,
    )


def _copying(device: torch.device, count: int) -> Spread:
    """Seconds of copying so many bytes; they are given back."""
    source = torch.empty(count, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return _timed(device, lambda: target.copy_(source), 10)


def _timed(device: torch.device, do: Callable[[], Any], repeats: int) -> Spread:
    for _ in range(2):
        do()
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        do()
        synchronize(device)
        times.append(time.perf_counter() - began)
    found = spread(times)
    assert found is not None
    return found


# -- whether it is right -------------------------------------------------------------------------


def correct(work: Work) -> None:
    """Every method on the device against the CPU; variable-length kernel and batches against the
    plain ways."""
    small = _small_model()
    there = _small_model().to(device=work.device)
    ids = torch.randint(97, (360,), generator=torch.Generator().manual_seed(1)).tolist()
    names = [name for name in preset_names() if not name.endswith("-paper")] + ["nexus-paper"]
    for name in names:
        with _noted(work, f"{name}, float32"):
            here, other = (_played(model, name, ids) for model in (small, there))
            work.tell("same", what=f"{name}, float32: device against CPU", **_compared(here, other))
    if work.device.type == "cuda":
        half = _small_model().to(device=work.device, dtype=torch.bfloat16)
        for name in ("dense", "nexus", "snapkv", "morphkv", "ada-nexus"):
            with _noted(work, f"{name}, bfloat16"):
                here, other = _played(small, name, ids), _played(half, name, ids)
                work.tell(
                    "same",
                    what=f"{name}, bfloat16 on the device against float32 on the CPU",
                    **_compared(here, other, half=True),
                )
        with _noted(work, "variable-length attention"):
            _varlen(work, half, ids)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        if work.device.type == "cpu" and dtype is torch.bfloat16:
            continue
        for fixed in (False, True):
            with _noted(work, f"batched decode, {dtype}, fixed {fixed}"):
                _batched_is_solo(work, there.to(dtype=dtype), dtype, tolerance, fixed=fixed)


@dataclass
class Played:
    """What a small model did: logits of every token written, and what each cut kept."""

    logits: torch.Tensor
    kept: list[torch.Tensor]


def _small_model() -> Any:
    """Large enough for every kernel, small enough for a CPU; attention far from uniform."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.2,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)


def _config(name: str) -> Any:
    if name == "dense":
        return preset(name)
    budget = {"kind": "tokens", "tokens": 192}
    return preset(name, budget=budget, scope="prefill+decode", prefill_eviction="chunk")


@torch.inference_mode()
def _played(model: PreTrainedModel, name: str, ids: list[int]) -> Played:
    cache = EvictingCache(model, _config(name), record_kept=True)
    prefill(model, cache, ids[:300], chunk=100)
    logits = []
    for token in ids[300:]:
        logits.append(forward(model, cache, torch.tensor([token], device=model.device)).cpu())
        cache.evict("decode")
    kept = [record.kept for record in cache.stats.records if record.kept is not None]
    return Played(torch.stack(logits), kept)


def _compared(here: Played, there: Played, *, half: bool = False) -> dict[str, Any]:
    """Relative distance of logits, and cuts that kept the same.

    Right is: all cuts and logits the same but for rounding. In half precision (`half`) scores that
    are a rounding apart can change places, and what is kept then differs: there the first logits
    decide.
    """
    same = sum(
        a.shape == b.shape and bool((a == b).all())
        for a, b in zip(here.kept, there.kept, strict=False)
    )
    distance = _distance(there.logits, here.logits)
    first = _distance(there.logits[:1], here.logits[:1])
    equal = len(here.kept) == len(there.kept) == same
    return {
        "distance": distance,
        "first": first,
        "cuts": len(here.kept),
        "same_cuts": same,
        "ok": first < 0.1 if half else equal and distance < 1e-3,
    }


def _distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    """|found - reference| / |reference|; NaN never passes a comparison."""
    return float((found.double() - reference.double()).norm() / reference.double().norm())


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _varlen(work: Work, model: PreTrainedModel, ids: list[int]) -> None:
    """Heads of different lengths in one kernel, against one head after the other."""
    from cache import ragged_attention

    kernel = ragged_attention.varlen_kernel()
    if kernel is None:
        raise NotHere("this torch has no variable-length attention that reads segments in place")
    fast = _played(model, "ada-nexus", ids)
    with _replaced(ragged_attention, "varlen_kernel", lambda: None):
        plain = _played(model, "ada-nexus", ids)
    what = "ada-nexus, bfloat16: variable-length kernel against one head after the other"
    work.tell("same", what=what, **_compared(plain, fast, half=True))


@torch.inference_mode()
def _batched_is_solo(
    work: Work, model: PreTrainedModel, dtype: torch.dtype, tolerance: float, *, fixed: bool
) -> None:
    """Four sessions of different lengths as one batch, and each by itself."""
    config, lengths = _config("nexus"), (40, 130, 201, 333)
    random = torch.Generator().manual_seed(2)
    prompts = [torch.randint(97, (n,), generator=random).tolist() for n in lengths]
    written = torch.randint(97, (40, len(lengths)), generator=random).tolist()
    pool = make_pool(model, config, rows=len(lengths))
    together = [EvictingCache(model, config, pool=pool, record_kept=True) for _ in lengths]
    alone = [EvictingCache(model, config, record_kept=True) for _ in lengths]
    for caches in (together, alone):
        for cache, prompt in zip(caches, prompts, strict=True):
            prefill(model, cache, prompt, chunk=64)
    decoder, worst = batch_decoder(model, pool, fixed=fixed), 0.0
    for tokens in written:
        batch = decoder.step(together, tokens).cpu()
        solo = torch.stack(
            [
                forward(model, cache, torch.tensor([token], device=model.device)).cpu()
                for cache, token in zip(alone, tokens, strict=True)
            ]
        )
        worst = max(worst, _distance(batch, solo))
        for cache in (*together, *alone):
            cache.evict("decode")
    pairs = [
        bool((a.kept == b.kept).all())
        for one, two in zip(together, alone, strict=True)
        for a, b in zip(one.stats.records, two.stats.records, strict=True)
        if a.kept is not None and b.kept is not None
    ]
    exact = all(pairs) or dtype is not torch.float32
    work.tell(
        "same",
        what=f"{len(lengths)} sessions as one batch against each alone, {dtype}"
        + (", fixed shapes (one graph on CUDA)" if fixed else ""),
        distance=worst,
        first=worst,
        cuts=len(pairs),
        same_cuts=sum(pairs),
        ok=exact and worst < tolerance,
    )


@contextlib.contextmanager
def _noted(work: Work, what: str) -> Iterator[None]:
    """An error of one check is a finding, and the next one goes on."""
    try:
        yield
    except NotHere as error:
        work.tell("missing", what=what, why=str(error))
    except Exception as error:
        work.tell("error", what=what, why=f"{type(error).__name__}: {error}"[:500])


# -- how fast it is ------------------------------------------------------------------------------


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
    with _replaced(model, "forward", fast):
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


# -- running the parts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part and its time limit in seconds."""

    run: Callable[[Work], None]
    limit: float


PARTS = {
    "machine": Part(machine, 60),
    "correct": Part(correct, 90),
    "table4": Part(table4, 250),
    "batched": Part(batched, 110),
    "read": Part(read, 60),
    "profiles": Part(profiles, 60),
    "compiled": Part(compiled, 120),
}


def child(work: Work, names: list[str], deadline: float) -> None:
    """Run parts one after the other in this process."""

    def over(*_: Any) -> None:
        raise OverTime

    signal.signal(signal.SIGALRM, over)
    for name in names:
        left = deadline - time.time()
        limit = min(PARTS[name].limit, left)
        work.part = name
        if limit < 1:
            work.tell("missing", what=name, why="no time was left")
            work.tell("end", seconds=0.0)
            continue
        work.tell("begin", limit=limit)
        began = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            PARTS[name].run(work)
        except OverTime:
            work.tell("error", what=name, why=f"stopped after {limit:.0f} s: its time was up")
        except NotHere as error:
            work.tell("missing", what=name, why=str(error))
        except Exception as error:
            work.tell("error", what=name, why=f"{type(error).__name__}: {error}"[:500])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        work.tell("end", seconds=time.perf_counter() - began)
        if work.device.type == "cuda":
            # After an error of the device nothing else in this process works: the parts that are
            # left then get a new one.
            torch.cuda.synchronize(work.device)
            torch.cuda.empty_cache()


def supervise(out: Path, names: list[str], dry: bool, device: str, deadline: float) -> None:
    """Run parts in processes: a new one for what is left whenever one died or hung."""
    left = list(names)
    while left and time.time() < deadline:
        command = [sys.executable, "-m", "benchmarks.h200", "--out", str(out), "--device", device]
        command += ["--child", ",".join(left), "--deadline", str(deadline)]
        process = subprocess.Popen(command + (["--dry-run"] if dry else []))
        why = _watch(process, out, dry, deadline)
        records = records_of(out)
        begun = {r["part"]: r["at"] for r in records if r["kind"] == "begin"}
        ended = [r["part"] for r in records if r["kind"] == "end"]
        broken = [name for name in left if name in begun and name not in ended]
        for name in broken:
            _add(out, {"part": name, "kind": "error", "what": name, "why": why})
            _add(out, {"part": name, "kind": "end", "seconds": time.time() - begun[name]})
        if not any(name in begun or name in ended for name in left):
            _add(out, {"part": left[0], "kind": "error", "what": left[0], "why": f"{why} at once"})
            left = left[1:]
        left = [name for name in left if name not in begun and name not in ended]
        report(out, dry)


def _watch(process: subprocess.Popen[bytes], out: Path, dry: bool, deadline: float) -> str:
    """Wait for a process, and kill it when a part overstays; why it ended, in words."""
    while True:
        try:
            code = process.wait(timeout=1)
            return f"its process ended with {code}"
        except subprocess.TimeoutExpired:
            pass
        report(out, dry)
        begun = [r for r in records_of(out) if r["kind"] in ("begin", "end")]
        late = time.time() > deadline + _KILL_AFTER
        if begun and begun[-1]["kind"] == "begin":
            late |= time.time() > begun[-1]["at"] + begun[-1]["limit"] + _KILL_AFTER
        if late:
            process.kill()
            process.wait()
            return "it hung and was killed"


def records_of(out: Path) -> list[dict[str, Any]]:
    """All findings so far; a torn last line is left out."""
    path = out / "h200.jsonl"
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _add(out: Path, record: dict[str, Any]) -> None:
    with (out / "h200.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


# -- what it says --------------------------------------------------------------------------------


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
            "# benchmarks/h200.py: a dry run on a CPU",
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


_HEADER = ["method", "seen", "batch", "tokens/s", "ms a step", "GiB", "peak GiB", "eviction %"]
_HEADER += ["noting %", "runs"]


_RIGHT = ["what", "first logits off by", "all logits off by", "same cuts", "right"]


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
    rows = []
    for decoded, printed in zip(scale.decoded, PAPER_SPEED, strict=True):
        for who in dict.fromkeys(r["who"] for r in runs):
            mine = [r for r in runs if (r["who"], r["tokens"]) == (who, scale.prompt + decoded)]
            if not mine:
                continue
            plain = who.partition("@")[0].removesuffix(FIXED)
            name = {"dynamic": "dense"}.get(plain, plain)
            speed = _median(mine, "tokens_per_s")
            rows.append(
                [
                    f"{decoded:,}",
                    who,
                    _spread(mine, "tokens_per_s"),
                    f"{speed / bound:.0%}" if bound and speed else "–",
                    _cell(mine, "step_ms", "{:.2f}"),
                    _gib(mine, "bytes"),
                    _gib(mine, "peak_bytes"),
                    _cell(mine, "evicting_share", "{:.1%}"),
                    _cell(mine, "noting_share", "{:.1%}"),
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
        rows.append(
            [
                label or who,
                f"{tokens:,}",
                str(batch),
                _spread(mine, "tokens_per_s"),
                _cell(mine, "step_ms", "{:.2f}"),
                _gib(mine, "bytes"),
                _gib(mine, "peak_bytes"),
                _cell(mine, "evicting_share", "{:.1%}"),
                _cell(mine, "noting_share", "{:.1%}"),
                str(len(mine)),
            ]
        )
    return rows


def _median(runs: list[dict[str, Any]], name: str) -> float | None:
    values = [run[name] for run in runs if name in run]
    return statistics.median(values) if values else None


def _cell(runs: list[dict[str, Any]], name: str, form: str) -> str:
    median = _median(runs, name)
    return "–" if median is None else form.format(median)


def _spread(runs: list[dict[str, Any]], name: str) -> str:
    values = [run[name] for run in runs if name in run]
    if not values:
        return "–"
    return f"{statistics.median(values):,.1f} ({min(values):,.1f} to {max(values):,.1f})"


def _gib(runs: list[dict[str, Any]], name: str) -> str:
    median = _median(runs, name)
    return "–" if median is None else f"{median / 2**30:.4g}"


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
    _add(out, {"part": "", "kind": "command", "command": " ".join(command)})
    try:
        supervise(out, names, dry_run, device, time.time() + 60 * minutes)
    finally:
        report(out, dry_run)
    print((out / "h200.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
