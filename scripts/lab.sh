#!/usr/bin/env bash
# Runs the lab as root, which network namespaces need, and gives its reports to the user.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin"

out=lab-results
for ((at = 1; at < $#; at++)); do
	if [ "${!at}" = --out ]; then
		next=$((at + 1))
		out=${!next}
	fi
done
mkdir -p "$out"
if [ "$(id -u)" != 0 ]; then
	echo "The lab builds network namespaces, which needs root; nothing of them stays." >&2
fi
code=0
scripts/as-root.sh "$(scripts/target-dir.sh)/release/tidegate-lab" "$@" || code=$?
if [ "$(id -u)" != 0 ]; then
	scripts/as-root.sh chown -R "$(id -u):$(id -g)" "$out"
fi
exit $code
