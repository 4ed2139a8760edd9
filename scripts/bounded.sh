#!/usr/bin/env bash
# Runs a command, and ends it and all that it started when it takes too long or when this script is ended.
#
#   scripts/bounded.sh LIMIT COMMAND...
#
# LIMIT is as `timeout` reads it, and 124 is what this ends with then. `timeout` alone does half of it: in the
# foreground it ends its own child but not that child's children, and otherwise Ctrl-C does not reach it.
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null' INT TERM HUP
timeout --kill-after=10 "$@" </dev/null &
bounded=$!
code=0
wait "$bounded" || code=$?
# A signal ends the wait before the command has ended.
while kill -0 "$bounded" 2>/dev/null; do
	wait "$bounded" || code=$?
done
exit "$code"
