"""The head of a GGUF file: its plain metadata, and whether all its tensors are there.

The `gguf` package's reader unpacks every token of the vocabulary, which takes ten seconds for what
is a few numbers here. Format: GGUF version 2 and 3 (ggml's docs/gguf.md), little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from agent.model_errors import BadModelFile

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the weights."""

    metadata: dict[str, int | float | bool | str]  # arrays are left out
    elements: int  # weights in all tensors together


def read_header(path: Path) -> GgufHeader:
    """Read the head of a GGUF file and check that the file is as long as its tensors need.

    Raises BadModelFile, naming the file and what is wrong with it.
    """
    with path.open("rb") as handle:
        start = handle.read(4)
        if start != b"GGUF":
            raise BadModelFile(f"{path} is not a GGUF file: it starts with {start!r}")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header, end = _parse(data)
            except (struct.error, IndexError, UnicodeDecodeError, KeyError, ValueError) as error:
                raise BadModelFile(
                    f"{path} is damaged or cut off in its header: {error}"
                ) from error
            if end > len(data):
                raise BadModelFile(f"{path} is cut off: it has {len(data)} bytes and needs {end}")
    return header


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4

    def take(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def number(self, code: str) -> int:
        return int(self.take(code))

    def text(self) -> str:
        length = self.number("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> int | float | bool | str | None:
        """The value at the cursor; None for an array, which is passed over."""
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} is not defined")
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            self.at += struct.calcsize("<" + _SCALARS[item]) * count
        else:
            for _ in range(count):
                if item == _STRING:
                    self.at += 8 + struct.unpack_from("<Q", self.data, self.at)[0]
                else:
                    self.value(item)
        return None


def _parse(data: mmap.mmap) -> tuple[GgufHeader, int]:
    """The header, and the length that the file must at least have."""
    cursor = _Cursor(data)
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not known (2 and 3 are)")
    tensors, pairs = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(pairs):
        key = cursor.text()
        value = cursor.value(cursor.number("I"))
        if value is not None:
            metadata[key] = value
    elements, end = 0, 0
    for _ in range(tensors):
        cursor.text()
        shape = [cursor.number("Q") for _ in range(cursor.number("I"))]
        kind, offset = GGMLQuantizationType(cursor.number("I")), cursor.number("Q")
        count = 1
        for side in shape:
            count *= side
        block, size = GGML_QUANT_SIZES[kind]
        elements += count
        end = max(end, offset + count // block * size)
    align = int(metadata.get("general.alignment", 32))
    start = -(-cursor.at // align) * align
    return GgufHeader(metadata, elements), start + end
