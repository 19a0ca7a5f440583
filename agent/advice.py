"""What is said to the model beyond a tool's own output: tests, repetition, what to do next."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent.dialects.base import Call
from agent.exits import Exit, ExitReason
from agent.prompts import offered_tools, render
from agent.settings import AgentSettings
from agent.tools import EDITING, RUNNING, Observation, Workspace
from agent.tools.run import test_result
from tasks.instance import Instance


class Advice:
    """Completes observations. Remembers what was done, and whether the last change passed."""

    def __init__(
        self, settings: AgentSettings, instance: Instance, workspace: Workspace, tools: list[str]
    ) -> None:
        self._messages, self._limits = settings.messages, settings.limits
        self._workspace, self._tools = workspace, tools
        offered = offered_tools(settings, instance)
        self._uses = {name: tool.uses or name for name, tool in offered.items()}
        self._title = instance.problem.strip().splitlines()[0] if instance.problem.strip() else ""
        self._seen: Counter[str] = Counter()
        self._doubted = False  # a submission was held back because tests fail
        self._tests_fail = False

    def state(self) -> dict[str, Any]:
        """What it remembers, as plain JSON; `restore` takes it up again."""
        return {"seen": dict(self._seen), "doubted": self._doubted, "tests_fail": self._tests_fail}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._seen = Counter(state["seen"])
        self._doubted, self._tests_fail = bool(state["doubted"]), bool(state["tests_fail"])

    def held_back(self, patch: bytes) -> str | None:
        """Why a submission is not accepted yet: nothing changed, or tests fail (said once).

        None accepts it. Where the set has no message for a reason, that is none.
        """
        if not patch:
            return self.message(self._messages.nothing_changed, patch) or None
        if self._tests_fail and not self._doubted and self._messages.tests_still_fail:
            self._doubted = True
            return self.message(self._messages.tests_still_fail, patch)
        return None

    def completed(
        self,
        call: Call,
        observation: Observation,
        patch: bytes,
        *,
        failed: bool,
        steps_left: int,
        tokens_left: int,
    ) -> Observation:
        """An observation with advice. Raises Exit when the model goes round in circles."""
        messages, notes = self._messages, []
        tool = self._uses[call.name]
        times = self._times(call, observation, patch)
        if times >= self._limits.repeats:
            raise Exit(ExitReason.STUCK, f"{times} times the same {call.name} and result")
        if times > 1:
            notes.append(self.message(messages.repeated, patch, call=call.name))
        elif failed:
            notes.append(self.message(messages.after_error, patch))
        elif observation.changed and tool in EDITING:
            notes.append(self._tests(patch))
            notes.append(self.message(messages.after_edit, patch, tests_fail=self._tests_fail))
        elif tool in RUNNING:
            notes.append(self.message(messages.after_test, patch))
        if not observation.final:
            left = {"left": steps_left, "tokens_left": tokens_left}
            notes.append(self.message(messages.steps_left, patch, **left))
        text = observation.text
        if messages.observation:
            code = observation.exit_code or int(failed)
            text = self.message(
                messages.observation, patch, tool=call.name, output=text, exit_code=code
            )
        return replace(observation, text="\n".join([text, *(note for note in notes if note)]))

    def message(self, template: str, patch: bytes, **values: Any) -> str:
        """A message of the tool set, filled in."""
        given = {"patch": bool(patch), "tools": self._tools, "title": self._title, **values}
        return render(template, **given).strip()

    def _times(self, call: Call, observation: Observation, patch: bytes) -> int:
        """How often this call had this result. Only where the tree is the same as well."""
        said = json.dumps([call.name, sorted(call.arguments.items()), observation.text])
        key = hashlib.sha256(said.encode() + b"\0" + patch).hexdigest()
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
