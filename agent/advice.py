"""What is said to the model beyond a tool's own output: tests, repetition, what to do next."""

from __future__ import annotations

from collections import Counter
from typing import Any

from agent.dialects.base import Call
from agent.exits import Exit, ExitReason
from agent.prompts import render
from agent.settings import AgentSettings
from agent.tools import EDITING, Observation, Workspace
from agent.tools.run import test_result
from tasks.instance import Instance


class Advice:
    """Completes observations. Remembers what was done, and whether the last change passed."""

    def __init__(
        self, settings: AgentSettings, instance: Instance, workspace: Workspace, tools: list[str]
    ) -> None:
        self._messages, self._limits = settings.messages, settings.limits
        self._workspace, self._tools = workspace, tools
        self._title = instance.problem.strip().splitlines()[0] if instance.problem.strip() else ""
        self._seen: Counter[tuple[str, str, bytes]] = Counter()
        self._doubted = False  # a submission was held back because tests fail
        self._tests_fail = False

    def held_back(self, patch: bytes) -> str | None:
        """Why a submission is not accepted yet: nothing changed, or tests fail (said once)."""
        if not patch:
            return self.message(self._messages.nothing_changed, patch)
        if self._tests_fail and not self._doubted and self._messages.tests_still_fail:
            self._doubted = True
            return self.message(self._messages.tests_still_fail, patch)
        return None

    def completed(
        self, call: Call, observation: Observation, patch: bytes, *, failed: bool, steps_left: int
    ) -> Observation:
        """An observation with advice. Raises Exit when the model goes round in circles."""
        messages, notes = self._messages, []
        times = self._times(call, observation, patch)
        if times >= self._limits.repeats:
            raise Exit(ExitReason.STUCK, f"{times} times the same {call.name} and result")
        if times > 1:
            notes.append(self.message(messages.repeated, patch, call=call.name))
        elif failed:
            notes.append(self.message(messages.after_error, patch))
        elif observation.changed and call.name in EDITING:
            notes.append(self._tests(patch))
            notes.append(self.message(messages.after_edit, patch, tests_fail=self._tests_fail))
        elif call.name in ("run", "test"):
            notes.append(self.message(messages.after_test, patch))
        if not observation.final:
            notes.append(self.message(messages.steps_left, patch, left=steps_left))
        text = "\n".join([observation.text, *(note for note in notes if note)])
        return Observation(text, changed=observation.changed, final=observation.final)

    def message(self, template: str, patch: bytes, **values: Any) -> str:
        """A message of the tool set, filled in."""
        given = {"patch": bool(patch), "tools": self._tools, "title": self._title, **values}
        return render(template, **given).strip()

    def _times(self, call: Call, observation: Observation, patch: bytes) -> int:
        """How often this call had this result. Only where the tree is the same as well."""
        key = (f"{call.name}{sorted(call.arguments.items())}", observation.text, patch)
        self._seen[key] += 1
        return self._seen[key]

    def _tests(self, patch: bytes) -> str:
        """What the project's own tests say to a change."""
        self._tests_fail = self._doubted = False
        if not self._limits.test_time or not self._workspace.test_command:
            return ""
        result = test_result(self._workspace, self._limits.test_time)
        if result is None:
            return ""
        passed, output = result
        self._tests_fail = not passed
        messages = self._messages
        template = messages.tests_pass if passed else messages.tests_fail
        return self.message(template, patch, output=output)
