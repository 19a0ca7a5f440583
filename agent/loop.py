"""The agent's loop: reply, call, observation, until something ends the run.

Whatever ends it, the patch is taken.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from agent.advice import Advice
from agent.chat import Chat
from agent.dialects.base import Call, Dialect, ParsedTurn
from agent.exits import Exit, ExitReason
from agent.interrupts import interruptible, uninterrupted
from agent.prompts import render, system_prompt, tool_functions, user_prompt
from agent.protocol import Reply, ReplyProtocol
from agent.session import TurnStats
from agent.settings import AgentSettings
from agent.token_log import TokenLog
from agent.tools import Observation, ToolError, Workspace
from agent.tools.context import issue_code
from agent.tools.text import clip
from agent.trajectory import Trajectory
from environments.base import Patch, Sandbox, SandboxError, SandboxFileError
from tasks.instance import Instance

_LEAST_REPLY = 32  # tokens; with fewer left a call cannot be written


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop, as it is shown and stored."""

    number: int
    thought: str
    call: Call | None
    problem: str | None  # what was wrong with the form, where no call could be read
    observation: str
    reply: Reply
    ids: tuple[int, int]  # where the reply stands in the token log
    tool_seconds: float
    thought_tokens: int  # of the reply, inside <think>
    changed: bool  # whether the patch is another one now


@dataclass(slots=True)
class Outcome:
    """How a run ended, and what it leaves."""

    reason: ExitReason
    detail: str
    patch: Patch
    steps: int
    tokens: int  # of the whole log
    seconds: float
    turns: list[TurnStats] = field(default_factory=list)
    tool_seconds: list[float] = field(default_factory=list)  # by turn


class Watcher(Protocol):
    """Told what happens, for display. All methods return at once."""

    def opened(self, system: str, user: str, tokens: int) -> None: ...

    def resumed(self, steps: int, tokens: int) -> None: ...

    def prefill(self, fed: int, total: int) -> None: ...

    def text(self, reply_so_far: str) -> None: ...

    def step(self, step: Step) -> None: ...


class Keeper(Protocol):
    """Keeps where a run stands. Told before each turn; `changed`: files may be others now."""

    def keep(self, turn: int, state: Callable[[], dict[str, Any]], *, changed: bool) -> None: ...


class StateMismatch(RuntimeError):
    """What was restored is not what was saved."""


class Silence:
    """A watcher that shows nothing."""

    def opened(self, system: str, user: str, tokens: int) -> None:
        pass

    def resumed(self, steps: int, tokens: int) -> None:
        pass

    def prefill(self, fed: int, total: int) -> None:
        pass

    def text(self, reply_so_far: str) -> None:
        pass

    def step(self, step: Step) -> None:
        pass


class Loop:
    """One attempt at one task, in an open sandbox that holds the task's tree."""

    def __init__(
        self,
        instance: Instance,
        sandbox: Sandbox,
        chat: Chat,
        protocol: ReplyProtocol,
        dialect: Dialect,
        settings: AgentSettings,
        trajectory: Trajectory,
        *,
        budget: int | None = None,
        watcher: Watcher | None = None,
        keeper: Keeper | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget`: tokens the cache holds, where it has a limit; turn 0 is kept well below it."""
        self.keeper = keeper
        self.instance, self.sandbox, self.chat, self.protocol = instance, sandbox, chat, protocol
        self.dialect, self.settings, self.limits = dialect, settings, settings.limits
        self.trajectory, self.budget, self.clock = trajectory, budget, clock
        self.watcher: Watcher = watcher or Silence()
        self.log = TokenLog()
        self.steps = 0
        self._tools = tool_functions(settings, instance)
        self._patch = Patch(b"")
        self._turns: list[TurnStats] = []
        self._tool_seconds: list[float] = []
        self._format_errors = 0

    def run(self, state: Mapping[str, Any] | None = None) -> Outcome:
        """Work until submission or a limit. Raises nothing: what ends the run is its outcome.

        `state`: what `state` gave in another process, to go on from; sandbox and protocol are then
        already what they were.
        """
        self._began = self.clock() - (state["seconds"] if state is not None else 0.0)
        self._deadline = self._began + self.limits.wall_time
        self._workspace = Workspace(
            self.sandbox,
            test_command=self.instance.test_command,
            test_paths=self.instance.test_paths,
            command_timeout=self.limits.command_timeout,
            observation_chars=self.limits.observation_chars,
            view_lines=self.limits.view_lines,
            deadline=self._deadline,
            clock=self.clock,
        )
        self._advice = Advice(self.settings, self.instance, self._workspace, list(self._tools))
        try:
            with interruptible():
                if state is None:
                    self._open()
                else:
                    self._take_up(state)
                while True:
                    self._step()
        except Exit as end:
            reason, detail = end.reason, str(end)
        except SandboxError as error:
            reason, detail = ExitReason.SANDBOX_LOST, f"{type(error).__name__}: {error}"
        except KeyboardInterrupt as error:
            reason, detail = ExitReason.INTERRUPTED, str(error) or "SIGINT"
        except Exception:  # whatever it was: the patch is taken, the trace goes into the report
            reason, detail = ExitReason.ERROR, traceback.format_exc()
        with uninterrupted():
            return self._close(reason, detail)

    # Going on in another process

    def state(self) -> dict[str, Any]:
        """Where the run stands between two turns, as JSON has it; all but sandbox and cache."""
        return {
            "steps": self.steps,
            "seconds": self.clock() - self._began,
            "format_errors": self._format_errors,
            "log": self.log.to_dict(),
            "turns": [asdict(turn) for turn in self._turns],
            "tool_seconds": self._tool_seconds,
            "patch_sha256": hashlib.sha256(self._patch.data).hexdigest(),
            "advice": self._advice.state(),
            "workspace": {"shown": self._workspace.shown, "undo": self._workspace.undo},
        }

    def _take_up(self, state: Mapping[str, Any]) -> None:
        """Become what `state` was taken from. Raises StateMismatch."""
        self.steps, self._format_errors = state["steps"], state["format_errors"]
        self.log = TokenLog.from_dict(state["log"])
        self._turns = [TurnStats(**turn) for turn in state["turns"]]
        self._tool_seconds = list(state["tool_seconds"])
        self._advice.restore(state["advice"])
        workspace = state["workspace"]
        self._workspace.shown = tuple((path, name) for path, name in workspace["shown"])
        self._workspace.undo = dict(workspace["undo"])
        if self.steps:
            self._patch = self.sandbox.diff()
        if hashlib.sha256(self._patch.data).hexdigest() != state["patch_sha256"]:
            raise StateMismatch(
                f"the files restored after step {self.steps} make another patch than those saved"
            )
        self.trajectory.patch(self._patch.data)
        self.watcher.resumed(self.steps, len(self.log))

    # The steps of a run

    def _open(self) -> None:
        """Turn 0: who the model is, the issue, and the code it is about."""
        system = system_prompt(
            self.settings, self.instance, self.dialect, workdir=self.sandbox.workdir
        )
        issue, code = self._user_prompt(system)
        self.chat.open(
            self.log,
            system,
            issue,
            tail=code,
            pin_system=self.settings.pin_system,
            pin_user=self.settings.pin_user,
            pin_tail=self.settings.pin_code,
        )
        user = issue + code
        self.trajectory.append("start", {"system": system, "user": user, "ids": [0, len(self.log)]})
        self.watcher.opened(system, user, len(self.log))
        self._keep(changed=True)

    def _keep(self, *, changed: bool) -> None:
        if self.keeper is not None:
            self.keeper.keep(self.steps, self.state, changed=changed)

    def _user_prompt(self, system: str) -> tuple[str, str]:
        """The issue, and as much code as leaves room in the budget for the turns to come."""
        chars = self.settings.context.code_chars
        room = None if self.budget is None else int(self.settings.context.share * self.budget)
        while True:
            found = issue_code(self._workspace, self.instance.problem, max_chars=chars)
            issue, code = user_prompt(
                self.settings,
                self.instance,
                code=_plain(found.text),
                workdir=self.sandbox.workdir,
            )
            self._workspace.shown = found.shown
            if not found.text or room is None:
                return issue, code
            if len(self.chat.encode(system + issue + code)) <= room:
                return issue, code
            chars = min(chars, len(found.text)) * 3 // 4

    def _step(self) -> None:
        """One reply and what comes of it."""
        new_tokens = self._room()
        reply = self.protocol.reply(
            self.log,
            max_new_tokens=new_tokens,
            stop_text=self._reply_is_over,
            on_text=self.watcher.text,
            on_prefill=self.watcher.prefill,
        )
        start = len(self.log)
        self.steps += 1
        self.log.append(reply.ids, role="assistant", kind="sampled", turn=self.steps)
        self._turns.append(reply.stats)
        began = self.clock()
        turn = self.dialect.parse(reply.text)
        end: Exit | None = None
        before = self._patch.data
        try:
            observation = self._observe(turn, reply, new_tokens)
        except SandboxError as error:
            end = Exit(ExitReason.SANDBOX_LOST, f"{type(error).__name__}: {error}")
            observation = Observation(f"The sandbox was lost: {error}")
        except Exit as exit_:
            end = exit_
            observation = Observation(str(exit_))
        self._tool_seconds.append(self.clock() - began)
        text = clip(_plain(observation.text), self.limits.observation_chars + 1_000)
        step = Step(
            number=self.steps,
            thought=turn.thought,
            call=turn.call,
            problem=turn.error.message if turn.error else None,
            observation=text,
            reply=reply,
            ids=(start, len(self.log)),
            tool_seconds=self._tool_seconds[-1],
            thought_tokens=self.chat.thought_tokens(reply.ids),
            changed=self._patch.data != before,
        )
        self.trajectory.append("step", _entry(step))
        self.watcher.step(step)
        if end is not None:
            raise end
        if observation.final:
            raise Exit(ExitReason.SUBMITTED)
        self.chat.bridge(self.log, text, role=self.settings.observation_role, turn=self.steps + 1)
        self._keep(changed=observation.changed)

    def _room(self) -> int:
        """Tokens the next reply may have. Raises Exit where a limit leaves none."""
        limits = self.limits
        if self.steps >= limits.steps:
            raise Exit(ExitReason.STEP_LIMIT, f"{limits.steps} steps")
        if self.clock() >= self._deadline:
            raise Exit(ExitReason.WALL_TIME, f"{limits.wall_time:g} s")
        left = limits.total_tokens - len(self.log)
        if left < min(_LEAST_REPLY, limits.new_tokens):
            raise Exit(
                ExitReason.TOKEN_LIMIT, f"{len(self.log)} of {limits.total_tokens} tokens used"
            )
        return min(limits.new_tokens, left)

    def _reply_is_over(self, text: str) -> bool:
        return self.dialect.stop(text) or self.clock() >= self._deadline

    def _observe(self, turn: ParsedTurn, reply: Reply, limit: int) -> Observation:
        """Do the call, or say what is wrong with its form. Raises Exit when that was too often."""
        if turn.call is None:
            return self._format_error(turn, reply, limit)
        self._format_errors = 0
        failed = False
        try:
            observation = self._tools[turn.call.name](self._workspace, turn.call.arguments)
        except ToolError as error:
            observation, failed = Observation(str(error)), True
        except SandboxFileError as error:
            observation, failed = Observation(f"{turn.call.name} failed: {error}"), True
        if observation.changed:
            self._save_patch()
        if observation.final and (why := self._advice.held_back(self._patch.data)):
            observation = Observation(why)
        return self._advice.completed(
            turn.call,
            observation,
            self._patch.data,
            failed=failed,
            steps_left=self.limits.steps - self.steps,
            tokens_left=self.limits.total_tokens - len(self.log),
        )

    def _format_error(self, turn: ParsedTurn, reply: Reply, limit: int) -> Observation:
        self._format_errors += 1
        message = turn.error.message if turn.error else ""
        if self._format_errors >= self.limits.format_errors:
            raise Exit(
                ExitReason.FORMAT_ERRORS,
                f"{self._format_errors} malformed replies in a row; the last: {message}",
            )
        messages = self.settings.messages
        template = messages.cut_off if reply.finish == "length" else messages.format_error
        text = render(
            template,
            message=message,
            limit=limit,
            left=self.limits.steps - self.steps,
            tokens_left=self.limits.total_tokens - len(self.log),
        )
        return Observation(text)

    # What is kept

    def _save_patch(self) -> None:
        patch = self.sandbox.diff()
        if patch.data != self._patch.data:
            self.trajectory.patch(patch.data)
        self._patch = patch

    def _close(self, reason: ExitReason, detail: str) -> Outcome:
        """Take the patch as it is now; where that fails, the last one that was saved stands."""
        try:
            if reason is not ExitReason.SANDBOX_LOST:
                self._save_patch()
        except SandboxError as error:
            detail = f"{detail}\nThe patch is the last one saved: {error}".strip()
        self.trajectory.patch(self._patch.data)
        outcome = Outcome(
            reason=reason,
            detail=detail,
            patch=self._patch,
            steps=self.steps,
            tokens=len(self.log),
            seconds=self.clock() - self._began,
            turns=self._turns,
            tool_seconds=self._tool_seconds,
        )
        self.trajectory.append(
            "end",
            {
                "exit": reason.value,
                "detail": detail,
                "steps": outcome.steps,
                "tokens": outcome.tokens,
                "seconds": round(outcome.seconds, 3),
                "patch_files": list(self._patch.files),
            },
        )
        return outcome


def _entry(step: Step) -> dict[str, Any]:
    call = step.call
    return {
        "step": step.number,
        "thought": step.thought,
        "call": None if call is None else {"name": call.name, "arguments": dict(call.arguments)},
        "problem": step.problem,
        "observation": step.observation,
        "finish": step.reply.finish,
        "ids": list(step.ids),
        "sampled": list(step.reply.ids),
        "stats": asdict(step.reply.stats),
        "held": list(step.reply.held),
        "thought_tokens": step.thought_tokens,
        "tool_seconds": round(step.tool_seconds, 4),
        "changed": step.changed,
    }


def _plain(text: str) -> str:
    """Text that can be encoded: what was no UTF-8 in a file becomes a question mark."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
