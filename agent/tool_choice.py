"""Which tool set a model gets where none is named: by its name, else by its chat template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

AUTO = "auto"

_SMALL = re.compile(r"smollm2|qwen2\.5-coder-(0\.5|1\.5)b")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The name of a tool set, and why it was chosen."""

    name: str
    reason: str


def choose_tools(model: str, chat_template: str | None = None) -> ToolChoice:
    """The tool set for a model, from what is known before it is loaded.

    `model`: as `agent.models.resolve` takes it. `chat_template`: read from the model's own files
    where it is not given. Of a hub repository only the tokenizer's config is fetched for it.
    """
    name = _name(model)
    if "deepswe" in name:
        return ToolChoice("r2e", "DeepSWE was trained with these tools")
    if re.match(r"qwen3(?!.*coder)", name):
        return ToolChoice("r2e", "DeepSWE, which was trained with these tools, is a Qwen3")
    if _SMALL.match(name):
        return ToolChoice("compact", "made for models as small as this one")
    template = chat_template if chat_template is not None else _template(model)
    if template is None:
        return ToolChoice("bash", "the model is not known by name, and no chat template was found")
    if "<function=" in template:
        return ToolChoice("r2e", "the model's template writes calls in the form of this set")
    if "<tool_call>" in template and "tools" in template and "arguments" in template:
        return ToolChoice("native", "the model's template has this form of tool calls")
    return ToolChoice("bash", "the model's template knows no form of tool calls that is read here")


def _name(model: str) -> str:
    """The part of a name, path or hub id that says which model it is."""
    path = Path(model)
    if path.parent.name == "snapshots":  # of the hub's local store: models--OWNER--NAME
        return path.parent.parent.name.split("--")[-1].lower()
    return path.name.lower()


def _template(model: str) -> str | None:
    path = Path(model).expanduser()
    if path.is_dir():
        return _read(path)
    if path.is_file():
        return _of_gguf(path)
    return _of_hub(model)


def _read(folder: Path) -> str | None:
    """The template, or all of several, among a model's files; None where there is none."""
    for name in _TEMPLATE_FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8")
            found = text if name.endswith(".jinja") else json.loads(text).get("chat_template")
        except (OSError, ValueError, AttributeError):  # what is wrong with it, loading will say
            continue
        if found:
            return found if isinstance(found, str) else json.dumps(found)
    return None


def _of_gguf(path: Path) -> str | None:
    from agent.gguf_header import read_header
    from agent.model_errors import BadModelFile

    try:
        found = read_header(path).metadata.get("tokenizer.chat_template")
    except (BadModelFile, OSError, ValueError):
        return None
    return found if isinstance(found, str) else None


@lru_cache(maxsize=64)
def _of_hub(repo: str) -> str | None:
    """The template of a hub repository: the same whether it was fetched before or not."""
    from agent import hub

    if not hub.REPOSITORY.fullmatch(repo):
        return None
    local = hub.local_snapshot(repo)
    if local is not None:
        return _read(local)
    try:
        hub.require_reachable()
        folder = hub.config_file(repo).parent
    except hub.HubUnavailable:
        return None
    for name in _TEMPLATE_FILES:
        try:
            hub.small_file(repo, name)
        except hub.HubUnavailable:  # not every repository has each
            continue
    return _read(folder)
