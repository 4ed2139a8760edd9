#!/usr/bin/env bash
# Turns the output of test binaries into what people read.
#
#   test-report.sh brief           standard input: a line a binary, its progress, and the output of failed tests
#   test-report.sh sum CODE LOG... the skipped tests, and the sum as the last line. CODE is that of the run. Ends
#                                  with 1 if a test failed or the run did, or if CI=true and a test skipped that
#                                  scripts/may-skip does not name
set -euo pipefail
cd "$(dirname "$0")/.."

case "$1" in
brief)
	awk '
		function told() { last = systime() }
		BEGIN { told() }
		/^ +Running / { name = $NF; sub(/.*\//, "", name); sub(/-[0-9a-f]+\)?$/, "", name); done = 0 }
		/^ +Doc-tests / { name = $2 " (docs)"; done = 0 }
		/^running [0-9]+ tests?$/ { all = $2 }
		/^test .* \.\.\. / {
			done++
			if (systime() - last >= 15) { printf "  %-28s %4d of %d so far\n", name, done, all; told() }
		}
		/^failures:$/ { failing = 1 }
		/^test result: / {
			failing = 0
			if ($4 + $6 > 0) { printf "  %-28s %4d passed%s\n", name, $4, $6 ? ", " $6 " failed" : ""; told() }
		}
		/^(error|warning: unused)/ || failing { print }
		{ fflush() }
	'
	;;
sum)
	code=$2
	shift 2
	awk -v code="$code" -v strict="${CI:-}" '
		FILENAME == ARGV[1] { if ($0 !~ /^(#|$)/) { allowed[$1] = 1 } next }
		/SKIP [-A-Za-z0-9_:]+: / {
			line = substr($0, index($0, "SKIP "))
			test = line; sub(/^SKIP /, "", test); sub(/: .*/, "", test)
			name = FILENAME test
			if (!(name in seen)) { seen[name] = 1; skips[++skipped] = line; tests[skipped] = test }
		}
		/^test .* \.\.\. ignored/ {
			test = $2; sub(/.*::/, "", test)
			skips[++skipped] = "SKIP " test ": marked as ignored"; tests[skipped] = test; ignored++
		}
		/^test result: / { passed += $4; failed += $6 }
		END {
			for (i = 1; i <= skipped; i++) print skips[i]
			if (strict == "true") {
				for (i = 1; i <= skipped; i++) {
					if (!(tests[i] in allowed)) {
						print "ERROR " tests[i] ": skipped, and scripts/may-skip does not name it"
						failed++; passed++
					}
				}
			}
			# A binary that dies takes its sum along.
			if (code != 0 && failed == 0) failed = 1
			printf "%d passed, %d failed, %d skipped\n", passed - skipped + ignored, failed, skipped
			exit failed > 0
		}
	' scripts/may-skip "$@"
	;;
esac
