#!/usr/bin/env bash
# Builds `tidegate` at earlier commits, has each put limits on, and looks whether this one goes on with them, with
# datagrams and a connection running: status, limit set, limit restore, apply, detach. Then the earlier one must
# leave the limits alone. Takes a build for each commit.
#
#   scripts/test-upgrade.sh [COMMIT...]
#
# Without commits: one for each layout of the maps that there has been.
set -euo pipefail
cd "$(dirname "$0")/.."

# In turn: nobody wrote down what was asked; ABI 1, 2, 3; ABI 4 before and after limits with a selector shared programs; ABI 5.
commits=("$@")
[ $# -gt 0 ] || commits=(929b2c8 2a24b0a d33cd6a a812ad8 a016ed2 fc90bcd2 6244f09a)

built=$(scripts/target-dir.sh)/upgrade
mkdir -p "$built"
older=
for commit in "${commits[@]}"; do
	commit=$(git rev-parse --short "$commit^{commit}")
	binary=$built/tidegate-$commit
	if [ ! -x "$binary" ]; then
		source=$built/source
		rm -rf "$source"
		mkdir "$source"
		# As new as they are: Cargo would take files older than its last build for built.
		git archive "$commit" | tar --extract --touch --directory "$source"
		echo "Building tidegate of $commit"
		(cd "$source" && cargo build --locked --package tidegate --bin tidegate --target-dir "$built/target")
		cp "$built/target/debug/tidegate" "$binary"
		rm -rf "$source"
	fi
	older=${older:+$older:}$binary
done

export TIDEGATE_OLDER=$older
tests=(cargo test --locked --package tidegate --test e2e)
if [ "$(id -u)" != 0 ]; then
	# Built as the user; only the test itself is root.
	host=$(rustc -vV | sed -n 's/^host: //p')
	tests+=(--config "target.$host.runner = ['$PWD/scripts/as-root.sh']")
fi
"${tests[@]}" -- upgrade:: --nocapture --test-threads=1
