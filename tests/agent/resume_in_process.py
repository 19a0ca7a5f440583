"""Runs that are killed: a server that has a model in memory and makes each attempt in a child.

    python resume_in_process.py MODEL KIND REPO

Lines on stdin: `start FOLDER` or `resume FOLDER`; answered by `pid N` when the child begins and by
`exit CODE` when it ended. The model's words are its own, greedy; whatever it says, the call is the
same command, which goes on from the files that it left behind.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

from agent import attempt
from agent.attempt import cache_config, make_attempt
from agent.chat import Chat
from agent.dialects.base import Call, ParsedTurn
from agent.keeper import KeepOptions
from agent.models import load
from agent.run_options import RunOptions
from tasks.repo import RepoTask

STEPS = 12
STEP = """
n=$(($(cat .count 2>/dev/null || echo 0) + 1))
echo $n > .count
mkdir -p out
cat "out/$((n - 1)).txt" /tmp/seen notes.ignored 2>/dev/null | cksum > "out/$n.txt"
echo $n >> /tmp/seen
echo $n >> notes.ignored
rm -f "out/$((n - 3)).txt"
if [ $n = 5 ]; then rm -r folder; echo now a file > folder; fi
cat "out/$n.txt"
sleep 0.1
"""


class OneCommand:
    """A dialect that takes every reply for the same call."""

    name = "one_command"
    format_help = ""

    def stop(self, text: str) -> bool:
        return False

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text, call=Call("run", {"command": "sh step.sh"}))

    def render(self, call: Call) -> str:
        return ""


def options(model: str, repo: Path) -> RunOptions:
    overrides = [
        "system=You work step by step.",
        "user={{ problem }}",
        "code=",
        "pin_user=false",
        "context.code_chars=0",
        "limits.total_tokens=100000",
        "limits.new_tokens=16",
        f"limits.steps={STEPS}",
    ]
    return RunOptions(
        repo=str(repo),
        issue="Count on.",
        model=model,
        dtype="float32",
        tools="compact",
        budget=192,
        chunk=32,
        temperature=0.0,
        overrides=tuple(overrides),
    )


def main(model: str, kind: str, repo: Path) -> None:
    torch.set_num_threads(1)
    loaded = load(model, dtype="float32", device="cpu")
    chat = Chat(loaded.tokenizer, loaded.name)
    chosen = options(model, repo)
    config = cache_config(chosen, 0)
    attempt.make_dialect = lambda *_, **__: OneCommand()
    print("ready", flush=True)
    for line in sys.stdin:
        what, folder = line.split()
        child = os.fork()
        if child:
            print(f"pid {child}", flush=True)
            status = os.waitpid(child, 0)[1]
            print(f"exit {os.waitstatus_to_exitcode(status)}", flush=True)
            continue
        try:
            with RepoTask(repo, chosen.issue or "") as task:
                done = make_attempt(
                    task,
                    loaded,
                    chat,
                    config,
                    chosen,
                    Path(folder),
                    seed=0,
                    sandbox=kind,
                    keep=KeepOptions(turns=4, seconds=1000.0),
                    resume=what == "resume",
                )
            print(f"{done.outcome.reason.value} {done.outcome.detail}", file=sys.stderr)
            code = 0 if done.outcome.reason.value == "step_limit" else 3
        except BaseException:
            traceback.print_exc()
            code = 4
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
