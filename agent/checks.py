"""What was run to check the last change of a run, read from its trajectory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.settings import AgentSettings
from agent.tools import EDITING, RUNNING
from agent.trajectory import read_trajectory

_CODE = re.compile(r"exit code:? (-?[0-9]+)|<returncode>(-?[0-9]+)</returncode>", re.IGNORECASE)
_LIMITS = ("time limit", "out of memory")


@dataclass(frozen=True, slots=True)
class Check:
    """A command that ran on the tree as the patch has it."""

    step: int
    command: str
    passed: bool | None  # None: the trajectory does not say
    outcome: str  # "passed", "exit code 2", ...
    tests: bool  # whether it is the project's own test command


@dataclass(frozen=True, slots=True)
class Checks:
    """Everything that was run since the last change; `changed_at` is None without a change."""

    changed_at: int | None
    ran: tuple[Check, ...]

    def data(self) -> dict[str, Any]:
        """As a report has it."""
        return {"changed_at": self.changed_at, "ran": [asdict(check) for check in self.ran]}


def checks_of(folder: Path, settings: AgentSettings, test_command: str | None) -> Checks:
    """Read them. A folder without a trajectory, or with a damaged one, gives none."""
    try:
        steps = [entry for entry in read_trajectory(folder) if entry.get("kind") == "step"]
    except (OSError, ValueError):
        return Checks(None, ())
    changes = [place for place, step in enumerate(steps) if step.get("changed")]
    if not changes:
        return Checks(None, ())
    last = changes[-1]
    ran = [
        check
        for step in steps[last:]
        if (check := _check(step, settings, test_command, first=step is steps[last]))
    ]
    return Checks(int(steps[last].get("step", last + 1)), tuple(ran))


def _check(
    step: Mapping[str, Any], settings: AgentSettings, test_command: str | None, *, first: bool
) -> Check | None:
    call, said = step.get("call") or {}, str(step.get("observation") or "")
    tool = settings.tools.get(call.get("name", ""))
    uses = (tool.uses or call["name"]) if tool else ""
    number = int(step.get("step", 0))
    if uses in EDITING and test_command:
        messages = settings.messages
        for template, right in ((messages.tests_pass, True), (messages.tests_fail, False)):
            words = template.partition("{{")[0].strip()
            if words and words in said:
                outcome = "passed" if right else "failed"
                return Check(number, test_command, right, outcome, tests=True)
    if uses not in RUNNING or first:  # a command that changed files ran on others than it left
        return None
    given = call.get("arguments") or {}
    command = test_command if uses == "test" else given.get("command") or given.get("cmd")
    if not command:
        return None
    code = step.get("exit_code")
    if code is None:
        found = _CODE.search(said)
        code = int(found[1] or found[2]) if found else None
    if code is None and uses == "execute_bash" and "[STDOUT]" in said:
        code = 0  # it names a code only where there is one
    troubles = [limit for limit in _LIMITS if limit in said.partition("\n")[0]]
    outcome = "; ".join([*troubles, "outcome unknown" if code is None else f"exit code {code}"])
    passed = None if code is None else code == 0
    return Check(number, command.strip(), passed, outcome, tests=command == test_command)
