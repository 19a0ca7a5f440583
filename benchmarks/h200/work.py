"""What the parts share: sizes, the device, the model, and where findings go."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agent.bench.contestants import NotHere
from agent.bench.shapes import shaped_model

_RECORDS = "h200.jsonl"


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

    @property
    def scale(self) -> Scale:
        return DRY if self.dry else REAL

    @cached_property
    def model(self) -> PreTrainedModel:
        """The big one: made when it is first asked for."""
        scale = self.scale
        return shaped_model(scale.shape, dtype=scale.dtype, device=self.device)

    def tell(self, kind: str, **values: Any) -> None:
        """Put one finding on the disk, and most on the terminal."""
        record = {"part": self.part, "kind": kind, "at": time.time(), **values}
        add(self.out, record)
        if kind not in ("begin", "reading"):
            print(json.dumps(record)[:400], flush=True)

    @contextlib.contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """What fails inside is a finding, and whatever comes next goes on."""
        try:
            yield
        except NotHere as error:
            self.tell("missing", what=what, why=str(error))
        except Exception as error:  # any: a kernel's or a compiler's fault has no type in common
            self.tell("error", what=what, why=f"{type(error).__name__}: {error}"[:500])


def add(out: Path, record: dict[str, Any]) -> None:
    """Put one record on the disk at once."""
    with (out / _RECORDS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def records_of(out: Path) -> list[dict[str, Any]]:
    """All findings so far; a torn last line is left out."""
    path = out / _RECORDS
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
