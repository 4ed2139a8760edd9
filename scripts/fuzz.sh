#!/usr/bin/env bash
# Runs every fuzz target for a bounded time each, one after the other. Ends with 1 at the first finding, whose
# input is then in fuzz/artifacts and is printed with the command that runs it again.
#
#   scripts/fuzz.sh SECONDS [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift

if ! cargo +nightly --version >/dev/null 2>&1; then
	echo "Fuzzing needs a nightly compiler: \`rustup toolchain install nightly\` first." >&2
	exit 1
fi
# Not in the distributions; a minute to build, once.
if ! command -v cargo-fuzz >/dev/null; then
	echo "cargo-fuzz drives the fuzzer, and is not here: building it"
	timeout 20m cargo install --locked --quiet cargo-fuzz
fi

targets=("$@")
if [ ${#targets[@]} = 0 ]; then
	mapfile -t targets < <(cargo +nightly fuzz list)
fi
for target in "${targets[@]}"; do
	echo "$target, $seconds s:"
	# Words of a text format, which no fuzzer finds by itself.
	words=()
	[ ! -f "fuzz/dictionaries/$target.dict" ] || words=("-dict=fuzz/dictionaries/$target.dict")
	cargo +nightly fuzz build --sanitizer none "$target"
	timeout --kill-after=10 "$((seconds + 60))" cargo +nightly fuzz run --sanitizer none "$target" -- \
		-max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 "${words[@]}"
done
