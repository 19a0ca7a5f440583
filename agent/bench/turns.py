"""Time to the first token, turn after turn of a scripted run of an agent.

Observations have fixed lengths and replies too; ids are random. Each protocol keeps a log of its
own: one cache for the whole run, or a fresh one every turn that reads the whole log again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from agent.bench.clock import synchronize
from agent.bench.readings import Spread, order, spread
from agent.engines import Alone
from agent.session import Session
from cache import AnyConfig, Sampling

PROTOCOLS = ("true_eviction", "full_context")


@dataclass(frozen=True)
class Script:
    """What happens: a first prompt, then as many observations as turns follow, of these lengths in
    turn; every reply is `reply` tokens long."""

    turns: int = 30
    prompt: int = 2048
    observations: tuple[int, ...] = (400,)
    reply: int = 32
    chunk: int = 256
    seed: int = 0

    def new(self, turn: int) -> int:
        """Tokens that are new to the log at `turn`, from 1, beside the reply before it."""
        if turn == 1:
            return self.prompt
        return self.observations[(turn - 2) % len(self.observations)]


@dataclass(frozen=True)
class Turn:
    """One turn of one side: seconds until the first token, and what was seen and held then."""

    who: str
    repeat: int
    turn: int
    first_token_s: float
    reply_s: float
    fed: int
    seen: int
    resident: int
    evictions: int
    bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Side:
    """A protocol with a config."""

    name: str
    protocol: str
    config: AnyConfig


class _Player:
    """One side in the middle of its run."""

    def __init__(self, model: PreTrainedModel, side: Side, script: Script, repeat: int) -> None:
        if side.protocol not in PROTOCOLS:
            raise ValueError(
                f"unknown protocol {side.protocol!r}; there are: {', '.join(PROTOCOLS)}"
            )
        self.model, self.side, self.script, self.repeat = model, side, script, repeat
        self.vocabulary = model.config.get_text_config().vocab_size
        self.random = torch.Generator().manual_seed(script.seed)
        self.log: list[int] = []
        self.engine = Alone(model)
        self.pool = self.engine.pool(side.config)
        self.session = self._fresh()

    def _fresh(self) -> Session:
        return Session(
            self.model,
            self.side.config,
            sampling=Sampling(),
            chunk=self.script.chunk,
            pool=self.pool,
            engine=self.engine,
        )

    def play(self, turn: int) -> Turn:
        """The next turn."""
        count = self.script.new(turn)
        self.log += torch.randint(self.vocabulary, (count,), generator=self.random).tolist()
        synchronize(self.model.device)
        began = time.perf_counter()
        if self.side.protocol == "full_context" and turn > 1:
            self.session.close()
            self.session = self._fresh()
        self.session.begin_turn()
        first: list[float] = []

        def drawn(ids: list[int]) -> bool:
            if not first:
                first.append(time.perf_counter() - began)
            return False

        self.session.feed(self.log[self.session.cache.seen :])
        ids, _ = self.session.sample(
            max_new_tokens=self.script.reply, stop_ids=frozenset(), stop=drawn
        )
        seconds = time.perf_counter() - began
        self.log += ids
        stats = self.session.turn_stats()
        return Turn(
            self.side.name,
            self.repeat,
            turn,
            first[0],
            seconds,
            stats.fed,
            len(self.log),
            stats.resident,
            stats.evictions,
            stats.cache_bytes,
            stats.peak_bytes,
        )


@dataclass
class Turns:
    """A script played by several sides: `done` grows, and is whole whenever it breaks off."""

    model: PreTrainedModel
    sides: Sequence[Side]
    script: Script
    repeats: int = 1
    done: list[Turn] = field(default_factory=list)
    finished: bool = False
    on_turn: Callable[[Turn], None] = lambda turn: None

    def run(self) -> None:
        """All sides play the same turn before any plays the next."""
        for repeat in range(self.repeats):
            players = [_Player(self.model, side, self.script, repeat) for side in self.sides]
            for turn in range(1, self.script.turns + 1):
                for player in order(players, repeat + turn):
                    self.done.append(player.play(turn))
                    self.on_turn(self.done[-1])
            for player in players:
                player.session.close()
        self.finished = True

    def first_token(self, who: str, turn: int) -> Spread | None:
        """Seconds until the first token of a turn, over the repeats."""
        return spread([t.first_token_s for t in self.done if (t.who, t.turn) == (who, turn)])

    def growth(self, who: str, late: int, early: int = 3) -> Spread | None:
        """Seconds at turn `late` over those at turn `early`, repeat by repeat."""
        by = {(t.repeat, t.turn): t.first_token_s for t in self.done if t.who == who}
        return spread(
            [
                by[repeat, late] / by[repeat, early]
                for repeat in range(self.repeats)
                if (repeat, late) in by and (repeat, early) in by
            ]
        )

    def data(self) -> list[dict[str, Any]]:
        """All turns as plain data."""
        return [dict(vars(turn)) for turn in self.done]
