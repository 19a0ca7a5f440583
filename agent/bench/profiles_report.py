"""What `agent bench profile` keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.bench.origin import at_end, markdown, origin_lines, save_all
from agent.bench.profiles import Profile, profile_rows, profile_words


def write(
    path: Path, found: Sequence[Profile], origin: dict[str, Any], model: str, top: int
) -> None:
    """The JSON file, and beside it the same as CSV and Markdown."""
    origin = at_end(origin)
    profiles = [profile.data(top) for profile in found]
    ops = [
        {"what": profile.what, "who": profile.who, "seen": profile.seen, **op}
        for profile, plain in zip(found, profiles, strict=True)
        for op in plain["ops"]
    ]
    lines = ["# Where the time of a step goes", *origin_lines(origin), f"{model}."]
    for profile in found:
        lines += [profile_words(profile), markdown(*profile_rows(profile, top))]
    save_all(path, {"origin": origin, "model": model, "profiles": profiles}, ops, lines)
