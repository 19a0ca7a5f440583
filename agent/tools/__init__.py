"""The tools a model can call. A tool set (YAML) chooses among them and describes them."""

from collections.abc import Mapping
from types import MappingProxyType

from agent.tools.base import Observation, Tool, ToolError
from agent.tools.edit import edit
from agent.tools.replace_function import replace_function
from agent.tools.run import run, test
from agent.tools.search import search
from agent.tools.submit import submit
from agent.tools.view import view
from agent.tools.workspace import Workspace

TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        "edit": edit,
        "replace_function": replace_function,
        "run": run,
        "search": search,
        "submit": submit,
        "test": test,
        "view": view,
    }
)

__all__ = ["TOOLS", "Observation", "Tool", "ToolError", "Workspace"]
