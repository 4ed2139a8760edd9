#!/usr/bin/env bash
# Runs commands in a clone of this repository, in a fresh root file system: what a newcomer has, and nothing
# that an earlier run has installed, mounted or built.
#
#   scripts/fresh.sh possible             end with 0 if a fresh root can be made here; otherwise say why not
#   scripts/fresh.sh base                 make the root as a tar file, and print its path
#   scripts/fresh.sh run [--user] CMD...  run each CMD with `bash -c` in the clone, until one fails: as root, or
#                                         with --user as an ordinary user who may use sudo
#
# The root holds the distribution's smallest system, with what README asks for (git, make, certificates) and
# sudo. The Rust toolchain is mounted into it, cargo's downloads are copied, and settings of package registries
# come from this machine. Mounts and processes are private, and end with the script. Nothing is mounted at
# /sys/fs/bpf.
#
# The clone holds what is committed. Its logs are copied to target/fresh. After a failure the root stays in
# target/fresh/root until the next run, but not in CI, where nobody would look.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin"
source scripts/debian.sh

self=$PWD/scripts/fresh.sh
work=$PWD/target/fresh
root=$work/root
# Where the clone lies inside.
clone=/home/tidegate
# A root that is older than this is made anew: it misses too many of the distribution's updates.
base_days=7
packages=git,make,ca-certificates,sudo
user=newcomer
# Settings of registries and proxies that a command inside needs as well.
settings='^(https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY|CARGO_(NET|HTTP|REGISTRIES|REGISTRY)_.*|PIP_(INDEX_URL|EXTRA_INDEX_URL|DEFAULT_TIMEOUT)|CI|TERM|PROPTEST_.*|TIDEGATE_.*)$'

# What a root with everything built in it takes, in GB, and some more.
disk_gb=12

# The disk that a new root may take, in GB: it replaces the one that a failure has left.
free_gb() {
	local free left=0
	free=$(df --output=avail --block-size=1M . | tail -1)
	[ ! -e "$root" ] || left=$(du --one-file-system --summarize --block-size=1M "$root" 2>/dev/null | cut -f 1)
	echo $(((free + left) / 1024))
}

# The reason why a fresh root cannot be made here, or nothing.
obstacle() {
	local free
	free=$(free_gb)
	if [ "$free" -lt "$disk_gb" ]; then
		echo "a fresh root takes up to $disk_gb GB of disk, and $free are free here"
	elif ! command -v apt-get >/dev/null; then
		echo "the root is made of Debian's or Ubuntu's packages, and there is no apt-get here"
	elif [ "$(id -u)" != 0 ] && ! { command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; }; then
		echo "a root file system needs root, and there is no sudo that works"
	elif ! scripts/deps.sh fresh >&2; then
		echo "mmdebstrap cannot be installed"
	elif ! scripts/as-root.sh unshare --mount --pid --fork true 2>/dev/null; then
		echo "this machine allows no mount and process namespaces"
	fi
}

# The distribution's own sources, one a line, without those that the user has added.
sources() {
	local release
	release=$(. /etc/os-release && echo "$VERSION_CODENAME")
	apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
		awk -v release="$release" '($2 == "Debian" || $2 == "Ubuntu") && index($3, release) == 1 &&
			$3 !~ /backports|proposed/ { print "deb", $1, $3, $4 }' | sort -u
}

# As root: the base system as a tar file, and its path in `base`. It is made once, and again when it is old.
make_base() {
	local lines key options=() line
	lines=$(sources)
	[ -n "$lines" ] || { echo "apt names no source of Debian or Ubuntu" >&2; return 1; }
	key=$(echo "$packages $lines" | sha256sum | cut -c 1-12)
	base=$work/base-$key.tar
	if [ -z "$(find "$base" -mtime "-$base_days" 2>/dev/null)" ]; then
		echo "Making a fresh root file system (a minute, once in $base_days days)"
		rm -f "$work"/base-*.tar
		while read -r line; do
			options+=(--aptopt="$line")
		done < <(apt_settings)
		mmdebstrap --quiet --format=tar --variant=minbase --include="$packages" "${options[@]}" \
			"$(. /etc/os-release && echo "$VERSION_CODENAME")" "$base.new" - <<<"$lines"
		mv "$base.new" "$base"
	fi
}

# As root: mounts and enters the root, and runs the commands there, as the user named first.
inside() {
	local who=$1 home name value variables=()
	shift
	mount --make-rprivate /
	mount --bind "$root" "$root"
	mount -t proc proc "$root/proc"
	mount -t sysfs sysfs "$root/sys"
	mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
	mount --rbind /dev "$root/dev"
	mount -t tmpfs -o mode=755 tmpfs "$root/run"
	mkdir -p "$root/opt/rust"
	mount --bind -o ro "$FRESH_SYSROOT" "$root/opt/rust"

	home=/root
	[ "$who" = root ] || home=/home/$who
	mkdir -p "$root$home/.cargo/registry" "$FRESH_CARGO_HOME/registry"
	for name in cache index; do
		[ ! -e "$FRESH_CARGO_HOME/registry/$name" ] || flock "$FRESH_CARGO_HOME/.package-cache" \
			cp -a "$FRESH_CARGO_HOME/registry/$name" "$root$home/.cargo/registry/"
	done
	for name in config config.toml credentials.toml; do
		[ ! -e "$FRESH_CARGO_HOME/$name" ] || cp "$FRESH_CARGO_HOME/$name" "$root$home/.cargo/"
	done
	for name in /etc/resolv.conf /etc/hosts /etc/pip.conf; do
		[ ! -e "$name" ] || cp --dereference "$name" "$root$name"
	done
	# The authorities that this machine trusts, where a company has its own.
	value=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
	if [ -e "$value" ]; then
		cp --dereference "$value" "$root/etc/ssl/this-machine.crt"
		for name in SSL_CERT_FILE CARGO_HTTP_CAINFO PIP_CERT CURL_CA_BUNDLE; do
			variables+=("$name=/etc/ssl/this-machine.crt")
		done
	fi
	while IFS='=' read -r -d '' name value; do
		[[ ! $name =~ $settings || $name = CARGO_HTTP_CAINFO ]] || variables+=("$name=$value")
	done </proc/self/environ
	variables+=("HOME=$home" "USER=$who" LANG=C.UTF-8 "PATH=/opt/rust/bin:$home/.cargo/bin:/usr/local/bin:/usr/bin:/bin")
	if [ "$who" = root ]; then
		variables+=("PATH=/opt/rust/bin:$home/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	else
		chroot "$root" useradd --no-create-home --home-dir "$home" --shell /bin/bash "$who"
		echo "$who ALL=(ALL) NOPASSWD: ALL" >"$root/etc/sudoers.d/$who"
		# A login shell finds cargo, as after the installation of rustup.
		echo 'PATH="/opt/rust/bin:$PATH"' >"$root$home/.profile"
		chroot "$root" chown -R "$who:" "$home" "$clone"
	fi

	cd "$root"
	mkdir -p .outside
	pivot_root . .outside
	umount --lazy /.outside
	rmdir /.outside
	cd "$clone"
	for name in "$@"; do
		setpriv --reuid "$who" --regid "$who" --init-groups env -i "${variables[@]}" bash -c "$name" </dev/null
	done
}

# As root: builds the root, runs the commands as the user named first, keeps the logs.
run_as_root() {
	local base lock code=0
	mkdir -p "$work"
	exec {lock}>"$work/lock"
	flock --nonblock "$lock" || { echo "Another fresh root of this checkout is in use: wait for its end." >&2; return 1; }
	make_base
	rm -rf --one-file-system "$root"
	mkdir -p "$root"
	tar --extract --file "$base" --directory "$root"
	mkdir -p "$root$(dirname "$clone")"
	git -c safe.directory='*' clone --quiet --no-hardlinks "$PWD" "$root$clone"
	unshare --mount --pid --fork --kill-child "$self" inside "$@" || code=$?
	rm -rf "$work/logs"
	mkdir -p "$work/logs"
	cp "$root$clone"/target/*.log "$root$clone"/target/vm/*.log "$work/logs/" 2>/dev/null || true
	if [ "$code" = 0 ] || [ "${CI:-}" = true ]; then
		rm -rf --one-file-system "$root"
	else
		echo "The fresh root stays in target/fresh/root; its logs are in target/fresh/logs." >&2
	fi
	return "$code"
}

run() {
	local why name value variables=() who=root
	if [ "${1:-}" = --user ]; then
		who=$user
		shift
	fi
	why=$(obstacle)
	if [ -n "$why" ]; then
		echo "SKIP test-fresh: $why" >&2
		# For CI this part is required.
		[ "${CI:-}" != true ] || return 1
		return 0
	fi
	if [ -n "$(git status --porcelain 2>/dev/null)" ]; then
		echo "The clone has what is committed; changes that are not committed stay outside."
	fi
	mkdir -p "$work"
	while IFS='=' read -r -d '' name value; do
		[[ ! $name =~ $settings ]] || variables+=("$name=$value")
	done </proc/self/environ
	# sudo passes no environment on.
	scripts/as-root.sh env "${variables[@]}" "FRESH_SYSROOT=$(rustc --print sysroot)" \
		"FRESH_CARGO_HOME=${CARGO_HOME:-$HOME/.cargo}" "SSL_CERT_FILE=${SSL_CERT_FILE:-}" \
		"$self" run_as_root "$who" "$@"
}

case "${1:-}" in
possible)
	why=$(obstacle)
	[ -z "$why" ] || { echo "$why"; exit 1; }
	;;
base)
	mkdir -p "$work"
	scripts/as-root.sh "$self" print_base
	;;
print_base)
	make_base >&2
	echo "$base"
	;;
run | run_as_root | inside) "$@" ;;
*)
	sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
	exit 1
	;;
esac
