"""Whether Python text parses, and what is wrong where it does not. Nothing is executed."""

from __future__ import annotations

import ast
import threading
import warnings
from dataclasses import dataclass

# Filters of warnings are the process's: sessions in threads change them one after the other.
_quiet = threading.Lock()


@dataclass(frozen=True, slots=True)
class SyntaxFault:
    """Where a file does not parse, and why."""

    line: int
    message: str


def syntax_fault(data: bytes) -> SyntaxFault | None:
    """The first fault of a Python file, or None when it parses."""
    try:
        with _quiet, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "<edit>", "exec", flags=ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as error:
        return SyntaxFault(error.lineno or 1, f"{type(error).__name__}: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return SyntaxFault(1, f"{type(error).__name__}: {error}")
    return None


def parse(data: bytes) -> ast.Module | None:
    """The syntax tree of a Python file, or None when it does not parse."""
    try:
        with _quiet, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
