"""Both protocols over one log: what they feed, what they keep, and that they agree when nothing
is evicted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_talk import CHAT, STOP, Recorder, nexus, talk, tiny

from agent.chat import Chat
from agent.protocol import LogChanged, Reply, TrueEviction, make_protocol
from agent.token_log import TokenLog
from cache import AnyConfig, Sampling


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_protocols_agree_when_nothing_is_evicted(family: str) -> None:
    model, logs, seen = tiny(family), [], []
    for name in ("true_eviction", "full_context"):
        sampling = Recorder()
        protocol = make_protocol(name, model, CHAT, nexus(1 << 20), sampling=sampling, chunk=48)
        logs.append(talk(protocol, turns=4))
        seen.append(torch.stack(sampling.logits))
    assert list(logs[0].ids) == list(logs[1].ids)
    torch.testing.assert_close(seen[0], seen[1], atol=1e-4, rtol=0)


@pytest.mark.model
def test_protocols_agree_on_a_trained_model() -> None:
    from agent.models import load

    loaded = load("smollm2-135m", dtype="float32", device="cpu")
    chat = Chat(loaded.tokenizer, name=loaded.name)
    ids, seen = [], []
    for name in ("true_eviction", "full_context"):
        sampling = Recorder()
        protocol = make_protocol(
            name, loaded.model, chat, nexus(1 << 20), sampling=sampling, chunk=64
        )
        log = TokenLog()
        chat.open(log, "You are brief.", "Name three rivers and one fact about each of them.")
        for turn in range(1, 4):
            reply = protocol.reply(log, max_new_tokens=16)
            log.append(reply.ids, role="assistant", kind="sampled", turn=turn)
            chat.bridge(log, f"Tell me more about number {turn}.", turn=turn + 1)
        ids.append(list(log.ids))
        seen.append(torch.stack(sampling.logits))
        protocol.close()
    assert ids[0] == ids[1]
    torch.testing.assert_close(seen[0], seen[1], atol=1e-4, rtol=0)


def test_true_eviction_feeds_each_id_once() -> None:
    protocol = make_protocol("true_eviction", tiny("llama"), CHAT, nexus(256), sampling=Sampling())
    fed: list[int] = []

    def check(turn: int, log: TokenLog, reply: Reply) -> None:
        fed.append(reply.stats.fed)
        # The last sampled id waits for the next turn; all others were fed, prefilled or decoded.
        assert reply.stats.seen == len(log) - 1
        assert reply.stats.sampled == len(reply.ids)

    talk(protocol, turns=4, after=check)
    assert fed == [150, 61, 61, 61]


def test_full_context_feeds_the_whole_log_every_turn() -> None:
    protocol = make_protocol("full_context", tiny("llama"), CHAT, nexus(128), sampling=Sampling())
    lengths: list[tuple[int, int, int]] = []

    def check(turn: int, log: TokenLog, reply: Reply) -> None:
        lengths.append((reply.stats.fed, len(log) - len(reply.ids), reply.stats.evictions))

    talk(protocol, turns=3, pinned=False, after=check)
    assert all(fed == before for fed, before, _ in lengths)
    assert all(evictions > 0 for _, _, evictions in lengths)


def test_pinned_spans_stay_through_many_turns() -> None:
    protocol = make_protocol(
        "true_eviction",
        tiny("llama"),
        CHAT,
        nexus(320, prefill_eviction="chunk"),
        sampling=Sampling(),
        chunk=64,
    )
    assert isinstance(protocol, TrueEviction)
    talk(protocol, turns=12, prompt=150)
    cache = protocol.session.cache
    assert cache.stats.evictions > 5
    kept = cache.kept_blocks()
    for block in range(-(-150 // 32)):
        assert bool((kept == block).any(-1).all()), f"block {block} of the pinned prompt is gone"


def test_memory_is_flat_over_forty_turns_of_long_observations() -> None:
    protocol = make_protocol(
        "true_eviction",
        tiny("qwen2"),
        CHAT,
        nexus(128, prefill_eviction="chunk", seed=2),
        sampling=Sampling(),
        chunk=64,
    )
    held: list[int] = []

    def check(turn: int, log: TokenLog, reply: Reply) -> None:
        assert isinstance(protocol, TrueEviction)
        cache = protocol.session.cache
        pool, ring = cache.pool, cache._window.ring
        assert ring is not None
        tensors = (pool.keys, pool.values, pool.block_ids, ring)
        assert reply.stats.cache_bytes == sum(t.numel() * t.element_size() for t in tensors)
        assert reply.stats.resident <= 128 + 32
        held.append(reply.stats.cache_bytes)

    talk(protocol, turns=40, prompt=20, observation=300, new_tokens=40, after=check)
    assert len(set(held[2:])) == 1


def test_an_interrupted_prefill_goes_on_where_it_was() -> None:
    model, config = tiny("llama"), nexus(1 << 20)
    logs = []
    for interrupt in (False, True):
        sampling = Recorder()
        protocol = make_protocol("true_eviction", model, CHAT, config, sampling=sampling, chunk=32)
        log = TokenLog()
        log.append(range(8, 158), role="user", kind="injected", turn=0)
        if interrupt:

            def stop(fed: int, total: int) -> None:
                if fed >= 64:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                protocol.reply(log, max_new_tokens=5, on_prefill=stop)
            assert not sampling.logits
        reply = protocol.reply(log, max_new_tokens=5)
        assert reply.stats.fed == (150 - 64 if interrupt else 150)
        logs.append((reply.ids, torch.stack(sampling.logits)))
    assert logs[0][0] == logs[1][0]
    torch.testing.assert_close(logs[0][1], logs[1][1], atol=1e-4, rtol=0)


def test_a_changed_log_is_refused() -> None:
    protocol = make_protocol("true_eviction", tiny("llama"), CHAT, nexus(256), sampling=Sampling())
    first, other = TokenLog(), TokenLog()
    first.append(range(8, 58), role="user", kind="injected", turn=0)
    protocol.reply(first, max_new_tokens=3)
    other.append([*range(8, 57), 99, 100], role="user", kind="injected", turn=0)
    with pytest.raises(LogChanged, match="50 ids"):
        protocol.reply(other, max_new_tokens=3)


@pytest.mark.parametrize("name", ["true_eviction", "full_context"])
def test_another_process_goes_on_from_what_was_saved_or_from_the_log_alone(
    name: str, tmp_path: Path
) -> None:
    model, config, sampling = tiny("llama", initializer_range=0.2), nexus(256), Recorder()
    saved, damaged, others = (tmp_path / file for file in ("saved", "damaged", "others"))
    keeps = name == "true_eviction"

    def told(path: Path, config: AnyConfig) -> TokenLog:
        """A conversation whose cache is saved after the second of its four turns."""
        protocol = make_protocol(name, model, CHAT, config, sampling=sampling, chunk=64)

        def save(turn: int, log: TokenLog, reply: Reply) -> None:
            if turn == 2:
                assert protocol.save(path, model_id="m") == path.exists() == keeps

        return talk(protocol, turns=4, after=save)

    told(others, nexus(288))
    log = told(saved, config)
    damaged.write_bytes(saved.read_bytes()[:-9] if keeps else b"")
    replies = [segment for segment in log.segments if segment.kind == "sampled"]
    last, read = replies[-1], [segment.end - 1 for segment in replies]
    expected = torch.stack(sampling.logits[last.start - last.end :])
    head, fed = log.head(last.start), list[int]()
    for files in ([damaged, others, saved, damaged], []):
        protocol = make_protocol(name, model, CHAT, config, sampling=sampling, chunk=64)
        heard: list[tuple[int, int]] = []
        count = protocol.resume(
            head, files, model_id="m", on_replay=lambda *now, heard=heard: heard.append(now)
        )
        assert heard[-1:] == ([(count, count)] if keeps else [])
        fed.append(count)
        with pytest.raises(LogChanged):
            protocol.reply(log.head(replies[0].start), max_new_tokens=3)
        reply = protocol.reply(head, max_new_tokens=12)
        assert reply.ids == log.ids[last.start : last.end]
        assert torch.equal(torch.stack(sampling.logits[-len(reply.ids) :]), expected)
        assert (reply.stats.evictions > 0) or keeps
    assert fed == ([read[2] - read[1], read[2]] if keeps else [0, 0])


def test_stop_text_ends_a_reply_and_leaves_its_last_id_unfed() -> None:
    protocol = make_protocol("true_eviction", tiny("llama"), CHAT, nexus(256), sampling=Sampling())
    log, heard = TokenLog(), list[str]()
    log.append(range(8, 58), role="user", kind="injected", turn=0)
    reply = protocol.reply(
        log,
        max_new_tokens=50,
        stop_text=lambda text: len(text.split()) == 4,
        on_text=heard.append,
    )
    assert (reply.finish, len(reply.ids), reply.stats.seen) == ("stop_text", 4, 53)
    assert heard == [" ".join(map(str, reply.ids[:n])) for n in range(1, 5)]


def test_a_stop_id_ends_a_reply_and_is_part_of_it() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[STOP] = 1e3 * model.lm_head.weight[STOP].abs()
    log = TokenLog()
    log.append(range(8, 58), role="user", kind="injected", turn=0)
    protocol = make_protocol("true_eviction", model, CHAT, nexus(256), sampling=Sampling())
    reply = protocol.reply(log, max_new_tokens=400)
    assert reply.finish == "stop"
    assert reply.ids[-1] == STOP
    assert STOP not in reply.ids[:-1]


@pytest.mark.parametrize("seed", [0, 5])
def test_sampled_replies_are_a_function_of_the_seed(seed: int) -> None:
    model = tiny("llama")
    logs = [
        talk(
            make_protocol(
                "true_eviction",
                model,
                CHAT,
                nexus(160, prefill_eviction="chunk", seed=1),
                sampling=Sampling(temperature=1.0, top_p=0.95, seed=s),
                chunk=64,
            ),
            turns=3,
            prompt=40,
        )
        for s in (seed, seed, seed + 1)
    ]
    assert list(logs[0].ids) == list(logs[1].ids)
    assert list(logs[0].ids) != list(logs[2].ids)


def test_an_unknown_protocol_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'magic'.*true_eviction, full_context"):
        make_protocol("magic", tiny("llama"), CHAT, nexus(256), sampling=Sampling())
