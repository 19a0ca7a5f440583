"""Bytes that each method holds after a 4K-token prompt and 512 generated tokens.

The prompt is Python of this repository. It is read once by a dense cache, of which every method
takes a copy (a fork), cuts it, and writes on for itself. What a cache holds and its peak are read
from its tensors. A fork starts from the whole prompt, so its peak is the prompt's: what a method
needs that cuts while it reads is measured by reading the prompt again, with a cut after each chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from agent.models import LoadedModel, load
from agent.progress import TerminalProgress
from benchmarks import reporting
from cache import DenseConfig, EvictingCache, EvictingConfig, Sampling, decode, prefill, preset
from cache.config import AnyConfig

HEADER = ["method", "scope", "keeps", "evictions", "most held", "bytes", "of dense", "state"]
HEADER += ["peak (fork)", "peak, cut by chunk"]
_DENSE = ("dense", "none")


@dataclass(frozen=True)
class Row:
    """One method under one scope; what is counted in tokens is per layer and KV head."""

    name: str
    scope: str
    resident: int
    evictions: int
    most: int  # tokens held at once while writing, before a step's cut
    nbytes: int
    state: int
    peak: int
    chunk_peak: int

    @property
    def key(self) -> tuple[str, str]:
        """What it is a row of."""
        return self.name, self.scope

    def cells(self, dense: int) -> list[str]:
        """The row in a table."""
        name, scope, *numbers = astuple(self)
        resident, evictions, most, nbytes, *others = (f"{number:,}" for number in numbers)
        share = f"{self.nbytes / dense:.1%}"
        return [f"`{name}`", scope, resident, evictions, most, nbytes, share, *others]


def rows_of(text: str) -> list[Row]:
    """Rows of a results file that this module wrote."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(HEADER) and cells[0].startswith("`"):
            name, scope = cells[0].strip("`"), cells[1]
            numbers = [int(cell.replace(",", "")) for cell in cells[2:] if "%" not in cell]
            rows.append(Row(name, scope, *numbers))
    return rows


def prompt_ids(tokenizer: Any, count: int) -> list[int]:
    """The first `count` tokens of this repository's own Python, file after file."""
    files = [
        path
        for room in ("cache", "agent")
        for path in sorted((reporting.ROOT / room).glob("**/*.py"))
    ]
    text = "".join(
        f"# {path.relative_to(reporting.ROOT)}\n{path.read_text(encoding='utf-8')}\n"
        for path in files
    )
    ids = list(tokenizer(text).input_ids)
    if len(ids) < count:
        raise ValueError(f"a prompt of {count} tokens: this repository's Python has {len(ids)}")
    return ids[:count]


def digest(ids: list[int]) -> str:
    """By which a run that goes on knows that the prompt is still the same."""
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:12]


def cases(names: list[str], density: float) -> dict[tuple[str, str], AnyConfig]:
    """By (name, scope): each method while it decodes too, and as its own default is."""
    budget = {"kind": "density", "density": density}
    found: dict[tuple[str, str], AnyConfig] = {}
    for name in names:
        config = preset(name)
        if not isinstance(config, EvictingConfig):
            found[name, "none"] = config
            continue
        for scope in dict.fromkeys(["prefill+decode", config.scope]):
            found[name, scope] = preset(name, budget=budget, scope=scope)
    return found


def dense_config() -> DenseConfig:
    """For the cache that is forked. Of another block size than the row `dense`, whose copy is then
    its own: without the queries and sums that this one keeps for the others."""
    return DenseConfig(block_size=1)


@torch.inference_mode()
def measure(
    loaded: LoadedModel,
    trunk: EvictingCache,
    logits: torch.Tensor,
    key: tuple[str, str],
    config: AnyConfig,
    ids: list[int],
    new_tokens: int,
    chunk: int,
    progress: Callable[[], None],
) -> Row:
    """One method: a fork that writes `new_tokens`, then a reading of its own for the peak."""
    cache = trunk.fork(config=config)
    cache.evict("prefill", last_chunk=True)
    cache.stats.peak_tokens = cache.resident
    writing = decode(loaded.model, cache, logits, sampling=Sampling())
    next(writing)
    for _ in range(new_tokens):  # each feeds the id before it
        next(writing)
        progress()
    row = (cache.resident, cache.stats.evictions, cache.stats.peak_tokens, cache.nbytes)
    state, peak = cache.state_bytes, cache.peak_bytes
    del cache, writing
    if isinstance(config, EvictingConfig):
        config = config.model_copy(update={"prefill_eviction": "chunk"})
    own = EvictingCache(loaded.model, config)
    prefill(loaded.model, own, ids, chunk=chunk, on_chunk=lambda _: progress())
    return Row(*key, *row, state, peak, own.peak_bytes)


def report(head: list[str], rows: list[Row], missing: list[tuple[str, str]]) -> str:
    """The results file."""
    lines = ["# Bytes that stay\n", *head]
    if missing:
        left = ", ".join(f"{name} ({scope})" for name, scope in missing)
        lines.append(f"**Not measured yet: {left}. The same command goes on.**\n")
    dense = next(row.nbytes for row in rows if row.key == _DENSE)
    lines += [
        reporting.markdown(HEADER, [row.cells(dense) for row in rows]),
        "",
        "All bytes are those of tensors: keys and values with the room that is reserved behind "
        "them, block numbers, and the method's state (kept queries, sums), which `state` gives "
        "alone. `keeps` and `most held`: tokens per layer and KV head (the mean where they "
        "differ) at the end, and the most while writing. `of dense` compares `bytes`.\n",
        "`peak (fork)`: the prompt was read by a dense cache and copied, so every method starts "
        "with all of it; a cut once at the prompt's end has this peak in any case, plus what "
        "growing takes. `peak, cut by chunk`: the prompt read anew with `prefill_eviction: chunk`, "
        "without the writing; old and new buffers are both counted while one is replaced.\n",
        "Scope `prefill` is the default of SnapKV and what is built on it, as in its own code: it "
        "does not evict while it writes, and grows by every token.",
    ]
    return "\n".join(lines)


def main(
    model: Annotated[str, typer.Option(help="As `agent run --model`.")] = "qwen2.5-coder-0.5b",
    method: Annotated[
        list[str] | None, typer.Option(help="Only this preset; can be given again.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 4096,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are written.")] = 512,
    density: Annotated[float, typer.Option(min=0.01, max=1, help="Share that stays.")] = 0.2,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens in a forward pass.")] = 512,
    dtype: Annotated[str, typer.Option(help="As `agent run --dtype`.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is there.")] = False,
    out: Annotated[Path, typer.Option(help="Results file.")] = reporting.RESULTS
    / "resident_bytes.md",
) -> None:
    """Read a prompt, write on under every method, and say what each one holds.

    Ctrl-C keeps the methods that are done; the same command goes on with the others.
    """
    try:
        names = reporting.chosen(method or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    names = list(dict.fromkeys(["dense", *names]))  # what all are compared with comes first
    with TerminalProgress() as telling:
        loaded = load(model, dtype=dtype, device=device, progress=telling)
    ids = prompt_ids(loaded.tokenizer, prompt)
    settings = (
        f"{loaded.name} (sha256 `{loaded.sha256[:12]}…`), linear layers in {loaded.precision}, "
        f"cache in {str(loaded.dtype).removeprefix('torch.')}, {loaded.device}. A prompt of "
        f"{prompt:,} tokens (this repository's Python, sha256 of the ids `{digest(ids)}…`) in "
        f"chunks of {chunk}, {new_tokens} tokens "
        f"written greedily, density {density:g} of the tokens seen.\n"
    )
    wanted, rows = cases(names, density), list[Row]()
    if out.exists() and not fresh:
        old = out.read_text(encoding="utf-8")
        if settings.strip() not in old:
            raise typer.BadParameter(
                f"{out.name} was made with other settings; give --fresh or another --out"
            )
        rows = rows_of(old)
    origin = reporting.Origin(loaded.device)
    todo = {key: config for key, config in wanted.items() if key not in {row.key for row in rows}}

    def save() -> None:
        head = [*origin.lines(), settings]
        done = {row.key for row in rows}
        rows.sort(key=lambda row: list(wanted).index(row.key) if row.key in wanted else len(wanted))
        missing = [key for key in wanted if key not in done]
        reporting.save(out, report(head, rows, missing))

    chunks = -(-prompt // chunk)
    with reporting.bar() as progress:
        task = progress.add_task("", total=chunks + len(todo) * (new_tokens + chunks))

        def one() -> None:
            progress.advance(task)

        try:
            if todo:
                progress.update(task, description="reading the prompt")
                trunk = EvictingCache(loaded.model, dense_config(), forks=list(wanted.values()))
                logits = prefill(loaded.model, trunk, ids, chunk=chunk, on_chunk=lambda _: one())
            for key, config in todo.items():
                progress.update(task, description=f"{key[0]}, {key[1]}")
                rows.append(
                    measure(loaded, trunk, logits, key, config, ids, new_tokens, chunk, one)
                )
                save()
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    print(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
