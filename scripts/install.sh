#!/usr/bin/env bash
# Installs `tidegate` with its man pages, completions and unit, or removes them.
#
#   scripts/install.sh install|uninstall PREFIX [DESTDIR]
#
# It builds as the user who calls it, and asks for root (through sudo) only where that user may not write.
# Called as root without a cargo, it installs the binary that is there.
set -euo pipefail
cd "$(dirname "$0")/.."

verb=${1:?"install or uninstall"} prefix=${2:?"a prefix, such as /usr/local"} destdir=${3:-}
to=$destdir$prefix
units=lib/systemd/system

# Runs a command as this user if it may write below the destination, otherwise as root.
writing() {
	local there=$to
	while [ ! -e "$there" ]; do
		there=$(dirname "$there")
	done
	if [ -w "$there" ]; then
		"$@"
	else
		scripts/as-root.sh "$@"
	fi
}

install_all() {
	local binary
	if command -v "${CARGO:-cargo}" >/dev/null; then
		make --no-print-directory build
		binary=$(scripts/target-dir.sh)/release/tidegate
	else
		binary=${CARGO_TARGET_DIR:-target}/release/tidegate
		if [ ! -x "$binary" ]; then
			echo "$binary is not there, and this user has no cargo to build it." \
				"Type \`make install\` as the user who has, without sudo: it asks for root when it must." >&2
			return 1
		fi
		echo "There is no cargo in PATH: installing the binary that is there, $("$binary" --version)."
	fi

	# Everything is made in a directory of this user's first: what runs as root only copies.
	stage=$(mktemp -d)
	trap 'rm -rf "$stage"' EXIT
	install -D -m 755 "$binary" "$stage/bin/tidegate"
	install -d "$stage/share/man/man1" "$stage/share/bash-completion/completions" "$stage/share/zsh/site-functions" \
		"$stage/share/fish/vendor_completions.d" "$stage/$units"
	"$binary" man "$stage/share/man/man1"
	"$binary" completions bash >"$stage/share/bash-completion/completions/tidegate"
	"$binary" completions zsh >"$stage/share/zsh/site-functions/_tidegate"
	"$binary" completions fish >"$stage/share/fish/vendor_completions.d/tidegate.fish"
	for unit in tidegate-agent.service tidegate-daemon.service; do
		sed "s|/usr/local/bin|$prefix/bin|" "packaging/systemd/$unit" >"$stage/$units/$unit"
	done
	(cd "$stage" && find . -type f) | while read -r file; do
		mode=644
		[ ! -x "$stage/$file" ] || mode=755
		writing install -D -m "$mode" "$stage/$file" "$to/${file#./}"
	done
	echo "tidegate is in $to/bin. The units tidegate-agent.service (man tidegate-agent) and tidegate-daemon.service" \
		"(man tidegate-daemon) start when you enable them."
	echo "Limits of an earlier version stay on; \`tidegate limit restore\` replaces those that this one cannot read."
}

uninstall_all() {
	writing rm -f "$to/bin/tidegate" "$to"/share/man/man1/tidegate.1 "$to"/share/man/man1/tidegate-*.1 \
		"$to/share/bash-completion/completions/tidegate" "$to/share/zsh/site-functions/_tidegate" \
		"$to/share/fish/vendor_completions.d/tidegate.fish" \
		"$to/$units/tidegate-agent.service" "$to/$units/tidegate-daemon.service"
	echo "tidegate is removed from $to. Limits that are on stay on; \`tidegate detach\` would have taken them off."
}

case "$verb" in
install) install_all ;;
uninstall) uninstall_all ;;
*)
	echo "$verb: say install or uninstall" >&2
	exit 1
	;;
esac
