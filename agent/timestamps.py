"""Moments as reports and results have them."""

from __future__ import annotations

import time


def utc(seconds: float | None = None) -> str:
    """Seconds since the epoch, or now, as 2026-01-31T23:59:59Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
