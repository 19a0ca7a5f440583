"""The command `agent`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agent import flags
from agent.cli_bench import bench_app
from agent.cli_compare import compare
from agent.cli_errors import fail
from agent.cli_eval import evaluate
from agent.cli_images import images_app
from agent.cli_models import models_app
from agent.cli_runs import list_runs, show
from agent.cli_tasks import tasks_app
from agent.doctor import doctor
from agent.run_options import (
    DEFAULT_MODEL,
    DEMO_INSTANCE,
    DEMO_SEED,
    OptionError,
    parse_options,
)

app = typer.Typer(
    help="Coding agents whose KV cache never outgrows its budget. Start with `agent run`.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
app.add_typer(models_app, name="models")
app.add_typer(images_app, name="images")
app.add_typer(tasks_app, name="tasks")
app.add_typer(bench_app, name="bench")
app.command("doctor")(doctor)
app.command("eval")(evaluate)
app.command("compare")(compare)
app.command("runs")(list_runs)
app.command("show")(show)

_TASK, _KEPT = "What to work on", "Going on after an interruption"
_WITH_RESUME = {"resume", "out", "as_json", "quiet"}


@app.command("run")
def run(
    context: typer.Context,
    task: Annotated[str, typer.Option(help="Kind of task.", rich_help_panel=_TASK)] = "repo_issue",
    instance: Annotated[
        str | None,
        typer.Option(
            metavar="ID[@FILE]",
            help=f"An instance with hidden tests. Without it and --repo: {DEMO_INSTANCE}.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    repo: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Your own repository; the agent works on a copy.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    issue: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|FILE", help="What is wrong in --repo or --image.", rich_help_panel=_TASK
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A Docker image to work in. Without --repo it holds the project, in /testbed.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    test_command: Annotated[
        str | None,
        typer.Option(
            "--test-cmd",
            "--test-command",
            metavar="COMMAND",
            help="How the tests of --repo are run; guessed from its files where it is not given.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="A virtual environment or conda prefix of this machine for --repo, read-only.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    setup: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Runs once in the sandbox, with network, before the agent starts; what it makes "
            "is kept for the same tree and is no part of the patch.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the patch to --repo.", rich_help_panel=_TASK)
    ] = False,
    branch: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The patch as a commit on a new branch of --repo, from HEAD; all else stays.",
            rich_help_panel=_TASK,
        ),
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
        int | None,
        typer.Option(
            help=f"Of the first attempt: 0, for the demo {DEMO_SEED}.", rich_help_panel=flags.LIMITS
        ),
    ] = None,
    attempts: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Seeded attempts in turn, graded when all are over (pass@K); one prefill of the "
            "first prompt and one cache seed serve them all. Attempt N alone: --seed FIRST+N-1 "
            "--set cache.seed=FIRST (dense: --seed only).",
            rich_help_panel=flags.LIMITS,
        ),
    ] = 1,
    until_resolved: Annotated[
        bool,
        typer.Option(
            "--until-resolved",
            help="Grade after each attempt and stop at the first that resolves.",
            rich_help_panel=flags.LIMITS,
        ),
    ] = False,
    parallel: Annotated[
        bool,
        typer.Option(
            "--parallel",
            help="Make the attempts at once: one model writes for all, a token of each at a time. "
            "Memory for K caches.",
            rich_help_panel=flags.LIMITS,
        ),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Go on with a run that was ended: its folder, its name in --out, or last.",
            rich_help_panel=_KEPT,
        ),
    ] = None,
    snapshot_turns: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Save the cache after K turns; 0 keeps nothing to go on from.",
            rich_help_panel=_KEPT,
        ),
    ] = 5,
    snapshot_seconds: Annotated[
        float,
        typer.Option(
            metavar="S", help="Or after S seconds, if that is sooner.", rich_help_panel=_KEPT
        ),
    ] = 60.0,
    sandbox: flags.SandboxKind = "auto",
    tools: flags.ToolSet = "auto",
    set_: flags.Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where run folders go.", rich_help_panel=flags.OUTPUT),
    ] = None,
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
) -> None:
    """Let a model fix an issue in a repository, in a sandbox, on one cache of fixed size.

    Without options: a small real model works on a real bug of a real package, and hidden tests
    decide. Ends with 0 whatever the verdict; 1 when the run itself failed, 2 for options that do
    not fit, 130 when it was interrupted.

    Whatever ends it (Ctrl-C, kill -9, a reboot), `--resume RUN` goes on after the last turn that
    was finished: files, cache and limits are what they were.
    """
    settings = flags.overrides(
        steps=steps,
        new_tokens=max_new_tokens,
        total_tokens=max_tokens,
        wall_time=wall_time,
        set_=set_,
    )
    values: dict[str, Any] = {
        "task": task,
        "instance": instance,
        "repo": repo,
        "issue": issue,
        "image": image,
        "test_command": test_command,
        "env": env,
        "setup": setup,
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
        "until_resolved": until_resolved,
        "parallel": parallel,
        "sandbox": sandbox,
        "apply": apply,
        "branch": branch,
        "snapshot_turns": snapshot_turns,
        "snapshot_seconds": snapshot_seconds,
        "overrides": settings,
    }
    errors = Console(stderr=True)
    try:
        if resume is not None:
            _require_alone(context)
        options = parse_options(values)
    except OptionError as error:
        fail(str(error), 2, errors)
    console = errors if as_json else Console()
    with errors.status("loading") if not quiet else nullcontext():
        from agent.run_command import execute
        from agent.run_command import resume as go_on
        from agent.run_failures import RUN_FAILURES
    place, hushed = out or Path("runs"), quiet or as_json
    try:
        if resume is not None:
            report, code = go_on(resume, out=place, console=console, quiet=hushed)
        else:
            report, code = execute(options, out=place, console=console, quiet=hushed)
    except OptionError as error:
        fail(str(error), 2, errors)
    except RUN_FAILURES as error:
        fail(str(error) or type(error).__name__, 1, errors)
    except KeyboardInterrupt:
        fail("interrupted", 130, errors)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    raise typer.Exit(code)


def _require_alone(context: typer.Context) -> None:
    """With --resume all options are the run's. Raises OptionError for one that was given."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in _WITH_RESUME:
            raise OptionError(
                f"--resume takes the options of the run; {parameter.opts[0]} cannot be given"
            )


@app.command("clean")
def clean(
    everything: Annotated[
        bool, typer.Option("--all", help="Also containers of runs that still go on.")
    ] = False,
) -> None:
    """Remove sandboxes that runs which died left behind."""
    from environments import clean as remove

    for kind, count in remove(everything=everything).items():
        typer.echo(f"{kind}: {count} removed")


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
