#!/usr/bin/env bash
# What people read of the output of test binaries.
#
#   test-report.sh brief           standard input: a line a binary, and the output of failed tests
#   test-report.sh failed LOG      the names of the tests that failed
#   test-report.sh sum CODE LOG... the skipped tests, those that passed only when run again, and the sum as the
#                                  last line; CODE is that of the run
set -euo pipefail

case "$1" in
brief)
	awk '
		/^ +Running / { name = $NF; sub(/.*\//, "", name); sub(/-[0-9a-f]+\)?$/, "", name) }
		/^ +Doc-tests / { name = $2 " (docs)" }
		/^failures:$/ { failing = 1 }
		/^test result: / {
			failing = 0
			if ($4 + $6 > 0) printf "  %-28s %4d passed%s\n", name, $4, $6 ? ", " $6 " failed" : ""
		}
		/^(error|warning: unused)/ || failing { print }
		{ fflush() }
	'
	;;
failed)
	# A binary names them in a list of its own, after their output.
	awk '/^failures:$/ { listing = 1; next } /^test result: / { listing = 0 }
		listing && /^    [A-Za-z0-9_:]+$/ { print $1 }' "$2" | sort -u
	;;
sum)
	code=$2
	shift 2
	awk -v code="$code" '
		/SKIP [-A-Za-z0-9_:]+: / {
			line = substr($0, index($0, "SKIP "))
			name = FILENAME $0; sub(/.*SKIP /, "", name); sub(/: .*/, "", name); name = FILENAME name
			if (!(name in seen)) { seen[name] = 1; skips[++skipped] = line }
		}
		/^test .* \.\.\. ignored/ { skips[++skipped] = "SKIP " $2 ": marked as ignored"; ignored++ }
		/^AGAIN / { again[++agains] = $0; failed--; passed++ }
		/^test result: / { passed += $4; failed += $6 }
		END {
			for (i = 1; i <= skipped; i++) print skips[i]
			for (i = 1; i <= agains; i++) print again[i]
			# A binary that dies takes its sum along.
			if (code != 0 && failed == 0) failed = 1
			printf "%d passed, %d failed, %d skipped\n", passed - skipped + ignored, failed, skipped
		}
	' "$@"
	;;
esac
