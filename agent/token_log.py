"""The conversation as token ids: append-only, with a record of where each span came from.

The ids are the truth. Text is derived from them and never encoded again, because decoding and
encoding do not give the same ids back.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, overload

Kind = Literal["injected", "sampled"]

ROLES = ("system", "user", "assistant", "tool")
_LIMIT = 2**31  # ids are kept, and hashed, as 4-byte integers
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A span `[start, end)` of the log that was written at once.

    `kind` is "injected" (by the chat template or the environment) or "sampled" (by the model);
    `turn` counts from 0; `pinned` spans are never evicted; `text` is the source text of an
    injected span, None for a sampled one.
    """

    start: int
    end: int
    role: str
    kind: Kind
    turn: int
    pinned: bool = False
    text: str | None = None


class _View(Sequence[int]):
    """A live, read-only view of the log's ids; a slice is a tuple. It grows: it has no hash."""

    __slots__ = ("__ids",)

    def __init__(self, ids: array[int]) -> None:
        self.__ids = ids

    def __len__(self) -> int:
        return len(self.__ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self.__ids[index])
        return self.__ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.__ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        return f"<{len(self)} ids>"


class TokenLog:
    """Token ids that can be added to and never changed."""

    def __init__(self) -> None:
        self.__ids = array("i")
        self.__segments: list[Segment] = []
        self.__view = _View(self.__ids)

    def append(
        self,
        ids: Iterable[int],
        *,
        role: str,
        kind: Kind,
        turn: int,
        pinned: bool = False,
        text: str | None = None,
    ) -> Segment:
        """Add `ids` (maybe none) as one segment and return it.

        Raises `ValueError` or `TypeError`, leaving the log as it was, for an id outside
        [0, 2**31), an unknown role or kind, a turn before the last one, or a sampled span with
        source text.
        """
        if role not in ROLES:
            raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}")
        if kind not in get_args(Kind):
            raise ValueError(f"kind {kind!r} is not one of {', '.join(get_args(Kind))}")
        last = self.__segments[-1].turn if self.__segments else 0
        if turn < last:
            raise ValueError(f"turn {turn} comes before turn {last}, which is already in the log")
        if kind == "sampled" and text is not None:
            raise ValueError("a sampled span has no source text: its text is decoded from its ids")
        new = array("i")
        for value in ids:
            token = operator.index(value)
            if not 0 <= token < _LIMIT:
                raise ValueError(f"token id {token} is outside 0 to {_LIMIT - 1}")
            new.append(token)
        start = len(self.__ids)
        self.__ids.extend(new)
        segment = Segment(start, start + len(new), role, kind, turn, pinned, text)
        self.__segments.append(segment)
        return segment

    @property
    def ids(self) -> Sequence[int]:
        """All ids, as a live read-only view: no copy is made, and a slice of it is a tuple."""
        return self.__view

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self.__segments)

    def __len__(self) -> int:
        return len(self.__ids)

    def __repr__(self) -> str:
        return f"TokenLog({len(self)} ids, {len(self.__segments)} segments)"

    def head(self, n: int) -> TokenLog:
        """A log of the segments that end at or before id `n`."""
        log = TokenLog()
        for segment in self.__segments:
            if segment.end > n:
                break
            log.__ids.extend(self.__ids[segment.start : segment.end])
            log.__segments.append(segment)
        return log

    def pinned_spans(self) -> list[tuple[int, int]]:
        """`[start, end)` of what is pinned, in order, neighbours joined."""
        spans: list[tuple[int, int]] = []
        for segment in self.__segments:
            if not segment.pinned or segment.start == segment.end:
                continue
            if spans and spans[-1][1] == segment.start:
                spans[-1] = (spans[-1][0], segment.end)
            else:
                spans.append((segment.start, segment.end))
        return spans

    def digest(self, n: int | None = None) -> str:
        """sha256 (hex) of the first `n` ids as 4-byte little-endian integers; of all by default.

        Equal digests at different times show that nothing before `n` has changed.
        """
        count = len(self.__ids) if n is None else n
        if not 0 <= count <= len(self.__ids):
            raise ValueError(f"cannot digest {count} ids: the log holds {len(self.__ids)}")
        ids = self.__ids[:count]
        if sys.byteorder == "big":
            ids.byteswap()
        return hashlib.sha256(ids.tobytes()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Everything in the log, as JSON types. `from_dict` gives it back."""
        return {
            "format": _FORMAT,
            "ids": list(self.__ids),
            "digest": self.digest(),
            "segments": [
                {
                    "start": segment.start,
                    "end": segment.end,
                    "role": segment.role,
                    "kind": segment.kind,
                    "turn": segment.turn,
                    "pinned": segment.pinned,
                    "text": segment.text,
                }
                for segment in self.__segments
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TokenLog:
        """The log that `to_dict` wrote; `ValueError` if the ids or the segments do not fit."""
        if data.get("format") != _FORMAT:
            raise ValueError(f"token log format {data.get('format')!r} is not {_FORMAT}")
        log, ids = cls(), data["ids"]
        for entry in data["segments"]:
            start, end = entry["start"], entry["end"]
            if start != len(log) or not start <= end <= len(ids):
                raise ValueError(f"segment [{start}, {end}) does not follow id {len(log)}")
            log.append(
                ids[start:end],
                role=entry["role"],
                kind=cast(Kind, entry["kind"]),
                turn=entry["turn"],
                pinned=entry["pinned"],
                text=entry["text"],
            )
        if len(log) != len(ids):
            raise ValueError(f"{len(ids) - len(log)} ids at the end belong to no segment")
        if log.digest() != data["digest"]:
            raise ValueError("the ids do not have the digest that was written with them")
        return log
