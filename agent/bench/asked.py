"""What `agent bench` was asked for: numbers, budgets, the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from agent.cli_errors import fail

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def numbers(name: str, text: str) -> list[int]:
    """What `--name` was given: "0,4_096" is 0 and 4096. Raises ValueError."""
    try:
        found = [int(part.replace("_", "")) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(
            f"--{name} takes whole numbers with commas between, not {text!r}"
        ) from None
    if any(number < 0 for number in found):
        raise ValueError(f"--{name} {text}: a number of tokens is not negative")
    return found


def budgets(text: str) -> tuple[list[int], list[float]]:
    """Tokens, and shares: what is below 1, or 1.0. Raises ValueError."""
    tokens, shares = list[int](), list[float]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            number = float(part)
        except ValueError:
            raise ValueError(f"--budget takes numbers with commas between, not {text!r}") from None
        if number <= 0 or (number > 1 and number != int(number)):
            raise ValueError(f"--budget {part}: a number of tokens, or a share up to 1.0")
        if number > 1 or "." not in part:
            tokens.append(int(number))
        else:
            shares.append(number)
    return tokens, shares


def names(text: str) -> list[str]:
    """Each once, in their order."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def require_model(shape: str | None, model: str | None, layers: int | None) -> None:
    """Raises ValueError for options that exclude each other."""
    if shape is not None and model is not None:
        raise ValueError("--shape and --model exclude each other")
    if layers is not None and model is not None:
        raise ValueError("--layers cuts a --shape; a --model is taken whole")


def load_model(
    errors: Console,
    shape: str | None,
    model: str | None,
    layers: int | None,
    dtype: str,
    device: str,
    threads: int | None,
    seed: int,
) -> tuple[PreTrainedModel, str]:
    """The model, and what it is in words. Ends the command where there is none."""
    import torch

    from agent.bench.shapes import shaped_model, weight_bytes
    from agent.models import choose_device, choose_precision, load
    from agent.progress import TerminalProgress
    from agent.run_failures import RUN_FAILURES

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        if model is not None:
            with TerminalProgress() as telling:
                loaded = load(model, dtype=dtype, device=device, progress=telling)
            made, kind = loaded.model, f"{loaded.name} (sha256 {loaded.sha256[:12]}…)"
            precision = loaded.precision
        else:
            name = shape or "qwen2.5-coder-0.5b"
            where = choose_device(device)
            precision = choose_precision("float32" if dtype == "int8" else dtype, where)
            if precision == "int8":  # what auto is on some CPUs: for whole models only
                precision = "float32"
            with errors.status(f"making {name}"):
                made = shaped_model(
                    name, layers=layers, dtype=getattr(torch, precision), device=where, seed=seed
                )
            cut = f", {layers} layers of it" if layers else ""
            kind = f"shape of {name}{cut}, random weights"
    except RUN_FAILURES as error:
        fail(str(error) or type(error).__name__, 1, errors)
    except ValueError as error:
        fail(message(error), 2, errors)
    size = weight_bytes(made) / 2**30
    return made, f"{kind}, {precision}, {size:.2f} GiB of weights, {made.device}"


def paragraph(words: str, request: Any) -> str:
    """What was measured, under a table that is kept. words: of the model."""
    how = (
        "were filled with random keys and values (an evicting cache with what its budget leaves)"
        if request.context == "fill"
        else "were read by the model"
    )
    return (
        f"{words[0].upper()}{words[1:]}. Chunks of {request.chunk} tokens; contexts {how}; an "
        f"observation of {request.observation} tokens, then {request.new_tokens} written greedily "
        f"and timed, then {request.watched} watched; {request.repeats} repeats."
    )


def message(error: Exception) -> str:
    """An error in one line; of pydantic's messages those that say what is wrong."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("For further"))
