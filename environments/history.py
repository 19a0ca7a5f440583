"""The past of a repository in a workspace, with its future taken away.

A copy of a repository may hold the fix of the very issue that is worked on: on a later commit, a
tag, a remote branch, in the reflog, in a stash, or as an object that nothing names. `scrub_history`
leaves what HEAD reaches and what the index holds, and nothing else that git or a reader of its
files could find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from environments.base import SandboxError

if TYPE_CHECKING:
    from environments.base import Sandbox

SECONDS = 900.0

# Once for each git folder. Every file below it that can name or hold a later object is removed or
# written anew; the working tree and the index stay as they are. The end is a check, not a hope.
SCRIPT = r"""
set -eu
fail() { echo "$1: $2" >&2; exit 1; }
scrub() {
  at=$1
  g() {
    git --git-dir="$at" -c core.hooksPath=/dev/null -c core.fsmonitor=false -c gc.auto=0 \
      -c core.bare=true -c core.logAllRefUpdates=false "$@"
  }
  head=$(g rev-parse -q --verify 'HEAD^{commit}' || true)
  own=$(g symbolic-ref -q HEAD || true)
  [ -e "$at/commondir" ] && fail "$at" "is a worktree of another repository"
  rm -rf "$at/logs" "$at/worktrees" "$at/rebase-merge" "$at/rebase-apply" "$at/refs/bisect" \
    "$at/refs/replace" "$at/branches" "$at/remotes" "$at/sequencer" "$at/lost-found"
  for f in "$at"/*_HEAD "$at/info/grafts" "$at/info/refs" "$at/gc.pid" "$at/AUTO_MERGE" \
    "$at"/objects/info/commit-graph* "$at/COMMIT_EDITMSG" "$at/MERGE_MSG" "$at/SQUASH_MSG" \
    "$at"/BISECT_* "$at"/objects/pack/*.keep "$at"/objects/pack/*.promisor; do
    rm -rf "$f"
  done
  g for-each-ref --format='%(refname)' | while IFS= read -r ref; do
    [ "$ref" = "$own" ] || g update-ref --no-deref -d "$ref"
  done
  for section in remote branch; do
    g config --local --name-only --get-regexp "^$section\\." 2>/dev/null | sed 's/\.[^.]*$//' |
      sort -u | while IFS= read -r name; do
        g config --local --remove-section "$name" || true
      done
  done
  g config --local --unset-all extensions.partialClone || true
  g repack -a -d -q
  rm -f "$at/objects/info/alternates"
  g prune --expire=now
  [ -z "$(g stash list 2>/dev/null)" ] || fail "$at" "a stash is left"
  left=$(g for-each-ref --format='%(refname)' | grep -vxF -- "$own" || true)
  [ -z "$left" ] || fail "$at" "references are left: $left"
  g cat-file --batch-all-objects --batch-check='%(objecttype) %(objectname)' |
    sed -n 's/^commit //p; s/^tag /tag /p' | sort > "$work/all"
  if [ -n "$head" ]; then g rev-list "$head" | sort > "$work/base"; else : > "$work/base"; fi
  cmp -s "$work/all" "$work/base" || fail "$at" "commits beyond HEAD are left"
}
work=$2
restore() {
  ls -r "$work/closed" | while IFS= read -r n; do
    path=$(tail -n +2 "$work/closed/$n"; printf x)
    chmod "$(head -n 1 "$work/closed/$n")" "${path%x}"
  done
  rm -rf "$work"
}
mkdir -m 700 "$work" "$work/closed"
trap restore EXIT
cd -- "$1"
# folders closed to their owner are opened for as long as this takes
find . -type d ! -perm -0500 -exec sh -c '
  f=$2/closed/$(printf %06d $(($(ls "$2/closed" | wc -l))))
  { stat -c %a "$1"; printf %s "$1"; } > "$f"; chmod u+rwx "$1"' sh {} "$work" \;
if ! command -v git >/dev/null 2>&1; then
  # nobody can use a history without git, but its objects could still be read
  find . -name .git -prune -exec rm -rf {} +
  exit 0
fi
find . -name .git -type d -prune -print > "$work/found"
find . -path '*/.git/modules/*' -name HEAD -type f ! -path '*/logs/*' ! -path '*/refs/*' \
  -exec dirname {} \; >> "$work/found"
while IFS= read -r place; do
  if [ -f "$place/HEAD" ] && [ -d "$place/objects" ]; then scrub "$place" </dev/null; fi
done < "$work/found"
find . -name .git ! -type d -print > "$work/links"
while IFS= read -r place; do
  # a repository elsewhere: below this folder it is done already, beyond it nothing is promised
  inside=$(cd -- "$(dirname "$place")" && git rev-parse --absolute-git-dir 2>/dev/null || true)
  case $inside in "$PWD"/*|"") ;; *) rm -rf "$place" ;; esac
done < "$work/links"
"""
ENV = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "LC_ALL": "C",
}


def scrub_history(sandbox: Sandbox, scratch: str) -> None:
    """Remove what lies beyond HEAD from every repository in the workspace.

    Gone afterwards: remotes, tags, other branches, notes, stashes, reflogs, worktrees, and every
    packed or loose object that neither HEAD nor the index reaches. A `.git` that names a repository
    outside the workspace is removed; so is a `.git` folder where there is no git. `scratch` is a
    path inside that does not exist. Raises SandboxError when anything is left.
    """
    argv = ["sh", "-c", SCRIPT, "sh", sandbox.workdir, scratch]
    done = sandbox.run(argv, timeout=SECONDS, cwd="/", env=ENV)
    if done.exit_code != 0:
        reason = f"took more than {SECONDS:.0f} s" if done.timed_out else done.text.strip()[-1000:]
        raise SandboxError(f"the history in {sandbox.workdir} could not be cut at HEAD: {reason}")
