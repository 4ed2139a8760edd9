#!/usr/bin/env bash
# Runs a command as root, in this directory, with this PATH and the variables TIDEGATE_*: as it is, or through sudo.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
	exec "$@"
elif command -v sudo >/dev/null; then
	mapfile -t ours < <(env | grep '^TIDEGATE_')
	exec sudo env "PATH=$PATH:/usr/sbin:/sbin" "${ours[@]}" "$@"
fi
echo "needs root, and there is no sudo: run this as root: $*" >&2
exit 1
