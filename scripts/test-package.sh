#!/usr/bin/env bash
# Tries the .deb of this machine's architecture in a fresh root file system, as a user does.
#
#   scripts/test-package.sh DIR      DIR: where `make package` has put it
#
# It is installed with apt, run, upgraded with a changed configuration file, removed and purged. Then nothing of it
# may be left. Needs root, for chroot.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/debian.sh

# As root: the package in a root made of an archive.
inside() {
	local base=$1 deb=$2 root name
	work=$(mktemp --directory)
	root=$work/root
	trap 'umount --recursive --lazy "$work"/root/{proc,dev} 2>/dev/null || true; rm -rf --one-file-system "$work"' EXIT
	mkdir "$root"
	tar --extract --file "$base" --directory "$root" --numeric-owner --exclude='./dev/*'
	cp "$deb" "$root/package.deb"
	mount --make-rprivate /
	mount -t proc proc "$root/proc"
	mount --rbind /dev "$root/dev"
	for name in /etc/resolv.conf /etc/hosts; do
		[ ! -e "$name" ] || cp --dereference "$name" "$root$name"
	done
	apt_settings >"$root/etc/apt/apt.conf.d/99host"
	chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
		bash -euo pipefail -s <<-'END'
		fail() {
			echo "FAILED: $*" >&2
			exit 1
		}
		left() {
			find / -xdev -name '*tidegate*' -not -path '/proc/*' -not -path '/var/log/*' -not -path '/var/cache/*'
		}
		before=$(left)
		[ -z "$before" ] || fail "the root is not fresh: $before"
		apt-get -qq update
		apt-get -qq install --yes --no-install-recommends man-db >/dev/null
		echo "install"
		apt-get -qq install --yes /package.deb
		[ "$(tidegate --version)" = "tidegate $(dpkg-query --show --showformat '${Version}' tidegate | sed 's/-[0-9]*$//')" ] ||
			fail "another version: $(tidegate --version)"
		for page in tidegate tidegate-limit-add tidegate-doctor tidegate-schemes; do
			man "$page" | grep -q NAME || fail "man $page"
		done
		for file in /usr/share/bash-completion/completions/tidegate /usr/share/zsh/site-functions/_tidegate \
			/usr/share/fish/vendor_completions.d/tidegate.fish /usr/lib/systemd/system/tidegate-daemon.service \
			/usr/lib/systemd/system/tidegate-agent.service /usr/share/doc/tidegate/copyright; do
			[ -s "$file" ] || fail "$file is missing"
		done
		if grep -rn /usr/local/bin /usr/lib/systemd/system/tidegate-*; then fail "a unit names another binary"; fi
		[ "$(readlink -f /usr/lib/cni/tidegate-cni)" = /usr/bin/tidegate ] || fail "no plugin of CNI"
		sed "s/^#\([[a-z]\)/\1/" /etc/tidegate/limits.toml | tidegate check - || fail "the examples of the default file"
		dpkg-query --show --showformat '${Conffiles}' tidegate | grep -q /etc/tidegate/limits.toml || fail "no conffile"
		echo "install again, with a changed configuration file"
		echo "# changed" >>/etc/tidegate/limits.toml
		touch /etc/tidegate/fleet.toml
		apt-get -qq install --yes --reinstall /package.deb
		tail -n 1 /etc/tidegate/limits.toml | grep -q changed || fail "the configuration file was overwritten"
		echo "remove"
		apt-get -qq remove --yes tidegate
		[ ! -e /usr/bin/tidegate ] || fail "the binary is still there"
		[ -e /etc/tidegate/limits.toml ] || fail "remove took the configuration"
		echo "purge"
		mkdir -p /var/lib/tidegate/fleet
		apt-get -qq purge --yes tidegate
		after=$(left)
		[ -z "$after" ] || fail "left after purge: $after"
	END
	echo "the package installs, upgrades, and goes without a trace"
}

case "${1:?"the directory of the packages"}" in
inside) "$@" ;;
*)
	deb=$(ls -t "$1"/tidegate_*_"$(dpkg --print-architecture)".deb | head -n 1)
	base=$(scripts/fresh.sh base)
	scripts/as-root.sh unshare --mount "$PWD/scripts/test-package.sh" inside "$base" "$deb"
	;;
esac
