#!/usr/bin/env bash
# All tests: those that need no privileges as the user who calls, then those named `root_*` as root.
# A test that cannot run prints `SKIP its_name: why`; they are listed at the end. Passing tests print
# a line a crate; the whole output is in target/test.log. The last line is the sum.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$PWD/target/test.log
# A phase that takes longer than this hangs.
limit=20m
mkdir -p target
: >"$log"

# One line for each test binary that ran a test, and the output of the tests that failed.
brief() {
	awk '
		/^ +Running / { name = $NF; sub(/.*\//, "", name); sub(/-[0-9a-f]+\)$/, "", name) }
		/^ +Doc-tests / { name = $2 " (docs)" }
		/^failures:$/ { failing = 1 }
		/^test result: / {
			failing = 0
			if ($4 + $6 > 0) printf "  %-28s %4d passed%s\n", name, $4, $6 ? ", " $6 " failed" : ""
		}
		/^(error|warning: unused)/ || failing { print }
		{ fflush() }
	'
}

phase() {
	echo "$1:"
	shift
	timeout --foreground --kill-after=10 "$limit" "$@" -- "${filter[@]}" --show-output 2>&1 </dev/null |
		tee -a "$log" | brief
}

cargo test --workspace --locked --no-run 2>&1 | grep -v '^  Executable '

code=0
filter=(--skip root_)
phase "Tests without privileges" cargo test --workspace --locked --no-fail-fast || code=$?

filter=(root_)
tests=(cargo test --workspace --locked --no-fail-fast --lib --bins --tests)
if [ "$(id -u)" != 0 ]; then
	if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || { [ -t 0 ] && sudo -v; }; }; then
		# Cargo builds and starts them as the user; only the tests themselves are root.
		host=$(rustc -vV | sed -n 's/^host: //p')
		tests+=(--config "target.$host.runner = ['$PWD/scripts/as-root.sh']")
	else
		echo "No root and no sudo: the privileged tests are skipped."
	fi
fi
phase "Privileged tests" "${tests[@]}" || code=$?

if [ "$code" = 124 ]; then
	echo "The tests did not end within $limit."
fi

awk -v code="$code" '
	/SKIP [A-Za-z0-9_:]+: / {
		line = substr($0, index($0, "SKIP "))
		name = $0; sub(/.*SKIP /, "", name); sub(/: .*/, "", name)
		if (!(name in seen)) { seen[name] = 1; skips[++skipped] = line }
	}
	/^test .* \.\.\. ignored/ { skips[++skipped] = "SKIP " $2 ": marked as ignored"; ignored++ }
	/^test result: / { passed += $4; failed += $6 }
	END {
		for (i = 1; i <= skipped; i++) print skips[i]
		# A binary that dies takes its sum along.
		if (code != 0 && failed == 0) failed = 1
		printf "%d passed, %d failed, %d skipped\n", passed - skipped + ignored, failed, skipped
	}
' "$log"
exit "$code"
