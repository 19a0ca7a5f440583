"""A pytest plugin that writes each test's outcome to a file; `grading` puts it into the sandbox.

Loaded there by `-p` under a name drawn for the run. The file's path and a key come over stdin,
which is read before any code of the tree that pytest loads itself; each line carries its number and
a tag made with the key. What the tests print plays no part. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
from typing import Any


class Recorder:
    """Writes `{"n": number, ...}` and the tag of that text, a line per report."""

    def __init__(self, path: str, key: bytes) -> None:
        self._key = key
        self._count = 0
        self._pid = os.getpid()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # bound now: a test may have replaced them while its report is made
        self._write, self._getpid, self._dumps = os.write, os.getpid, json.dumps
        self._record(event="start")

    def _record(self, **fields: object) -> None:
        if self._getpid() != self._pid:  # a child that a test forked and that ran on
            return
        text = self._dumps({"n": self._count, **fields}).encode()
        tag = hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()
        self._write(self._descriptor, tag + b" " + text + b"\n")
        self._count += 1

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._record(
            event="report",
            id=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            xfail=hasattr(report, "wasxfail"),
        )

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._record(event="collect", id=report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._record(event="finish", exit=int(exitstatus))


def pytest_addoption(parser: Any, pluginmanager: Any) -> None:
    """Called while options are read: before conftest files, and before stdin is captured."""
    path, key, folder = json.loads(sys.stdin.readline())
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    kept = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    pluginmanager.register(Recorder(path, bytes.fromhex(key)))
