#!/usr/bin/env bash
# Kills `tidegate` before each system call by which `limit add`, `set` and `del`, `apply` and `detach` change
# something, for every scheme, and then 1000 times at random moments; looks each time whether the next command
# finds the host in order. Takes an hour or more. `make test` runs a sample of a minute.
#
#   scripts/test-kill.sh          all of it
#   scripts/test-kill.sh sample   the sample
#   scripts/test-kill.sh moments   the 1000 random moments alone
#   scripts/test-kill.sh NAME     every place of the cases whose name holds NAME, as "htb add"
#
# TIDEGATE_KILL_SEED repeats the random part of a run that printed it.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-all}
case $what in
sample) ;;
moments) export TIDEGATE_KILL=moments ;;
all) export TIDEGATE_KILL=all ;;
*) export TIDEGATE_KILL=all TIDEGATE_KILL_CASE=$what ;;
esac

tests=(cargo test --locked --package tidegate --test e2e)
if [ "$(id -u)" != 0 ]; then
	# Built as the user; only the test itself is root.
	host=$(rustc -vV | sed -n 's/^host: //p')
	tests+=(--config "target.$host.runner = ['$PWD/scripts/as-root.sh']")
fi
"${tests[@]}" -- kill:: members::root_a_killed --nocapture --test-threads=1
