#!/usr/bin/env bash
# Installs what is missing, after it said what and why. Silent, and off the network, if nothing is.
#
#   scripts/deps.sh GROUP...      groups: bench, build, cross-aarch64, cross-root, fleet, fresh, kube, lab, lint,
#                                 package, package-aarch64, vm, web
#
# Debian and Ubuntu: it installs with apt. Fedora and Arch: it prints the command with their names for the
# packages, and ends with 1. Elsewhere it prints Debian's names, and ends with 1.
set -euo pipefail
cd "$(dirname "$0")/.."
# Where Debian keeps nginx and tc, and where users do not look.
export PATH="$PATH:/usr/sbin:/sbin"

# group | Debian | Fedora | Arch | why | how to see that it is there
needs() {
	cat <<-'END'
	build | clang | clang | clang | compiles the eBPF programs; bindgen reads their headers with its library | command -v clang
	build | gcc | gcc | gcc | compiles libbpf | command -v gcc
	build | make | make | make | builds libbpf | command -v make
	build | pkg-config | pkgconf-pkg-config | pkgconf | finds the libraries that libbpf links to | command -v pkg-config
	build | libc6-dev | glibc-devel | glibc | headers of the C library | test -e /usr/include/stdio.h
	build | linux-libc-dev | kernel-headers | linux-api-headers | headers of the kernel | test -e /usr/include/linux/bpf.h
	build | libelf-dev | elfutils-libelf-devel | libelf | libbpf reads eBPF objects with it | pkg-config --exists libelf
	build | zlib1g-dev | zlib-devel | zlib | libelf unpacks sections with it | pkg-config --exists zlib
	lab | python3-jsonschema | python3-jsonschema | python-jsonschema | checks the JSON schema of spec files in a test | python3 -c 'import jsonschema'
	lab | iproute2 | iproute-tc | iproute2 | sets up tc and namespaces as users do | command -v tc
	lab | iperf3 | iperf3 | iperf3 | sends the transfer that is limited and measured | command -v iperf3
	lab | nginx | nginx | nginx | serves the file that is downloaded | command -v nginx
	lab | redis-server | valkey-compat-redis | valkey | answers the requests of applications | command -v redis-server
	lab | postgresql | postgresql-server postgresql-contrib | postgresql | answers pgbench in applications | command -v initdb || ls /usr/lib/postgresql/*/bin/initdb
	lab | curl | curl | curl | downloads it | command -v curl
	lab | wget | wget | wget | downloads it with a limit of its own, as a peer of tidegate run | command -v wget
	lab | rsync | rsync | rsync | is such a peer | command -v rsync
	lab | rclone | rclone | rclone | is such a peer, and serves two of them | command -v rclone
	lab | restic | restic | restic | is such a peer | command -v restic
	lab | openssh-client | openssh-clients | openssh | has scp, such a peer | command -v scp
	lab | openssh-server | openssh-server | openssh | takes in what scp and rsync send | command -v sshd
	lab | nftables | nftables | nftables | polices, as a peer of scheme police | command -v nft
	lab | iptables | iptables-nft | iptables | hands packets to the relay of drl-cost | command -v iptables
	lab | dropbear-bin | dropbear | dropbear | runs an SSH session through a limited port | command -v dropbear
	lab | tcpdump | tcpdump | tcpdump | captures what a policer lets through | command -v tcpdump
	fleet | redis-server | valkey-compat-redis | valkey | is a registry in which a daemon finds its peers | command -v redis-server
	fleet | etcd-server | etcd | etcd | is another such registry | command -v etcd
	web | chromium | chromium | chromium | opens the page of tidegate web in a test | command -v chromium
	web | prometheus | golang-github-prometheus | prometheus | checks metrics, alerts and dashboards in tests | command -v promtool
	kube | etcd-server | etcd | etcd | keeps what the API server of make test-kube stores | command -v etcd
	kube | jq | jq | jq | compares its objects | command -v jq
	kube | curl | curl | curl | asks it with a token | command -v curl
	kube | openssl | openssl | openssl | makes its certificates | command -v openssl
	kube | python3 | python3 | python | finds free ports | command -v python3
	kube | runc | runc | runc | runs the agent as a container | command -v runc
	kube | golang-github-containers-common | containers-common | containers-common | has the seccomp profile of runtimes | test -e /usr/share/containers/seccomp.json
	fresh | mmdebstrap | mmdebstrap | mmdebstrap | makes the fresh root file system of make test-fresh | command -v mmdebstrap
	package | autoconf | autoconf | autoconf | configures the libelf that is linked in | command -v autoreconf
	package | automake | automake | automake | makes its makefiles | command -v automake
	package | autopoint | gettext-devel | gettext | makes its translations | command -v autopoint
	package | flex | flex | flex | makes its scanners | command -v flex
	package | bison | bison | bison | makes its parsers | command -v bison
	package | gawk | gawk | gawk | makes its tables | command -v gawk
	package | file | file | file | tells that the binary is static | command -v file
	cross-aarch64 | gcc-aarch64-linux-gnu | gcc-aarch64-linux-gnu | aarch64-linux-gnu-gcc | compiles for aarch64 | command -v aarch64-linux-gnu-gcc
	cross-aarch64 | libc6-dev-arm64-cross | glibc-arm-linux-gnu | aarch64-linux-gnu-glibc | the C library for aarch64 | test -e /usr/aarch64-linux-gnu/lib/libc.a
	package-aarch64 | qemu-user-static | qemu-user-static | qemu-user-static | starts the binary for aarch64 | command -v qemu-aarch64-static
	cross-root | mmdebstrap | mmdebstrap | mmdebstrap | makes the root file system that has Rust for aarch64 | command -v mmdebstrap
	cross-root | debian-archive-keyring | debian-keyring | debian-archive-keyring | proves that its packages are Debian's | test -e /usr/share/keyrings/debian-archive-keyring.gpg
	vm | qemu-system-x86 | qemu-system-x86-core | qemu-system-x86 | emulates the machines of make test-vm | command -v qemu-system-x86_64
	vm | busybox-static | busybox | busybox | is the first process in them | command -v busybox
	vm | file | file | file | tells virtme-ng what a kernel's file is | command -v file
	vm | kmod | kmod | kmod | loads the modules of their kernels | command -v depmod
	vm | python3-venv | python3 | python | holds virtme-ng, which starts them | python3 -c 'import ensurepip'
	vm | mmdebstrap | mmdebstrap | mmdebstrap | makes the root file system that has systemd | command -v mmdebstrap
	vm | e2fsprogs | e2fsprogs | e2fsprogs | makes a disk of it | command -v mke2fs
	vm | debian-archive-keyring | debian-keyring | debian-archive-keyring | proves that their kernels are Debian's | test -e /usr/share/keyrings/debian-archive-keyring.gpg
	bench | valgrind | valgrind | valgrind | counts the instructions of a timing wheel | command -v valgrind
	lint | clang-format | clang-tools-extra | clang | checks the format of the eBPF programs | command -v clang-format
	END
}

# The oldest kernel whose BPF has what the programs use.
oldest_kernel=6.1

# Building needs no particular kernel. Running does: say so before anybody waits for a build.
check_kernel() {
	local found
	found=$(uname -r)
	if [ "$(printf '%s\n' "$oldest_kernel" "$found" | sort -V | head -n 1)" != "$oldest_kernel" ]; then
		echo "This machine runs Linux $found, and Tidegate needs $oldest_kernel or newer." \
			"Boot a newer kernel (Debian 12, Ubuntu 24.04 and Fedora 38 have one)." >&2
		return 1
	fi
	if [ ! -e /sys/kernel/btf/vmlinux ]; then
		echo "This kernel ($found) carries no BTF: /sys/kernel/btf/vmlinux is missing, and eBPF programs need it." \
			"Boot a kernel that is built with CONFIG_DEBUG_INFO_BTF=y, as the distributions' are." >&2
		return 1
	fi
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

# A package that brings a server must not leave it running, now or after the next boot. That of PostgreSQL must not
# make a database either: while it is installed, the setting of postgresql-common says so.
install_packages() {
	as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 bash -euc '
		policy=/usr/sbin/policy-rc.d
		clusters=/etc/postgresql-common/createcluster.conf
		own_policy=
		undo() {
			[ -z "$own_policy" ] || rm -f "$policy"
			[ ! -e "$clusters.before" ] || mv "$clusters.before" "$clusters"
		}
		trap undo EXIT
		if [ ! -e "$policy" ]; then
			own_policy=yes
			printf "#!/bin/sh\nexit 101\n" >"$policy"
			chmod 755 "$policy"
		fi
		lock="-o DPkg::Lock::Timeout=300"
		apt-get $lock --quiet=2 update || echo "apt-get update failed; trying with what is known"
		if [[ " $* " = *" iperf3 "* ]] && command -v debconf-set-selections >/dev/null; then
			echo "iperf3 iperf3/start_daemon boolean false" | debconf-set-selections
		fi
		install="apt-get $lock --quiet=2 --yes --no-install-recommends install"
		if [[ " $* " = *" postgresql "* ]]; then
			$install postgresql-common
			cp --preserve "$clusters" "$clusters.before"
			echo "create_main_cluster = false" >>"$clusters"
		fi
		$install "$@"
		for server in nginx:nginx redis-server:redis-server etcd-server:etcd postgresql:postgresql openssh-server:ssh; do
			service=${server#*:}
			if [[ " $* " = *" ${server%:*} "* ]] && command -v systemctl >/dev/null; then
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

# Who installs here, and which column of the table has its names.
if command -v apt-get >/dev/null; then
	installer="apt-get install --no-install-recommends" column=debian
elif command -v dnf >/dev/null; then
	installer="dnf install" column=fedora
elif command -v pacman >/dev/null; then
	installer="pacman -S --needed" column=arch
else
	installer="" column=debian
fi

check_rust
[[ " $* " != *" lab "* ]] || check_kernel

missing=()
reasons=()
while IFS='|' read -r group debian fedora arch why check; do
	group=$(trimmed "$group")
	[[ " $* " = *" $group "* ]] || continue
	if ! eval "$check" >/dev/null 2>&1; then
		package=$(trimmed "${!column}")
		missing+=("$package")
		reasons+=("$(printf '  %-22s %s' "$package" "$(trimmed "$why")")")
	fi
done < <(needs)

if [ ${#missing[@]} = 0 ]; then
	exit 0
fi

{
	echo "Missing on this machine:"
	printf '%s\n' "${reasons[@]}"
	if [ -z "$installer" ]; then
		echo "Install these (the names are Debian's), then try again."
		exit 1
	fi
	if [ "$column" != debian ]; then
		echo "Install them, then try again:"
		echo "  sudo $installer ${missing[*]}"
		exit 1
	fi
	if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
		echo "Installing needs root, and there is no sudo. As root:"
		echo "  $installer ${missing[*]}"
		exit 1
	fi
	echo "Installing them with apt-get. No server is left running."
} >&2
install_packages "${missing[@]}" >&2
