"""A tree saved in one sandbox and restored in another."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments import SandboxSpec, open_sandbox
from environments.base import Sandbox
from environments.treesave import clock, restore_tree, save_tree

# What is there: kind, mode, content or target, and time of change, of all files and folders.
LISTING = r"""
cd / && find workspace tmp home/agent \( -type f -o -type l -o -type d \) ! -path 'tmp' |
LC_ALL=C sort | while IFS= read -r p; do
  if [ -L "$p" ]; then echo "$p -> $(readlink "$p")"
  elif [ -d "$p" ]; then echo "$p $(stat -c '%a' "$p")"
  else echo "$p $(stat -c '%a %Y' "$p") $(cksum < "$p")"; fi
done
"""
CHANGES = r"""
set -e
printf '\0\377 new' > 'new file'
mkdir -p deep/er empty && echo in > deep/er/x && chmod 700 empty
rm old && rm -r gone
rm -r folder && echo 'a file now' > folder
rm file && mkdir file && echo below > file/below
echo changed > kept && touch -d 2001-01-01 kept
chmod 755 script
ln -s new\ file link && ln -s /nowhere broken
mkdir build && echo obj > build/out.o
echo more > ignored.log
mkdir -p .git && echo mine > .git/note
echo aside > /tmp/aside && echo home > ~/.rc
printf x > 'name with
newline'
"""


def files(sandbox: Sandbox) -> list[str]:
    done = sandbox.run(LISTING, output_cap=200_000)
    assert done.exit_code == 0, done.text
    return done.text.splitlines()


def start(sandbox: Sandbox, tmp_path: Path) -> int:
    tree = tmp_path / "tree"
    if not tree.exists():
        for name in ("old", "kept", "file", "same", "script", "gone/a", "gone/b/c", "folder/y"):
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name}\n")
        (tree / ".gitignore").write_text("*.log\n")
    sandbox.put_tree(tree)
    sandbox.mark_base()
    return clock(sandbox)


def test_another_sandbox_has_the_same_files(sandbox_kind: str, tmp_path: Path) -> None:
    with open_sandbox(SandboxSpec(), sandbox_kind) as first:
        since = start(first, tmp_path)
        assert first.run(CHANGES).exit_code == 0
        saved, expected, patch = save_tree(first, since), files(first), first.diff()
    assert patch.data
    with open_sandbox(SandboxSpec(), sandbox_kind) as second:
        start(second, tmp_path)
        before = files(second)
        restore_tree(second, saved)
        assert files(second) == expected != before
        assert second.diff().data == patch.data
        # and once more, from a state that was restored
        again = clock(second)
        assert second.run("rm -r deep && echo 2 > same").exit_code == 0
        saved, expected = save_tree(second, since), files(second)
        assert again >= since
    with open_sandbox(SandboxSpec(), sandbox_kind) as third:
        start(third, tmp_path)
        restore_tree(third, saved)
        assert files(third) == expected


def test_a_whole_tree(sandbox_kind: str, tmp_path: Path) -> None:
    with open_sandbox(SandboxSpec(), sandbox_kind) as first:
        start(first, tmp_path)
        saved, expected = save_tree(first, 0, scratch=()), files(first)
    with open_sandbox(SandboxSpec(), sandbox_kind) as second:
        restore_tree(second, saved, scratch=())
        assert files(second) == expected


def test_nothing_changed(sandbox_kind: str, tmp_path: Path) -> None:
    with open_sandbox(SandboxSpec(), sandbox_kind) as sandbox:
        start(sandbox, tmp_path)
        expected = files(sandbox)
        restore_tree(sandbox, save_tree(sandbox, clock(sandbox) + 10))
        assert files(sandbox) == expected


def test_what_is_no_saved_tree_is_refused(tmp_path: Path) -> None:
    with open_sandbox(SandboxSpec(), "bubblewrap") as sandbox:
        start(sandbox, tmp_path)
        with pytest.raises(ValueError, match="no saved tree"):
            restore_tree(sandbox, b"PK but no zip")
