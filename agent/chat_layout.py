"""What a chat template writes around messages, read off its renders.

A template is a program; what matters here are the constant texts it puts around contents. They are
found by rendering dummy conversations with marker words as contents and cutting the result at the
markers. Nothing is assumed about the syntax of the template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Message = Mapping[str, str]
Render = Callable[[Sequence[Message]], str]  # conversation -> text, generation prompt included

# Two sets of markers (system, user, assistant, new message): what differs between the two renders
# beyond the markers depends on the contents.
_MARKERS = (("Qzsysa", "Qzusera", "Qzassta", "Qznewa"), ("kwsb two", "kwub", "kwab three", "kwnb"))
_PADDING = "\n \t"
# What templates do to the ends of a content, by frequency.
_EDGES: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
)


def as_message(role: str, content: str) -> Message:
    """A message as chat templates take it."""
    return {"role": role, "content": content}


class LayoutError(ValueError):
    """A template that is not constant text around contents; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A content between two constant texts; `edges` is what the template does to its ends."""

    before: str
    after: str
    edges: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class Layout:
    """The constant texts of a template.

    `system` and `user` are the slots of the two opening messages (`system.after` is the same text
    as `user.before`). `messages` holds, for each role that the template knows, the slot of a
    message after an assistant turn: `before` begins with what closes that turn. `user.after` and
    the `after` of the messages end with the generation prompt. The generation prompt ends with
    `opener` where a past assistant turn has `past_opener` (both empty for most; some models are
    given `<think>`, and a past turn without a thought gets an empty one).
    """

    system: Slot
    user: Slot
    messages: Mapping[str, Slot]
    opener: str
    past_opener: str


def read_layout(render: Render) -> Layout:
    """Find the layout of a template.

    Raises `LayoutError` where it cannot render system, user, assistant, user, or where what it
    writes around contents depends on them. The role "tool" is left out if that is so for it alone.
    """
    layout, other = (_read(render, *markers) for markers in _MARKERS)
    if layout != other:
        raise LayoutError("the text around the messages changes with what they say")
    sys, user, asst, new = _MARKERS[0]
    opening = as_message("system", sys), as_message("user", user)

    def edges(
        *before: Message, role: str, marker: str, after: Sequence[Message] = ()
    ) -> Callable[[str], str]:
        plain = render([*before, as_message(role, marker), *after])
        at = plain.rindex(marker)
        padded = _PADDING + marker + _PADDING
        seen = render([*before, as_message(role, padded), *after])
        for change in _EDGES:
            if seen == plain[:at] + change(padded) + plain[at + len(marker) :]:
                return change
        raise LayoutError(f"blanks at the ends of a {role} message are changed in an unknown way")

    past = (*opening, as_message("assistant", asst))
    messages = {}
    for role, slot in layout.messages.items():
        try:
            messages[role] = _with_edges(slot, edges(*past, role=role, marker=new))
        except LayoutError:  # some templates write a tool's output as JSON
            if role == "user":
                raise
    return Layout(
        system=_with_edges(layout.system, edges(role="system", marker=sys, after=opening[1:])),
        user=_with_edges(layout.user, edges(opening[0], role="user", marker=user)),
        messages=messages,
        opener=layout.opener,
        past_opener=layout.past_opener,
    )


def chatml(messages: Sequence[Message]) -> str:
    """ChatML by hand, with a generation prompt, for a model whose own template is of no use.

    Raises `LayoutError` for a role that not every ChatML model was trained with.
    """
    text = ""
    for message in messages:
        if message["role"] not in ("system", "user", "assistant"):
            raise LayoutError(f"plain ChatML has no role {message['role']!r}")
        text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def _read(render: Render, sys: str, user: str, asst: str, new: str) -> Layout:
    """The layout as these markers show it, edges not looked at."""
    opening = [as_message("system", sys), as_message("user", user)]
    past = [*opening, as_message("assistant", asst)]
    start, between, end = _cut(render(opening), sys, user)
    *_, header, before, after = _cut(render([*past, as_message("user", new)]), sys, user, asst, new)
    same = 0
    while same < min(len(header), len(end)) and header[same] == end[same]:
        same += 1
    messages = {"user": Slot(before, after)}
    try:
        *_, before, after = _cut(render([*past, as_message("tool", new)]), sys, user, asst, new)
        messages["tool"] = Slot(before, after)
    except LayoutError:
        pass  # a template without that role
    return Layout(Slot(start, between), Slot(between, end), messages, end[same:], header[same:])


def _cut(text: str, *markers: str) -> list[str]:
    """The pieces of `text` around the markers, which have to stand in it once each, in order."""
    pieces = []
    for marker in markers:
        if text.count(marker) != 1:
            raise LayoutError("a message is left out, repeated, or out of order in the render")
        piece, _, text = text.partition(marker)
        pieces.append(piece)
    return [*pieces, text]


def _with_edges(slot: Slot, edges: Callable[[str], str]) -> Slot:
    return Slot(slot.before, slot.after, edges)
