"""The conversation of a log as the model's chat template renders it whole (`history: template`).

A server that is sent messages works like this: each turn it is given the conversation as text and
renders it again. This is for comparison with that; the log itself stays raw.
"""

from __future__ import annotations

from agent.chat import Chat, Piece
from agent.token_log import Segment, TokenLog


def template_ids(chat: Chat, log: TokenLog) -> list[int]:
    """Ids of the conversation in `log` as the template renders it, generation prompt at the end.

    What differs from `log.ids`:

    - Thoughts of past turns are left out where the template leaves them out. Qwen3's drops those
      before the last message of role user, and keeps those of a run of role tool.
    - What the template does to a turn that it keeps: Qwen3's strips newlines around a thought and
      drops one that is empty.
    - What the model said is decoded and encoded again, so the same text can have other ids. Special
      tokens within a reply, and a character that was cut in two, are lost.
    - A thought that the generation prompt opened counts as part of the reply.
    - Where the generation prompt closes a thought (thinking switched off), that empty thought
      stands in the newest prompt only.

    Calls are text here, not the `tool_calls` of a message: their arguments are never written anew.
    Control tokens are those the template writes, and the marks that the model drew as one id
    (<think>, <tool_call>). One that is merely spelled, by a tool's output or by the model, stays
    text, and the template does not see it: a rendering by text alone would take it for real.

    Raises ValueError unless the log ends with a generation prompt, and UnbridgeableTemplate where
    the template is not used or does not render the conversation.
    """
    return chat.whole(_messages(chat, log))


def _messages(chat: Chat, log: TokenLog) -> list[tuple[str, list[Piece]]]:
    """The conversation as (role, content); the turn that is about to begin is none of them."""
    segments = log.segments
    if not segments or segments[-1].role != "assistant" or segments[-1].kind == "sampled":
        raise ValueError("the log does not end with a generation prompt: open or bridge it first")
    messages: list[tuple[str, list[Piece]]] = []
    for before, segment in zip((None, *segments), segments, strict=False):
        content = _content(chat, log, segment)
        # Turn 0 may hold the user message in two segments; a prompt and its reply are one turn.
        if before is not None and before.role == segment.role:
            messages[-1][1].extend(content)
        else:
            messages.append((segment.role, content))
    return messages[:-1]


def _content(chat: Chat, log: TokenLog, segment: Segment) -> list[Piece]:
    if segment.kind == "sampled":
        reply = chat.pieces(log.ids[segment.start : segment.end])
        return [*chat.thought_opener, *reply]
    if segment.role == "assistant":
        return []  # the prompt, or what closes a turn: the template writes its own
    return [segment.text or ""]
