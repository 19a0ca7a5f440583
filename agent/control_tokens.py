"""Text to ids where control tokens come from the template alone, never from text that spells them.

Special tokens are control tokens, and so are the tokens a template writes that are not special:
<think>, <tool_response>, <tool_call>.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Letters: no template changes it, no JSON escapes it, blanks are not stripped off.
_WORD = "Qzspelt"


class ControlTokens:
    """The control tokens of a tokenizer and a chat template.

    `by_text` has their ids; `ids` is the set of these; `special` has the texts of the special ones,
    `marks` the ids of the others; `pattern` matches any of them.

    Before a text from outside goes through a template, `hide` puts a word in place of each control
    token that it spells; `ids_between` puts the text back behind the point where control tokens are
    looked for. So what a template renders can be encoded with its own control tokens only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._tokenizer: Any = tokenizer
        self.by_text: dict[str, int] = {}
        self.special: set[str] = set()
        marks = []
        for token_id, token in tokenizer.added_tokens_decoder.items():
            mark = bool(token.content.strip()) and token.content in template and not token.special
            if token.special:
                self.special.add(token.content)
            if token.special or mark:
                self.by_text[token.content] = token_id
            if mark:
                marks.append(token.content)
        self.ids = frozenset(self.by_text.values())
        self.marks = frozenset(self.by_text[text] for text in marks)
        self.pattern, self._at_marks = _any_of(self.by_text), _any_of(marks)
        self._hidden = [_WORD, *self.by_text]
        self._to_hide, self._at_hidden = _any_of(self._hidden), re.compile(rf"{_WORD}(\d+)z")

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
        if not self.ids.isdisjoint(ids):  # overlapping marks: keep all characters apart
            ids = self._encode_pieces(clean)
        return ids

    def _encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        ids: list[int] = []
        for piece in filter(None, pieces):
            ids += self._tokenizer.encode(
                piece, add_special_tokens=False, split_special_tokens=True
            )
        return ids

    def ids_between(self, before: str, content: str = "", after: str = "") -> list[int]:
        """Ids of a content between texts of the template, whose control tokens are real ones.

        Text between two control tokens is encoded in one piece, content and template together, as
        it is when the whole conversation is encoded: blanks at the seam may share a token. What was
        hidden in the texts of the template is put back; the content is taken as it is.
        """
        ids: list[int] = []
        run = ""
        for text, of_template in ((before, True), (content, False), (after, True)):
            for at, piece in enumerate(self.pattern.split(text) if of_template else [text]):
                if at % 2:
                    ids += [*self.encode(run), self.by_text[piece]]
                    run = ""
                else:
                    run += self._restore(piece) if of_template else piece
        return ids + self.encode(run)

    def hide(self, value: Any) -> Any:
        """A text, or all texts in JSON data, with a word for each control token they spell."""
        if isinstance(value, str):
            return self._to_hide.sub(lambda at: f"{_WORD}{self._hidden.index(at[0])}z", value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def hides(self, text: str) -> bool:
        """Whether something in a text was hidden."""
        return self._at_hidden.search(text) is not None

    def _restore(self, text: str) -> str:
        return self._at_hidden.sub(lambda at: self._hidden[int(at[1])], text)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """One group that matches any of `texts`, the longest first; nothing if there is none."""
    choices = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return re.compile(f"({choices})" if choices else r"(?!)()")
