"""One needle among three distractors in about 2K tokens: which methods still find it at 20 %.

The format is RULER's niah_multikey_1 with sentences of our own as filler: a 7-digit number for each
of four adjective-noun keys, the question for one of them at the end of the prompt, and the answer's
first words after the assistant's header. A sample counts when the number is in what the model says.
Every method goes on from a copy of one and the same dense prefill, cut once.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from agent.models import LoadedModel, load
from agent.progress import TerminalProgress
from benchmarks import reporting
from cache import DenseConfig, EvictingCache, EvictingConfig, Sampling, decode, prefill, preset
from cache.config import AnyConfig
from cache.methods import make_method

INTRO = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
ANSWER = "The special magic number for {key} mentioned in the provided text is"
DISTRACTORS = 3

# Keys and filler share no word, so that only the needles speak of the keys.
_KEYS = (
    "amber brisk crooked dusty eager frozen gentle hollow idle jolly keen lucid mellow nimble odd "
    "plush quaint rusty sturdy tidy upbeat vivid wicked young",
    "anchor badger candle dragon engine falcon guitar hammer island jacket kettle ladder mirror "
    "needle orchid pepper quilt rocket saddle tunnel urchin violin wallet zipper",
)
_FILLER = (
    "farmer teacher sailor neighbour painter driver baker doctor gardener miller clerk shepherd",
    "carried repaired counted painted moved found sold cleaned borrowed measured wrapped weighed",
    "old heavy green narrow wooden quiet round broken warm plain",
    "table fence basket door wagon bridge letter carpet bottle window bucket stone",
    "river market station church hill garden harbour mill school road meadow barn",
    "morning evening spring summer autumn winter storm holiday harvest night",
)


@dataclass(frozen=True)
class Sample:
    """One prompt, and the number that is asked for."""

    ids: list[int]
    value: str


@dataclass
class Tally:
    """What one method did: hits in the order of the samples, and tokens it kept."""

    hits: list[bool] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


def sentence(draw: random.Random) -> str:
    """One of some 1.7 million sentences."""
    who, did, how, what, where, when = (draw.choice(words.split()) for words in _FILLER)
    return f"The {who} {did} the {how} {what} near the {where} before the {when}."


def make_sample(tokenizer: Any, number: int, samples: int, tokens: int, answer: bool) -> Sample:
    """Sample `number` of `samples`: the needle's depth goes evenly from the top to the end."""
    draw = random.Random(f"needle {number}")
    firsts, seconds = (draw.sample(words.split(), DISTRACTORS + 1) for words in _KEYS)
    keys = [f"{first}-{second}" for first, second in zip(firsts, seconds, strict=True)]
    values = [str(draw.randrange(10**6, 10**7)) for _ in keys]
    needles = [NEEDLE.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
    depths = [(number + 0.5) / samples, *(draw.random() for _ in range(DISTRACTORS))]
    filler = [sentence(draw) for _ in range(tokens // 8)]

    def ids(count: int) -> list[int]:
        lines = filler[:count]
        # From the end, so that an insertion does not shift those that follow.
        for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
            lines.insert(round(depth * count), needle)
        user = INTRO + " ".join(lines) + QUESTION.format(key=keys[0])
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
        )
        tail = ANSWER.format(key=keys[0]) if answer else ""
        return list(tokenizer(text + tail, add_special_tokens=False).input_ids)

    low, high = 0, len(filler)
    while low < high:  # the most sentences that fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(ids(middle)) <= tokens else (low, middle - 1)
    return Sample(ids(low), values[0])


def configs_of(names: list[str], density: float) -> dict[str, AnyConfig]:
    """Each preset, cut once after the prompt."""
    budget = {"kind": "density", "density": density}
    found: dict[str, AnyConfig] = {}
    for name in names:
        config = preset(name)
        if isinstance(config, EvictingConfig):
            config = preset(name, budget=budget, scope="prefill", prefill_eviction="end")
        found[name] = config
    return found


@torch.inference_mode()
def run_sample(
    loaded: LoadedModel,
    sample: Sample,
    configs: dict[str, AnyConfig],
    new_tokens: int,
    chunk: int,
    tallies: dict[str, Tally],
    progress: Any,
) -> None:
    """Prefill once and let every method go on from there."""
    model, tokenizer = loaded.model, loaded.tokenizer
    # A block size of its own makes it another config than that of the row `dense`.
    trunk = EvictingCache(model, DenseConfig(block_size=1), forks=list(configs.values()))
    logits = prefill(model, trunk, sample.ids, chunk=chunk)
    found: dict[str, tuple[bool, int]] = {}
    for name, config in configs.items():
        cache = trunk.fork(config=config)
        cache.evict("prefill", last_chunk=True)
        kept, said = cache.resident, list[int]()
        for token in decode(model, cache, logits, sampling=Sampling()):
            said.append(token)
            if token == tokenizer.eos_token_id or len(said) >= new_tokens:
                break
            if sample.value in tokenizer.decode(said):
                break
        found[name] = (sample.value in tokenizer.decode(said), kept)
        progress()
    for name, (hit, kept) in found.items():  # all methods or none: a row is of whole samples
        tallies[name].hits.append(hit)
        tallies[name].kept.append(kept)


def wilson(hits: int, of: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share (Wilson's score interval)."""
    share, square = hits / of, z * z / of
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / of + square / of / 4) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def report(
    head: list[str], configs: dict[str, AnyConfig], tallies: dict[str, Tally], samples: int
) -> str:
    """The results file."""
    done = len(next(iter(tallies.values())).hits)
    lines = ["# A needle among three distractors\n", *head]
    if done < samples:
        lines.insert(1, f"**Only {done} of {samples} samples so far.**\n")
    header = ["method", "hits", "95 % interval", "keeps, tokens", "knows the question", "by depth"]
    rows = []
    for name, config in configs.items():
        tally = tallies[name]
        low, high = wilson(sum(tally.hits), done)
        aware = "everything stays"
        if isinstance(config, EvictingConfig):
            aware = "yes" if make_method(config).query_aware else "no"
        rows.append(
            [
                f"`{name}`",
                f"{sum(tally.hits)} of {done}",
                f"{low:.0%} to {high:.0%}",
                f"{sum(tally.kept) / done:,.0f}",
                aware,
                "".join("x" if hit else "." for hit in tally.hits),
            ]
        )
    lines += [
        reporting.markdown(header, rows),
        "",
        "Hits: the number is in the reply. Interval: Wilson's, of the share of hits. By depth: x "
        "a hit, . a miss, the needle going from the prompt's start to its end. The question was "
        "there when the cache was cut: a method that knows it scores by the question itself, so "
        "these hits do not say what would be left for a question that comes later.",
    ]
    return "\n".join(lines)


def main(
    model: Annotated[str, typer.Option(help="As `agent run --model`.")] = "qwen2.5-coder-0.5b",
    method: Annotated[
        list[str] | None,
        typer.Option(help="Only this preset; can be given again. Default: all, and nexus-paper."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts.")] = 12,
    tokens: Annotated[int, typer.Option(min=256, help="Most tokens of a prompt.")] = 2048,
    density: Annotated[float, typer.Option(min=0.01, max=1, help="Share that stays.")] = 0.2,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 32,
    answer_prefix: Annotated[
        bool, typer.Option(help="Put the answer's first words after the assistant's header.")
    ] = True,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens in a forward pass.")] = 512,
    dtype: Annotated[str, typer.Option(help="As `agent run --dtype`.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="Results file.")] = reporting.RESULTS / "needle.md",
) -> None:
    """Hide a number in filler, ask for it, and count which methods still answer.

    Ctrl-C keeps the samples that are done.
    """
    try:
        names = reporting.chosen(method or [*reporting.own_presets(), "nexus-paper"])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    configs = configs_of(names, density)
    with TerminalProgress() as telling:
        loaded = load(model, dtype=dtype, device=device, progress=telling)
    tallies = {name: Tally() for name in names}
    origin = reporting.Origin(loaded.device)
    prompts = [
        make_sample(loaded.tokenizer, number, samples, tokens, answer_prefix)
        for number in range(samples)
    ]
    lengths = [len(sample.ids) for sample in prompts]
    prefix = "after the answer's first words" if answer_prefix else "without an answer prefix"

    def save() -> None:
        head = [
            *origin.lines(),
            f"{loaded.name} (sha256 `{loaded.sha256[:12]}…`), linear layers in {loaded.precision}, "
            f"cache in {str(loaded.dtype).removeprefix('torch.')}, {loaded.device}.\n",
            f"Prompts of {min(lengths):,} to {max(lengths):,} tokens in the model's chat template, "
            f"the question at the end, read in chunks of {chunk}; density {density:g} of them "
            f"stays, cut once after the prompt (scope `prefill`); greedy, {prefix}. One dense "
            "prefill a sample, forked over all methods.\n",
        ]
        reporting.save(out, report(head, configs, tallies, samples))

    with reporting.bar() as progress:
        task = progress.add_task("", total=samples * len(names))
        try:
            for number, sample in enumerate(prompts):
                progress.update(task, description=f"sample {number + 1} of {samples}")
                run_sample(
                    loaded,
                    sample,
                    configs,
                    new_tokens,
                    chunk,
                    tallies,
                    lambda: progress.advance(task),
                )
                save()
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    print(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
