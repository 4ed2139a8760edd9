# The unit as shipped, in a machine of its own with systemd as PID 1. Read by scripts/vm.sh.
#
#   scripts/vm.sh systemd                    all checks of all schemes, and those in containers
#   scripts/vm.sh systemd police             those of one scheme
#   scripts/vm.sh systemd podman             what tidegate does in containers of podman
#   scripts/vm.sh systemd pace:stops,kill    some of them; scripts/vm/unit-checks.sh has their names
#
# TIDEGATE_BINARY and TIDEGATE_UNIT name another binary or unit than those of this tree.
#
# A Debian root file system is made once (target/vm/systemd/KEY.tar, where KEY is a hash of its packages). For
# each run the binary, its man pages and the unit are installed into it as `make install` does, and it becomes an
# ext4 image. The image boots once for each scheme; what a machine writes to its disk is discarded. The directory
# target/vm/systemd/share carries the checks in and their log out.

# The kernel of these machines.
systemd_kernel=6.12
# A machine that has not ended by then hangs.
limit_systemd=20m
unit_schemes=(pace police spring htb)
image_packages=(systemd systemd-sysv dbus iproute2 kmod procps jq libelf1 podman crun)

# A release whose C library is not older than that which the binary was linked with.
image_suite() {
	(
		source /etc/os-release
		[ "${VERSION_CODENAME:-}" = bookworm ] && echo bookworm || echo trixie
	)
}

# The root file system as an archive; its path is in `base`.
make_base() {
	local suite key partial=$vm/systemd/partial.tar
	suite=$(image_suite)
	key=$(echo "$suite ${image_packages[*]}" | sha256sum | cut -c 1-12)
	base=$vm/systemd/$suite-$key.tar
	[ ! -e "$base" ] || return 0
	debian_sources "$suite" >"$vm/systemd/sources.list" || return 1
	apt_settings >"$vm/systemd/apt.conf"
	echo "Making a root file system of Debian $suite (${image_packages[*]})"
	# What can be made anew need not reach the disk at each step.
	scripts/as-root.sh env --unset APT_CONFIG mmdebstrap --quiet --variant=minbase \
		--include="$(IFS=,; echo "${image_packages[*]}")" \
		--aptopt="$vm/systemd/apt.conf" --dpkgopt=force-unsafe-io \
		"$suite" "$partial" "$vm/systemd/sources.list" >"$vm/systemd/mmdebstrap.log" 2>&1 || return 1
	mv "$partial" "$base"
}

# As root: a disk of that archive, with the binary, its man pages and the unit, and what runs the checks.
make_disk() {
	local archive=$1 binary=$2 unit=$3 disk=$4 root service
	root=$(mktemp --directory)
	trap "rm -rf --one-file-system '$root'" EXIT
	tar --extract --file "$archive" --directory "$root" --numeric-owner --exclude=./dev/*
	install -D -m 755 "$binary" "$root/usr/local/bin/tidegate"
	mkdir -p "$root/usr/local/share/man/man1" "$root/usr/local/lib/systemd/system"
	"$binary" man "$root/usr/local/share/man/man1"
	cp "$unit" "$root/usr/local/lib/systemd/system/tidegate-daemon.service"
	echo tidegate >"$root/etc/hostname"
	for service in setup checks; do
		cp "scripts/vm/unit-$service.service" "$root/etc/systemd/system/"
		ln -s "../unit-$service.service" "$root/etc/systemd/system/multi-user.target.wants/"
	done
	ln -s /usr/local/lib/systemd/system/tidegate-daemon.service "$root/etc/systemd/system/multi-user.target.wants/"
	rm -f "$disk"
	mke2fs -q -t ext4 -d "$root" "$disk" 1G
	# Whoever called this boots it.
	chown --reference="$vm" "$disk"
}

# Boots the disk with systemd; the share is mounted by unit-setup.service.
boot_image() {
	local kernel=$1 checks=$2 kvm=()
	runs_on_kvm "$kernel" || kvm=("${emulated[@]}" --append tidegate.emulated)
	# systemd has the console, and a console that ends would end the machine.
	tail --follow /dev/null --pid $$ |
		vng --run "$(ls "$vm/$kernel"/boot/vmlinuz-*)" "${kvm[@]}" --force-9p --cpus "$cpus" --memory 1G \
		--root-disk "$vm/systemd/disk.img" --root-dev /dev/vda --root-fstype ext4 --systemd --rw \
		--append systemd.mask=serial-getty@ttyS0.service --append "tidegate.checks=$checks" \
		--qemu-opts="-snapshot -virtfs local,path=$vm/systemd/share,mount_tag=tidegate,security_model=none"
}

# The checks of each scheme; their log is target/vm/systemd.log.
check_unit() {
	local base share=$vm/systemd/share words=("$@") word boot_log code=0
	local binary=${TIDEGATE_BINARY:-$root/target/debug/tidegate}
	local unit=${TIDEGATE_UNIT:-$root/packaging/systemd/tidegate-daemon.service}
	((${#words[@]} > 0)) || words=("${unit_schemes[@]}" podman)
	mkdir -p "$vm/systemd"
	: >"$vm/systemd.log"
	if ! fetch_kernel "$systemd_kernel" || ! make_base; then
		echo "SKIP unit_under_systemd: Debian's kernel $systemd_kernel or a root file system cannot be fetched" |
			tee "$vm/systemd.log"
		return 0
	fi
	[ -n "${TIDEGATE_BINARY:-}" ] || cargo build --quiet --locked --bin tidegate || return 1
	scripts/as-root.sh "$self" make_disk "$base" "$binary" "$unit" "$vm/systemd/disk.img" || return 1
	echo "The unit under systemd, on $(describe "$systemd_kernel"):"
	for word in "${words[@]}"; do
		rm -rf "$share"
		mkdir -p "$share"
		cp scripts/vm/unit-checks.sh scripts/podman.sh "$share/"
		boot_log=$vm/boot-systemd-${word%%:*}.log
		scripts/bounded.sh "$limit_systemd" \
			"$self" boot_image "$systemd_kernel" "$word" >"$boot_log" 2>&1 </dev/null || true
		{
			echo "     Running unit-${word%%:*}-0"
			cat "$share/log" 2>/dev/null || tail -n 30 "$boot_log"
		} | tee -a "$vm/systemd.log" | scripts/test-report.sh brief
		if [ ! -e "$share/code" ]; then
			echo "  the machine did not end within $limit_systemd, or did not boot: $boot_log"
		fi
		[ "$(cat "$share/code" 2>/dev/null)" = 0 ] || code=1
	done
	return "$code"
}
