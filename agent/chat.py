"""Messages as token ids that are only ever appended to a `TokenLog`.

Turn 0 is the system and the user message in the model's own template. From then on the bridge adds
exactly what stands between two turns: what closes the assistant turn if the model did not write it,
the boundary, the new message and the generation prompt. Nothing that is in the log is rendered,
decoded or encoded again. Contents are encoded so that no text in them becomes a control token.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from agent.chat_layout import LayoutError, Message, Render, as_message, chatml, read_layout
from agent.control_tokens import ControlTokens
from agent.token_log import TokenLog

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Role = Literal["user", "tool"]
Tool = Mapping[str, Any]  # a JSON schema: {"type": "function", "function": {"name": ...}}
Piece = str | int  # a text from outside, or the id of a control token

# Special tokens with which models end a turn or a text, beside the template's own close.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
_THINK, _UNTHINK = "<think>", "</think>"

# The conversation of the self-test: blanks at the ends, indentation, blank lines, other scripts.
_TEST_SYSTEM = "Follow the rules.\n\n  1. One call."
_TEST_MESSAGES = (
    "Fix the issue.\n\n```python\ndef f(x):\n    return x\n```\n",
    "    3 | indented = True\n    4 |\n",
    "\n\n\ttab, naïve, 日本語, 12345 🙂  ",
    "Exit code: 0",
    "done.\r\n",
)
_TEST_REPLIES = (
    "<think>\nI look first.\n</think>\n\n<function=view>\n</function>",
    "Then I edit.\n\n    x = 1\n",
    "<think>again\n\nand again</think>Run it.",
    "Submit",
)

_OPENING = (as_message("system", "s"), as_message("user", "u"))
_EMPTY_THOUGHT = rf"(?:{_THINK})?\s*(?:{_UNTHINK})?\s*"


class UnbridgeableTemplate(ValueError):
    """The model's chat template cannot be continued by appending ids only."""


class Chat:
    """Turns messages into ids for one tokenizer and its chat template.

    The template is checked at construction: a conversation of several turns built by appending has
    to give the ids of the same conversation rendered and encoded as a whole, with what the model
    thought kept. A template that fails is replaced by plain ChatML if the tokenizer has
    `<|im_start|>` and `<|im_end|>` as special tokens; otherwise `UnbridgeableTemplate` is raised.

    tools: JSON schemas that the template writes into turn 0 in its own way. `UnbridgeableTemplate`
    where it does not: there is no plain form to fall back to. thinking: False switches the model's
    thoughts off, by the template's own switch (`enable_thinking`); `UnbridgeableTemplate` where it
    has none. None leaves it to the template.

    Attributes: `stop_ids`, the ids that end a turn; `close_id`, the one the template ends it with;
    `roles`, the roles a bridged message can have; `tools`; `layout_source`, "template" or "chatml",
    and `layout_note`, why the template was not used; `opens_in_thought`, whether the generation
    prompt leaves the model inside `<think>`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "the model",
        tools: Sequence[Tool] | None = None,
        *,
        thinking: bool | None = None,
    ) -> None:
        self.name, self.tools, self._thinking = name, tuple(tools or ()), thinking
        self._tokenizer: Any = tokenizer
        self._tokens = ControlTokens(tokenizer, str(tokenizer.chat_template or ""))
        self._schemas = self._tokens.hide(self.tools)
        self.layout_source: Literal["template", "chatml"] = "template"
        self.layout_note = ""
        try:
            self._check_tools()
            self._check_thinking()
            self._use(self._render)
        except LayoutError as error:
            self._fall_back(error)
        self.opens_in_thought = self._layout.user.after.rstrip().endswith(_THINK)
        ends = {self._tokens.by_text[text] for text in _ENDS if text in self._tokens.special}
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset({self.close_id, *ends} | (set() if eos is None else {eos}))

    def with_tools(self, tools: Sequence[Tool]) -> Chat:
        """The same chat for a model that is given these tools."""
        return Chat(self._tokenizer, self.name, tools, thinking=self._thinking)

    # Writing to a log

    def open(
        self,
        log: TokenLog,
        system: str,
        user: str,
        *,
        tail: str = "",
        pin_system: bool = True,
        pin_user: bool = True,
        pin_tail: bool = False,
    ) -> None:
        """Write turn 0: system and user message and the generation prompt.

        The user message is `user` and `tail`, encoded as one; each is a segment (to within a token
        where they meet), so that the tail alone may be left unpinned. Raises `ValueError` if the
        log is not empty.
        """
        if len(log):
            raise ValueError(f"turn 0 needs an empty log, this one holds {len(log)} ids")
        first, second = self._layout.system, self._layout.user
        system_end, user_header = self._divide(first.after)
        user_end, prompt = self._divide(second.after)
        system_ids = self._tokens.ids_between(first.before, first.edges(system), system_end)
        user_ids = self._tokens.ids_between(user_header, second.edges(user + tail), user_end)
        cut = (
            len(self._tokens.ids_between(user_header, second.edges(user)))
            if tail
            else len(user_ids)
        )
        log.append(
            system_ids, role="system", kind="injected", turn=0, pinned=pin_system, text=system
        )
        log.append(user_ids[:cut], role="user", kind="injected", turn=0, pinned=pin_user, text=user)
        if tail:
            log.append(
                user_ids[cut:], role="user", kind="injected", turn=0, pinned=pin_tail, text=tail
            )
        log.append(
            self._tokens.ids_between(prompt), role="assistant", kind="injected", turn=0, text=prompt
        )

    def bridge(
        self, log: TokenLog, text: str, *, role: Role = "user", turn: int, pinned: bool = False
    ) -> None:
        """Write what stands between the assistant turn in the log and turn `turn`.

        A turn that does not end with the template's own close token (it was cut off, or stopped at
        the end of a call) gets it first, as injected. Raises `ValueError` for an empty log or a
        role that the template does not know.
        """
        if not len(log):
            raise ValueError("there is no turn to follow: open the log first")
        if role not in self._layout.messages:
            raise ValueError(
                f"the chat template of {self.name} has no role {role!r}; it has: "
                + ", ".join(sorted(self.roles))
            )
        if log.ids[-1] != self.close_id:
            last = log.segments[-1]
            log.append(
                [self.close_id], role="assistant", kind="injected", turn=last.turn, text=self._close
            )
        slot = self._layout.messages[role]
        end, prompt = self._divide(slot.after)
        message = self._tokens.ids_between(
            slot.before.removeprefix(self._close), slot.edges(text), end
        )
        log.append(message, role=role, kind="injected", turn=turn, pinned=pinned, text=text)
        log.append(
            self._tokens.ids_between(prompt),
            role="assistant",
            kind="injected",
            turn=turn,
            text=prompt,
        )

    # Text and ids

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(self._layout.messages)

    def text(self, ids: Iterable[int]) -> str:
        """Decode ids, special tokens and a stop id at the end left out, all else exact.

        Bytes that are no UTF-8 (a character cut in two) come out as U+FFFD.
        """
        return self._decode(self._said(ids))

    def encode(self, text: str) -> list[int]:
        """Encode text from outside: no id of it is a control token, whatever it spells.

        Decoding gives the text back, except for what the tokenizer itself normalizes (Qwen's
        composes characters to NFC) and lone surrogates, which become U+FFFD.
        """
        return self._tokens.encode(text)

    def pieces(self, ids: Iterable[int]) -> list[Piece]:
        """What `text` gives for ids that were sampled, marks such as <think> kept as their ids."""
        pieces: list[Piece] = []
        for marks, group in groupby(self._said(ids), self._tokens.marks.__contains__):
            run = list(group)
            pieces += run if marks else [self._decode(run)]
        return pieces

    def thought_tokens(self, ids: Sequence[int]) -> int:
        """How many ids of a reply stand inside <think>...</think>, the tags included.

        A reply starts inside where the generation prompt opens a thought. A thought that was never
        closed goes on to the end; all before a `</think>` that was never opened is one too.
        """
        kept = self._said(ids)
        text = self._decode(kept, skip_special_tokens=False)
        spans: list[tuple[int, int]] = []
        start = 0 if self.opens_in_thought else None
        for tag in re.finditer(f"{_THINK}|{_UNTHINK}", text):
            if tag[0] == _THINK:
                start = tag.start() if start is None else start
            elif start is None:
                spans = [(0, tag.end())]
            else:
                spans.append((start, tag.end()))
                start = None
        if start is not None:
            spans.append((start, len(text)))

        def ids_up_to(end: int) -> int:  # the fewest that decode to the text up to there
            wanted = text[:end]
            return bisect_left(
                range(len(kept)),
                True,
                key=lambda n: self._decode(kept[:n], skip_special_tokens=False).startswith(wanted),
            )

        return sum(
            ids_up_to(end) - (ids_up_to(start + 1) - 1 if start else 0)
            for start, end in spans
            if start < end
        )

    def _said(self, ids: Iterable[int]) -> list[int]:
        """Ids of a turn without the stop id at its end."""
        kept = list(ids)
        if kept and kept[-1] in self.stop_ids:
            kept.pop()
        return kept

    def _decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    # The conversation as a whole

    def whole(self, messages: Iterable[tuple[str, Sequence[Piece]]]) -> list[int]:
        """Ids of a conversation (role, content) as the template renders it, prompt at the end.

        A control token is one that the template writes or that is given as an id in a content. One
        that a text spells is hidden from the template, so that it neither becomes one nor is taken
        for one there. Raises `UnbridgeableTemplate` where the template is not used or fails.
        """
        rows = [as_message(role, self._hidden(content)) for role, content in messages]
        if self.layout_source != "template":
            raise UnbridgeableTemplate(self.layout_note)
        try:
            return self._tokens.ids_between(self._render(rows))
        except LayoutError as error:
            raise UnbridgeableTemplate(f"the chat template of {self.name}: {error}") from error

    def _hidden(self, content: Sequence[Piece]) -> str:
        """A content in which only ids are control tokens. Texts side by side are one text."""
        texts = {token_id: text for text, token_id in self._tokens.by_text.items()}
        said = ""
        for mark, group in groupby(content, lambda piece: isinstance(piece, int)):
            run = list(group)
            if mark:
                said += "".join(texts[piece] for piece in run if isinstance(piece, int))
            else:
                said += self._tokens.hide("".join(map(str, run)))
        return said

    @property
    def thought_opener(self) -> list[Piece]:
        """What the generation prompt opens a thought with; empty where it does not."""
        if not self.opens_in_thought:
            return []
        prompt = self._layout.user.after
        return [
            self._tokens.by_text[piece] if at % 2 else piece
            for at, piece in enumerate(self._tokens.pattern.split(prompt[prompt.rindex(_THINK) :]))
            if piece
        ]

    def _divide(self, text: str) -> tuple[str, str]:
        """Cut what follows a message into its own end and the header of the next one."""
        close = re.search(
            rf"{re.escape(self._close)}\s*(?={self._tokens.pattern.pattern}|\Z)", text
        )
        return (text[: close.end()], text[close.end() :]) if close else (text, "")

    # Reading the template

    def _render(self, messages: Sequence[Message], **changes: Any) -> str:
        if not self._tokenizer.chat_template:
            raise LayoutError("it has none")
        given: dict[str, Any] = {"tools": self._schemas or None}
        if self._thinking is not None:
            given["enable_thinking"] = self._thinking
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **given | changes,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise LayoutError(f"it does not render the messages {roles}: {error}") from error
        return text

    def _check_tools(self) -> None:
        """Every tool has a name, and the template writes it."""
        for tool, schema in zip(self.tools, self._schemas, strict=True):
            name = schema.get("function", schema).get("name")
            if not name or not isinstance(name, str):
                raise ValueError(f"a tool's schema has no name: {dict(tool)!r}")
            given, bare = self._render(_OPENING), self._render(_OPENING, tools=None)
            if given.count(name) <= bare.count(name):
                raise LayoutError(f"it writes nothing about the tool {name!r} it is given")

    def _check_thinking(self) -> None:
        if self._thinking is False and self._render(_OPENING) == self._render(
            _OPENING, enable_thinking=True
        ):
            raise LayoutError("it has no switch `enable_thinking`")

    def _use(self, render: Render) -> None:
        """Take the layout of `render` and test it; `LayoutError` if it does not hold."""
        layout = read_layout(render)
        close = self._tokens.pattern.match(layout.messages["user"].before)
        if close is None:
            raise LayoutError(
                "an assistant turn does not end with one special token but with "
                f"{layout.messages['user'].before!r}"
            )
        openers = layout.past_opener + layout.opener
        if any(text in openers for text in self._tokens.special):
            raise LayoutError(
                f"the generation prompt ends with {layout.opener!r} where an assistant turn of the "
                f"past has {layout.past_opener!r}"
            )
        self._close, self.close_id = close[0], self._tokens.by_text[close[0]]
        self._layout = layout
        self._test_contents()
        self._test_conversation(render, ("user", "user", "user", "user"))
        if "tool" in layout.messages:
            try:
                if not layout.messages["tool"].before.startswith(self._close):
                    raise LayoutError("a tool message does not close the turn before it")
                self._test_conversation(render, ("tool", "tool", "user", "tool"))
            except LayoutError as error:  # tool output can still come as a user message
                self.layout_note = f"role tool is not used: {error}"
                self._layout = replace(layout, messages={"user": layout.messages["user"]})

    def _fall_back(self, error: LayoutError) -> None:
        refused = f"the chat template of {self.name} cannot be continued by appending ids: {error}"
        remedy = "Choose a model with another template."
        if self.tools:
            raise UnbridgeableTemplate(
                f"the chat template of {self.name} cannot be given tools: {error}. Choose a tool "
                "set that describes its tools in the prompt, such as bash or compact"
            ) from error
        if self._thinking is False:
            raise UnbridgeableTemplate(
                f"thinking cannot be switched off for {self.name} by its chat template: {error}"
            ) from error
        if not {"<|im_start|>", "<|im_end|>"} <= self._tokens.special:
            raise UnbridgeableTemplate(f"{refused}. {remedy}") from error
        try:
            self._use(chatml)
        except LayoutError as second:
            raise UnbridgeableTemplate(
                f"{refused}; nor can plain ChatML: {second}. {remedy}"
            ) from second
        self.layout_source, self.layout_note = "chatml", refused

    def _test_contents(self) -> None:
        """No control token comes out of a text that spells it, and the text comes back."""
        text = "a".join(["", *self._tokens.by_text, *self._tokens.by_text, ""])
        ids = self.encode(text)
        back = self._decode(ids, skip_special_tokens=False)
        if not self._tokens.ids.isdisjoint(ids) or back != text:
            raise LayoutError("text that spells its control tokens cannot be encoded as plain text")

    def _test_conversation(self, render: Render, roles: Sequence[Role]) -> None:
        """Compare a conversation that was appended with the same one rendered as a whole."""
        log = TokenLog()
        self.open(log, _TEST_SYSTEM, _TEST_MESSAGES[0])
        messages = [as_message("system", _TEST_SYSTEM), as_message("user", _TEST_MESSAGES[0])]
        words = []
        for turn, role in enumerate(roles):
            ids = self._encode_render(_TEST_REPLIES[turn])
            closed = [self.close_id] if turn % 2 else []  # every other turn is cut off
            log.append([*ids, *closed], role="assistant", kind="sampled", turn=turn)
            self.bridge(log, _TEST_MESSAGES[turn + 1], role=role, turn=turn + 1)
            # The template sees a word in place of the reply, so it cannot strip the thought.
            words.append(f"Reply{turn}Word")
            messages.append(as_message("assistant", words[-1]))
            messages.append(as_message(role, _TEST_MESSAGES[turn + 1]))
        # A reply begins where sampling begins, so the text is encoded up to there and from there.
        expected: list[int] = []
        whole = render(messages)
        for word, reply in zip(words, _TEST_REPLIES, strict=False):
            head, _, whole = whole.partition(word)
            expected += self._encode_render(self._with_opener(head))
            expected += self._encode_render(reply)
        expected += self._encode_render(whole)
        if list(log.ids) == expected:
            return
        at = next(
            (
                i
                for i, pair in enumerate(zip(log.ids, expected, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(log), len(expected)),
        )
        seen, wanted = (
            self._tokenizer.decode(list(ids[at : at + 12])) for ids in (log.ids, expected)
        )
        raise LayoutError(
            f"from id {at} on a conversation rendered as a whole has {wanted!r} where appending "
            f"has {seen!r}"
        )

    def _with_opener(self, head: str) -> str:
        """What precedes a turn of the past, with the end it had when that turn was sampled.

        There the template may write the end of an empty thought, or leave out what opened one.
        """
        header = self._divide(self._layout.user.after)[1].removesuffix(self._layout.opener)
        before, found, seen = head.rpartition(header)
        known = seen in ("", self._layout.past_opener) or re.fullmatch(_EMPTY_THOUGHT, seen)
        return before + header + self._layout.opener if found and known else head

    def _encode_render(self, text: str) -> list[int]:
        """Encode by the tokenizer alone, unless schemas of tools spell control tokens in it."""
        if self._tokens.hides(text):
            return self._tokens.ids_between(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
