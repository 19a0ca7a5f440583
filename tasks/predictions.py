"""Predictions in the format of SWE-bench: which patch a model made for which instance.

A `.jsonl` file has one a line; a `.json` file is a list, or an object by instance id.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.instance import TaskError
from tasks.rows import read_file

ID, MODEL, PATCH = "instance_id", "model_name_or_path", "model_patch"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One patch. Bytes that are no UTF-8 survive a file and back as lone surrogates."""

    instance_id: str
    model: str
    patch: bytes

    def record(self) -> dict[str, str]:
        """The official form."""
        text = self.patch.decode("utf-8", "surrogateescape")
        return {ID: self.instance_id, MODEL: self.model, PATCH: text}


def read_predictions(path: Path, known: Collection[str] = ()) -> dict[str, Prediction]:
    """All predictions of a file by instance id, in its order.

    A missing or null patch is an empty one. TaskError for what is no prediction, for two of one
    id, and for ids that are not among `known` (if any are given).
    """
    found: dict[str, Prediction] = {}
    for place, row in _rows(path):
        for key in (ID, MODEL):
            if not isinstance(row.get(key), str) or not row[key]:
                raise TaskError(f"{place} is no prediction: it has no {key}")
        patch = row.get(PATCH) or ""
        if not isinstance(patch, str):
            raise TaskError(f"{place}: {PATCH} is no text")
        name = row[ID]
        if name in found:
            raise TaskError(f"{place} is a second prediction for {name}; give one per instance")
        if known and name not in known:
            raise TaskError(f"{place}: {name} is not among the {len(known)} instances asked for")
        found[name] = Prediction(name, row[MODEL], patch.encode("utf-8", "surrogateescape"))
    return found


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix not in (".json", ".jsonl"):
        raise TaskError(f"{path}: predictions are .jsonl or .json files")
    if path.suffix == ".json":
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TaskError(f"cannot read {path}: {error}") from error
        if isinstance(data, dict):
            for name, fields in data.items():
                if not isinstance(fields, dict):
                    raise TaskError(f"{path}, {name} is no object with fields")
                yield f"{path}, {name}", {ID: name, **fields}
            return
    for row in read_file(path):
        yield row.place, row.fields


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write a file whole or not at all: `.json` as a list, any other as JSON lines."""
    records = [prediction.record() for prediction in predictions]
    if path.suffix == ".json":
        text = json.dumps(records, indent=1) + "\n"
    else:
        text = "".join(json.dumps(record) + "\n" for record in records)
    write_whole(path, text.encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
