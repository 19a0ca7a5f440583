"""`agent bench`: speed, memory and where the time goes, on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from agent.bench import asked, shown
from agent.cli_errors import fail

bench_app = typer.Typer(
    help="Measure speed and bytes of caches, side by side with transformers' own.",
    no_args_is_help=True,
)

_what = partial(typer.Option, rich_help_panel="What is measured")
_model = partial(typer.Option, rich_help_panel="Model")
_output = partial(typer.Option, rich_help_panel="Output")

Shape = Annotated[
    str | None,
    _model(
        metavar="NAME",
        help="A published size with random weights: llama-3.1-8b, llama-3.2-1b, "
        "qwen2.5-coder-{0.5b,1.5b,7b,32b}, qwen3-{8b,32b}, deepswe, smollm2-135m, tiny. No files "
        "are needed.",
    ),
]
ModelName = Annotated[
    str | None,
    _model(metavar="NAME", help="As `agent run --model`."),
]
Layers = Annotated[
    int | None,
    _model(metavar="N", help="Only so many layers of --shape."),
]
Dtype = Annotated[str, _model(help="auto, bfloat16, float16, float32.")]
Device = Annotated[str, _model(help="auto, cpu, cuda, cuda:1.")]
Threads = Annotated[int | None, _model(min=1, help="Threads of torch.")]
Scope = Annotated[
    str | None,
    _what(help="When methods evict: prefill, prefill+decode. Default: each one's own."),
]
PrefillEviction = Annotated[str, _what(help="chunk or end, as `agent run`.")]
Chunk = Annotated[int, _what(min=1, help="Tokens of a chunk.")]
Seed = Annotated[int, _what(help="Of weights, ids and contexts.")]
JsonFile = Annotated[
    Path | None,
    _output(
        "--json",
        metavar="FILE",
        help="Keep all runs in FILE, and beside it the same as .csv and .md.",
    ),
]
Quiet = Annotated[bool, _output("--quiet", "-q", help="No progress bar.")]


@bench_app.command("speed")
def speed(
    methods: Annotated[
        str,
        _what(
            metavar="A[,B...]",
            help="dense, any method, NAME+fixed (decoded by static shapes; one graph on CUDA), "
            "dynamic and static (transformers' caches), re-prefill.",
        ),
    ] = "dense,dynamic,static,nexus",
    against: Annotated[str, _what(help="Ratios are against this one.")] = "dense",
    budget: Annotated[
        str,
        _what(metavar="N[,N...]", help="Tokens; below 1: share of tokens seen."),
    ] = "2048",
    prefill: Annotated[
        str,
        _what(metavar="N[,N...]", help="Lengths that are read from nothing."),
    ] = "2048",
    seen: Annotated[
        str,
        _what(metavar="N[,N...]", help="Lengths behind which is written."),
    ] = "0,4096",
    batch: Annotated[
        str,
        _what(metavar="N[,N...]", help="Sequences that write together."),
    ] = "1",
    context: Annotated[
        str,
        _what(
            help="How --seen comes about: fill (random keys and values), or read (by the model)."
        ),
    ] = "fill",
    observation: Annotated[
        int,
        _what(min=0, help="Tokens read before the first is written."),
    ] = 256,
    new_tokens: Annotated[int, _what(min=1, help="Tokens written and timed.")] = 64,
    watched: Annotated[
        int,
        _what(
            min=0,
            help="Tokens written after these with a clock around each part of the cache's work.",
        ),
    ] = 32,
    repeats: Annotated[int, _what(min=1, help="Of everything.")] = 3,
    chunk: Chunk = 512,
    scope: Scope = None,
    prefill_eviction: PrefillEviction = "chunk",
    seed: Seed = 0,
    shape: Shape = None,
    model: ModelName = None,
    layers: Layers = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Reading and writing speed, eviction's share, bytes and time to the first token.

    All methods and lengths take turns; numbers are medians with extremes. Ctrl-C keeps what was
    measured.
    """
    errors = Console(stderr=True)
    try:
        lengths = {
            name: asked.numbers(name, text) for name, text in (("prefill", prefill), ("seen", seen))
        }
        batches = asked.numbers("batch", batch)
        if context not in ("fill", "read"):
            raise ValueError(f"--context {context!r} is neither fill nor read")
        if any(number < 1 for number in (*lengths["prefill"], *batches)):
            raise ValueError("--prefill and --batch take numbers of at least 1")
        budgets, shares = asked.budgets(budget)
        asked.require_model(shape, model, layers)
    except ValueError as error:
        fail(str(error), 2, errors)
    with shown.status(errors, "loading", quiet):
        from agent.bench import speed_report as say
        from agent.bench.contestants import contestants
        from agent.bench.origin import at_end, origin, origin_lines
        from agent.bench.speed import Bench, Request
    loaded, words = asked.load_model(errors, shape, model, layers, dtype, device, threads, seed)
    changes: dict[str, Any] = {"prefill_eviction": prefill_eviction}
    if scope is not None:
        changes["scope"] = scope
    try:
        sides = contestants(
            loaded, asked.names(methods), budgets, densities=shares, changes=changes
        )
    except ValueError as error:
        fail(asked.message(error), 2, errors)
    if against not in [side.name for side in sides]:
        against = sides[0].name
    bench = Bench(
        loaded,
        sides,
        Request(
            prefill=tuple(dict.fromkeys(lengths["prefill"])),
            seen=tuple(dict.fromkeys(lengths["seen"])),
            batches=tuple(dict.fromkeys(batches)),
            context="fill" if context == "fill" else "read",
            observation=observation,
            new_tokens=new_tokens,
            watched=watched,
            chunk=chunk,
            repeats=repeats,
            seed=seed,
        ),
    )
    start = origin(loaded.device)
    settings = {"model": words, "methods": [side.name for side in sides], "against": against}

    def save() -> None:
        if json_file is not None:
            found, paragraph = (
                say.data(bench, start, settings),
                asked.paragraph(words, bench.request),
            )
            say.write(json_file, found, bench, against, paragraph)

    interrupted = False
    with shown.bar(errors, quiet) as bar:
        task = bar.add_task("", total=bench.work())
        bench.on_begin = lambda point, repeat: bar.update(
            task, description=f"{say.where(point)}, repeat {repeat + 1}"
        )
        bench.on_work = lambda amount: bar.advance(task, amount)
        bench.on_reading = save
        try:
            bench.run()
        except KeyboardInterrupt:
            interrupted = True
    save()
    console = shown.console()
    for table in say.tables(bench.readings, against):
        shown.print_table(console, *say.short_table(table))
    for point, why in bench.failed.items():
        console.print(Text(f"{say.where(point)}: not measured, {why}", "yellow"))
    for line in origin_lines(at_end(start)):
        console.print(line, highlight=False, markup=False, style="dim")
    if interrupted:
        fail("interrupted: this is what was measured until then", 130, errors)
    raise typer.Exit(1 if bench.failed and not bench.readings.runs else 0)


@bench_app.command("turns")
def turns(
    method: Annotated[str, _what(metavar="NAME", help="What evicts.")] = "nexus",
    budget: Annotated[int, _what(min=1, help="Tokens.")] = 2048,
    count: Annotated[int, _what("--turns", min=3, help="Of the run.")] = 30,
    prompt: Annotated[int, _what(min=1, help="Tokens of the first prompt.")] = 2048,
    observations: Annotated[
        str,
        _what(metavar="N[,N...]", help="Tokens of what each later turn adds, over and over."),
    ] = "400",
    reply: Annotated[int, _what(min=1, help="Tokens of each reply.")] = 32,
    repeats: Annotated[int, _what(min=1, help="Of the run.")] = 1,
    without: Annotated[
        bool,
        _what("--no-full-context", help="Only true_eviction and dense."),
    ] = False,
    chunk: Chunk = 256,
    prefill_eviction: PrefillEviction = "chunk",
    seed: Seed = 0,
    shape: Shape = None,
    model: ModelName = None,
    layers: Layers = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Time to the first token of every turn of a scripted run of an agent.

    true_eviction (one cache, which forgets) and dense (one cache, which grows) beside
    full_context, which reads everything again every turn. Ctrl-C keeps what was measured.
    """
    errors = Console(stderr=True)
    try:
        lengths = asked.numbers("observations", observations)
        if any(number < 1 for number in lengths):
            raise ValueError("--observations takes numbers of at least 1")
        asked.require_model(shape, model, layers)
    except ValueError as error:
        fail(str(error), 2, errors)
    with shown.status(errors, "loading", quiet):
        from agent.bench import turns_report as say
        from agent.bench.origin import origin
        from agent.bench.turns import Script, Side, Turn, Turns
        from cache import preset
    loaded, words = asked.load_model(errors, shape, model, layers, dtype, device, threads, seed)
    try:
        budgeted = preset(
            method,
            budget={"kind": "tokens", "tokens": budget},
            prefill_eviction=prefill_eviction,
        )
    except ValueError as error:
        fail(asked.message(error), 2, errors)
    again = budgeted.model_copy(update={"prefill_eviction": "end"})
    sides = [
        Side(f"true_eviction {method}@{budget}", "true_eviction", budgeted),
        Side("true_eviction dense", "true_eviction", preset("dense")),
        Side(f"full_context {method}@{budget}", "full_context", again),
    ][: 2 if without else 3]
    script = Script(count, prompt, tuple(lengths), reply, chunk, seed)
    played = Turns(loaded, sides, script, repeats)
    start, interrupted = origin(loaded.device), False

    def save() -> None:
        if json_file is not None:
            say.write(json_file, say.data(played, start, words), played)

    with shown.bar(errors, quiet) as bar:
        task = bar.add_task("", total=repeats * count * len(sides))

        def heard(turn: Turn) -> None:
            bar.update(task, advance=1, description=f"turn {turn.turn}, {turn.who}")
            save()

        played.on_turn = heard
        try:
            played.run()
        except KeyboardInterrupt:
            interrupted = True
    save()
    console = shown.console()
    shown.print_table(console, "Seconds until the first token", *say.rows(played))
    for line in say.words(played):
        console.print(line, highlight=False, markup=False)
    if interrupted:
        fail("interrupted: this is what was measured until then", 130, errors)


@bench_app.command("profile")
def profile(
    what: Annotated[str, _what(help="decode, evict or prefill.")] = "decode",
    method: Annotated[str, _what(metavar="NAME", help="As in `speed`.")] = "nexus",
    budget: Annotated[int, _what(min=1, help="Tokens.")] = 2048,
    seen: Annotated[
        str,
        _what(metavar="N[,N...]", help="Tokens behind the step."),
    ] = "4096",
    steps: Annotated[int, _what(min=1, help="To average over.")] = 8,
    top: Annotated[int, _output(min=1, help="Operations to show.")] = 20,
    chunk: Chunk = 512,
    seed: Seed = 0,
    shape: Shape = None,
    model: ModelName = None,
    layers: Layers = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """What one step costs, operation by operation: calls, time, memory, waits of the host."""
    errors = Console(stderr=True)
    try:
        lengths = asked.numbers("seen", seen)
        asked.require_model(shape, model, layers)
    except ValueError as error:
        fail(str(error), 2, errors)
    with shown.status(errors, "loading", quiet):
        from agent.bench import profiles, profiles_report
        from agent.bench.contestants import contestants
        from agent.bench.origin import origin
    kinds: dict[str, profiles.What] = {kind: kind for kind in profiles.WHAT}
    if what not in kinds:
        fail(f"--what {what!r} is not one of {', '.join(kinds)}", 2, errors)
    loaded, words = asked.load_model(errors, shape, model, layers, dtype, device, threads, seed)
    start, found = origin(loaded.device), []
    console = shown.console()
    changes = {"prefill_eviction": "chunk", "scope": "prefill+decode"}
    try:
        [side] = contestants(loaded, [method], [budget], changes=changes)
        for length in lengths:
            with shown.status(errors, f"{what} at {length:,} seen", quiet):
                found.append(
                    profiles.profiled(
                        loaded, side, kinds[what], seen=length, steps=steps, chunk=chunk
                    )
                )
            title = profiles.profile_words(found[-1])
            shown.print_table(console, title, *profiles.profile_rows(found[-1], top))
    except ValueError as error:
        fail(asked.message(error), 2, errors)
    except KeyboardInterrupt:
        fail("interrupted", 130, errors)
    finally:
        if json_file is not None and found:
            profiles_report.write(json_file, found, start, words, top)
