"""What each method keeps, what it needs beside keys and values, and what one eviction step costs.

Caches in the shape of Qwen2.5-Coder-0.5B are filled with random keys and brought to their budget;
then they take a block of tokens and cut it off again, over and over, as while decoding. No model
runs. A number is a median; methods take turns, since other work may share the machine, and on one
thread it is the processor's time that counts, not the clock's.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from benchmarks import reporting
from cache import EvictingCache, EvictingConfig, preset
from cache.methods import make_method

SUMMARIES = {
    "nexus": "blocks by direct attention plus a short walk over blocks, drawn by a weighted "
    "reservoir, per KV head",
    "topk": "Nexus weights, the largest stay (a control)",
    "snapkv": "tokens by the attention of the newest 32 queries, smoothed along the prompt",
    "h2o": "tokens by the attention they got over their whole life, and as many recent ones",
    "morphkv": "tokens that the newest 32 agree on, and these",
    "streaming_llm": "4 sinks and the newest tokens",
    "random": "blocks by chance alone (a control)",
    "dense": "everything",
    "pyramidkv": "as `snapkv` (8 queries), lower layers more than higher ones",
    "ada-snapkv": "as `snapkv`, heads by how many of their layer's best tokens they have",
    "ada-pyramidkv": "both",
    "ada-nexus": "as `nexus`, heads by how many of their layer's best blocks they have",
}
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
BEGIN = "<!-- methods: written by `python -m benchmarks.method_table --write-readme` -->"
END = "<!-- end of methods -->"


@dataclass
class Measured:
    """Of one method at one number of keys: milliseconds, and bytes once at the budget."""

    steps: list[float] = field(default_factory=list)
    noting: list[float] = field(default_factory=list)  # by token: what `observe` takes
    state: int = 0
    ids: int = 0


def shaped_model(dtype: torch.dtype) -> PreTrainedModel:
    """A model that is only a shape: a cache asks it for nothing else."""
    config = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, **SHAPE)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Content:
    """Random keys, values, queries and sums for one number of tokens, shared by all methods.

    Odd KV heads have keys that are 2.5 times as long, so that their attention peaks and adaptive
    budgets have something to tell apart.
    """

    def __init__(self, tokens: int, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.dtype = dtype
        self.random = torch.Generator().manual_seed(tokens)
        self.keys, self.values = self.pair(tokens)
        self.queries = self.normal(SHAPE["num_attention_heads"], 64)
        lead = (SHAPE["num_hidden_layers"], SHAPE["num_key_value_heads"])
        self.sums = torch.rand((*lead, tokens), generator=self.random)

    def normal(self, heads: int, tokens: int) -> torch.Tensor:
        """[L, heads, tokens, D]."""
        shape = (SHAPE["num_hidden_layers"], heads, tokens, SHAPE["head_dim"])
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def pair(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of new tokens."""
        heads = SHAPE["num_key_value_heads"]
        keys, values = self.normal(heads, tokens), self.normal(heads, tokens)
        keys[:, 1::2] *= 2.5
        return keys, values


def filled(model: PreTrainedModel, config: EvictingConfig, content: Content) -> EvictingCache:
    """A cache that has read `content` and cut it back to its budget."""
    cache = EvictingCache(model, config)
    tensors = {"keys": content.keys, "values": content.values}
    if cache.pool.with_sums:
        tensors["sums"] = content.sums
    scaling = (SHAPE["head_dim"] ** -0.5,) * cache.num_layers
    state = replace(cache.state(), seen=content.tokens, scaling=scaling, tensors=tensors)
    state = state.uncut(config)
    if config.window:
        ring = {"queries": content.queries[:, :, : config.window]}
        state = replace(state, tensors={**state.tensors, **ring})
    cache.restore(state)
    cache.evict("prefill")
    return cache


def clock() -> float:
    """Seconds of this thread where it does all the work: it may wait long for a busy processor."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def append(cache: EvictingCache, content: Content, tokens: int) -> float:
    """Take in new tokens as a forward pass does, without the attention; seconds in `observe`."""
    keys, values = content.pair(tokens)
    queries = content.normal(SHAPE["num_attention_heads"], tokens)
    seconds = 0.0
    for layer in range(cache.num_layers):
        held, _ = cache.update(keys[layer, None], values[layer, None], layer)
        began = clock()
        cache.observe(
            layer, queries[layer, None], held, cache.segments(layer), SHAPE["head_dim"] ** -0.5
        )
        seconds += clock() - began
        cache.finish_layer(layer)
    return seconds


def measure(
    model: PreTrainedModel, name: str, keys: int, content: Content, steps: int, found: Measured
) -> None:
    """Add `steps` timed steps of one method, after one that is not timed."""
    budget = {"kind": "tokens", "tokens": keys}
    config = preset(name, budget=budget, scope="prefill+decode")
    assert isinstance(config, EvictingConfig)
    cache, size = filled(model, config, content), config.block_size
    found.state = cache.state_bytes
    found.ids = int((cache.block_ids >= 0).sum()) * cache.block_ids.element_size()
    for number in range(steps + 1):
        if size > 1:
            append(cache, content, size - 1)
        noting = append(cache, content, 1)
        began = clock()
        record = cache.evict("decode")
        seconds = clock() - began
        if record is None or (record.before, record.after) != (keys // size + 1, keys // size):
            raise RuntimeError(f"{name} at {keys} keys did not cut one block: {record}")
        if number:
            found.steps.append(seconds * 1e3)
            found.noting.append(noting * 1e3)


def short(milliseconds: float) -> str:
    """Two digits are all that a busy machine tells."""
    if milliseconds >= 10:
        return f"{milliseconds:.0f}"
    return f"{milliseconds:.1f}" if milliseconds >= 1 else f"{milliseconds:.2f}"


Results = dict[str, dict[int, Measured]]


def readme_table(names: list[str], sizes: list[int], results: Results) -> str:
    """What the README shows."""
    shown = " / ".join(kilo(size) for size in sizes)
    header = [
        "name",
        "what stays",
        "unit",
        "state, MiB",
        f"ms a step at {shown} keys",
        "ms a token",
    ]
    rows = []
    for name in names:
        config, found = preset(name), results.get(name, {})
        row = [f"`{name}`", SUMMARIES.get(name, ""), "block" if config.block_size > 1 else "token"]
        if not isinstance(config, EvictingConfig):
            rows.append([*row, "0", "none", "none"])
            continue
        medians = [
            statistics.median(found[size].steps) if size in found else None for size in sizes
        ]
        per_step = " / ".join("?" if ms is None else short(ms) for ms in medians)
        per_token = " / ".join(
            "?" if ms is None else short(ms / config.block_size) for ms in medians
        )
        if config.scope == "prefill":
            per_token = "none (once a prompt)"
        rows.append([*row, state(found), per_step, per_token])
    return "\n\n".join(filter(None, [reporting.markdown(header, rows), observed(sizes, results)]))


def observed(sizes: list[int], results: Results) -> str:
    """What methods that look at every token's attention need beside their steps, as a sentence."""
    parts = []
    for name, found in results.items():
        config = preset(name)
        if isinstance(config, EvictingConfig) and make_method(config).observes and found:
            noted = [
                short(statistics.median(found[size].noting)) if size in found else "?"
                for size in sizes
            ]
            parts.append(f"`{name}` also computes the attention of every token again: ")
            parts.append(f"{' / '.join(noted)} ms a token.")
    return "".join(parts)


def state(found: dict[int, Measured]) -> str:
    """Bytes beside keys and values: as they are, or by 1K keys where they grow."""
    if not found:
        return "?"
    low, high = min(found), max(found)
    first, last = found[low].state, found[high].state
    if first == last:
        return reporting.mib(first) if first else "0"
    each = (last - first) / (high - low) * 1024
    return f"{each / 2**20:.2f} per 1K keys"


def kilo(size: int) -> str:
    """1024 as 1K."""
    return f"{size // 1024}K" if size % 1024 == 0 else str(size)


def details(names: list[str], sizes: list[int], results: Results) -> str:
    """Medians with quartiles and extremes, and what is noted at every token."""
    header = ["name", "keys", "median", "quartiles", "extremes", "steps", "noting, ms a token"]
    header += ["state, bytes", "block numbers, bytes"]
    rows = []
    for name in names:
        for size in sizes:
            found = results.get(name, {}).get(size)
            if found is None or len(found.steps) < 2:
                continue
            low, middle, high = statistics.quantiles(found.steps, n=4)
            times = [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
            times += [f"{min(found.steps):.2f} to {max(found.steps):.2f}", str(len(found.steps))]
            noting = f"{statistics.median(found.noting):.2f}"
            rows.append([name, kilo(size), *times, noting, f"{found.state:,}", f"{found.ids:,}"])
    return reporting.markdown(header, rows)


def replace_in_readme(text: str, methods: str) -> str:
    """The README with another table of methods. Raises ValueError where its markers are gone."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{methods}\n{END}{after}"


def report(
    names: list[str],
    sizes: list[int],
    results: Results,
    origin: reporting.Origin,
    dtype: str,
    complete: bool,
) -> str:
    """The results file."""
    timed = "the thread's own" if torch.get_num_threads() == 1 else "those of the clock"
    lines = [
        "# What one eviction step costs",
        "" if complete else "\n**Broken off: not every method and size was measured.**\n",
        *origin.lines(),
        f"Random keys in the shape of Qwen2.5-Coder-0.5B (24 layers, 2 KV heads, 14 query heads, "
        f'D = 64), {dtype}. A step is `cache.evict("decode")` alone: from B + 1 blocks to B in all '
        "layers, scope `prefill+decode` whatever the method's own is; B blocks hold the keys "
        "named. Before it, twice as many keys were read and cut once. `ms a token` is a step over "
        f"the block's size. Milliseconds are {timed}. Methods take turns in rounds; the first "
        "step of each turn does not count.\n",
        readme_table(names, sizes, results),
        "",
        "`state` is what a method keeps beside keys and values (`cache.state_bytes`): the newest "
        "queries, H2O's sums. The numbers of the blocks come on top, 8 bytes per block, layer and "
        "KV head. `noting` is what `cache.observe` takes in all layers for one new token: a copy "
        "of its queries, and in H2O its attention to all keys once more; it is not part of the "
        "step.\n",
        "Milliseconds of one step:\n",
        details(names, sizes, results),
    ]
    return "\n".join(lines)


def main(
    method: Annotated[
        list[str] | None, typer.Option(help="Only this preset; can be given again.")
    ] = None,
    keys: Annotated[
        list[int] | None, typer.Option(help="Keys held, a multiple of 32; can be given again.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each method takes its turn.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps in each turn.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16.")] = "float32",
    write_readme: Annotated[
        bool, typer.Option("--write-readme", help="Put the table into README.md as well.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Results file.")] = reporting.RESULTS
    / "method_table.md",
) -> None:
    """Measure what one eviction step of each method costs on this CPU.

    Ctrl-C keeps what was measured (README.md is then left as it is).
    """
    torch.set_num_threads(threads)
    try:
        names = reporting.chosen(method or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    sizes = sorted(keys or [1024, 4096, 16384])
    if any(size % 32 or size < 256 for size in sizes):
        raise typer.BadParameter("--keys must be multiples of 32, and 256 or more")
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(dtype)
    if kind is None:
        raise typer.BadParameter(f"--dtype {dtype!r} is not float32 or bfloat16")
    origin = reporting.Origin()
    evicting = [name for name in names if isinstance(preset(name), EvictingConfig)]
    results: Results = {name: {} for name in evicting}
    model, complete = shaped_model(kind), False
    try:
        with torch.inference_mode(), reporting.bar() as progress:
            task = progress.add_task("", total=len(evicting) * len(sizes) * rounds)
            for size in sizes:
                progress.update(task, description=f"random keys for {kilo(size)}")
                content = Content(2 * size, kind)
                for turn in range(rounds):
                    # Every other round backwards, so that no method is always behind the same one.
                    for name in evicting if turn % 2 == 0 else evicting[::-1]:
                        progress.update(task, description=f"{name}, {kilo(size)} keys")
                        found = results[name].setdefault(size, Measured())
                        measure(model, name, size, content, steps, found)
                        progress.advance(task)
        complete = True
    except KeyboardInterrupt:
        for by_size in results.values():
            for size in [size for size, found in by_size.items() if not found.steps]:
                del by_size[size]
    reporting.save(out, report(names, sizes, results, origin, dtype, complete))
    print(readme_table(names, sizes, results))
    print(f"\nin {out.name}" + ("" if complete else ", broken off"))
    if not complete:
        raise typer.Exit(130)
    if write_readme:
        readme = reporting.ROOT / "README.md"
        text = readme.read_text(encoding="utf-8")
        reporting.save(readme, replace_in_readme(text, readme_table(names, sizes, results)))


if __name__ == "__main__":
    typer.run(main)
