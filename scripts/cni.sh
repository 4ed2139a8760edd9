#!/usr/bin/env bash
# tidegate-cni in a chain after the plugin `ptp`, called by cnitool, which is what a runtime does: usage:
# scripts/cni.sh TIDEGATE. Needs root, the plugins of Debian's containernetworking-plugins and cnitool
# (go install github.com/containernetworking/cni/cnitool@v1.3.0). Prints SKIP where one is missing; puts everything
# back. CNI_PLUGINS is the plugins' directory.
set -euo pipefail

tidegate=$(realpath "${1:?usage: scripts/cni.sh TIDEGATE}")
plugins=${CNI_PLUGINS:-/usr/lib/cni}
for needed in "$plugins/ptp" "$plugins/host-local"; do
	if [ ! -x "$needed" ]; then
		echo "SKIP cni.sh: needs $needed (apt install containernetworking-plugins)"
		exit 0
	fi
done
if ! cnitool=$(command -v cnitool); then
	echo "SKIP cni.sh: needs cnitool (go install github.com/containernetworking/cni/cnitool@v1.3.0)"
	exit 0
fi

name=tidegate-cni-$$
host=$name-h container=$name-c
work=$(mktemp -d)
cleanup() {
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
