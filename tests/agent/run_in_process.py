"""A scripted run in a process of its own, for tests that end it by a signal.

    python run_in_process.py KIND FOLDER

An edit, a second edit, then a command that lasts until the run is ended.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripted import ScriptedProtocol, byte_chat, xml

from agent.loop import Loop
from agent.prompts import make_dialect
from agent.settings import load_settings
from agent.trajectory import Trajectory
from environments import SandboxSpec, open_sandbox
from tasks.instance import Instance


def main(kind: str, folder: Path) -> None:
    settings = load_settings("compact", ["limits.total_tokens=100000", "dialect=xml_calls"])
    instance = Instance("x", "f() is wrong")
    chat = byte_chat()
    marker = f"sleep 3600.{folder.name[-6:]}"
    script = [
        xml("edit", path="a.py", start="2", text="    return 2"),
        xml("edit", path="new.py", text="x = 1"),
        xml("run", command=marker),
    ]
    tree = folder / "tree"
    tree.mkdir(parents=True)
    (tree / "a.py").write_text("def f():\n    return 1\n")
    with Trajectory(folder / "run") as trajectory, open_sandbox(SandboxSpec(), kind) as sandbox:
        sandbox.put_tree(tree)
        sandbox.mark_base()
        dialect = make_dialect(settings, instance)
        loop = Loop(
            instance, sandbox, chat, ScriptedProtocol(chat, script), dialect, settings, trajectory
        )
        print(loop.run().reason.value, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
