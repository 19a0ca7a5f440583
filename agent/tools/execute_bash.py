"""`execute_bash`: a shell command, its two outputs apart."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from agent.tools.base import Observation, ToolError
from agent.tools.run import troubles
from agent.tools.text import clip, clip_lines
from agent.tools.workspace import Workspace
from environments.base import SandboxError, SandboxLost

# They wait for somebody at a terminal, or go on after the command is over; neither can be here.
_REFUSED = ("ipython", "jupyter", "nohup")
_ERRORS = "/tmp/.stderr"  # in the sandbox
_LINES = 40  # shown of each end of an output


def execute_bash(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Run `command` (or `cmd`) in a fresh shell at the top of the tree."""
    given = [arguments[key] for key in ("command", "cmd") if arguments.get(key, "").strip()]
    if len(given) != 1:
        raise ToolError("Give one command, as the parameter command.")
    command = given[0].strip()
    first = _first_word(command)
    if first in _REFUSED:
        raise ToolError(
            f"{first} is not run here: each command runs by itself, without a terminal, and what "
            "it leaves running is ended. Run a script or a one-line command instead."
        )
    # The shell sends its errors to a file first of all; so the sandbox's own stream is the output.
    # On a line of its own, which is obeyed before the next is read: that may be no valid command.
    result = workspace.run(f"exec 2>{_ERRORS}\n{command}")
    errors = _taken(workspace, _ERRORS)
    limit = workspace.observation_chars
    err = clip(clip_lines(errors.strip("\n"), _LINES, _LINES), limit // 2)
    out = clip(clip_lines(result.text.strip("\n"), _LINES, _LINES), max(limit - len(err), 200))
    rows = []
    if result.exit_code or result.timed_out:
        facts = "; ".join([f"exit code {result.exit_code}", *troubles(result)])
        rows.append(f"The command failed: {facts}.")
    rows += ["[STDOUT]", out, "", "[STDERR]", err]
    return Observation("\n".join(rows).rstrip("\n"), changed=True, exit_code=result.exit_code)


def _first_word(command: str) -> str:
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # a quote left open: the shell will say so
        words = command.split()
    return words[0] if words else ""


def _taken(workspace: Workspace, file: str) -> str:
    """The content of a file, which is removed. Nothing where it cannot be read."""
    try:
        found = workspace.run(["cat", file])
        workspace.run(["rm", "-f", file])
    except SandboxLost:
        raise
    except SandboxError:
        return ""
    return found.text if found.exit_code == 0 else ""
