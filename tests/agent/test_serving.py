"""Sessions in threads that share a model write what each one writes alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_talk import CHAT, nexus, talk, tiny

from agent import engines as engines_module
from agent import serving as serving_module
from agent.engines import Alone
from agent.int8_linear import quantize_linears
from agent.interrupts import Interrupted
from agent.protocol import make_protocol
from agent.serving import Serving
from agent.session import Session
from agent.shared_prompt import SharedPrompt
from agent.token_log import TokenLog
from cache import PoolFull, Sampling, batch_decode, make_pool, preset
from cache.batch_decode import BatchDecoder
from cache.static_step import StaticStep

Outcome = Any


def in_threads(*works: Callable[[], Any]) -> list[Outcome]:
    """What each returned or raised, all at work at once."""
    found: list[Outcome] = [None] * len(works)

    def run(number: int) -> None:
        try:
            found[number] = works[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


CONFIGS = [
    nexus(128),
    preset("dense"),
    preset("h2o", budget={"kind": "tokens", "tokens": 100}),
    preset("ada-nexus", budget={"kind": "tokens", "tokens": 256}),
]


def conversation(model: Any, number: int, engine: Any, name: str = "true_eviction") -> TokenLog:
    sampling = Sampling(0.7 * (number % 2), 0.95, seed=number)
    config = CONFIGS[number % len(CONFIGS)]
    protocol = make_protocol(name, model, CHAT, config, sampling=sampling, chunk=48, engine=engine)
    try:
        return talk(protocol, turns=3, prompt=90 + 17 * number, new_tokens=14, pinned=False)
    finally:
        protocol.close()


@pytest.mark.parametrize("share", [False, True])
def test_conversations_of_all_methods_are_those_of_their_solo_runs(share):
    """Prompts of others are read in between; their lengths, methods and turns differ."""
    model = tiny("qwen2")
    alone = [list(conversation(model, n, None).ids) for n in range(4)]
    with Serving(model, 4, share_pool=share) as serving:
        logs = in_threads(*[lambda n=n: conversation(model, n, serving) for n in range(4)])
    assert [list(log.ids) for log in logs] == alone
    drawn = sum(s.end - s.start for log in logs for s in log.segments if s.kind == "sampled")
    assert serving.fed == drawn - 4 * 3  # the last one of a turn goes in front of the next
    assert serving.fed > 1.5 * serving.steps


def test_with_8_bit_layers_no_step_is_padded_and_each_row_is_its_solo_run_to_the_bit():
    model = tiny("qwen2")
    quantize_linears(model)
    serving = Serving(model, 5, patience=60)
    alone, beside = (
        [session(model, engine, seed) for seed in range(3)] for engine in (Alone(model), serving)
    )
    passes: list[int] = []  # rows of each, from here on: the prompts are read
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: passes.append(x.shape[0]) or forward(x)
    together = threading.Barrier(3, timeout=30)

    def begin(ids: list[int]) -> bool:
        if len(ids) == 1:
            together.wait()
        return False

    works = [lambda s=s, n=n: drawn(s, 10 + 9 * n, begin) for n, s in enumerate(beside)]
    results = in_threads(*works)
    # Nine tokens of each behind its first, and so on: the longest one goes on by itself.
    assert passes == [3] * 9 + [2] * 9 + [1] * 9
    assert results == [drawn(s, 10 + 9 * n) for n, s in enumerate(alone)]
    for one, other in zip(alone, beside, strict=True):
        mine, yours = one.cache.state().tensors, other.cache.state().tensors
        assert all(torch.equal(mine[plane], yours[plane]) for plane in mine)
    serving.close()


@pytest.mark.parametrize("name", ["true_eviction", "full_context"])
def test_one_conversation_by_static_shapes_as_on_cuda(name, monkeypatch):
    model = tiny("qwen2")
    steps: list[StaticStep] = []
    whole = StaticStep.step

    def step(self: StaticStep, *arguments: Any) -> Any:
        steps.append(self)
        return whole(self, *arguments)

    monkeypatch.setattr(StaticStep, "step", step)
    for number in range(4):  # the last one's heads differ in length: it has no static shapes
        alone = conversation(model, number, Alone(model), name)
        engine = Alone(model, static=True)
        assert list(conversation(model, number, engine, name).ids) == list(alone.ids)
        decoder = engine._decoder
        assert (decoder is None) == (number == 3)
        if decoder is not None:
            assert decoder.pool is not None
            replies = 3 * 13  # the last id of a turn goes in front of the next one
            assert len(steps) == replies
            assert len({id(step) for step in steps}) == 1  # a new one would be a new graph
        steps.clear()


def test_where_a_step_can_be_captured_it_is_without_being_asked_for(monkeypatch):
    model = tiny("llama")
    for able in (True, False):
        for module in (engines_module, serving_module, batch_decode):
            monkeypatch.setattr(module, "can_capture", lambda _, able=able: able)
        engine = Alone(model)
        drawn(session(model, engine), 3)
        assert (engine._decoder is not None) == able
        pool = make_pool(model, CONFIGS[0])
        assert (BatchDecoder(model, pool)._static is not None) == able
        with Serving(model, 2, share_pool=True) as serving:
            serving._on_gpu = True
            decoder = serving._decoder_of(
                session(model, serving, pool=serving.pool(CONFIGS[0])).cache
            )
        assert (decoder._static is not None) == able


def engines(model: Any) -> list[Any]:
    return [Alone(model), Alone(model, static=True), Serving(model, 3), Serving(model, 2)]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_a_replay_leaves_the_cache_that_writing_left(config, number):
    """To the bit: by the same passes, with others or none beside it."""
    model = tiny("llama")
    engine = engines(model)[number]
    first, second = (session(model, engine, config=config) for _ in range(2))
    ids, told = drawn(first, 41), list[int]()
    engine.replay(second.cache, ids[:-1], on_token=told.append)
    assert told[-1] == 40
    assert first.cache.seen == second.cache.seen == 100
    assert first.cache.stats.evictions == second.cache.stats.evictions
    mine, yours = first.cache.state(), second.cache.state()
    assert mine.tensors.keys() == yours.tensors.keys()
    for plane, tensor in mine.tensors.items():
        assert torch.equal(tensor, yours.tensors[plane]), plane
    if isinstance(engine, Serving):
        engine.close()


def test_full_context_and_a_shared_pool_that_is_given_back_every_turn():
    model = tiny("llama")
    alone = [list(conversation(model, n, None, "full_context").ids) for n in (0, 4)]
    with Serving(model, 2, share_pool=True) as serving:
        works = [lambda n=n: conversation(model, n, serving, "full_context") for n in (0, 4)]
        logs = in_threads(*works)
        assert serving.pool(CONFIGS[0]) is serving.pool(CONFIGS[0])
    assert [list(log.ids) for log in logs] == alone


def session(model: Any, engine: Any, seed: int = 0, **options: Any) -> Session:
    sampling = Sampling(0.8, seed=seed)
    config = options.pop("config", CONFIGS[0])
    made = Session(model, config, sampling=sampling, chunk=40, engine=engine, **options)
    made.feed(list(range(10, 70)))
    return made


def drawn(made: Session, count: int, stop: Callable[[list[int]], bool] | None = None) -> Any:
    return made.sample(max_new_tokens=count, stop_ids=(), stop=stop)[0]


def test_a_step_is_for_all_who_write_and_one_who_waits_for_its_tests_holds_nobody_up():
    model = tiny("llama")
    expected = [drawn(session(model, None, seed), 30) for seed in range(3)]
    with Serving(model, 4, patience=60) as serving:
        made = [session(model, serving, seed) for seed in range(4)]
        assert len(drawn(made[3], 10)) == 10  # its turn is over, and it asks for nothing
        together = threading.Barrier(3, timeout=30)

        def begin(ids: list[int]) -> bool:
            if len(ids) == 1:
                together.wait()
            return False

        def late(ids: list[int]) -> bool:
            time.sleep(0.01)
            return begin(ids)

        before = serving.steps
        results = in_threads(
            lambda: drawn(made[0], 30, late),
            *[lambda n=n: drawn(made[n], 30, begin) for n in (1, 2)],
        )
        assert results == expected
        assert serving.steps - before == 29


def test_who_is_slow_between_two_tokens_is_waited_for_no_longer_than_patience():
    model = tiny("llama")
    expected = drawn(session(model, None, 1), 20)
    with Serving(model, 2, patience=0.01) as serving:
        slow, quick = session(model, serving, 0), session(model, serving, 1)
        release, released = threading.Event(), []

        def wait(ids: list[int]) -> bool:
            if len(ids) == 2:
                released.append(release.wait(30))
            return False

        def work() -> list[int]:
            try:
                return drawn(quick, 20)
            finally:
                release.set()

        results = in_threads(lambda: drawn(slow, 5, wait), work)
    assert results[1] == expected
    assert len(results[0]) == 5
    assert released == [True]  # the other one was through before


class Boom(Exception):
    pass


def test_what_breaks_in_one_session_reaches_that_one_alone():
    model = tiny("qwen2")
    expected = [drawn(session(model, None, seed), 25) for seed in range(3)]
    with Serving(model, 3) as serving:
        made = [session(model, serving, seed) for seed in range(3)]
        evict, made[1].cache.evict = made[1].cache.evict, fail_at(made[1].cache.evict, 7)
        update, made[2].cache.update = made[2].cache.update, fail_at(made[2].cache.update, 20)
        results = in_threads(*[lambda each=each: drawn(each, 25) for each in made])
        assert results[0] == expected[0]
        assert all(isinstance(each, Boom) for each in results[1:])
        # The one whose pass broke off is as it was before that token, and can go on.
        made[1].cache.evict, made[2].cache.update = evict, update
        seen = made[2].cache.seen
        made[2].feed([5])
        assert made[2].cache.seen == seen + 1
        assert len(drawn(made[2], 3)) == 3


def fail_at(method: Callable[..., Any], call: int) -> Callable[..., Any]:
    """From that call on."""
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise Boom
        return method(*args, **kwargs)

    return wrapper


def test_errors_of_a_prompt_and_of_work_are_raised_where_they_were_asked_for():
    model = tiny("llama")
    with Serving(model, 1, share_pool=True) as serving:
        made = session(model, serving, pool=serving.pool(CONFIGS[0]))
        with pytest.raises(PoolFull):
            session(model, serving, pool=serving.pool(CONFIGS[0]))
        with pytest.raises(ValueError, match="no new ids"):
            made.feed([])
        with pytest.raises(IndexError):
            made.feed([1, 10**6])
        with pytest.raises(Boom):
            serving.do(lambda: fail_at(print, 1)())
        assert serving.do(lambda: serving.do(lambda: 3)) == 3
        made.feed([5])
        assert len(drawn(made, 3)) == 3
    with pytest.raises(ValueError, match="rows=0"):
        Serving(model, 0)


def test_stop_ends_all_who_wait_with_its_reason_and_close_ends_the_thread():
    model = tiny("llama")
    serving = Serving(model, 3, patience=60)
    made = [session(model, serving, seed) for seed in range(2)]
    busy, stopped = threading.Event(), threading.Event()

    def hold(ids: list[int]) -> bool:
        """The other one waits for this one's next token, this one for the stop."""
        if len(ids) == 10:
            busy.set()
            assert stopped.wait(30)
        return False

    def stop() -> None:
        assert busy.wait(30)
        while not serving._feeds:
            time.sleep(0.01)
        serving.stop("SIGTERM")
        stopped.set()

    results = in_threads(lambda: drawn(made[0], 10**6, hold), lambda: drawn(made[1], 10**6), stop)
    for result in results[:2]:
        assert isinstance(result, Interrupted)
        assert str(result) == "SIGTERM"
    # What was fed is whole: another engine can go on.
    for each in made:
        each.engine = Alone(model)
        each.feed([5])
    serving.close()
    assert not serving._thread.is_alive()
    with pytest.raises(Interrupted, match="SIGTERM"):
        serving.do(lambda: 1)


def test_a_caller_that_is_interrupted_leaves_nothing_under_way(monkeypatch):
    """As Ctrl-C does in the main thread, in the middle of waiting."""
    model = tiny("llama")
    with Serving(model, 1) as serving:
        made = session(model, serving)
        wait, waits = threading.Event.wait, []

        def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread() and not waits:
                waits.append(event)
                raise KeyboardInterrupt
            return wait(event, timeout)

        seen = made.cache.seen
        monkeypatch.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drawn(made, 5)
        assert waits[0].is_set()
        assert made.cache.seen in (seen, seen + 1)
        assert not serving._feeds
        assert serving._writing == 0
        made.feed([5])
        assert len(drawn(made, 4)) == 4


@pytest.mark.parametrize("share", [False, True])
def test_the_first_prompt_is_prefilled_once_for_attempts_side_by_side(share):
    model = tiny("qwen2")

    def attempt(seed: int, engine: Any, shared: SharedPrompt | None) -> tuple[list[int], int]:
        protocol = make_protocol(
            "true_eviction",
            model,
            CHAT,
            nexus(128),
            sampling=Sampling(0.9, seed=seed),
            chunk=48,
            shared=shared,
            engine=engine,
        )
        fed: list[int] = []
        log = talk(
            protocol,
            turns=2,
            pinned=False,
            after=lambda turn, log, reply: fed.append(reply.stats.fed),
        )
        protocol.close()
        return list(log.ids), fed[0]

    alone = [attempt(seed, None, None)[0] for seed in range(3)]
    shared = SharedPrompt()
    with Serving(model, 3, share_pool=share) as serving:
        works = [lambda seed=seed: attempt(seed, serving, shared) for seed in range(3)]
        results = in_threads(*works)
    shared.close()
    assert [ids for ids, _ in results] == alone
    assert sorted(fed for _, fed in results) == [0, 0, 150]


def test_a_row_does_not_depend_on_who_else_writes():
    """To the bit, as every step is padded to the same number of rows."""
    model = tiny("qwen2")

    def keys(serving: Serving, seeds: Sequence[int]) -> list[torch.Tensor]:
        made = [session(model, serving, seed, config=preset("dense")) for seed in seeds]
        results = in_threads(*[lambda each=each: drawn(each, 12) for each in made])
        assert all(isinstance(result, list) for result in results)
        return [each.cache.state().tensors["keys"] for each in made]

    with Serving(model, 4) as serving:
        for seed, together in enumerate(keys(serving, range(4))):
            assert torch.equal(keys(serving, [seed])[0], together)
