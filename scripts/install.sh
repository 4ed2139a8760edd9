#!/usr/bin/env bash
# Installs `tidegate` with its man pages, completions and unit, or removes them.
#
#   scripts/install.sh install|uninstall PREFIX [DESTDIR]
#   scripts/install.sh stage BINARY PREFIX DIR [GENERATOR]
#
# `install` builds as the user who calls it, also if that user calls it through sudo, and is root only where that
# user may not write. Called as root without a cargo, it installs the binary that is there.
#
# `stage` lays out what is to be below PREFIX in DIR, man pages and completions as GENERATOR prints them: a
# binary that runs on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."

verb=${1:?"install, uninstall or stage"}
shift

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

stage() {
	local binary=$1 prefix=$2 stage=$3 generator=${4:-$1} unit
	install -D -m 755 "$binary" "$stage/bin/tidegate"
	# The same binary, under the name by which runtimes of containers call it.
	install -d "$stage/lib/cni"
	ln -s ../../bin/tidegate "$stage/lib/cni/tidegate-cni"
	install -d "$stage/share/man/man1" "$stage/share/man/man7" "$stage/share/bash-completion/completions" \
		"$stage/share/zsh/site-functions" "$stage/share/fish/vendor_completions.d" "$stage/lib/systemd/system"
	"$generator" man "$stage/share/man/man1"
	mv "$stage"/share/man/man1/*.7 "$stage/share/man/man7"
	"$generator" completions bash >"$stage/share/bash-completion/completions/tidegate"
	"$generator" completions zsh >"$stage/share/zsh/site-functions/_tidegate"
	"$generator" completions fish >"$stage/share/fish/vendor_completions.d/tidegate.fish"
	for unit in packaging/systemd/*; do
		sed "s|/usr/local/bin|$prefix/bin|" "$unit" >"$stage/lib/systemd/system/${unit##*/}"
	done
}

# Whether the user who called sudo has a cargo: what is built then is that user's, not root's.
as_caller() {
	sudo --set-home --user "$SUDO_USER" bash --login -c 'cd "$0" && exec "$@"' "$PWD" "$@"
}
caller_has_cargo() {
	[ "$(id -u)" = 0 ] && [ -n "${SUDO_USER:-}" ] && [ "$SUDO_USER" != root ] &&
		as_caller command -v cargo >/dev/null 2>&1
}

install_all() {
	local binary
	if caller_has_cargo; then
		as_caller make --no-print-directory build
		binary=$(as_caller scripts/target-dir.sh)/release/tidegate
	elif command -v "${CARGO:-cargo}" >/dev/null; then
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
	stage "$binary" "$prefix" "$stage"
	(cd "$stage" && find . -type f) | while read -r file; do
		mode=644
		[ ! -x "$stage/$file" ] || mode=755
		writing install -D -m "$mode" "$stage/$file" "$to/${file#./}"
	done
	writing install -d "$to/lib/cni"
	writing ln -sfn ../../bin/tidegate "$to/lib/cni/tidegate-cni"
	echo "tidegate is in $to/bin. The units tidegate-agent.service (man tidegate-agent), tidegate-daemon.service" \
		"(man tidegate-daemon) and tidegate-web.service (man tidegate-web) start when you enable them."
	echo "Limits of an earlier version stay on; \`tidegate limit restore\` replaces those that this one cannot read."
}

uninstall_all() {
	writing rm -f "$to/bin/tidegate" "$to/lib/cni/tidegate-cni" "$to"/share/man/man1/tidegate.1 "$to"/share/man/man1/tidegate-*.1 \
		"$to"/share/man/man7/tidegate-*.7 "$to"/lib/systemd/system/tidegate-*.service \
		"$to/share/bash-completion/completions/tidegate" "$to/share/zsh/site-functions/_tidegate" \
		"$to/share/fish/vendor_completions.d/tidegate.fish"
	echo "tidegate is removed from $to. Limits that are on stay on; \`tidegate detach\` would have taken them off."
}

case "$verb" in
install | uninstall)
	prefix=${1:?"a prefix, such as /usr/local"} destdir=${2:-}
	to=$destdir$prefix
	"${verb}_all"
	;;
stage) stage "$@" ;;
*)
	echo "$verb: say install, uninstall or stage" >&2
	exit 1
	;;
esac
