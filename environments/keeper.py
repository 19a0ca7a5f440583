"""Process 1 of a container whose image has no Python: a shell that keeps and ends processes.

It does with a shell's own words what the resident program does: reads requests from stdin, answers
on stdout, and leaves when stdin ends, that is when the client is gone; with it the kernel ends all
other processes. Needs `sh` (dash, busybox or bash) and /proc. Requests, each answered by its own
number and the counts of out-of-memory kills, refused forks and living processes:

    mark N   take note of what is running: it belongs to earlier commands
    count N  count
    end N    end all that was started since the mark
    all N    end everything

No request forks before processes were ended, so a fork bomb cannot keep it from working.
"""

from __future__ import annotations

# Reads the program from stdin: as an argument it would fill every listing of processes.
BOOT = """text=
while IFS= read -r line; do
  [ "$line" = '# end' ] && break
  text="$text$line
"
done
eval "$text\""""

KEEPER = r"""
trap '' HUP INT QUIT TERM USR1 USR2 ALRM PIPE
value=0; groups=/sys/fs/cgroup
counter() {
  name=$1; value=0; shift
  for file; do
    [ -r "$file" ] || continue
    while read -r key number rest; do
      [ "$key" = "$name" ] && { value=$number; return; }
    done < "$file"
  done
}
# now: " pid:parent:start" of every process that lives, but this one and the spare
list() {
  now=; living=0
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    [ "$pid" = 1 ] || [ "$pid" = "$spare" ] && continue
    text=
    # names of programs may hold line ends
    { while read -r part; do text="$text $part"; done < "$folder/stat"; } 2>/dev/null
    set -- ${text##*) }
    case ${1:-Z} in Z|X) continue ;; esac
    now="$now $pid:$2:${20}"; living=$((living + 1))
  done
  now="$now "
}
# Orphans become children of this shell, and a shell waits only while it waits for a child of its
# own: the spare, whose end frees the place for another one.
reap() {
  command eval '[ -z "$spare" ] || kill -0 "$spare" || { wait "$spare"; spare=; }' 2>/dev/null
  command eval '( : )' 2>/dev/null
}
rest_now() {
  [ -n "$spare" ] && kill -0 "$spare" 2>/dev/null && return
  command eval 'sleep 2000000000 </dev/null >/dev/null 2>&1 & spare=$!' 2>/dev/null
}
end_all() {
  tries=0
  while [ $tries -lt 500 ] && kill -9 -1 2>/dev/null; do
    [ -n "$spare" ] && { wait "$spare" 2>/dev/null; spare=; }
    reap; tries=$((tries + 1))
    list; [ $living = 0 ] && break
  done
}
# A process belongs to an earlier command if one of the mark is among its ancestors.
end_since() {
  tries=0
  while [ $tries -lt 30 ] && [ "$before" != " " ]; do
    list; doomed=
    for entry in $now; do
      at=$entry; hops=0
      while [ $hops -lt 1000 ]; do
        pid=${at%%:*}; at=${at#*:}; parent=${at%%:*}; start=${at#*:}
        case $before in *" $pid:$start "*) break ;; esac
        others=${now#*" $parent:"}
        [ "$others" = "$now" ] && { doomed="$doomed ${entry%%:*}"; break; }
        at=$parent:${others%%" "*}; hops=$((hops + 1))
      done
    done
    [ -z "$doomed" ] && return
    kill -9 $doomed 2>/dev/null
    reap; tries=$((tries + 1))
  done
  end_all
}
mark() {
  list; before=" "
  for entry in $now; do before="$before${entry%%:*}:${entry##*:} "; done
}
answer() {
  reap; rest_now; list
  counter oom_kill $groups/memory/memory.oom_control $groups/memory.events; ooms=$value
  counter max $groups/pids/pids.events $groups/pids.events
  echo "$1 $ooms $value $living"
}
spare=; before=" "; now=" "
rest_now
echo ready
while read -r word number rest; do
  case $word in
    mark) mark ;;
    count) ;;
    end) end_since ;;
    all) end_all ;;
    *) continue ;;
  esac
  answer "$number"
done
# end
"""
