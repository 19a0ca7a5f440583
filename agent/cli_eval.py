"""`agent eval`: many tasks, each with a fresh cache and sandbox, graded by their hidden tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agent import flags
from agent.cli_errors import fail
from agent.cli_tasks import Filter, Ids, Shuffle, Slice, Source
from agent.run_options import DEFAULT_MODEL, DEFAULT_SEED, OptionError, parse_options

_BATCH = "The batch"


def evaluate(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Where results are kept. With the same DIR, what is finished stays.",
            rich_help_panel=_BATCH,
        ),
    ],
    tasks: Source = "pairs",
    ids: Ids = None,
    filter: Filter = "",
    slice: Slice = "",
    shuffle: Shuffle = False,
    shuffle_seed: Annotated[
        int | None, typer.Option(help="Of the order that --shuffle draws, if not --seed.")
    ] = None,
    model: flags.Model = DEFAULT_MODEL,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    device_map: flags.DeviceMap = None,
    quantize: flags.Quantize = None,
    method: flags.MethodName = "nexus",
    protocol: flags.ProtocolName = "true_eviction",
    budget: flags.Budget = None,
    cache_gib: flags.CacheGib = None,
    density: flags.Density = None,
    scope: flags.Scope = None,
    prefill_eviction: flags.PrefillEviction = None,
    chunk: flags.Chunk = 256,
    steps: flags.Steps = None,
    max_new_tokens: flags.NewTokens = None,
    max_tokens: flags.TotalTokens = None,
    wall_time: flags.WallTime = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    seed: Annotated[
        int,
        typer.Option(help="Of first attempts, and of --shuffle.", rich_help_panel=flags.LIMITS),
    ] = DEFAULT_SEED,
    attempts: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Seeded attempts at each instance (pass@K): all first ones, then all second ones.",
            rich_help_panel=flags.LIMITS,
        ),
    ] = 1,
    sandbox: flags.SandboxKind = "auto",
    tools: flags.ToolSet = "auto",
    set_: flags.Overrides = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            "-w",
            min=1,
            metavar="N",
            help="Processes, each with a model of its own and its share of the cores.",
            rich_help_panel=_BATCH,
        ),
    ] = 1,
    sessions_per_worker: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="K",
            help="Runs that share a worker's model: while one waits for its tests, others write, "
            "and those that write do so as one batch. Each has its own cache; waiting for the "
            "others is part of its time.",
            rich_help_panel=_BATCH,
        ),
    ] = 1,
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="R",
            help="Further tries of a run that ended in an error, in one go.",
            rich_help_panel=_BATCH,
        ),
    ] = 1,
    silence: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="After so long without a sign of life a run is ended as an error.",
            rich_help_panel=_BATCH,
        ),
    ] = 3600.0,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Who makes the runs: local, or package.module:Factory.",
            rich_help_panel=_BATCH,
        ),
    ] = "local",
    work: Annotated[str, typer.Option(hidden=True)] = "",
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
) -> None:
    """Let a model work on many tasks, and say how many it resolved.

    Whatever ends it (Ctrl-C, SIGTERM, kill -9, a power cut), the same command goes on: finished
    runs stay, errors are tried again, other options are other runs. Ends with 0 when all runs are
    finished, whatever their verdicts; 1 when some ended in errors, 2 when it could not begin, 130
    when it was interrupted.
    """
    settings = flags.overrides(
        steps=steps,
        new_tokens=max_new_tokens,
        total_tokens=max_tokens,
        wall_time=wall_time,
        set_=set_,
    )
    values: dict[str, Any] = {
        "instance": "any",  # the runs' own; without one, options are the demo's
        "model": model,
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "quantize": quantize,
        "tools": tools,
        "method": method,
        "protocol": protocol,
        "scope": scope,
        "budget": budget,
        "cache_gib": cache_gib,
        "density": density,
        "prefill_eviction": prefill_eviction,
        "chunk": chunk,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "attempts": attempts,
        "sandbox": sandbox,
        "overrides": settings,
    }
    errors = Console(stderr=True)
    try:
        options = parse_options(values)
    except OptionError as error:
        fail(str(error), 2, errors)
    try:
        from agent.batch.carry_out import DEFAULT_WORK
        from agent.batch.engine import EngineError
        from agent.batch.store import StoreError
        from agent.eval_command import Request, Selection, execute
        from agent.run_failures import RUN_FAILURES

        named = [name.strip() for part in ids or () for name in part.split(",") if name.strip()]
        order = seed if shuffle_seed is None else shuffle_seed
        request = Request(
            source=tasks,
            selection=Selection(tuple(named), filter, shuffle, order, slice),
            options=options,
            out=out,
            workers=workers,
            sessions=sessions_per_worker,
            retries=retries,
            silence=silence,
            engine=engine,
            work=work or DEFAULT_WORK,
            argv=tuple(sys.argv[1:]),
        )
    except KeyboardInterrupt:
        fail("interrupted before it began", 130, errors)
    try:
        console = errors if as_json else Console()
        report, code = execute(request, console=console, quiet=quiet)
    except (OptionError, StoreError) as error:
        fail(str(error), 2, errors)
    except RUN_FAILURES as error:
        fail(str(error) or type(error).__name__, 2, errors)
    except EngineError as error:
        fail(f"{error}\nThe same command goes on from here.", 1, errors)
    except KeyboardInterrupt:
        fail("interrupted before it began", 130, errors)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    raise typer.Exit(code)
