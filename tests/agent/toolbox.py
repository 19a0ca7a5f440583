"""Calling a tool as the loop does."""

from __future__ import annotations

from agent.tools import Observation, Tool, Workspace


def call(tool: Tool, workspace: Workspace, **arguments: str) -> Observation:
    """One call; ToolError passes through."""
    return tool(workspace, arguments)
