#!/usr/bin/env bash
# Makes packages of a static binary: .deb, .rpm, .tar.gz and an OCI image, and their SHA256SUMS.
#
#   scripts/package.sh DIR [ARCH...]      ARCH: x86_64 (default), aarch64
#   scripts/package.sh deb BINARY DIR
#   scripts/package.sh rpm BINARY DIR
#   scripts/package.sh compile ARCH FILE
#
# `deb` and `rpm` pack a binary of this machine that is there, as a .deb, or as a .rpm and the release after it. The
# tests install such packages. `compile` builds the binary alone, with the Rust that is here.
#
# The binary has libelf, zlib and the C library built in, and runs on any Linux that Tidegate supports. For another
# architecture than this machine's it is built with a cross compiler, and started once by qemu-user. Rust's standard
# library for it comes from rustup. Where rustup cannot fetch it, Debian's Rust builds the binary (cross-root.sh).
# The version is the workspace's, in Cargo.toml. cargo-deb and cargo-generate-rpm are installed if they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."

host=$(uname -m)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# crates/cli/Cargo.toml names it.
stage=target/package/stage
built=$(scripts/target-dir.sh)
# What rustup downloads is some 30 MB.
limit_rustup=3m

# As Debian and Docker call it.
other_name() {
	case "$1" in x86_64) echo amd64 ;; aarch64) echo arm64 ;; esac
}

# Builds the binary of an architecture with the Rust that is here, as a file without symbols.
compile() {
	local arch=$1 file=$2 triple=$1-unknown-linux-gnu strip=strip linker
	if [ "$arch" != "$host" ]; then
		linker=CARGO_TARGET_$(tr a-z- A-Z_ <<<"$triple")_LINKER
		export "$linker=$arch-linux-gnu-gcc"
		strip=$arch-linux-gnu-strip
	fi
	# With a target the flags are not for build scripts, which load libraries.
	RUSTFLAGS="-C target-feature=+crt-static" "${CARGO:-cargo}" build --release --locked --bin tidegate \
		--features static --target "$triple"
	"$strip" -o "$file" "$built/$triple/release/tidegate"
}

# Whether Rust's standard library for an architecture is here, or rustup fetches it.
has_library() {
	local triple=$1-unknown-linux-gnu
	[ -d "$(rustc --print target-libdir --target "$triple")" ] || {
		command -v rustup >/dev/null && scripts/bounded.sh "$limit_rustup" rustup target add "$triple"
	}
}

# Builds the binary of an architecture as DIR/tidegate-ARCH, and starts it.
build() {
	local arch=$1 file=$out/tidegate-$1 start=()
	if [ "$arch" = "$host" ]; then
		compile "$arch" "$file"
	elif has_library "$arch"; then
		echo "$arch: building with this machine's Rust"
		scripts/deps.sh "cross-$arch"
		compile "$arch" "$file"
	else
		echo "$arch: rustup has no standard library for it here; building with Debian's Rust"
		scripts/cross-root.sh "$arch" "$file"
	fi
	if ! file "$file" | grep -Eq 'static(-pie|ally) linked'; then
		echo "$file is not static" >&2
		return 1
	fi
	[ "$arch" = "$host" ] || start=("qemu-$arch-static")
	"${start[@]}" "$file" --version
}

# Binaries of another architecture do not run here: this machine's prints their man pages.
generator() {
	if [ -x "$out/tidegate-$host" ]; then
		echo "$out/tidegate-$host"
	else
		"${CARGO:-cargo}" build --quiet --release --locked --bin tidegate
		echo "$built/release/tidegate"
	fi
}

# A tar file that is the same each time that it is made of the same files.
pack() {
	tar --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --format=posix \
		--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime "$@"
}

# An image with the binary alone.
make_image() {
	local arch=$1 root=$out/image
	install -D -m 755 "$out/tidegate-$arch" "$root/usr/bin/tidegate"
	scripts/image.sh "$out/tidegate-$version-$arch.oci.tar" "tidegate:$version" "$(other_name "$arch")" "$root" \
		/usr/bin/tidegate
	rm -r "$root"
}

# Lays out what is in all packages: the binary, and what GENERATOR prints.
stage() {
	local binary=$1 generator=$2
	rm -rf "$stage"
	scripts/install.sh stage "$binary" /usr "$stage/usr" "$generator"
	install -D -m 644 packaging/limits.toml "$stage/etc/tidegate/limits.toml"
}

# Of what is laid out; further arguments are cargo-deb's.
make_deb() {
	local arch=$1 file=$2 doc=target/package/debian
	shift 2
	mkdir -p "$doc"
	gzip --no-name --best --stdout CHANGELOG.md >"$doc/changelog.gz"
	cat >"$doc/changelog.Debian" <<-END
		tidegate ($version-1) unstable; urgency=medium

		  * Version $version; changelog.gz says what is new.

		 -- $maintainer  $(date --utc --rfc-email --date="@$epoch")
	END
	cargo deb --quiet --no-build --no-strip --locked --package tidegate --target "$arch-unknown-linux-gnu" \
		--maintainer "$maintainer" --output "$file" "$@"
	rm -r "$doc"
}

# Of what is laid out; further arguments are cargo-generate-rpm's.
make_rpm() {
	local arch=$1 file=$2
	shift 2
	cargo generate-rpm --package crates/cli --target "$arch-unknown-linux-gnu" --output "$file" "$@"
}

make_packages() {
	local arch=$1
	stage "$out/tidegate-$arch" "$(generator)"
	make_deb "$arch" "$out/tidegate_${version}_$(other_name "$arch").deb"
	make_rpm "$arch" "$out/tidegate-$version-1.$arch.rpm" --payload-compress zstd
	pack --create --gzip --file "$out/tidegate-$version-$arch.tar.gz" --directory "$stage" usr etc
	make_image "$arch"
	rm -rf "$stage"
}

form=packages
case "${1:-}" in
compile)
	compile "${2:?"an architecture"}" "${3:?"a file"}"
	exit 0
	;;
deb | rpm)
	form=$1 binary=${2:?"a binary"}
	shift 2
	;;
esac
out=${1:?"a directory for the packages"}
shift
[ $# -gt 0 ] || [ "$form" != packages ] || set -- x86_64

groups=(build package)
[ "$form" = packages ] || groups=(build)
for arch in "$@"; do
	case "$arch" in
	"$host") ;;
	aarch64) groups+=(package-aarch64) ;;
	*)
		echo "$arch: packages are made for x86_64 and aarch64; another than this machine's ($host) only for aarch64" >&2
		exit 1
		;;
	esac
done
scripts/deps.sh "${groups[@]}"
tools=(deb generate-rpm)
[ "$form" != deb ] || tools=(deb)
[ "$form" != rpm ] || tools=(generate-rpm)
for tool in "${tools[@]}"; do
	if ! command -v "cargo-$tool" >/dev/null; then
		echo "cargo-$tool makes packages, and is not here: building it"
		cargo install --locked --quiet "cargo-$tool"
	fi
done

mkdir -p "$out"
out=$(realpath "$out")
# Packages of one commit are the same, and whoever made the commit answers for them.
epoch=$(git log -1 --format=%ct 2>/dev/null || date +%s)
maintainer=$(git log -1 --format='%cn <%ce>' 2>/dev/null || echo "The authors of Tidegate <root@localhost>")
export SOURCE_DATE_EPOCH=$epoch
if [ "$form" != packages ]; then
	strip -o "$out/binary" "$binary"
	stage "$out/binary" "$binary"
	rm "$out/binary"
	if [ "$form" = deb ]; then
		make_deb "$host" "$out/tidegate_${version}_$(other_name "$host").deb" --fast
	else
		for release in 1 2; do
			make_rpm "$host" "$out/tidegate-$version-$release.$host.rpm" --payload-compress gzip \
				--set-metadata "release = \"$release\""
		done
	fi
	rm -rf "$stage"
	exit 0
fi
for arch in "$@"; do
	build "$arch"
	make_packages "$arch"
done
rm "${@/#/$out/tidegate-}"
(cd "$out" && sha256sum tidegate[_-]"$version"[_-]* >SHA256SUMS && cat SHA256SUMS)
