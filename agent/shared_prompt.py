"""One prefill of the first prompt for several attempts at a task."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from agent.session import Session
from agent.token_log import TokenLog

_Prompt = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]  # ids, pinned spans


class SharedPrompt:
    """The first prompt of several attempts, prefilled by the first that reads it to its end.

    Attempts go on from forks of a template that nobody feeds, so that none can spoil it. While they
    run, the template holds memory of its own: the budget's under a token budget, a copy of all keys
    and values of the prompt under `dense`. The last attempt takes the template itself.

    last: to be set before the last attempt begins. tokens, nbytes: of the template, 0 until there
    is one; they stay when it is gone.
    """

    def __init__(self) -> None:
        self.last = False
        self.tokens = self.nbytes = 0
        self._template: Session | None = None
        self._prompt: _Prompt = ((), ())
        self._lock = threading.Lock()

    def turn(self) -> AbstractContextManager[object]:
        """While one attempt is in it, others that are made beside it wait: there is one template.
        Prefilling and `keep` belong into it."""
        return self._lock

    def keep(self, session: Session, log: TokenLog) -> None:
        """Make the template of a session that has read `log` from its first id to its last.

        Does nothing where there is a template, or no further attempt.
        """
        if self._template is None and not self.last:
            template = session.fork()
            self._template, self._prompt = template, _prompt(log)
            self.tokens, self.nbytes = template.cache.seen, template.cache.nbytes

    def in_place_of(self, fresh: Session, log: TokenLog) -> Session | None:
        """What the empty session `fresh` would be after reading `log`, which is closed for it.

        None, and `fresh` stays open, unless `log` is exactly the prompt that was kept, ids and
        pins, and model, cache config and chunk are those that it was prefilled with.
        """
        template = self._template
        if template is None or not (
            self._prompt == _prompt(log)
            and template.model is fresh.model
            and template.cache.config == fresh.cache.config
            and template.chunk == fresh.chunk
        ):
            return None
        fresh.close()  # the fork takes its row
        if not self.last:
            return template.fork(sampling=fresh.sampling, pool=fresh.cache.pool)
        self._template = None
        template.sampling = fresh.sampling
        template.begin_turn(forked=True)
        return template

    def close(self) -> None:
        """Free the template."""
        if self._template is not None:
            self._template.close()
            self._template = None


def _prompt(log: TokenLog) -> _Prompt:
    """What of a log decides its prefill."""
    return tuple(log.ids), tuple(log.pinned_spans())
