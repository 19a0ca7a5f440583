"""Which tool set a model gets, and that options hold what was chosen."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from agent import tool_choice
from agent.batch.item import make_items, settled
from agent.catalogue import CATALOGUE
from agent.run_options import DEFAULT_MODEL, OptionError, RunOptions, parse_options
from agent.settings import load_settings, tool_sets
from agent.tool_choice import choose_tools
from environments import Choice

HERMES = "{% if tools %}<tool_call>\n{'name': x, 'arguments': y}{% endif %}"
XML = "{% if tools %}<tool_call>\n<function=name>{% endif %} arguments"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "compact"),
        ("qwen2.5-coder-0.5b", "compact"),
        ("QWEN2.5-Coder-1.5B", "compact"),
        ("qwen3-8b", "r2e"),
        ("deepswe-preview", "r2e"),
        ("agentica-org/DeepSWE-Preview", "r2e"),
        ("Qwen/Qwen3-32B", "r2e"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "compact"),
        ("/models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "compact"),
        ("/hub/models--Qwen--Qwen3-4B/snapshots/0a1b2c", "r2e"),
    ],
)
def test_known_names(model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_choice, "_template", lambda model: pytest.fail("nothing is read"))
    choice = choose_tools(model)
    assert choice.name == name
    assert choice.reason


def test_every_model_of_the_catalogue_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_choice, "_template", lambda model: pytest.fail("nothing is read"))
    assert {choose_tools(name).name for name in CATALOGUE} == {"compact", "r2e"}
    assert choose_tools(DEFAULT_MODEL).name == "compact"


@pytest.mark.parametrize(
    ("template", "name"), [(HERMES, "native"), (XML, "r2e"), (PLAIN, "bash"), ("", "bash")]
)
def test_others_by_their_template(template: str, name: str) -> None:
    assert choose_tools("Qwen/Qwen3-Coder-30B", template).name == name
    assert choose_tools("Qwen/Qwen2.5-Coder-7B", template).name == name
    assert name in tool_sets()


def test_the_template_is_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert choose_tools(str(tmp_path)).name == "bash"
    assert "no chat template" in choose_tools(str(tmp_path)).reason
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": HERMES}]}))
    assert choose_tools(str(tmp_path)).name == "native"
    config.write_text(json.dumps({"chat_template": PLAIN}))
    assert choose_tools(str(tmp_path)).name == "bash"
    (tmp_path / "chat_template.jinja").write_text(XML)
    assert choose_tools(str(tmp_path)).name == "r2e"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("[no JSON")
    assert choose_tools(str(tmp_path)).name == "bash"


def test_the_template_is_read_from_a_gguf_file(tmp_path: Path) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    file = tmp_path / "other.gguf"
    pair = text("tokenizer.chat_template") + struct.pack("<I", 8) + text(HERMES)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair + b"\0" * 64)
    assert choose_tools(str(file)).name == "native"
    file.write_bytes(b"GGUF")
    assert choose_tools(str(file)).name == "bash"


def test_a_repository_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent import hub

    (tmp_path / "chat_template.jinja").write_text(HERMES)
    monkeypatch.setattr(hub, "local_snapshot", lambda repo: tmp_path)
    assert choose_tools("owner/fetched").name == "native"
    monkeypatch.setattr(hub, "local_snapshot", lambda repo: None)

    def unreachable() -> None:
        raise hub.HubUnavailable("no")

    monkeypatch.setattr(hub, "require_reachable", unreachable)
    assert choose_tools("owner/not-there").name == "bash"
    # Not fetched yet: its small files are, so that the answer is the one of later on.
    import huggingface_hub

    asked = []
    monkeypatch.setattr(hub, "require_reachable", lambda: None)
    monkeypatch.setattr(hub, "config_file", lambda repo: tmp_path / "config.json")

    def fetched(repo: str, name: str) -> str:
        asked.append((repo, name))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)
    assert choose_tools("owner/new").name == "native"
    assert ("owner/new", "chat_template.jinja") in asked
    assert all(not name.endswith((".safetensors", "tokenizer.json")) for _, name in asked)


def test_a_repository_need_not_have_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    from agent import hub

    def fetched(repo: str, name: str) -> str:
        if name not in ("config.json", "tokenizer_config.json"):
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"no {name}")
        (tmp_path / name).write_text(json.dumps({"chat_template": HERMES}))
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "local_snapshot", lambda repo: None)
    monkeypatch.setattr(hub, "require_reachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)
    assert choose_tools("owner/old-form").name == "native"


# In the options of a run


def test_options_hold_what_was_chosen_and_why() -> None:
    assert RunOptions().tools == "compact"
    assert RunOptions().tools_reason
    named = parse_options({"tools": "native", "instance": "x"})
    assert (named.tools, named.tools_reason) == ("native", None)
    assert parse_options({"tools": "auto", "model": "qwen3-8b"}).tools == "r2e"
    again = RunOptions.model_validate(RunOptions(model="qwen3-8b").model_dump())
    assert (again.tools, again.tools_reason) == ("r2e", RunOptions(model="qwen3-8b").tools_reason)


def test_the_demo_is_what_it_was() -> None:
    options = parse_options({})
    assert options.demo
    assert (options.tools, options.model) == ("compact", "qwen2.5-coder-1.5b")
    assert options.sampling().model_dump() == {"temperature": 0.6, "top_p": 0.95}
    settings = options.settings()
    assert (settings.dialect, settings.calls, settings.history) == ("fenced", "first", "raw")
    assert settings.messages.observation == ""


def test_sampling_is_the_tool_sets_unless_it_is_given() -> None:
    def numbers(**values: Any) -> tuple[float, float]:
        found = parse_options({"instance": "x", **values}).sampling()
        return found.temperature, found.top_p

    assert numbers(model="qwen3-8b") == (1.0, 1.0)
    assert numbers(model="qwen3-8b", temperature=0.0) == (0.0, 1.0)
    assert numbers(model="qwen3-8b", top_p=0.5) == (1.0, 0.5)
    assert numbers(overrides=("sampling.temperature=0.2",)) == (0.2, 0.95)
    with pytest.raises(OptionError, match="all the same"):
        parse_options({"instance": "x", "attempts": 2, "overrides": ("sampling.temperature=0",)})
    with pytest.raises(OptionError, match="all the same"):
        parse_options({"instance": "x", "attempts": 2, "temperature": 0})


def test_keys_hold_names_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.choose", lambda kind: Choice("bubblewrap", "said so"))

    class Row:
        instance_id, digest = "pkg-1", "aa"

    def key(**values: Any) -> str:
        options = settled(parse_options({"instance": "x", "device": "cpu", **values}))
        (item,) = make_items("pairs", [Row()], options, config="c")
        assert item.options["tools"] != "auto"
        assert "tools_reason" not in item.options
        assert item.options["temperature"] is not None
        return item.key

    assert key() == key(tools="compact") == key(tools="auto", temperature=0.6, top_p=0.95)
    assert key(model="qwen3-8b") == key(model="qwen3-8b", tools="r2e", temperature=1.0)
    assert key() != key(tools="native")
    (item,) = make_items("pairs", [Row()], parse_options({"instance": "x"}), config="c")
    assert (item.options["temperature"], item.options["top_p"]) == (0.6, 0.95)


def test_a_templates_history_needs_a_fresh_cache_each_turn() -> None:
    asked = {"instance": "x", "overrides": ("history=template",)}
    with pytest.raises(OptionError, match="--protocol full_context"):
        parse_options(asked)
    options = parse_options({**asked, "protocol": "full_context"})
    assert options.settings().history == "template"
    with pytest.raises(OptionError, match="history"):  # an item of a batch is made without parsing
        RunOptions.model_validate(asked).settings()


def test_every_set_keeps_to_the_sandboxes_life() -> None:
    from environments import SandboxSpec

    for name in tool_sets():
        settings = load_settings(name)
        assert settings.limits.wall_time < SandboxSpec().ttl
    r2e = load_settings("r2e")
    assert (r2e.limits.steps, r2e.limits.total_tokens, r2e.limits.command_timeout) == (
        100, 65_536, 90,
    )  # fmt: skip
