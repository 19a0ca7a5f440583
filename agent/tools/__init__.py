"""The tools a model can call. A tool set (YAML) chooses among them and describes them."""

from collections.abc import Mapping
from types import MappingProxyType

from agent.tools.base import Observation, Tool, ToolError
from agent.tools.define import define
from agent.tools.edit import edit
from agent.tools.run import run, test
from agent.tools.search import search
from agent.tools.submit import submit
from agent.tools.view import view
from agent.tools.workspace import Workspace

TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        "define": define,
        "edit": edit,
        "run": run,
        "search": search,
        "submit": submit,
        "test": test,
        "view": view,
    }
)

EDITING = frozenset({"define", "edit"})  # tools whose change is checked by the project's tests

__all__ = ["EDITING", "TOOLS", "Observation", "Tool", "ToolError", "Workspace"]
