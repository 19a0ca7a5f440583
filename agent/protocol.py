"""Two ways to serve the same token log: one cache for ever, or the whole history every turn.

Both read the ids of one `TokenLog` and sample with the same draws, so that they differ in the cache
alone. With `history="template"` the second reads the log as the model's chat template renders it,
as a server that is sent messages would; then the ids differ too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, get_args

from transformers import PreTrainedModel

from agent.chat import Chat
from agent.engines import Alone, Engine
from agent.held import held_shares
from agent.session import Finish, Session, TurnStats
from agent.shared_prompt import SharedPrompt
from agent.template_history import template_ids
from agent.token_log import TokenLog
from cache import AnyConfig, EvictingCache, Sampling, load_snapshot, save_snapshot
from cache.attention import attach
from cache.generate import DEFAULT_CHUNK
from cache.snapshot import BadSnapshot

ProtocolName = Literal["true_eviction", "full_context"]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)
History = Literal["raw", "template"]


class LogChanged(RuntimeError):
    """Ids that were fed already are not what the log says now."""


@dataclass(frozen=True)
class Reply:
    """What the model said: ids (a stop id included), their text, why it ended, what it cost.

    held: which parts of the stream the cache holds then; see `agent.held`.
    """

    ids: tuple[int, ...]
    text: str
    finish: Finish
    stats: TurnStats
    held: tuple[float, ...] = ()


class ReplyProtocol(Protocol):
    """Turns a log into the next reply; the caller appends the reply's ids to the log."""

    name: str

    def reply(
        self,
        log: TokenLog,
        *,
        max_new_tokens: int,
        stop_text: Callable[[str], bool] | None = None,
        on_text: Callable[[str], None] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Reply:
        """The next assistant turn after everything in `log`.

        stop_text: told the reply so far after each id, ends it by True. on_text: told the same
        text, for display. on_prefill: told (ids fed, ids to feed).
        """
        ...

    def close(self) -> None:
        """Free the cache."""
        ...


class KeptProtocol(ReplyProtocol, Protocol):
    """A protocol that another process can go on with."""

    def save(self, path: Path, *, model_id: str) -> bool:
        """Write to `path` what is kept between turns; False, and no file, where nothing is."""
        ...

    def resume(
        self,
        log: TokenLog,
        saved: Iterable[Path],
        *,
        model_id: str,
        on_replay: Callable[[int, int], None] | None = None,
    ) -> int:
        """Become what the protocol was that the replies in `log` came from.

        saved: files that `save` wrote at turns of this log, the best first; one that cannot be used
        is passed over. What none of them holds is fed again as it was fed, on_replay being told
        (ids fed, ids to feed). Returns how many ids that were.
        """
        ...


class _CacheProtocol:
    """What both protocols share: feeding a session what it lacks, and sampling a turn."""

    name: str

    def __init__(
        self,
        model: PreTrainedModel,
        chat: Chat,
        config: AnyConfig,
        *,
        sampling: Sampling,
        chunk: int = DEFAULT_CHUNK,
        shared: SharedPrompt | None = None,
        history: History = "raw",
        engine: Engine | None = None,
    ) -> None:
        self.chat, self.history = chat, history
        self._model, self._config = model, config
        self._sampling, self._chunk = sampling, chunk
        self._shared = shared
        attach(model)
        self._engine = engine or Alone(model)
        self._pool = self._engine.pool(config)
        self._start()

    def _start(self, cache: EvictingCache | None = None) -> None:
        self.session = Session(
            self._model,
            self._config,
            sampling=self._sampling,
            chunk=self._chunk,
            pool=self._pool,
            cache=cache,
            engine=self._engine,
        )
        self._pinned: set[tuple[int, int]] = set()
        self._fed_digest: tuple[int, str] | None = None

    def reply(
        self,
        log: TokenLog,
        *,
        max_new_tokens: int,
        stop_text: Callable[[str], bool] | None = None,
        on_text: Callable[[str], None] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Reply:
        self._check_prefix(log)
        prompt = log.ids if self.history == "raw" else _rendered(self.chat, log)
        self._begin_turn()
        shared, self._shared = self._shared, None  # the first prompt alone is shared
        if shared is None or prompt != log.ids:
            self._feed(prompt, log, on_prefill)
        else:
            with shared.turn():
                if not self._take(shared, log):
                    self._feed(prompt, log, on_prefill)
                    shared.keep(self.session, log)
        session, chat = self.session, self.chat

        def stop(drawn: list[int]) -> bool:
            text = chat.text(drawn)
            if on_text is not None:
                on_text(text)
            return stop_text is not None and stop_text(text)

        watched = stop if stop_text is not None or on_text is not None else None
        ids, finish = session.sample(
            max_new_tokens=max_new_tokens, stop_ids=chat.stop_ids, stop=watched
        )
        self._fed_digest = (len(log), log.digest(len(log)))
        held = tuple(held_shares(session.cache))
        return Reply(tuple(ids), chat.text(ids), finish, session.turn_stats(), held)

    def close(self) -> None:
        self.session.close()

    def save(self, path: Path, *, model_id: str) -> bool:
        return False

    def resume(
        self,
        log: TokenLog,
        saved: Iterable[Path],
        *,
        model_id: str,
        on_replay: Callable[[int, int], None] | None = None,
    ) -> int:
        self._shared = None
        self._fed_digest = (len(log), log.digest())
        return 0

    def _begin_turn(self) -> None:
        """Get the session ready for a turn: here, only its counters."""
        self.session.begin_turn()

    def _take(self, shared: SharedPrompt, log: TokenLog) -> bool:
        """Go on from the shared prompt, if it is what the log holds."""
        session = shared.in_place_of(self.session, log)
        if session is None:
            return False
        self.session, self._pool = session, session.cache.pool
        self._pinned = set(log.pinned_spans())
        return True

    def _feed(
        self,
        ids: Sequence[int],
        log: TokenLog,
        on_prefill: Callable[[int, int], None] | None,
    ) -> None:
        """Pin what is to be pinned, then prefill what the session has not seen of `ids`."""
        self._pin(log)
        new = ids[self.session.cache.seen :]
        progress = None
        if on_prefill is not None:
            total, report = len(new), on_prefill

            def progress(fed: int) -> None:
                report(fed, total)

        self.session.feed(new, on_progress=progress)

    def _check_prefix(self, log: TokenLog) -> None:
        if self._fed_digest is None:
            return
        length, digest = self._fed_digest
        if len(log) < length or log.digest(length) != digest:
            raise LogChanged(
                f"the first {length} ids of the log changed after they were fed; a persistent "
                "cache can only be appended to"
            )

    def _pin(self, log: TokenLog) -> None:
        for span in log.pinned_spans():
            if span not in self._pinned:
                self.session.cache.pin(*span)
                self._pinned.add(span)


class TrueEviction(_CacheProtocol):
    """One cache across all turns: each turn feeds only the ids that are new."""

    name = "true_eviction"

    def save(self, path: Path, *, model_id: str) -> bool:
        save_snapshot(self.session.cache, path, model_id=model_id)
        return True

    def resume(
        self,
        log: TokenLog,
        saved: Iterable[Path],
        *,
        model_id: str,
        on_replay: Callable[[int, int], None] | None = None,
    ) -> int:
        for path in saved:
            if self._load(path, log, model_id):
                break
        # Of a reply all ids but the last are fed one by one, as they were when they were sampled.
        replies = [segment for segment in log.segments if segment.kind == "sampled"]
        began = self.session.cache.seen
        total = max([segment.end - 1 for segment in replies], default=began) - began

        def told(_: int) -> None:
            if on_replay is not None:
                on_replay(self.session.cache.seen - began, total)

        for segment in replies:
            if segment.end - 1 <= self.session.cache.seen:
                continue
            head = log.head(segment.start)
            self._feed(head.ids, head, lambda fed, _: told(fed))
            ids = log.ids[segment.start : segment.end - 1]
            self._engine.replay(self.session.cache, ids, on_token=told)
        super().resume(log, saved, model_id=model_id)  # last: a session that starts knows no log
        return self.session.cache.seen - began

    def _load(self, path: Path, log: TokenLog, model_id: str) -> bool:
        """Go on with a saved cache. False where it is damaged, or of another model or config."""
        self.session.close()
        try:
            load = partial(load_snapshot, path, self._model, model_id=model_id, pool=self._pool)
            cache = self._engine.do(load)
        except BadSnapshot:
            self._start()
            return False
        if cache.config != self._config or cache.seen > len(log):
            cache.close()
            self._start()
            return False
        self._start(cache)
        self._pinned = set(log.head(cache.seen).pinned_spans())
        return True


class FullContext(_CacheProtocol):
    """A fresh cache every turn: all ids are prefilled again and compressed afresh."""

    name = "full_context"

    def _begin_turn(self) -> None:
        self.session.close()
        self._start()


def make_protocol(
    name: str,
    model: PreTrainedModel,
    chat: Chat,
    config: AnyConfig,
    *,
    sampling: Sampling,
    chunk: int = DEFAULT_CHUNK,
    shared: SharedPrompt | None = None,
    history: History = "raw",
    engine: Engine | None = None,
) -> KeptProtocol:
    """The protocol called `name`. Raises ValueError for an unknown one.

    shared: where the first prompt comes from if it was prefilled already, and is kept if not.
    engine: what uses the model; None where nobody else does.
    history: "template" feeds `template_ids(chat, log)` in place of the log's ids; ValueError under
    true_eviction, and for a chat whose template is not used.
    """
    known: dict[str, type[_CacheProtocol]] = {
        "true_eviction": TrueEviction,
        "full_context": FullContext,
    }
    if name not in known:
        raise ValueError(f"unknown protocol {name!r}; there are: {', '.join(known)}")
    if history not in get_args(History):
        raise ValueError(f"unknown history {history!r}; there are: {', '.join(get_args(History))}")
    if history == "template" and name == "true_eviction":
        raise ValueError(
            "history=template rewrites the past at every turn (thoughts are stripped), and "
            "true_eviction's one cache can only be appended to: use full_context, or history=raw"
        )
    if history == "template" and chat.layout_source != "template":
        raise ValueError(
            f"history=template needs the model's own chat template: {chat.layout_note}. "
            "Use history=raw"
        )
    return known[name](
        model,
        chat,
        config,
        sampling=sampling,
        chunk=chunk,
        shared=shared,
        history=history,
        engine=engine,
    )


def _rendered(chat: Chat, log: TokenLog) -> Sequence[int]:
    """The log's conversation as its template renders it, with what is pinned at the same ids.

    Pins are positions in the log. They hold for the rendering too where both begin alike, as they
    do for turn 0. Raises ValueError for a pinned span behind the point where they part.
    """
    ids = template_ids(chat, log)
    pinned = max((end for _, end in log.pinned_spans()), default=0)
    if tuple(ids[:pinned]) != log.ids[:pinned]:
        raise ValueError(
            f"ids up to {pinned} are pinned, but the chat template of {chat.name} renders them in "
            "another way than the log has them: with history=template pin nothing but the system "
            "and the first user message, or use history=raw"
        )
    return ids
