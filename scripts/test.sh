#!/usr/bin/env bash
# Runs all tests: those that need no privileges as the user who calls, then those named `root_*` as root, then
# a few of these on Debian's kernels in virtual machines.
#
# A test that cannot run prints `SKIP its_name: why`; they are listed at the end. Passing tests print a line a
# crate, and how far it is while it takes long; the whole output is in target/test.log. The last line is the sum.
#
# With CI=true only the tests in scripts/may-skip may skip: any other SKIP is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$PWD/target/test.log
# A phase that takes longer than this hangs.
limit=30m
# Later than this after their start, the virtual machines are left out.
vm_within_s=2400
mkdir -p target
: >"$log"

phase() {
	echo "$1:"
	shift
	scripts/bounded.sh "$limit" "$@" -- "${filter[@]}" --show-output 2>&1 </dev/null |
		tee -a "$log" | scripts/test-report.sh brief
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
		echo "SKIP privileged-tests: neither root nor a sudo that works" | tee -a "$log"
	fi
fi
root_code=0
phase "Privileged tests" "${tests[@]}" || root_code=$?
[ "$root_code" = 0 ] || code=$root_code

if [ "$code" = 124 ]; then
	echo "The tests did not end within $limit."
fi

# The tests that tell most, on Debian's kernels, if there is time left of what a change may take.
logs=("$log")
if ((SECONDS < vm_within_s)); then
	scripts/vm.sh quick || code=1
	logs+=("$PWD/target/vm/quick.log")
else
	echo "SKIP test-vm-late: the tests took ${SECONDS} s; \`make test-vm\` runs them on Debian's kernels" | tee -a "$log"
fi

echo "All tests took $SECONDS s."
scripts/test-report.sh sum "$code" "${logs[@]}"
