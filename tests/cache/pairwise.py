"""All pairs of option values in few cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(case: Mapping[str, Any], names: Sequence[str]) -> set[Pair]:
    """The pairs of values in a case, complete or not, in the order of `names`."""
    values = [(name, case[name]) for name in names if name in case]
    return set(itertools.combinations(values, 2))


def wanted_pairs(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda _: True
) -> list[Pair]:
    """All pairs of values of two options that may go together."""
    return [
        ((one, x), (other, y))
        for one, other in itertools.combinations(options, 2)
        for x in options[one]
        for y in options[other]
        if allowed({one: x, other: y})
    ]


def all_pairs(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda _: True
) -> list[Case]:
    """Cases in which every allowed pair occurs, greedily few; the same ones on every call.

    allowed: whether the values of a case, complete or not, may go together. Where an option is left
    without an allowed value a ValueError says so.
    """
    names = list(options)
    missing = dict.fromkeys(wanted_pairs(options, allowed))
    cases: list[Case] = []
    while missing:
        case: Case = dict(next(iter(missing)))  # the first pair that no case has yet
        for name in names:
            if name in case:
                continue
            tries = [{**case, name: value} for value in options[name]]
            tries = [each for each in tries if allowed(each)]
            if not tries:
                raise ValueError(f"no value of {name} goes with {case}")
            case = max(tries, key=lambda each: sum(pair in missing for pair in pairs(each, names)))
        for pair in pairs(case, names):
            missing.pop(pair, None)
        cases.append({name: case[name] for name in names})
    return cases
