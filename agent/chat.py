"""Messages as token ids that are only ever appended to a `TokenLog`.

Turn 0 is the system and the user message in the model's own template. From then on the bridge adds
exactly what stands between two turns: what closes the assistant turn if the model did not write it,
the boundary, the new message and the generation prompt. Nothing that is in the log is rendered,
decoded or encoded again. Contents are encoded so that no text in them becomes a control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from agent.chat_layout import LayoutError, Message, Render, chatml, read_layout
from agent.token_log import TokenLog

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Role = Literal["user", "tool"]

# Special tokens with which models end a turn or a text, beside the template's own close.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")


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


class UnbridgeableTemplate(ValueError):
    """The model's chat template cannot be continued by appending ids only."""


class Chat:
    """Turns messages into ids for one tokenizer and its chat template.

    The template is checked at construction: a conversation of several turns built by appending has
    to give the ids of the same conversation rendered and encoded as a whole, with what the model
    thought kept. A template that fails is replaced by plain ChatML if the tokenizer has
    `<|im_start|>` and `<|im_end|>` as special tokens; otherwise `UnbridgeableTemplate` is raised.

    Attributes: `stop_ids`, the ids that end a turn; `close_id`, the one the template ends it with;
    `roles`, the roles a bridged message can have; `layout_source`, "template" or "chatml", and
    `layout_note`, why the template was not used; `opens_in_thought`, whether the generation prompt
    leaves the model inside `<think>`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str = "the model") -> None:
        self.name = name
        self._tokenizer: Any = tokenizer
        template = str(tokenizer.chat_template or "")
        self._control: dict[str, int] = {}
        self._special: set[str] = set()
        marks = []
        for token_id, token in tokenizer.added_tokens_decoder.items():
            # Some tokens are not special, but structure to this template: <think>, <tool_response>.
            mark = bool(token.content.strip()) and token.content in template and not token.special
            if token.special:
                self._special.add(token.content)
            if token.special or mark:
                self._control[token.content] = token_id
            if mark:
                marks.append(token.content)
        self._control_ids = frozenset(self._control.values())
        self._at_control, self._at_marks = _any_of(self._control), _any_of(marks)
        self.layout_source: Literal["template", "chatml"] = "template"
        self.layout_note = ""
        try:
            self._use(self._render)
        except LayoutError as error:
            self._fall_back(error)
        self.opens_in_thought = self._layout.user.after.rstrip().endswith("<think>")
        ends = {self._control[text] for text in _ENDS if text in self._special}
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset({self.close_id, *ends} | (set() if eos is None else {eos}))

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
        system_ids = self._ids(first.before, first.edges(system), system_end)
        user_ids = self._ids(user_header, second.edges(user + tail), user_end)
        cut = len(self._ids(user_header, second.edges(user))) if tail else len(user_ids)
        log.append(
            system_ids, role="system", kind="injected", turn=0, pinned=pin_system, text=system
        )
        log.append(user_ids[:cut], role="user", kind="injected", turn=0, pinned=pin_user, text=user)
        if tail:
            log.append(
                user_ids[cut:], role="user", kind="injected", turn=0, pinned=pin_tail, text=tail
            )
        log.append(self._ids(prompt), role="assistant", kind="injected", turn=0, text=prompt)

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
        message = self._ids(slot.before.removeprefix(self._close), slot.edges(text), end)
        log.append(message, role=role, kind="injected", turn=turn, pinned=pinned, text=text)
        log.append(self._ids(prompt), role="assistant", kind="injected", turn=turn, text=prompt)

    # Text and ids

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(self._layout.messages)

    def text(self, ids: Iterable[int]) -> str:
        """Decode ids, special tokens and a stop id at the end left out, all else exact.

        Bytes that are no UTF-8 (a character cut in two) come out as U+FFFD.
        """
        kept = list(ids)
        if kept and kept[-1] in self.stop_ids:
            kept.pop()
        decoded: str = self._tokenizer.decode(
            kept, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return decoded

    def encode(self, text: str) -> list[int]:
        """Encode text from outside: no id of it is a control token, whatever it spells.

        Decoding gives the text back, except for what the tokenizer itself normalizes (Qwen's
        composes characters to NFC) and lone surrogates, which become U+FFFD.
        """
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # A mark is broken after its first character, so that it is no longer seen as one.
        pieces = [
            part
            for at, piece in enumerate(self._at_marks.split(clean))
            for part in ((piece[:1], piece[1:]) if at % 2 else (piece,))
        ]
        ids = self._encode_pieces(pieces)
        if not self._control_ids.isdisjoint(ids):  # overlapping marks: keep all characters apart
            ids = self._encode_pieces(clean)
        return ids

    def _encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        ids: list[int] = []
        for piece in filter(None, pieces):
            ids += self._tokenizer.encode(
                piece, add_special_tokens=False, split_special_tokens=True
            )
        return ids

    def _ids(self, before: str, content: str = "", after: str = "") -> list[int]:
        """Ids of a content between texts of the template, whose control tokens are real ones.

        Text between two control tokens is encoded in one piece, content and template together, as
        it is when the whole conversation is encoded: blanks at the seam may share a token.
        """
        ids: list[int] = []
        run = ""
        for text, at_control in ((before, True), (content, False), (after, True)):
            for at, piece in enumerate(self._at_control.split(text) if at_control else [text]):
                if at % 2:
                    ids += [*self.encode(run), self._control[piece]]
                    run = ""
                else:
                    run += piece
        return ids + self.encode(run)

    def _divide(self, text: str) -> tuple[str, str]:
        """Cut what follows a message into its own end and the header of the next one."""
        close = re.search(rf"{re.escape(self._close)}\s*(?={self._at_control.pattern}|\Z)", text)
        return (text[: close.end()], text[close.end() :]) if close else (text, "")

    # Reading the template

    def _render(self, messages: Sequence[Message]) -> str:
        if not self._tokenizer.chat_template:
            raise LayoutError("it has none")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise LayoutError(f"it does not render the messages {roles}: {error}") from error
        return text

    def _use(self, render: Render) -> None:
        """Take the layout of `render` and test it; `LayoutError` if it does not hold."""
        layout = read_layout(render)
        close = self._at_control.match(layout.messages["user"].before)
        if close is None:
            raise LayoutError(
                "an assistant turn does not end with one special token but with "
                f"{layout.messages['user'].before!r}"
            )
        openers = layout.past_opener + layout.opener
        if any(text in openers for text in self._special):
            raise LayoutError(
                f"the generation prompt ends with {layout.opener!r} where an assistant turn of the "
                f"past has {layout.past_opener!r}"
            )
        self._close, self.close_id = close[0], self._control[close[0]]
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
        if not {"<|im_start|>", "<|im_end|>"} <= self._special:
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
        text = "a".join(["", *self._control, *self._control, ""])
        ids = self.encode(text)
        back = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if not self._control_ids.isdisjoint(ids) or back != text:
            raise LayoutError("text that spells its control tokens cannot be encoded as plain text")

    def _test_conversation(self, render: Render, roles: Sequence[Role]) -> None:
        """Compare a conversation that was appended with the same one rendered as a whole."""
        log = TokenLog()
        self.open(log, _TEST_SYSTEM, _TEST_MESSAGES[0])
        messages = [_message("system", _TEST_SYSTEM), _message("user", _TEST_MESSAGES[0])]
        words = []
        for turn, role in enumerate(roles):
            ids = self._tokenizer.encode(_TEST_REPLIES[turn], add_special_tokens=False)
            closed = [self.close_id] if turn % 2 else []  # every other turn is cut off
            log.append([*ids, *closed], role="assistant", kind="sampled", turn=turn)
            self.bridge(log, _TEST_MESSAGES[turn + 1], role=role, turn=turn + 1)
            # The template sees a word in place of the reply, so it cannot strip the thought.
            words.append(f"Reply{turn}Word")
            messages.append(_message("assistant", words[-1]))
            messages.append(_message(role, _TEST_MESSAGES[turn + 1]))
        # A reply begins where sampling begins, so the text is encoded up to there and from there.
        expected: list[int] = []
        whole = render(messages)
        for word, reply in zip(words, _TEST_REPLIES, strict=False):
            head, _, whole = whole.partition(word)
            head = head.removesuffix(self._layout.past_opener) + self._layout.opener
            expected += self._tokenizer.encode(head, add_special_tokens=False)
            expected += self._tokenizer.encode(reply, add_special_tokens=False)
        expected += self._tokenizer.encode(whole, add_special_tokens=False)
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


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """One group that matches any of `texts`, the longest first; nothing if there is none."""
    choices = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return re.compile(f"({choices})" if choices else r"(?!)()")


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
