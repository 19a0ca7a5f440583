"""Rows of SWE-bench files: the classic fields, and those that version 5 of the harness added.

Classic rows (Lite, Verified, full) say which commit and which tests; the image follows from the id.
Rows of version 5 bring their own image, evaluation script and name of a log parser as well. Lists
of tests come as lists or as JSON text, by the file.
"""

from __future__ import annotations

import json
from datetime import date
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

# an id becomes the name of a folder and part of the name of an image
ID_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$"


def _tests(name: str) -> Any:
    return Field(validation_alias=AliasChoices(name, name.lower()), serialization_alias=name)


class SweRow(BaseModel):
    """One instance. Unknown fields are ignored; fields that are null take their default."""

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    instance_id: str = Field(pattern=ID_PATTERN)
    repo: str = Field(min_length=1)  # owner/name
    base_commit: str = Field("", pattern=r"^[A-Za-z0-9._/-]*$")
    version: str = ""  # of the project, as the harness's tables name it
    problem_statement: str = Field(min_length=1)
    hints_text: str = ""  # comments made before the fix; the agent does not see them
    patch: str = ""  # the reference
    test_patch: str = ""
    fail_to_pass: tuple[str, ...] = _tests("FAIL_TO_PASS")
    pass_to_pass: tuple[str, ...] = _tests("PASS_TO_PASS")
    environment_setup_commit: str = ""
    created_at: str = ""
    image: str | None = None
    eval_script: str | None = None
    log_parser: str | None = None
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"

    @field_validator("fail_to_pass", "pass_to_pass", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if value is None:
            return ()
        if not isinstance(value, str):
            return value
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise ValueError(f"neither a list nor JSON text of a list: {error}") from error
        if not isinstance(value, list):
            raise ValueError("the JSON text is not that of a list")
        return value

    @field_validator(
        "base_commit",
        "version",
        "hints_text",
        "patch",
        "test_patch",
        "environment_setup_commit",
        "created_at",
        "eval_type",
        mode="before",
    )
    @classmethod
    def _given(cls, value: Any, info: Any) -> Any:
        if value is None:
            return cls.model_fields[info.field_name].default
        return value.isoformat() if isinstance(value, date) else value  # parquet has dates

    @field_validator("image", "eval_script", "log_parser", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return value or None  # columns of a mixed table are empty where a row has none

    @property
    def default_image(self) -> str:
        """The official image of an instance, for rows that name none."""
        name = self.instance_id.replace("__", "_1776_").lower()
        return f"swebench/sweb.eval.x86_64.{name}:latest"

    def record(self) -> dict[str, Any]:
        """The row as the official files have it (tests as lists), without fields not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
