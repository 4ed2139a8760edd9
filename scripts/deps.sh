#!/usr/bin/env bash
# Installs what is missing, after it said what and why. Silent, and off the network, if nothing is.
#
#   scripts/deps.sh GROUP...      groups: bench, build, fleet, lab, lint, vm
#
# Packages come from apt. Where there is none, it says what to install and ends with 1.
set -euo pipefail
cd "$(dirname "$0")/.."
# Where Debian keeps nginx and tc, and where users do not look.
export PATH="$PATH:/usr/sbin:/sbin"

# group | package | why | how to see that it is there
needs() {
	cat <<-'END'
	build | clang           | compiles the eBPF programs                   | command -v clang
	build | gcc             | compiles libbpf                              | command -v gcc
	build | make            | builds libbpf                                | command -v make
	build | pkg-config      | finds the libraries that libbpf links to     | command -v pkg-config
	build | libc6-dev       | headers of the C library                     | test -e /usr/include/stdio.h
	build | linux-libc-dev  | headers of the kernel                        | test -e /usr/include/linux/bpf.h
	build | libelf-dev      | libbpf reads eBPF objects with it            | pkg-config --exists libelf
	build | zlib1g-dev      | libelf unpacks sections with it              | pkg-config --exists zlib
	lab   | iproute2        | sets up tc and namespaces as users do        | command -v tc
	lab   | iperf3          | the transfer that is limited and measured    | command -v iperf3
	lab   | nginx           | serves the file that is downloaded           | command -v nginx
	lab   | curl            | downloads it                                 | command -v curl
	lab   | nftables        | polices, as a peer of scheme police          | command -v nft
	lab   | iptables        | gives packets to the relay that drl-cost has  | command -v iptables
	lab   | dropbear-bin    | is an SSH session through a limited port     | command -v dropbear
	lab   | tcpdump         | captures what a policer lets through         | command -v tcpdump
	fleet | redis-server    | a registry that a daemon finds its peers in   | command -v redis-server
	fleet | etcd-server     | another one                                  | command -v etcd
	vm    | qemu-system-x86 | emulates the machines of make test-vm        | command -v qemu-system-x86_64
	vm    | busybox-static  | is the first thing that runs in them         | command -v busybox
	vm    | kmod            | loads the modules of their kernels           | command -v depmod
	vm    | python3-venv    | holds virtme-ng, which starts them           | python3 -c 'import ensurepip'
	vm    | mmdebstrap      | makes the root file system with systemd      | command -v mmdebstrap
	vm    | e2fsprogs       | makes a disk of it                           | command -v mke2fs
	vm    | debian-archive-keyring | says that their kernels are Debian's  | test -e /usr/share/keyrings/debian-archive-keyring.gpg
	bench | valgrind        | counts the instructions of a timing wheel    | command -v valgrind
	lint  | clang-format    | checks how the eBPF programs are set         | command -v clang-format
	END
}

# The Rust toolchain is the user's own affair; an old one fails late and at length, so look first.
check_rust() {
	local wanted found
	wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
	if ! found=$(cargo --version 2>/dev/null); then
		echo "There is no cargo in PATH. Tidegate needs Rust $wanted or newer: https://rustup.rs"
		if [ -n "${SUDO_USER:-}" ]; then
			echo "(Or it is in the PATH of $SUDO_USER: call make without sudo, it asks when it must.)"
		fi
		return 1
	fi >&2
	found=$(echo "$found" | cut -d ' ' -f 2)
	if [ "$(printf '%s\n' "$wanted" "$found" | sort -V | head -n 1)" != "$wanted" ]; then
		echo "cargo is version $found, and Tidegate needs $wanted or newer: \`rustup update\`," \
			"or https://rustup.rs if your cargo came from the distribution." >&2
		return 1
	fi
}

as_root() {
	if [ "$(id -u)" = 0 ]; then
		"$@"
	else
		sudo "$@"
	fi
}

# A package that brings a server must not leave it running, now or after the next boot.
install_packages() {
	as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 bash -euc '
		policy=/usr/sbin/policy-rc.d
		if [ ! -e "$policy" ]; then
			trap "rm -f $policy" EXIT
			printf "#!/bin/sh\nexit 101\n" >"$policy"
			chmod 755 "$policy"
		fi
		lock="-o DPkg::Lock::Timeout=300"
		apt-get $lock --quiet=2 update || echo "apt-get update failed; trying with what is known"
		if [[ " $* " = *" iperf3 "* ]] && command -v debconf-set-selections >/dev/null; then
			echo "iperf3 iperf3/start_daemon boolean false" | debconf-set-selections
		fi
		apt-get $lock --quiet=2 --yes --no-install-recommends install "$@"
		for service in nginx redis-server etcd; do
			if [[ " $* " = *" $service"* ]] && command -v systemctl >/dev/null; then
				systemctl --quiet disable "$service.service" >/dev/null 2>&1 ||
					echo "$service stays enabled: \`systemctl disable $service\` keeps it from starting at boot"
			fi
		done
	' deps "$@"
}

trimmed() {
	local text=$1
	text=${text#"${text%%[![:space:]]*}"}
	echo "${text%"${text##*[![:space:]]}"}"
}

check_rust

missing=()
reasons=()
while IFS='|' read -r group package why check; do
	group=$(trimmed "$group") package=$(trimmed "$package")
	[[ " $* " = *" $group "* ]] || continue
	if ! eval "$check" >/dev/null 2>&1; then
		missing+=("$package")
		reasons+=("$(printf '  %-15s %s' "$package" "$(trimmed "$why")")")
	fi
done < <(needs)

if [ ${#missing[@]} = 0 ]; then
	exit 0
fi

{
	echo "Missing on this machine:"
	printf '%s\n' "${reasons[@]}"
	if ! command -v apt-get >/dev/null; then
		echo "There is no apt-get here. Install these (the names are Debian's), then try again."
		exit 1
	fi
	if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
		echo "Installing needs root, and there is no sudo. As root:"
		echo "  apt-get install --no-install-recommends ${missing[*]}"
		exit 1
	fi
	echo "Installing them with apt-get. No server is left running."
} >&2
install_packages "${missing[@]}" >&2
