"""Where the results of a batch are kept, so that `kill -9` at any moment loses one run at most.

    DIR/manifest.json                   each start of the batch: what was asked, with what
    DIR/report.json                     the summary of the last start
    DIR/predictions.jsonl               the patches, in the format of SWE-bench
    DIR/logs/                           what workers printed
    DIR/runs/INSTANCE/CELL-KEY/         one run: trajectory, patches, report.json, result.json
    DIR/runs/INSTANCE/CELL-KEY.try-N/   a try of it that came to nothing

`result.json` is written last and whole: a run that has none did not end, and is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.batch.item import Item
from agent.trajectory import PATCH, write_atomic, write_report
from tasks.predictions import Prediction, write_predictions

FORMAT = 1
FINISHED, ERROR, INTERRUPTED = "finished", "error", "interrupted"
RESULT, PREDICTION, MANIFEST = "result.json", "prediction.diff", "manifest.json"
_FOLDER = re.compile(r".*-[0-9a-f]{10}")
_ORPHANS = 10.0  # seconds in which the workers of a process that died have to end

Result = dict[str, Any]


class StoreError(Exception):
    """A folder that cannot be used for a batch; the text says why and what to do."""


class Store:
    """The folder of a batch. Reading needs no lock; who writes holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock_fd: int | None = None  # workers share it: while one lives, the folder is taken

    # Results

    def folder_of(self, item: Item) -> Path:
        """The folder of a run, whether it is there or not."""
        name = f"{_safe(item.cell) or 'run'}-{item.key[:10]}"
        return self.folder / "runs" / item.instance_id / name

    def result(self, item: Item) -> Result | None:
        """The result of this very run: None if there is none, or it is damaged, or another
        item's, or the patch beside it is not the one that was graded."""
        folder = self.folder_of(item)
        found = _read(folder / RESULT)
        if found is None or found.get("format") != FORMAT or found.get("key") != item.key:
            return None
        if found.get("state") == FINISHED and found.get("patch_sha256") != _patch_sum(folder):
            return None
        return found if found.get("state") in (FINISHED, ERROR) else None

    def finished(self, items: Iterable[Item]) -> dict[str, Result]:
        """The results, by key, of those that need not be run again."""
        found = {item.key: self.result(item) for item in items}
        return {key: data for key, data in found.items() if data and data["state"] == FINISHED}

    def results(self) -> Iterator[Result]:
        """All results in the folder, of whatever config, sorted by place."""
        for path in sorted(self.folder.glob(f"runs/*/*/{RESULT}")):
            found = _read(path)
            if _FOLDER.fullmatch(path.parent.name) and found and found.get("format") == FORMAT:
                yield found

    def fresh(self, item: Item) -> Path:
        """An empty folder for a try of a run. What an earlier try left is set aside.

        Raises StoreError if the run is finished.
        """
        folder = self.folder_of(item)
        found = self.result(item)
        if found is not None and found["state"] == FINISHED:
            raise StoreError(f"{folder} holds a finished run; it is not made again")
        if folder.exists():
            number = 1
            while (aside := folder.with_name(f"{folder.name}.try-{number}")).exists():
                number += 1
            if any(folder.iterdir()):
                folder.rename(aside)
            else:
                shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def write(self, item: Item, result: Mapping[str, Any]) -> Result:
        """Keep a result, whole or not at all; returns it as it is kept."""
        folder = self.folder_of(item)
        folder.mkdir(parents=True, exist_ok=True)
        data = {"format": FORMAT, "key": item.key, "item": item.model_dump(mode="json"), **result}
        data["patch_sha256"] = _patch_sum(folder)
        text = json.dumps(data, indent=2, ensure_ascii=True) + "\n"
        write_atomic(folder / RESULT, text.encode())
        return data

    def patch(self, item: Item) -> bytes | None:
        """The patch that was graded."""
        return _patch(self.folder_of(item))

    # Files about all of them

    def predictions(self, items: Iterable[Item]) -> list[Path]:
        """Write the patches of finished runs: one file for each cell and attempt, since the format
        has one patch an instance. Returns the files, `predictions.jsonl` alone where there are no
        cells and one attempt."""
        files: dict[str, list[Prediction]] = {}
        for item in items:
            rows = files.setdefault(_predictions_name(item), [])
            found = self.result(item)
            patch = self.patch(item)
            if found is not None and found["state"] == FINISHED and patch is not None:
                rows.append(Prediction(item.instance_id, model_name(item), patch))
        for name, rows in files.items():
            write_predictions(self.folder / name, rows)
        return [self.folder / name for name in files]

    def sessions(self) -> list[dict[str, Any]]:
        """Each start of the batch, oldest first."""
        data = _read(self.folder / MANIFEST)
        return list(data["sessions"]) if data else []

    def note_session(self, facts: Mapping[str, Any]) -> None:
        """Add a start to the manifest."""
        self._write_manifest([*self.sessions(), dict(facts)])

    def _write_manifest(self, sessions: list[dict[str, Any]]) -> None:
        data = {"format": FORMAT, "sessions": sessions}
        text = json.dumps(data, indent=2, ensure_ascii=True) + "\n"
        write_atomic(self.folder / MANIFEST, text.encode())

    def report(self, report: Mapping[str, Any]) -> None:
        """Replace the report."""
        write_report(self.folder, report)

    # One batch at a time

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder, which is made if missing.

        Raises StoreError if another batch holds it, or if it is something else's folder. What a
        process that died held is free at once.
        """
        self._own()
        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(handle)
            if not (self.folder / MANIFEST).exists():  # it says whose folder this is
                self._write_manifest([])
            self.lock_fd = handle
            yield
        finally:
            self.lock_fd = None
            os.close(handle)

    def _own(self) -> None:
        """Make the folder, or see that it is one of ours."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            others = [path for path in self.folder.iterdir() if path.name[0] != "."]
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be used: {error}") from error
        data = _read(self.folder / MANIFEST)
        if others and data is None:
            raise StoreError(
                f"{self.folder} holds other things (such as {others[0].name}) and is no folder of "
                "a batch; name a new one"
            )
        if data is not None and data.get("format") != FORMAT:
            raise StoreError(
                f"{self.folder} was written by another version (format {data.get('format')}, this "
                f"one writes {FORMAT}); name a new folder"
            )

    def _take(self, handle: int) -> None:
        end = time.monotonic() + _ORPHANS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
                if _alive(holder) or time.monotonic() > end:
                    raise StoreError(_taken(self.folder, holder)) from None
                time.sleep(0.05)  # its workers are about to end
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} {socket.gethostname()} {since}\n".encode(), 0)


def model_name(item: Item) -> str:
    """What a prediction calls the model: with method and protocol, which are part of it."""
    model = str(item.options.get("model", "unknown"))
    if model.startswith(("/", ".", "~")):
        model = Path(model).name
    parts = [model, item.options.get("method"), item.options.get("protocol")]
    return "+".join(str(part) for part in parts if part)


def _predictions_name(item: Item) -> str:
    parts = ["predictions"]
    if item.cell:
        parts.append(_safe(item.cell))
    if item.attempt > 1:
        parts.append(f"attempt-{item.attempt}")
    return ".".join(parts) + ".jsonl"


def _safe(name: str) -> str:
    return "".join(char if char.isalnum() or char in "._+-" else "-" for char in name)[:80]


def _patch(folder: Path) -> bytes | None:
    """The graded patch; where nothing was graded, all of it."""
    for name in (PREDICTION, PATCH):
        try:
            return (folder / name).read_bytes()
        except FileNotFoundError:
            continue
    return None


def _patch_sum(folder: Path) -> str | None:
    patch = _patch(folder)
    return None if patch is None else hashlib.sha256(patch).hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is none or it is damaged."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _alive(holder: str) -> bool:
    """Whether the process named in a lock may be alive; on another machine it may."""
    pid, _, rest = holder.partition(" ")
    if not pid.isdigit() or rest.partition(" ")[0] != socket.gethostname():
        return bool(holder)
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _taken(folder: Path, holder: str) -> str:
    pid, _, rest = holder.partition(" ")
    host, _, since = rest.partition(" ")
    who = f"process {pid} on {host} since {since}" if since else "another process"
    if since and not _alive(holder):
        return f"workers of {who}, which died, still go on in {folder}; try again in a moment"
    return f"{folder} is in use by {who}; wait until it ends, or name another folder"
