"""Attempts that go on from one prefill of their first prompt are those that prefill it each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_talk import CHAT, Recorder, nexus, talk, tiny

from agent.chat import Chat
from agent.protocol import Reply, make_protocol
from agent.session import Session
from agent.shared_prompt import SharedPrompt
from agent.token_log import TokenLog
from cache import AnyConfig, EvictingCache, Sampling, preset

PROMPT, TURNS, NEW = 150, 3, 10
CHUNKED = nexus(96, prefill_eviction="chunk", seed=4)
CONFIGS = {
    "nexus": CHUNKED,
    "nexus at the end": nexus(96, prefill_eviction="end", seed=4),
    "h2o": preset("h2o", budget={"kind": "density", "density": 0.5}, block_size=8),
    "ada-snapkv": preset("ada-snapkv", window=8, budget={"kind": "tokens", "tokens": 96}),
    "dense": preset("dense"),
}


@pytest.fixture(scope="module")
def model() -> Any:
    """Attention far from even, so that what was evicted is missed."""
    return tiny("llama", initializer_range=0.25)


class Told:
    """What an attempt said and cost, and the logits it drew from."""

    def __init__(self, protocol: Any, sampling: Recorder, **changes: Any) -> None:
        self.replies: list[Reply] = []
        self.protocol = protocol
        settings = {"turns": TURNS, "prompt": PROMPT, "new_tokens": NEW, "pinned": False}
        log = talk(
            protocol,
            **{**settings, **changes},
            after=lambda turn, log, reply: self.replies.append(reply),
        )
        self.ids = list(log.ids)
        self.logits = torch.stack(sampling.logits)
        self.kept = protocol.session.cache.kept_blocks()

    @property
    def first(self) -> Any:
        return self.replies[0].stats


def attempt(
    model: Any,
    config: AnyConfig,
    *,
    shared: SharedPrompt | None = None,
    name: str = "true_eviction",
    seed: int = 0,
    chunk: int = 48,
    **changes: Any,
) -> Told:
    sampling = Recorder(temperature=1.0, seed=seed)
    protocol = make_protocol(
        name, model, CHAT, config, sampling=sampling, chunk=chunk, shared=shared
    )
    return Told(protocol, sampling, **changes)


def assert_same(one: Told, two: Told) -> None:
    assert one.ids == two.ids
    assert torch.equal(one.logits, two.logits)
    assert torch.equal(one.kept, two.kept)


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Tokens of each forward pass."""
    passes: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        passes.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["true_eviction", "full_context"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_an_attempt_on_the_shared_prompt_is_the_one_without_it(
    kind: str, name: str, model: Any
) -> None:
    config, shared = CONFIGS[kind], SharedPrompt()
    alone = [attempt(model, config, name=name, seed=seed) for seed in range(3)]
    assert len({tuple(one.ids) for one in alone}) == 3
    for seed in range(3):
        shared.last = seed == 2
        with counted(model) as passes:
            one = attempt(model, config, name=name, seed=seed, shared=shared)
        assert_same(one, alone[seed])
        # Nothing else is fed to the model than what the statistics say.
        fed = sum(reply.stats.fed for reply in one.replies)
        assert sum(passes) == fed + TURNS * (NEW - 1)
        stats, plain = one.first, alone[seed].first
        evicted = (stats.forked_evictions, stats.forked_evicted_tokens)
        if seed == 0:
            assert (stats.fed, stats.forked, *evicted) == (PROMPT, 0, 0, 0)
            assert stats.prefill_seconds > 0
        else:
            assert (stats.fed, stats.forked, stats.prefill_seconds) == (0, PROMPT, 0)
            assert (evicted[0] > 0) == config.evicts
        assert stats.evictions + evicted[0] == plain.evictions
        assert stats.evicted_tokens + evicted[1] == plain.evicted_tokens
        assert (stats.fork_seconds > 0) == (seed < 2)
        assert (stats.seen, stats.resident) == (plain.seen, plain.resident)
        for later, plainly in zip(one.replies[1:], alone[seed].replies[1:], strict=True):
            for field in ("fed", "evictions", "evicted_tokens", "resident", "seen"):
                assert getattr(later.stats, field) == getattr(plainly.stats, field)
            assert (later.stats.forked, later.stats.forked_evictions) == (0, 0)
            assert later.stats.fork_seconds == 0


def test_the_template_is_what_it_was_after_all_attempts(model: Any) -> None:
    shared = SharedPrompt()
    attempt(model, CHUNKED, shared=shared)
    template = shared._template
    assert template is not None
    before = {name: t.clone() for name, t in template.cache.state().tensors.items()}
    evictions, seen = template.cache.stats.evictions, template.cache.seen
    for seed in (1, 2):
        assert attempt(model, CHUNKED, shared=shared, seed=seed, turns=5).replies[-1].stats.fed > 0
    assert shared._template is template
    for name, tensor in template.cache.state().tensors.items():
        assert torch.equal(tensor, before[name])
    assert (template.cache.stats.evictions, template.cache.seen) == (evictions, seen)
    assert (shared.tokens, shared.nbytes) == (PROMPT, template.cache.nbytes)


def test_as_many_copies_are_made_as_attempts_need(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, fork = [0], EvictingCache.fork

    def counting(self: EvictingCache, **named: Any) -> EvictingCache:
        copies[0] += 1
        return fork(self, **named)

    monkeypatch.setattr(EvictingCache, "fork", counting)
    attempt(model, CHUNKED)
    assert copies == [0]
    shared = SharedPrompt()
    for number in range(3):
        shared.last = number == 2
        template = shared._template
        told = attempt(model, CHUNKED, shared=shared, seed=number)
    assert copies == [2]  # the template, and one for the second attempt
    assert told.protocol.session is template
    assert shared._template is None


def test_one_attempt_alone_keeps_nothing(model: Any) -> None:
    shared = SharedPrompt()
    shared.last = True
    attempt(model, CHUNKED, shared=shared)
    assert (shared._template, shared.tokens, shared.nbytes) == (None, 0, 0)


@pytest.mark.parametrize("name", ["true_eviction", "full_context"])
def test_attempts_that_fail_spoil_nothing(name: str, model: Any) -> None:
    shared = SharedPrompt()
    log = TokenLog()
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(8, 211, (PROMPT,), generator=generator).tolist()
    log.append(first, role="user", kind="injected", turn=0)

    def broken(**at: Any) -> None:
        protocol = make_protocol(
            name, model, CHAT, CHUNKED, sampling=Sampling(), chunk=48, shared=shared
        )
        with pytest.raises(KeyboardInterrupt):
            protocol.reply(log, max_new_tokens=NEW, **at)
        protocol.close()

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    broken(on_prefill=interrupt)  # in the first chunk of the prompt
    assert shared._template is None
    broken(stop_text=interrupt)  # the prompt is there, the reply is not
    assert shared.tokens == PROMPT
    broken(stop_text=interrupt)
    told = attempt(model, CHUNKED, name=name, seed=7, shared=shared)
    assert told.first.forked == PROMPT
    assert_same(told, attempt(model, CHUNKED, name=name, seed=7))


def test_a_prefill_taken_up_again_is_not_kept(model: Any) -> None:
    """Its chunks fell elsewhere, so that what it evicted is not what a prefill evicts."""
    shared = SharedPrompt()
    protocol = make_protocol(
        "true_eviction", model, CHAT, CHUNKED, sampling=Sampling(), chunk=48, shared=shared
    )
    log = TokenLog()
    log.append(range(8, 158), role="user", kind="injected", turn=0)

    def interrupt(fed: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        protocol.reply(log, max_new_tokens=2, on_prefill=interrupt)
    assert protocol.reply(log, max_new_tokens=2).stats.fed == 150 - 48
    assert shared._template is None


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": PROMPT + 1},
        {"prompt": PROMPT - 1},
        {"pinned": True, "config": nexus(256, prefill_eviction="chunk")},
        {"config": CHUNKED.model_copy(update={"seed": 5})},
        {"chunk": 50},
        {"model": "another"},
    ],
    ids=["longer", "shorter", "pins", "config", "chunk", "model"],
)
def test_what_differs_is_prefilled(changes: dict[str, Any], model: Any) -> None:
    other = dict(changes)
    given = other.get("config", CHUNKED)
    kept = given if "pinned" in other else CHUNKED
    shared = SharedPrompt()
    attempt(model, kept, shared=shared)
    template = shared._template
    where = tiny("llama", initializer_range=0.25) if other.pop("model", None) else model
    config = other.pop("config", CHUNKED)
    told = attempt(where, config, seed=1, shared=shared, **other)
    assert (told.first.forked, told.first.fork_seconds) == (0, 0)
    assert told.first.fed == other.get("prompt", PROMPT)
    assert_same(told, attempt(where, config, seed=1, **other))
    assert shared._template is template
    assert attempt(model, kept, seed=1, shared=shared).first.forked == PROMPT


def test_the_pins_of_the_prompt_hold_in_every_attempt(model: Any) -> None:
    config, shared = nexus(256, prefill_eviction="chunk"), SharedPrompt()
    for seed in range(3):
        shared.last = seed == 2
        told = attempt(model, config, seed=seed, shared=shared, pinned=True, turns=6)
        assert (told.first.forked > 0) == (seed > 0)
        assert told.protocol.session.cache.stats.evictions > 0
        for block in range(-(-PROMPT // 32)):
            assert bool((told.kept == block).any(-1).all())


def test_a_forked_session_goes_on_by_itself(model: Any) -> None:
    def started() -> Session:
        session = Session(model, CHUNKED, sampling=Sampling(temperature=1.0), chunk=48)
        session.feed(range(8, 158))
        return session

    def go_on(session: Session) -> list[int]:
        drawn, _ = session.sample(max_new_tokens=40, stop_ids=())
        session.begin_turn()
        session.feed([drawn[-1], *range(20, 90)])
        return drawn + session.sample(max_new_tokens=40, stop_ids=())[0]

    undisturbed = go_on(started())
    session = started()
    other = session.fork(sampling=Sampling(temperature=1.0, seed=1))
    twin = session.fork()
    assert other.cache.pool is not session.cache.pool
    assert twin._logits is not None
    assert session._logits is not None
    assert twin._logits.data_ptr() != session._logits.data_ptr()
    assert twin.cache.stats is not session.cache.stats
    assert go_on(other) != undisturbed
    assert go_on(session) == undisturbed
    assert go_on(twin) == undisturbed
    assert session.fork().turn_stats().seen == session.cache.seen


def test_a_session_can_be_forked_before_it_has_anything_to_say(model: Any) -> None:
    session = Session(model, CHUNKED, sampling=Sampling(), chunk=48)
    session.feed(range(8, 40))
    session.sample(max_new_tokens=3, stop_ids=())
    with pytest.raises(RuntimeError, match="feed the prompt first"):
        session.fork().sample(max_new_tokens=3, stop_ids=())


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from agent.models import load

    return load("smollm2-135m", dtype="float32", device="cpu")


@pytest.mark.model
@pytest.mark.parametrize("name", ["true_eviction", "full_context"])
def test_attempts_share_a_prompt_on_a_trained_model(name: str, smollm2: Any) -> None:
    chat = Chat(smollm2.tokenizer, name=smollm2.name)
    config = nexus(128, prefill_eviction="chunk", seed=2)
    tail = "".join(f"\nRiver {n} is {n * 37} miles long and {n * 11} feet deep." for n in range(20))

    def told(seed: int, shared: SharedPrompt | None) -> tuple[list[int], list[Reply]]:
        sampling = Sampling(temperature=0.8, top_p=0.95, seed=seed)
        protocol = make_protocol(
            name, smollm2.model, chat, config, sampling=sampling, chunk=96, shared=shared
        )
        log, replies = TokenLog(), []
        chat.open(log, "Be brief.", "Name three rivers.", tail=tail, pin_system=True, pin_user=True)
        for turn in (1, 2):
            replies.append(protocol.reply(log, max_new_tokens=16))
            log.append(replies[-1].ids, role="assistant", kind="sampled", turn=turn)
            chat.bridge(log, f"Tell me more about number {turn}.", turn=turn + 1)
        protocol.close()
        return list(log.ids), replies

    shared = SharedPrompt()
    _, (first, _) = told(6, shared)
    shared.last = True
    ids, (second, _) = told(7, shared)
    assert (second.stats.forked, second.stats.fed) == (first.stats.fed, 0)
    assert second.stats.forked_evictions > 0
    assert ids == told(7, None)[0]
