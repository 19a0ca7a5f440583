"""Keeping where a run stands, turn by turn, so that another process can go on with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agent.protocol import KeptProtocol
from agent.run_state import StateFolder
from agent.trajectory import Trajectory
from environments.base import Sandbox, SandboxError
from environments.treesave import save_tree


class KeepOptions(BaseModel):
    """How often the cache is saved: after `turns` turns or `seconds` seconds, whichever is first.
    Token log and files are saved after every turn; with 0 turns nothing is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = Field(5, ge=0)
    seconds: float = Field(60.0, ge=0)


class RunKeeper:
    """Saves the states of one attempt into its folder; see `agent.run_state`.

    A state that cannot be saved ends nothing: `say` is told once, and the next turn tries again.
    """

    def __init__(
        self,
        run: Path,
        sandbox: Sandbox,
        protocol: KeptProtocol,
        trajectory: Trajectory,
        options: KeepOptions,
        *,
        since: int,
        model_id: str,
        tree: bytes | None = None,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`since`: when the sandbox had its base and nothing else; `tree`: its files, if saved."""
        self.states = StateFolder(run)
        self._sandbox, self._protocol, self._trajectory = sandbox, protocol, trajectory
        self._options, self._since, self._model_id = options, since, model_id
        self._tree, self._say, self._clock = tree, say, clock
        self._cached_turn, self._cached_at = 0, clock()
        self._told = False

    def keep(self, turn: int, state: Callable[[], dict[str, Any]], *, changed: bool) -> None:
        """Save the state before the reply after `turn`."""
        try:
            if changed or self._tree is None:
                self._tree = None
                self._tree = save_tree(self._sandbox, self._since)
            if turn and self._cache_is_due(turn):
                path = self.states.cache_path(turn)
                if self._protocol.save(path, model_id=self._model_id):
                    self.states.thin_caches()
                self._cached_turn, self._cached_at = turn, self._clock()
            self.states.save(turn, state(), self._tree, self._trajectory.size)
        except (OSError, SandboxError) as error:
            if not self._told:
                self._say(f"this run could not be gone on with after turn {turn}: {error}")
            self._told = True

    def _cache_is_due(self, turn: int) -> bool:
        by_turns = turn - self._cached_turn >= self._options.turns
        return by_turns or self._clock() - self._cached_at >= self._options.seconds
