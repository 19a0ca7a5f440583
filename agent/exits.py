"""Why a run ends, and the exception that ends it."""

from __future__ import annotations

from enum import StrEnum


class ExitReason(StrEnum):
    """Why a run ended."""

    SUBMITTED = "submitted"
    STEP_LIMIT = "step_limit"
    TOKEN_LIMIT = "token_limit"
    WALL_TIME = "wall_time"
    STUCK = "stuck"
    FORMAT_ERRORS = "format_errors"
    SANDBOX_LOST = "sandbox_lost"
    INTERRUPTED = "interrupted"
    ERROR = "error"


# The run itself failed, whatever the model did.
FAILURES = frozenset({ExitReason.ERROR, ExitReason.SANDBOX_LOST})
# What a later process can do better; with any other reason a run is over.
UNFINISHED = FAILURES | {ExitReason.INTERRUPTED}


class Exit(Exception):
    """Ends the loop. The text says what the limit was, or what happened."""

    def __init__(self, reason: ExitReason, detail: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
