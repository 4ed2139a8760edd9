#!/usr/bin/env bash
# All tests: those that need no privileges as the user who calls, then those named `root_*` as root.
# A test that cannot run prints `SKIP its_name: why`; they are listed at the end. Passing tests print
# a line a crate; the whole output is in target/test.log. The last line is the sum.
#
# Privileged tests send traffic and run two at a time. A few that failed so are run once more, alone: what
# fails then is broken; what passes is listed as AGAIN, with its first failure above.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$PWD/target/test.log
# A phase that takes longer than this hangs.
limit=20m
# More failures than this are no noise of the machine.
again_max=5
# Later than this after their start, the virtual machines are left out.
vm_within_s=2400
mkdir -p target
: >"$log"

phase() {
	echo "$1:"
	shift
	timeout --foreground --kill-after=10 "$limit" "$@" -- "${filter[@]}" --show-output 2>&1 </dev/null |
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
		echo "No root and no sudo: the privileged tests are skipped."
	fi
fi
root_code=0
phase "Privileged tests" "${tests[@]}" || root_code=$?

mapfile -t failed < <(scripts/test-report.sh failed "$log" | grep root_ || true)
if ((root_code != 0 && root_code != 124 && ${#failed[@]} > 0 && ${#failed[@]} <= again_max)); then
	filter=(--exact --test-threads=1 "${failed[@]}")
	first=$log
	log=$PWD/target/again.log
	: >"$log"
	if phase "Again, alone" "${tests[@]}"; then
		root_code=0
		printf 'AGAIN %s: failed beside another test, passed alone\n' "${failed[@]}" >>"$first"
	fi
	log=$first
fi
[ "$root_code" = 0 ] || code=$root_code

if [ "$code" = 124 ]; then
	echo "The tests did not end within $limit."
fi

# The tests that tell most, on Debian's kernels, if there is time left of what a change may take.
if ((SECONDS < vm_within_s)); then
	scripts/vm.sh quick || code=1
	logs=("$log" "$PWD"/target/vm/quick.log)
else
	echo "SKIP test-vm: the tests took ${SECONDS} s; \`make test-vm\` runs them on Debian's kernels" | tee -a "$log"
	logs=("$log")
fi

scripts/test-report.sh sum "$code" "${logs[@]}"
exit "$code"
