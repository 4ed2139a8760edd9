#!/usr/bin/env bash
# Builds the static binary of another architecture with Debian's Rust, in a root file system of its own.
#
#   scripts/cross-root.sh ARCH FILE       ARCH: aarch64
#
# scripts/package.sh calls this where rustup cannot fetch Rust's standard library for ARCH. Debian packs it for each
# of its architectures, but it fits the compiler of the same version only: both are taken from the backports of
# Debian stable.
#
# The root is an archive in target/cross, and made once. For each build it is unpacked and entered in a mount
# namespace, so that nothing stays mounted. Inside there are this tree, read-only, cargo's downloads, and a directory
# for what is built. Commands there run as the user who called this. Needs root, for chroot.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin"
source scripts/debian.sh

self=scripts/cross-root.sh
work=$PWD/target/cross
root=$work/root
suite=trixie
# The headers of a kernel as new as that of the backports do not fit libbpf's own on arm64: 7.3 has __u128 in
# asm/sigcontext.h.
pins="Package: linux-libc-dev*\nPin: release n=$suite-backports\nPin-Priority: -1\n"
# Variables that a build inside needs as well: cargo finds its downloads by some of them.
settings='^(CARGO_(BUILD_JOBS|INCREMENTAL|REGISTR|SOURCE_)|SOURCE_DATE_EPOCH=)'

# What a build needs, as Debian calls it.
packages_of() {
	local arch=$1 name
	case "$arch" in
	aarch64) name=arm64 ;;
	*)
		echo "$arch: this builds for aarch64 only" >&2
		return 1
		;;
	esac
	echo "cargo libstd-rust-dev:$name gcc libc6-dev gcc-$arch-linux-gnu libc6-dev-$name-cross clang make pkgconf" \
		"autoconf automake autopoint bison flex gawk"
}

# The reason why such a root cannot be made here, or nothing.
obstacle() {
	if ! command -v apt-get >/dev/null || ! debian_sources "$suite" >/dev/null; then
		echo "apt has no source of Debian's packages here"
	elif [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
		echo "a root file system needs root, and there is no sudo"
	elif ! scripts/deps.sh cross-root >&2; then
		echo "mmdebstrap cannot be installed"
	elif ! scripts/as-root.sh unshare --mount --pid --fork true; then
		echo "this machine allows no mount and process namespaces"
	fi
}

# As root, in namespaces of its own: mounts what the root needs, and runs a command in it as USER:GROUP.
inside() {
	local owner=$1 downloads=$2 name
	shift 2
	mount -t proc proc "$root/proc"
	mount --rbind /dev "$root/dev"
	mkdir -p "$root/src" "$root/build"
	mount --bind -o ro "$PWD" "$root/src"
	mount --bind "$work/build" "$root/build"
	# Crates are unpacked inside: some are built where they are unpacked.
	for name in cache index; do
		mount --bind -o ro "$downloads/registry/$name" "$root/build/cargo/registry/$name"
	done
	exec chroot --userspec="$owner" "$root" env -i --chdir=/src "$@"
}

# As root: unpacks the root, and runs the command in it.
unpacked() {
	local code=0
	rm -rf --one-file-system "$root"
	mkdir "$root"
	tar --extract --file "$1" --directory "$root" --numeric-owner --exclude='./dev/*'
	shift
	unshare --mount --pid --fork --kill-child "$self" inside "$@" || code=$?
	rm -rf --one-file-system "$root"
	return "$code"
}

build() {
	local arch=$1 file=$2 packages why base downloads=${CARGO_HOME:-$HOME/.cargo} name variables
	packages=$(packages_of "$arch")
	why=$(obstacle)
	if [ -z "$why" ]; then
		debian_base "$work" "$suite $suite-backports" "$packages" \
			--architectures="$(dpkg --print-architecture),arm64" \
			--aptopt="APT::Default-Release \"$suite-backports\"" \
			--setup-hook="printf '$pins' >\"\$1/etc/apt/preferences.d/pins\"" ||
			why="mmdebstrap cannot make the root file system (target/cross/mmdebstrap.log)"
	fi
	if [ -n "$why" ]; then
		echo "$arch: neither rustup nor Debian's packages have Rust for it here: $why" >&2
		return 1
	fi
	"${CARGO:-cargo}" fetch --locked
	mkdir -p "$work"/build/cargo/registry/{cache,index}
	for name in config config.toml; do
		[ ! -e "$downloads/$name" ] || cp "$downloads/$name" "$work/build/cargo/"
	done
	mapfile -t variables < <(env | grep -E "$settings")
	# sudo passes no environment on.
	scripts/as-root.sh "$self" unpacked "$base" "$(id -u):$(id -g)" "$downloads" "${variables[@]}" \
		PATH=/usr/bin:/bin LANG=C.UTF-8 HOME=/build CARGO_HOME=/build/cargo CARGO_NET_OFFLINE=true \
		CARGO_TARGET_DIR=/build/target scripts/package.sh compile "$arch" "/build/tidegate-$arch"
	mv "$work/build/tidegate-$arch" "$file"
}

case "${1:-}" in
inside | unpacked) "$@" ;;
*) build "${1:?"an architecture"}" "${2:?"a file"}" ;;
esac
