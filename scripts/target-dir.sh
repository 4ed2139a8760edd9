#!/usr/bin/env bash
# Prints the directory in which cargo puts what it builds (CARGO_TARGET_DIR, cargo's settings, or target).
set -euo pipefail
cd "$(dirname "$0")/.."
"${CARGO:-cargo}" metadata --no-deps --offline --format-version 1 |
	sed 's/.*"target_directory":"\([^"]*\)".*/\1/'
