#!/usr/bin/env bash
# tidegate-cni in chains of plugins: usage: scripts/cni.sh TIDEGATE. After `ptp`, called by cnitool, which is what a
# runtime does; and after `bridge`, called by podman with `network_backend = "cni"`, which podman 5 no longer has.
# Needs root and the plugins of Debian's containernetworking-plugins, and for its two parts cnitool
# (go install github.com/containernetworking/cni/cnitool@v1.3.0), and podman 4, iproute2 and socat. Prints SKIP for what
# is missing; puts everything back. CNI_PLUGINS is the plugins' directory.
set -euo pipefail

tidegate=$(realpath "${1:?usage: scripts/cni.sh TIDEGATE}")
plugins=${CNI_PLUGINS:-/usr/lib/cni}
for needed in "$plugins/ptp" "$plugins/host-local"; do
	if [ ! -x "$needed" ]; then
		echo "SKIP cni.sh: needs $needed (apt install containernetworking-plugins)"
		exit 0
	fi
done

name=tidegate-cni-$$
host=$name-h container=$name-c
work=$(mktemp -d)
cleanup() {
	if [ -e "$work/podman" ]; then of_podman rm --force --time 0 "$name" >/dev/null 2>&1 || true; fi
	ip netns del "$container" 2>/dev/null || true
	ip netns del "$host" 2>/dev/null || true
	umount "$work/bpf" 2>/dev/null || true
	rm -rf "$work"
}
trap cleanup EXIT

mkdir "$work/bin" "$work/net" "$work/bpf"
mount -t bpf -o mode=0700 bpf "$work/bpf"
ip netns add "$host"
ip netns add "$container"
ln -s "$tidegate" "$work/bin/tidegate-cni"
network() {
	cat >"$work/net/10-$name.conflist" <<-END
		{ "cniVersion": "$1", "name": "$name", "plugins": [
		  { "type": "ptp", "ipam": { "type": "host-local", "subnet": "10.98.7.0/24", "dataDir": "$work/ipam" } },
		  { "type": "tidegate-cni", "capabilities": { "bandwidth": true } } ] }
	END
}
# As containerd writes it where only rates were asked for.
export CAP_ARGS='{"bandwidth":{"IngressRate":20000000,"IngressBurst":4294967295,
	"EgressRate":10000000,"EgressBurst":4294967295}}'
export NETCONFPATH=$work/net CNI_PATH=$plugins:$work/bin TIDEGATE_BPFFS=$work/bpf/tidegate

on_host() {
	nsenter "--net=/run/netns/$host" "$@"
}
cni() {
	on_host "$cnitool" "$1" "$name" "/run/netns/$container"
}
expect() {
	local what=$1 want=$2 said
	shift 2
	said=$("$@" 2>&1) || said="FAILED $said"
	case $said in
	*FAILED*) ;;
	*"$want"*)
		echo "ok: $what"
		return
		;;
	esac
	echo "FAILED: $what: wanted \`$want\`, got: $said"
	exit 1
}

with_cnitool() {
	local version cnitool
	if ! cnitool=$(command -v cnitool); then
		echo "SKIP cni.sh: cnitool (go install github.com/containernetworking/cni/cnitool@v1.3.0)"
		return
	fi
	for version in 0.4.0 1.0.0; do
		network "$version"
		expect "$version: a container is added" 10.98.7. cni add
		expect "$version: it is limited" "in force" on_host "$tidegate" status
		expect "$version: its rates are those of the runtime" 10mbit on_host "$tidegate" status
		expect "$version: a check finds it" "" cni check
		expect "$version: it is deleted" "" cni del
		expect "$version: it is deleted again" "" cni del
		expect "$version: nothing is left" "No limits" on_host "$tidegate" status
	done
	expect "nothing is left in the kernel" "" test ! -e "$TIDEGATE_BPFFS"
}

of_podman() {
	on_host env CONTAINERS_CONF="$work/containers.conf" podman --root "$work/podman" --runroot "$work/podman-run" \
		--storage-driver vfs --cni-config-dir "$work/podman-net" "$@"
}

with_podman() {
	local root=$work/root backend
	mkdir -p "$root"/{usr,tmp,etc,run,proc,sys,dev} "$work/podman-net"
	for dir in bin sbin lib lib64; do
		if [ -e "/usr/$dir" ]; then ln -s "usr/$dir" "$root/$dir"; fi
	done
	cat >"$work/containers.conf" <<-END
		[containers]
		log_driver = "k8s-file"
		[engine]
		cgroup_manager = "cgroupfs"
		events_logger = "file"
		[network]
		network_backend = "cni"
		cni_plugin_dirs = ["$plugins", "$work/bin"]
	END
	cat >"$work/podman-net/10-$name.conflist" <<-END
		{ "cniVersion": "0.4.0", "name": "$name", "plugins": [
		  { "type": "bridge", "bridge": "tgcni0", "isGateway": true, "ipam": { "type": "host-local",
		    "subnet": "10.98.8.0/24", "routes": [{ "dst": "0.0.0.0/0" }], "dataDir": "$work/podman-ipam" } },
		  { "type": "tidegate-cni", "egressRate": 10000000, "egressBurst": 400000 } ] }
	END
	backend=$(command -v podman >/dev/null && of_podman info --format '{{.Host.NetworkBackend}}') || true
	if [ "$backend" != cni ]; then
		echo "SKIP cni.sh: podman with network_backend = \"cni\""
		return
	fi
	on_host ip link set lo up
	expect "podman: a container is started" "" of_podman run --detach --name "$name" --network "$name" \
		--stop-timeout 0 --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 \
		--volume /usr:/usr:ro --rootfs "$root" sleep infinity
	expect "podman: it is limited" "in force" on_host "$tidegate" status
	expect "podman: its rate is that of the network" 10mbit on_host "$tidegate" status
	expect "podman: it restarts" "$name" of_podman restart --time 0 "$name"
	expect "podman: it is limited again" "in force" on_host "$tidegate" status
	expect "podman: it is removed" "" of_podman rm --force --time 0 "$name"
	expect "podman: nothing is left" "No limits" on_host "$tidegate" status
}

with_cnitool
with_podman
