"""The tools a model can call. A tool set (YAML) chooses among them and describes them."""

from collections.abc import Mapping
from types import MappingProxyType

from agent.tools.base import Observation, Tool, ToolError
from agent.tools.define import define
from agent.tools.edit import edit
from agent.tools.execute_bash import execute_bash
from agent.tools.file_editor import create, file_editor, str_replace
from agent.tools.run import run, test
from agent.tools.search import search
from agent.tools.search_counts import search_counts
from agent.tools.submit import submit
from agent.tools.view import view
from agent.tools.workspace import Workspace

TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        "create": create,
        "define": define,
        "edit": edit,
        "execute_bash": execute_bash,
        "file_editor": file_editor,
        "run": run,
        "search": search,
        "search_counts": search_counts,
        "str_replace": str_replace,
        "submit": submit,
        "test": test,
        "view": view,
    }
)

# Tools whose change is checked by the project's tests, and those that run commands.
EDITING = frozenset({"create", "define", "edit", "file_editor", "str_replace"})
RUNNING = frozenset({"execute_bash", "run", "test"})

__all__ = ["EDITING", "RUNNING", "TOOLS", "Observation", "Tool", "ToolError", "Workspace"]
