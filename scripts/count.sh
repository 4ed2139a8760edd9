#!/usr/bin/env bash
# Counts what there is to maintain: lines of production code by crate, locked packages, size of the binary.
#
#   scripts/count.sh [COMMIT]            the files as they are here, or as of a commit
#   scripts/count.sh --build [COMMIT]    also builds `tidegate` from nothing: how long it takes, how large it is
#
# A line of code is one that is not blank and holds more than a comment. Production code is the Rust below
# crates/*/src, without what is compiled for tests only, and the C of bpf/ without vmlinux.h. The lab and the
# instruments are listed apart. A file that is an instrument here counts as one in older commits too.
set -euo pipefail
cd "$(dirname "$0")/.."

build=
if [ "${1:-}" = --build ]; then
	build=yes
	shift
fi
commit=${1:-}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
mkdir "$tree"
if [ -n "$commit" ]; then
	git archive "$commit" | tar -x -C "$tree"
else
	git ls-files -z --cached --others --exclude-standard --deduplicate | xargs -0 ls -d 2>/dev/null |
		tar -c -T - | tar -x -C "$tree"
fi
instruments=$(git ls-files crates/instruments | sed 's|.*/||' | grep -vE '^(lib|mod|tests|build)\.rs$|\.toml$')

# Modules that are compiled for tests only: prints the path of each, without its ending.
test_modules() {
	find crates -path '*/src/*.rs' -print0 | xargs -0 awk '
		FNR == 1 {
			after = 0
			home = FILENAME
			sub(/\/(lib|main|mod)\.rs$/, "", home)
			sub(/\.rs$/, "", home)
		}
		/^#\[cfg\(test\)\]$/ { after = 1; next }
		after && /^#\[/ { next }
		after && match($0, /mod [a-z0-9_]+;$/) { print home "/" substr($0, RSTART + 4, RLENGTH - 5) }
		{ after = 0 }'
}

# Prints "CODE COMMENTS FILE" for each file named on standard input.
count_lines() {
	xargs -r awk '
		function finish() { if (file != "") print code + 0, comments + 0, file; code = comments = 0 }
		FNR == 1 { finish(); file = FILENAME; skip = ""; waits = 0; block = 0 }
		skip != "" { if (index($0, skip) == 1) skip = ""; next }
		/^ *#\[cfg\(test\)\]$/ { waits = 1; match($0, /^ */); indent = substr($0, 1, RLENGTH); next }
		waits {
			# The item that is for tests only: to its end, where the formatter puts the last brace.
			if ($0 ~ /^ *(#\[|\/\/)/) next
			if ($0 ~ /\{$/) skip = indent "}"
			if ($0 ~ /[{};,]$/) waits = 0
			next
		}
		/^[ \t]*$/ { next }
		block { comments++; if (/\*\//) block = 0; next }
		/^[ \t]*\/\// { comments++; next }
		/^[ \t]*\/\*/ { comments++; if (!/\*\//) block = 1; next }
		{ code++ }
		END { finish() }'
}

cd "$tree"
{
	find crates -path '*/src/*.rs' | grep -vF -f <(test_modules | sed 's|$|.rs|'; test_modules | sed 's|$|/|')
	find bpf crates/*/bpf -name '*.[ch]' ! -name vmlinux.h 2>/dev/null || true
} | sort | count_lines | awk -v instruments="$instruments" '
	BEGIN { n = split(instruments, names, /[ \n]+/); for (i = 1; i <= n; i++) instrument[names[i]] = 1 }
	{
		split($3, part, "/")
		name = part[1] == "bpf" ? "bpf (C)" : part[2]
		file = $3
		sub(/.*\//, "", file)
		if (file in instrument) name = "instruments"
		if (!(name in files)) order[++n_rows] = name
		code[name] += $1
		comments[name] += $2
		files[name]++
	}
	function row(name) { printf "%-22s %8d %9d %6d\n", name, code[name], comments[name], files[name] }
	END {
		printf "%-22s %8s %9s %6s\n", "production code", "code", "comments", "files"
		for (i = 1; i <= n_rows; i++) {
			name = order[i]
			if (name == "lab" || name == "instruments") continue
			row(name)
			code["all"] += code[name]; comments["all"] += comments[name]; files["all"] += files[name]
		}
		row("all")
		printf "\napart\n"
		row("instruments")
		row("lab")
	}'
printf '\n%-22s %8d\n' "locked packages" "$(grep -c '^name' Cargo.lock)"

sizes() {
	strip -o "$work/stripped" "$1"
	printf '%-22s %8d KiB\n' "binary" "$(($(stat -c %s "$1") / 1024))"
	printf '%-22s %8d KiB\n' "binary, stripped" "$(($(stat -c %s "$work/stripped") / 1024))"
}

if [ -n "$build" ]; then
	# What cargo downloads is no part of the time.
	cargo fetch --quiet --locked
	TIMEFORMAT='%R %U %S'
	export CARGO_TARGET_DIR=$work/target
	spent=$({ time cargo build --quiet --release --locked --package tidegate >"$work/log" 2>&1; } 2>&1) || {
		cat "$work/log" >&2
		exit 1
	}
	read -r elapsed user system <<<"$spent"
	printf '%-22s %8.0f s\n' "cold build" "$elapsed"
	printf '%-22s %8.0f s\n' "cold build, CPU" "$(awk "BEGIN { print $user + $system }")"
	sizes "$work/target/release/tidegate"
elif [ -z "$commit" ]; then
	cd "$OLDPWD"
	binary=$(scripts/target-dir.sh)/release/tidegate
	if [ -e "$binary" ]; then
		sizes "$binary"
	else
		echo "The size of the binary needs it: \`make build\` first, or scripts/count.sh --build"
	fi
fi
