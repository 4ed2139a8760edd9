# What checks inside a machine with systemd have in common. Read by the scripts that hold them.
#
# The kernel's command line says which run: tidegate.checks=WORD[:NAME,NAME...]. A check NAME is the function
# check_NAME. The output has the form of Rust's test harness, which scripts/test-report.sh reads. A script gives the
# names of all its checks in `checks`, the first part of their names in `prefix`, and a function `tell`, which prints
# what one needs to know of a failure.

share=/run/checks
# A condition is waited for so long, and looked at so often.
deadline_s=120 look_s=0.2
emulated=
if grep -q -w tidegate.emulated /proc/cmdline; then
	emulated=yes deadline_s=600 look_s=1
fi

word=$(sed -n 's/.*tidegate\.checks=\([^ ]*\).*/\1/p' /proc/cmdline)
words=()
if [[ $word = *:* ]]; then
	IFS=, read -r -a words <<<"${word#*:}"
	word=${word%%:*}
fi

# Waits for a command to succeed.
until_true() {
	local end=$((SECONDS + deadline_s))
	until "$@"; do
		if ((SECONDS > end)); then
			echo "waited in vain for: $*"
			return 1
		fi
		sleep "$look_s"
	done
}

# A command succeeds all the time.
stays() {
	local end=$((SECONDS + watch_s))
	while ((SECONDS < end)); do
		"$@" || {
			echo "did not last: $*"
			return 1
		}
		sleep "$look_s"
	done
}

run() {
	local name code=0 passed=0 failed=()
	exec >"$share/log" 2>&1
	((${#words[@]} == 0)) || checks=("${words[@]}")
	echo "running ${#checks[@]} tests"
	for name in "${checks[@]}"; do
		if ("check_$name") >"$share/$name.log" 2>&1 </dev/null; then
			echo "test ${prefix}_$name ... ok"
			passed=$((passed + 1))
		else
			tell >>"$share/$name.log" 2>&1
			echo "test ${prefix}_$name ... FAILED"
			failed+=("$name")
		fi
	done
	if ((${#failed[@]} > 0)); then
		code=1
		printf '\nfailures:\n'
		for name in "${failed[@]}"; do
			printf '\n---- %s_%s stdout ----\n' "$prefix" "$name"
			cat "$share/$name.log"
		done
		printf '\nfailures:\n'
		printf "    ${prefix}_%s\n" "${failed[@]}"
	fi
	printf '\ntest result: %s. %d passed; %d failed; 0 ignored\n' "$( ((code)) && echo FAILED || echo ok)" \
		"$passed" "${#failed[@]}"
	sync
	echo "$code" >"$share/code"
}
