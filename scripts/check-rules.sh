#!/usr/bin/env bash
# Rules that rustc and clippy do not know: licences and sources of the dependencies,
# lengths of files and lines, and a core that needs no operating system.
# What cannot be checked here says SKIP and why.
set -euo pipefail
cd "$(dirname "$0")/.."

# Not in the distributions; some minutes to build, once. Nobody needs it optimized.
if ! command -v cargo-deny >/dev/null; then
	echo "cargo-deny checks the licences of the dependencies, and is not here: building it"
	timeout 40m cargo install --debug --locked --quiet cargo-deny
fi
timeout 5m cargo deny --log-level error check licenses bans sources

# The advisories need a database from the network; a machine without one must pass.
if timeout 2m cargo deny fetch db >/dev/null 2>&1; then
	timeout 2m cargo deny --log-level error check --disable-fetch advisories
else
	echo "SKIP advisories: the database of RUSTSEC cannot be fetched"
fi

timeout 10m cargo test --quiet --locked --package tidegate-lab --test layout

target=wasm32-unknown-unknown
libdir=$(rustc --print target-libdir --target "$target" 2>/dev/null || true)
if [ -n "$libdir" ] && [ -d "$libdir" ]; then
	timeout 10m cargo build --quiet --locked --package tidegate-core --target "$target"
	echo "tidegate-core builds without an operating system ($target)"
else
	echo "SKIP core without an operating system: \`rustup target add $target\` first"
fi
