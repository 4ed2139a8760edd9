# The units and packages as shipped, in machines of their own with systemd as PID 1. Read by scripts/vm.sh.
#
#   scripts/vm.sh systemd                    everything below
#   scripts/vm.sh systemd police             the daemon's unit, with a limit of one scheme
#   scripts/vm.sh systemd podman             what tidegate does in containers of podman
#   scripts/vm.sh systemd package reboot     the life of the .deb: installed, upgraded, killed; then the same disk in
#                                            another boot, and purged
#   scripts/vm.sh systemd containers         limits on containers of podman, by name and by label
#   scripts/vm.sh systemd docker             the same of Docker
#   scripts/vm.sh systemd rpm                the .rpm: installed, upgraded, removed
#   scripts/vm.sh systemd hybrid v1          hosts with cgroup v1 beside v2, and with v1 alone
#   scripts/vm.sh systemd pace:stops,kill    some checks; the scripts scripts/vm/*-checks.sh have their names
#
# TIDEGATE_BINARY, TIDEGATE_UNIT and TIDEGATE_DEB name another binary, daemon's unit or .deb than those of this tree.
#
# A Debian root file system is made once (target/vm/systemd/KEY.tar, where KEY is a hash of its packages). For
# each run it becomes two ext4 images: one into which the binary, its man pages and the daemon's unit are installed
# as `make install` does, and one that only carries the .deb, and the same as a later version. An image boots once
# for each word; what a machine writes to its disk is discarded, but from `package` to `reboot`. The directory
# target/vm/systemd/share carries the checks in and their log out.

# The kernel of these machines, where none is said.
systemd_kernel=6.12
# A machine that has not ended by then hangs.
limit_systemd=40m
unit_words=(pace police spring htb podman package reboot containers docker rpm hybrid v1)
image_packages=(systemd systemd-sysv dbus iproute2 kmod procps jq libelf1 podman crun
	socat uidmap libpam-systemd dbus-user-session bpftool docker.io docker-registry curl rpm)

# A release whose C library is not older than that which the binary was linked with.
image_suite() {
	(
		source /etc/os-release
		[ "${VERSION_CODENAME:-}" = bookworm ] && echo bookworm || echo trixie
	)
}

# The root file system as an archive; its path is in `base`.
make_base() {
	local suite
	suite=$(image_suite)
	[ "$suite" = bookworm ] || image_packages+=(docker-cli)
	debian_base "$vm/systemd" "$suite" "${image_packages[*]}" \
		--customize-hook='cd "$1/lib/systemd/system" && for unit in docker.service docker.socket containerd.service \
			docker-registry.service; do
			[ ! -e "$unit" ] || chroot "$1" systemctl disable "$unit"
		done'
}

# As root: a disk of that archive, with what runs the checks, and what the function named first installs.
make_disk() {
	local archive=$1 disk=$2 root service
	shift 2
	root=$(mktemp --directory)
	trap "rm -rf --one-file-system '$root'" EXIT
	tar --extract --file "$archive" --directory "$root" --numeric-owner --exclude=./dev/*
	"$@"
	echo tidegate >"$root/etc/hostname"
	for service in setup checks; do
		cp "scripts/vm/unit-$service.service" "$root/etc/systemd/system/"
		ln -s "../unit-$service.service" "$root/etc/systemd/system/multi-user.target.wants/"
	done
	rm -f "$disk"
	mke2fs -q -t ext4 -d "$root" "$disk" 3G
	# Whoever called this boots it.
	chown --reference="$vm" "$disk"
}

# The binary, its man pages and the daemon's unit.
with_unit() {
	local binary=$1 unit=$2
	install -D -m 755 "$binary" "$root/usr/local/bin/tidegate"
	mkdir -p "$root/usr/local/share/man/man1" "$root/usr/local/lib/systemd/system"
	"$binary" man "$root/usr/local/share/man/man1"
	cp "$unit" "$root/usr/local/lib/systemd/system/tidegate-daemon.service"
	ln -s /usr/local/lib/systemd/system/tidegate-daemon.service "$root/etc/systemd/system/multi-user.target.wants/"
}

# The .deb, and the same as a later version, with another default file.
with_deb() {
	local deb=$1 parts
	install -D -m 644 "$deb" "$root/root/tidegate-1.deb"
	parts=$root/root/parts
	dpkg-deb --raw-extract "$deb" "$parts"
	sed -i 's/^Version: .*/&+later/' "$parts/DEBIAN/control"
	echo "# Of a later version." >>"$parts/etc/tidegate/limits.toml"
	dpkg-deb --root-owner-group -Zgzip -z1 --build "$parts" "$root/root/tidegate-2.deb" >/dev/null
	rm -r "$parts"
}

# The .rpm, and the same as a later release.
with_rpm() {
	local release
	for release in 1 2; do
		install -D -m 644 "$1"/tidegate-*-"$release".*.rpm "$root/root/tidegate-$release.rpm"
	done
}

# Boots a disk with systemd; the share is mounted by unit-setup.service. Further options are QEMU's.
boot_image() {
	local kernel=$1 checks=$2 disk=$3 share=${share:-$vm/systemd/share} kvm=() layout=()
	shift 3
	case ${checks%%:*} in
	hybrid | v1)
		# systemd asks for the second word since 256.
		layout=(--append systemd.unified_cgroup_hierarchy=0 --append SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1)
		;;&
	v1) layout+=(--append systemd.legacy_systemd_cgroup_controller=1) ;;
	esac
	runs_on_kvm "$kernel" || kvm=("${emulated[@]}" --append tidegate.emulated)
	# systemd has the console, and a console that ends would end the machine.
	tail --follow /dev/null --pid $$ |
		vng --run "$(ls "$vm/$kernel"/boot/vmlinuz-*)" "${kvm[@]}" --force-9p --cpus "$cpus" --memory 4G \
		--root-disk "$disk" --root-dev /dev/vda --root-fstype ext4 --systemd --rw \
		--append systemd.mask=serial-getty@ttyS0.service --append "tidegate.checks=$checks" "${layout[@]}" \
		--qemu-opts="$* -virtfs local,path=$share,mount_tag=tidegate,security_model=none"
}

# Makes the disk that a word needs, if this run has not made it yet.
disk_for() {
	local binary=${TIDEGATE_BINARY:-$(scripts/target-dir.sh)/debug/tidegate} deb=${TIDEGATE_DEB:-}
	local unit=${TIDEGATE_UNIT:-$root/packaging/systemd/tidegate-daemon.service} packages=$vm/systemd/$1
	local make=(scripts/as-root.sh "$self" make_disk "$base" "$vm/systemd/$1.img")
	[[ " ${made[*]} " != *" $1 "* ]] || return 0
	made+=("$1")
	if [ "$1" = deb ] && [ -n "$deb" ]; then
		"${make[@]}" with_deb "$deb"
		return
	fi
	[ -n "${TIDEGATE_BINARY:-}" ] || cargo build --quiet --locked --bin tidegate || return 1
	if [ "$1" = unit ]; then
		"${make[@]}" with_unit "$binary" "$unit"
		return
	fi
	rm -rf "$packages"
	scripts/package.sh "$1" "$binary" "$packages" >/dev/null || return 1
	[ "$1" = rpm ] || packages=$(ls "$packages"/*.deb)
	"${make[@]}" "with_$1" "$packages"
}

# The checks of each word; their log is target/vm/systemd.log.
check_systemd() {
	local base share=$vm/systemd/share words=("$@") word kind checks boot_log disk options code=0 made=()
	local life=$vm/systemd/life.img
	((${#words[@]} > 0)) || words=("${unit_words[@]}")
	mkdir -p "$vm/systemd"
	rm -f "$life"
	: >"$vm/systemd.log"
	if ! fetch_kernel "$systemd_kernel" || ! make_base; then
		echo "SKIP unit_under_systemd: Debian's kernel $systemd_kernel or a root file system cannot be fetched" |
			tee "$vm/systemd.log"
		return 0
	fi
	echo "Units and packages under systemd, on $(describe "$systemd_kernel"):"
	for word in "${words[@]}"; do
		kind=deb
		case ${word%%:*} in
		package | reboot) checks=package ;;
		containers | docker) checks=container ;;
		rpm) checks=rpm kind=rpm ;;
		hybrid | v1) checks=cgroup ;;
		*) checks=unit kind=unit ;;
		esac
		disk_for "$kind" || return 1
		disk=$vm/systemd/$kind.img options=-snapshot
		case ${word%%:*} in
		package) cp --sparse=always "$disk" "$life" ;;&
		package | reboot) disk=$life options= ;;
		esac
		if [ ! -e "$disk" ]; then
			echo "\`reboot\` is another boot of what \`package\` leaves: say \`systemd package reboot\`" >&2
			return 1
		fi
		rm -rf "$share"
		mkdir -p "$share"
		cp scripts/vm/*.sh scripts/podman.sh "$share/"
		mv "$share/$checks-checks.sh" "$share/main.sh"
		boot_log=$vm/boot-systemd-${word%%:*}.log
		scripts/bounded.sh "$limit_systemd" \
			"$self" boot_image "$systemd_kernel" "$word" "$disk" $options >"$boot_log" 2>&1 </dev/null || true
		{
			echo "     Running systemd-${word%%:*}-0"
			cat "$share/log" 2>/dev/null || tail -n 30 "$boot_log"
		} | tee -a "$vm/systemd.log" | scripts/test-report.sh brief
		if [ ! -e "$share/code" ]; then
			echo "  the machine did not end within $limit_systemd, or did not boot: $boot_log"
		fi
		[ "$(cat "$share/code" 2>/dev/null)" = 0 ] || code=1
	done
	rm -f "$vm"/systemd/*.img
	return "$code"
}
