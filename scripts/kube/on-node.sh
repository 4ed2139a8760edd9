#!/usr/bin/env bash
# Inside the machine of scripts/kube/node.sh: starts what a node has, then does what it is told. An order is a line for
# bash that may use the functions here, in share/order; its output is share/answer, its errors are share/errors, and its
# status is share/code.
set -uo pipefail
share=/run/checks

setup() {
	:
}

# A net beyond the node: 10.98.0.2, in the network namespace `peer`.
peer_up() {
	ip netns add peer
	ip link add tg0 type veth peer name tg1 netns peer
	ip address add 10.98.0.1/24 dev tg0
	ip -n peer address add 10.98.0.2/24 dev tg1
	ip -n peer link set lo up
	ip -n peer link set tg1 up
	ip -n peer route add default via 10.98.0.1
	ip link set tg0 up gso_max_segs 1
	# This counts what the node itself sends there.
	ip netns exec peer iptables --append INPUT --source 10.98.0.1 --jump ACCEPT
}

# Takes all that comes to port 9, and sends without an end to whoever comes to port 10; the arguments come before.
serve() {
	systemd-run --quiet "$@" socat -u TCP-LISTEN:9,reuseaddr,fork OPEN:/dev/null
	systemd-run --quiet "$@" socat -u OPEN:/dev/zero TCP-LISTEN:10,reuseaddr,fork
}

node_up() {
	local device image
	modprobe --all overlay veth virtio_net
	sysctl --quiet net.ipv4.ip_forward=1
	device=$(basename /sys/bus/virtio/drivers/virtio_net/virtio*/net/*)
	ip address add 10.0.2.15/24 dev "$device"
	ip link set "$device" up
	ip route add default via 10.0.2.2
	peer_up
	serve
	serve ip netns exec peer
	# The service of the API server, as kube-proxy has it.
	iptables --table nat --append OUTPUT --destination 10.0.0.1 --protocol tcp --dport 443 --jump DNAT \
		--to-destination "10.0.2.2:$(cat /etc/kubernetes/port)"
	systemctl start containerd
	for image in /var/lib/images/*.tar; do
		ctr --namespace k8s.io images import "$image"
		rm "$image"
	done
	# A later version, for an upgrade.
	ctr --namespace k8s.io images tag docker.io/library/tidegate:{1,2}
	ctr --namespace k8s.io images list
	systemctl start kubelet
}

# The cgroup of a pod.
cgroup_of() {
	(cd /sys/fs/cgroup && find kubepods.slice -maxdepth 2 -name "*pod${1//-/_}.slice" | grep .)
}

# A process of a pod.
process_of() {
	local processes
	mapfile -t processes < <(cat "/sys/fs/cgroup/$(cgroup_of "$1")"/*/cgroup.procs)
	[ -n "${processes[*]}" ] && echo "${processes[0]}"
}

# The end outside of a pod's interface. What leaves a pod with the node's network leaves by tg0.
device_of() {
	local pid net index
	pid=$(process_of "$1") || return 1
	net=/proc/$pid/ns/net
	if [ "$(readlink "$net")" = "$(readlink /proc/self/ns/net)" ]; then
		echo tg0
		return
	fi
	index=$(nsenter --net="$net" ip -oneline link show eth0 | sed 's/.*@if\([0-9]*\):.*/\1/')
	ip -oneline link | sed -n "s/^$index: \([^@:]*\)[@:].*/\1/p"
}

# Bytes, with the headers of frames, that have left by a device of those.
left_by() {
	if [ "$1" = tg0 ]; then
		ip netns exec peer iptables --list INPUT --numeric --verbose --exact |
			awk '$8 == "10.98.0.1" { print $2 + 14 * $1 }'
	else
		cat "/sys/class/net/$1/statistics/rx_bytes"
	fi
}

# Bytes that the container `in` of a pod has read, with the headers that they came with. Its shell has those of an `nc`
# that has ended.
received_by() {
	local pid
	for pid in $(cat "/sys/fs/cgroup/$(cgroup_of "$1")"/*/cgroup.procs); do
		if tr '\0' ' ' <"/proc/$pid/cmdline" | grep --quiet 'nc [0-9.]* 10 '; then
			cat "/proc/$pid/io"
		fi
	done 2>/dev/null | awk '$1 == "rchar:" { bytes += $2 } END { printf "%.0f\n", bytes / 1448 * 1514 }'
}

# A pod has an interface, and so many bytes more leave by it. A limit may be in force before that is there.
sends() {
	local device='' from end=$((SECONDS + 500))
	until device=$(device_of "$1") && [ -n "$device" ]; do
		((SECONDS < end)) || return 1
		sleep 1
	done 2>/dev/null
	from=$(left_by "$device")
	until (($(left_by "$device") > from + $2)); do
		((SECONDS < end)) || return 1
		sleep 1
	done
}

# The container `in` of a pod runs, and has read so many bytes.
receives() {
	local end=$((SECONDS + 500))
	until (($(received_by "$1") > $2)); do
		((SECONDS < end)) || return 1
		sleep 1
	done 2>/dev/null
}

# What has left pods and what they have received, by their names, and what limits have counted. Meanwhile nothing
# passes. Each argument is NAME=UID.
look() {
	local each device
	local -A devices
	for each in "$@"; do
		devices[$each]=$(device_of "${each#*=}")
	done
	for device in "${devices[@]}"; do
		ip link set "$device" down
	done
	{
		for each in "$@"; do
			echo "{ \"pods\": { \"${each%=*}\": {
				\"out\": $(left_by "${devices[$each]}"), \"in\": $(received_by "${each#*=}") } } }"
		done
		echo "{ \"at_s\": $(cut -d ' ' -f 1 /proc/uptime) }"
		tidegate status --json
	} | jq --slurp 'reduce .[] as $part ({}; . * $part)'
	for device in "${devices[@]}"; do
		ip link set "$device" up
	done
}

# What one needs to know of a failure.
tell() {
	journalctl --no-pager --unit kubelet --lines 40
	journalctl --no-pager --unit containerd --lines 20
	tail -n 30 /var/log/pods/tidegate_*/*/*.log
	tidegate status
}

run() {
	local never
	node_up >"$share/node.log" 2>&1
	touch "$share/up"
	# An emulated machine has no time for a program that sleeps.
	exec {never}<> <(:)
	until [ -e "$share/end" ]; do
		if [ ! -e "$share/order" ]; then
			read -r -t 0.2 -u "$never"
			continue
		fi
		mv "$share/order" "$share/doing"
		(eval "$(cat "$share/doing")") >"$share/answer" 2>"$share/errors" </dev/null
		echo $? >"$share/code-new"
		mv "$share/code-new" "$share/code"
	done
}

"$@"
