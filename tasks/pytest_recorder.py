"""A pytest plugin that writes each test's outcome to a file; `recording` puts it into the sandbox.

Loaded there by `-p` under a name drawn for the run. The file's path and a key come over stdin,
which is read before any code of the tree that pytest loads itself and before pytest captures it;
each line carries its number and a tag made with the key. What the tests print plays no part.
Standard library only, and old enough in form for Python 3.5 and pytest 3 (images of old projects).
"""

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
        text = self._dumps(dict(fields, n=self._count)).encode()
        tag = hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()
        self._write(self._descriptor, tag + b" " + text + b"\n")
        self._count += 1

    def configure(self, config: Any, name: str) -> None:
        root = getattr(config, "rootpath", None) or config.rootdir
        self._record(event="configure", root=str(root), start=os.getcwd())  # noqa: PTH109 (a str)
        # workers of pytest-xdist would look for the plugin in vain
        config.option.plugins = [p for p in config.option.plugins or () if p != name]

    def report(self, report: Any) -> None:
        self._record(
            event="report",
            id=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            xfail=hasattr(report, "wasxfail"),
        )

    def collected(self, report: Any) -> None:
        if report.failed:
            self._record(event="collect", id=report.nodeid)

    def finish(self, exitstatus: int) -> None:
        self._record(event="finish", exit=int(exitstatus))


def _hide(folder: str, plugin: str) -> None:
    """Processes that the tests start are not to look for the plugin, nor code of the tree."""
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    kept = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e != folder]
    options = os.environ.get("PYTEST_ADDOPTS", "").replace("-p " + plugin, "").strip()
    for name, value in (("PYTHONPATH", os.pathsep.join(kept)), ("PYTEST_ADDOPTS", options)):
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value


_line = sys.stdin.readline()
if _line:  # else a process that is not the one to be recorded
    _path, _key, _folder, _plugin = json.loads(_line)
    _hide(_folder, _plugin)
    _recorder = Recorder(_path, bytes.fromhex(_key))

    def pytest_configure(config: Any) -> None:
        _recorder.configure(config, __name__)

    pytest_runtest_logreport = _recorder.report
    pytest_collectreport = _recorder.collected

    def pytest_sessionfinish(exitstatus: int) -> None:
        _recorder.finish(exitstatus)

    del _line, _path, _key, _folder, _plugin
