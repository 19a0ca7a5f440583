"""Outcomes of tests as our own pytest plugin reports them: how it is put in place, what it said.

What the tests print plays no part. Folder, name, key and file of the plugin are drawn afresh for
each run. Code under test runs in the same process, so this is no wall: a patch made for it could
still cheat.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.base import Sandbox, SandboxError
from tasks.judging import ERROR, FAILED, PASSED, SKIPPED, XFAILED, XPASSED, worst

_SOURCE = Path(__file__).with_name("pytest_recorder.py")
RESULTS_CAP = 50_000_000  # bytes


@dataclass(frozen=True, slots=True)
class Records:
    """What the plugin wrote."""

    outcomes: Mapping[str, str]  # test id -> outcome
    started: bool = False  # it was loaded
    finished: bool = False  # pytest came to its end
    tampered: bool = False  # the results hold lines that it did not write
    uncollected: tuple[str, ...] = ()  # ids that failed to be collected
    root: str = ""  # pytest's root folder; ids are relative to it
    start: str = ""  # where pytest was started
    trouble: str = ""  # why not all of it could be read


@dataclass(frozen=True, slots=True)
class Recorder:
    """The plugin in a sandbox, for one run of pytest."""

    plugin: str  # its module's name: pytest's option -p loads it
    folder: str  # must be on the module path
    results: str
    key: bytes

    @classmethod
    def place(cls, box: Sandbox) -> Recorder:
        """Put it into a sandbox. Raises SandboxError."""
        folder, plugin = f"/tmp/{secrets.token_hex(12)}", f"p{secrets.token_hex(8)}"
        box.run(["mkdir", "-m", "700", folder])
        put = box.run(f"cat > {folder}/{plugin}.py", stdin=_SOURCE.read_bytes())
        if put.exit_code != 0:
            raise SandboxError(f"cannot write to {folder} in the sandbox: {put.text[-300:]}")
        results = f"{folder}/{secrets.token_hex(12)}"
        return cls(plugin, folder, results, secrets.token_bytes(32))

    @property
    def stdin(self) -> bytes:
        """The line that the plugin reads before anything of the tree runs."""
        line = json.dumps([self.results, self.key.hex(), self.folder, self.plugin])
        return line.encode() + b"\n"

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables that let pytest find the plugin, given those that are set already."""
        path = os.pathsep.join(part for part in (env.get("PYTHONPATH"), self.folder) if part)
        return {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def read(self, box: Sandbox) -> Records:
        """What it wrote so far. Raises SandboxError if the sandbox is gone."""
        written = box.run(["cat", self.results], output_cap=RESULTS_CAP)
        lines = written.output.splitlines() if written.exit_code == 0 else []
        trouble = f"the results are larger than {RESULTS_CAP} bytes" if written.omitted else ""
        return _parsed(lines, self.key, trouble)


def _parsed(lines: Sequence[bytes], key: bytes, trouble: str) -> Records:
    """What the plugin's lines say. Lines that it did not write are left out and reported."""
    outcomes: dict[str, str] = {}
    uncollected: list[str] = []
    started = finished = tampered = False
    number, root, start = 0, "", ""
    for line in lines:
        tag, _, text = line.partition(b" ")
        expected = hmac.new(key, text, hashlib.sha256).hexdigest().encode()
        record = json.loads(text) if hmac.compare_digest(tag, expected) else None
        if record is None or record["n"] != number:
            tampered = True
            continue
        number += 1
        event = record["event"]
        started = started or event == "start"
        finished = finished or event == "finish"
        if event == "configure":
            root, start = record["root"], record["start"]
        elif event == "collect":
            uncollected.append(record["id"])
        elif event == "report" and (outcome := _outcome(record)):
            outcomes[record["id"]] = worst([outcomes.get(record["id"], PASSED), outcome])
    missed = tuple(uncollected)
    return Records(outcomes, started, finished, tampered, missed, root, start, trouble)


def _outcome(record: Mapping[str, object]) -> str | None:
    """What one phase of a test says; None for a set-up or tear-down that passed."""
    outcome, xfail = record["outcome"], bool(record["xfail"])
    if outcome == "skipped":
        return XFAILED if xfail else SKIPPED
    if record["when"] != "call":
        return ERROR if outcome == "failed" else None
    if outcome == "passed":
        return XPASSED if xfail else PASSED
    return FAILED
