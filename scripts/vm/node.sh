# A machine with systemd that is a node of Kubernetes. Read by scripts/vm.sh.
#
#   scripts/vm.sh node DIR [OPTIONS]    boots one, and waits until it ends. DIR/root is copied to its disk. DIR/share is
#                                       where it finds main.sh, and what it and this machine see both; OPTIONS are QEMU's
#
# It has containerd, runc and the plugins of CNI. The address 10.0.2.2 in it is the loopback interface of this machine.

node_packages=(systemd systemd-sysv dbus iproute2 iptables kmod procps jq libelf1 socat
	containerd runc containernetworking-plugins)

with_files() {
	cp --recursive --no-target-directory --preserve=mode,links "$1" "$root"
}

node() {
	# A second processor of an emulated machine takes from the first.
	local dir=$1 base cpus=1
	shift
	image_packages=("${node_packages[@]}")
	mkdir -p "$vm/systemd"
	make_base || skip "no root file system of Debian can be made (target/vm/systemd/mmdebstrap.log)"
	scripts/as-root.sh "$self" make_disk "$base" "$dir/disk.img" with_files "$dir/root" || return 1
	share=$dir/share boot_image "$systemd_kernel" node "$dir/disk.img" \
		"-netdev user,id=node -device virtio-net-pci,netdev=node $*"
}
