"""`run` and `test`: commands in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agent.tools.base import Observation, ToolError, required
from agent.tools.text import clip
from agent.tools.workspace import Workspace
from environments.base import ExecResult

_TELLING = re.compile(r"^(E  |FAILED |ERROR |FAIL: |ERROR: |\w*(Error|Exception)\b.*:)")


def run(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Run a shell command and show its exit code and output."""
    command = required(arguments, "command").strip()
    return _shown(workspace, workspace.run(command))


def test(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Run the project's own tests."""
    if not workspace.test_command:
        raise ToolError("The project names no test command; use run.")
    return _shown(workspace, workspace.run(workspace.test_command))


def test_result(workspace: Workspace, seconds: float) -> tuple[bool, str] | None:
    """Whether the project's tests pass, and the lines that say why not. None when out of time."""
    if not workspace.test_command:
        return None
    result = workspace.run(workspace.test_command, timeout=seconds)
    if result.timed_out:
        return None
    return result.exit_code == 0, failures(result.text)


def failures(output: str, limit: int = 700) -> str:
    """The telling lines of a test run: what failed and why, as pytest and unittest print it."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.match(line)]
    chosen = list(dict.fromkeys(telling)) or lines[-8:]
    return clip("\n".join(line[:200] for line in chosen[:12]), limit)


def troubles(result: ExecResult) -> list[str]:
    """What the sandbox did to a command: its time, memory or processes were used up."""
    found = []
    if result.timed_out:
        found.append(f"stopped after {result.duration:.0f} s, the time limit")
    if result.out_of_memory:
        found.append("out of memory")
    if result.pids_exhausted:
        found.append("too many processes")
    return found


def _shown(workspace: Workspace, result: ExecResult) -> Observation:
    facts = [f"exit code {result.exit_code}", *troubles(result)]
    output = clip(result.text.strip("\n"), workspace.observation_chars)
    text = f"({', '.join(facts)})\n{output or 'no output'}"
    return Observation(text, changed=True, exit_code=result.exit_code)
