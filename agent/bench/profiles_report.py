"""What `agent bench profile` keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.bench.origin import csv_text, load, markdown, origin_lines, save
from agent.bench.profiles import Profile, profile_rows, profile_words


def write(
    path: Path, found: Sequence[Profile], origin: dict[str, Any], model: str, top: int
) -> None:
    """The JSON file, and beside it the same as CSV and Markdown."""
    origin = {**origin, "load_at_end": load()}
    profiles = [profile.data(top) for profile in found]
    save(path, json.dumps({"origin": origin, "model": model, "profiles": profiles}, indent=1))
    ops = [
        {"what": profile.what, "who": profile.who, "seen": profile.seen, **op}
        for profile, plain in zip(found, profiles, strict=True)
        for op in plain["ops"]
    ]
    save(path.with_suffix(".csv"), csv_text(ops))
    lines = ["# Where the time of a step goes", *origin_lines(origin), f"{model}."]
    for profile in found:
        lines += [profile_words(profile), markdown(*profile_rows(profile, top))]
    save(path.with_suffix(".md"), "\n\n".join(lines))
