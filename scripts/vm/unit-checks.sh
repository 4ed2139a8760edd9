#!/usr/bin/env bash
# Inside a machine with systemd: checks of tidegate-daemon.service as shipped, for one scheme.
#
# scripts/vm/checks.sh says how they are chosen: tidegate.checks=SCHEME[:NAME,NAME...].
#
#   boots     the limited service is not there when the machine boots, and comes later
#   stops     the limited service stops; the daemon goes on, and can be restarted meanwhile
#   restarts  the limited service restarts; `tidegate apply` limits it again under the same daemon
#   dns       names of peers do not resolve, and the name server does not answer
#   busy      another writer holds the store for longer than the watchdog allows
#   kill      the daemon is killed; the limit holds, and the unit shares again
#   oom       the daemon has no memory; the limit holds, and the unit shares again
#   full      the disk is full while the file is read again, and while the daemon starts
#
# SCHEME may be `podman`: then scripts/podman.sh runs instead, without the unit.
#
# The limited service is backup.service, which sends UDP by the device tg0. With `pace` and `police` the limit is
# on its cgroup. With `htb` it is a class for that cgroup inside the limit of the device. With `spring` it is on
# the device, which comes and goes with the service, as a guest's port does. All traffic ends at the other end of
# a veth pair.
set -uo pipefail

source "${BASH_SOURCE%/*}/checks.sh"

checks=(boots stops restarts dns busy kill oom full)
file=/etc/tidegate/fleet.toml
# Of the unit. Where the daemon must go on, it is watched for so long; a writer keeps the store for longer than the
# watchdog allows.
watchdog_s=2 watch_s=5
# Of the group.
interval=250ms lease=3s
# The group's rate; of it the host has a twentieth in any case.
group_bit_s=400000
# An emulated machine can stand still for seconds, and would be killed by a watchdog of 2 s. There, and only
# there, a drop-in gives the unit another one.
if [ -n "$emulated" ]; then
	watchdog_s=20 watch_s=10
	interval=1s lease=30s
fi

scheme=$word
[ "$scheme" != podman ] || checks=(containers)

# What is limited, and how.
limits() {
	local cgroup='{ cgroup = "system.slice/backup.service" }'
	case $scheme in
	htb)
		cat <<-END
			[[limit]]
			name = "uplink"
			scope = { dev = "tg0" }
			egress = "10mbit"
			scheme = "htb"

			[[limit]]
			name = "backup"
			scope = $cgroup
			parent = "uplink"
			ceiling = "2mbit"
			scheme = "htb"
		END
		;;
	*)
		[ "$scheme" != spring ] || cgroup='{ dev = "tg0" }'
		cat <<-END
			[[limit]]
			name = "backup"
			scope = $cgroup
			egress = "2mbit"
			scheme = "$scheme"
		END
		;;
	esac
}

# The spec; further lines of [fleet] are arguments.
write_file() {
	(($# > 0)) || set -- 'peers = ["127.0.0.1"]'
	mkdir -p /etc/tidegate
	{
		cat <<-END
			[fleet]
			name = "test"
			node = "h0"
			keys = "/etc/tidegate/fleet.keys"
			acceptors = ["h0"]
		END
		printf '%s\n' "$@"
		limits
		cat <<-END
			[[group]]
			name = "all"
			rate = "$((group_bit_s / 1000))kbit"
			algorithm = "share"
			members = ["backup"]
			hosts = 2
			interval = "$interval"
			lease = "$lease"
			suspect = "$lease"
		END
	} >"$file"
}

# The device that the service sends by.
port_up() {
	ip link add tg0 type veth peer name tg1
	ip address add 10.98.0.1/24 dev tg0
	ip link set tg1 up
	ip link set tg0 up
	# Nobody has this address: what is sent there goes over the wire, and nobody answers.
	ip neighbour replace 10.98.0.2 lladdr 02:00:00:00:00:99 nud permanent dev tg0
}

# The service: more than the limit, and not more than an emulated machine can bear.
flood() {
	local data i
	data=$(printf '%01400d' 0)
	exec 3>/dev/udp/10.98.0.2/9
	while :; do
		for i in {1..20}; do
			printf %s "$data" >&3
		done
		sleep 0.2
	done
}

setup() {
	local port=()
	[ "$scheme" != podman ] || return 0
	install -D -m 600 <(tidegate daemon --new-key 1) /etc/tidegate/fleet.keys
	write_file
	if [ "$scheme" = spring ]; then
		port=("ExecStartPre=/bin/bash $0 port_up" "ExecStopPost=/bin/ip link delete tg0")
	else
		port_up
	fi
	if [ "$watchdog_s" != 2 ]; then
		mkdir -p /etc/systemd/system/tidegate-daemon.service.d
		printf '[Service]\nWatchdogSec=%ss\n' "$watchdog_s" >/etc/systemd/system/tidegate-daemon.service.d/emulated.conf
		systemctl daemon-reload
	fi
	cat >/etc/systemd/system/backup.service <<-END
		[Service]
		$(printf '%s\n' "${port[@]}")
		ExecStart=/bin/bash $0 flood
	END
}

property() {
	systemctl show --value --property "$1" tidegate-daemon.service
}

limit() {
	tidegate status --json | jq -e ".limits[] | select(.name == \"backup\") | $1" >/dev/null
}

in_force() {
	limit '.state == "in_force"'
}

sharing() {
	tidegate status --json | jq -e '.fleet.groups[0].state == "sharing"' >/dev/null
}

active() {
	[ "$(property ActiveState)" = active ]
}

passed() {
	tidegate status --json | jq '[.limits[] | select(.name == "backup").egress
		| .pass_packets, .mark_packets, .slow_packets] | add'
}

passes_more_than() {
	(($(passed) > $1))
}

# Remembers the daemon that runs now.
daemon=
remember() {
	daemon=$(property MainPID)
	[ "$daemon" != 0 ]
}

same_daemon() {
	[ "$(property MainPID)" = "$daemon" ] && active
}

other_daemon() {
	[ "$(property MainPID)" != 0 ] && ! same_daemon && active
}

# The group's rate holds: what left by the device while a second of traffic passed.
holds() {
	local from to bytes
	from=$(cut -d ' ' -f 1 /proc/uptime) bytes=$(cat /sys/class/net/tg0/statistics/tx_bytes)
	sleep 4
	bytes=$(($(cat /sys/class/net/tg0/statistics/tx_bytes) - bytes)) to=$(cut -d ' ' -f 1 /proc/uptime)
	# A burst of 64 KB, and 5 % more.
	awk -v from="$from" -v to="$to" -v bytes="$bytes" -v rate="$group_bit_s" 'BEGIN {
		may = (to - from) * rate / 8 * 1.05 + 65536
		printf "%d bytes left in %.1f s, at most %d may\n", bytes, to - from, may
		exit bytes > may
	}'
}

# The service is limited by the group, its packets are counted, and its daemon runs.
works() {
	until_true active && until_true in_force && until_true sharing &&
		until_true passes_more_than "$(passed)" && holds
}

# A machine on which nothing has happened yet.
afresh() {
	systemctl stop tidegate-daemon.service backup.service
	systemctl reset-failed
	while mountpoint --quiet /var/lib/tidegate; do umount /var/lib/tidegate; done
	tidegate detach
	rm -rf /var/lib/tidegate/*
	write_file
	systemctl start backup.service && systemctl start tidegate-daemon.service && works && remember
}

applied() {
	tidegate apply "$file"
}

check_boots() {
	# Nobody has started anything; this comes first.
	until_true active && remember && stays same_daemon &&
		systemctl start backup.service && until_true applied && works && same_daemon
}

check_stops() {
	afresh && systemctl stop backup.service && stays same_daemon &&
		systemctl restart tidegate-daemon.service && until_true active && remember && stays same_daemon &&
		systemctl start backup.service && until_true applied && works && same_daemon
}

check_restarts() {
	afresh && systemctl restart backup.service && stays same_daemon && applied && works && same_daemon
}

check_dns() {
	local code=0
	# A name server whose packets are lost, so that every question takes its full time.
	ip link add dns0 type dummy
	ip address add 192.0.2.1/24 dev dns0
	ip link set dns0 up
	cp /etc/resolv.conf /run/resolv.conf
	echo nameserver 192.0.2.53 >/etc/resolv.conf
	afresh && write_file 'peers = ["away.example"]' 'dns = "fleet.example"' &&
		systemctl restart tidegate-daemon.service && works && remember && stays same_daemon || code=1
	cp /run/resolv.conf /etc/resolv.conf
	ip link delete dns0
	return "$code"
}

check_busy() {
	afresh && flock /sys/fs/bpf/tidegate sleep $((watchdog_s * 5 / 2)) && same_daemon && works && same_daemon
}

check_kill() {
	afresh && systemctl kill --signal KILL tidegate-daemon.service && in_force &&
		until_true other_daemon && works
}

was_out_of_memory() {
	journalctl --no-pager --unit tidegate-daemon.service | grep -q oom-kill
}

check_oom() {
	local code=0
	afresh && systemctl set-property --runtime tidegate-daemon.service MemoryMax=1M &&
		until_true was_out_of_memory && stays in_force && holds || code=1
	systemctl set-property --runtime tidegate-daemon.service MemoryMax=infinity
	((code == 0)) && until_true other_daemon && works
}

check_full() {
	afresh && systemctl stop tidegate-daemon.service &&
		mount -t tmpfs -o size=128k,mode=700 tmpfs /var/lib/tidegate &&
		systemctl start tidegate-daemon.service && works && remember || return 1
	fill
	sed -i "s/^lease = .*/lease = \"${lease%s}500ms\"/" "$file"
	# Read again: another group begins, and what it promises cannot be stored.
	systemctl reload tidegate-daemon.service
	stays same_daemon && in_force || return 1
	rm /var/lib/tidegate/fill
	works && same_daemon || return 1
	fill
	systemctl restart --no-block tidegate-daemon.service
	stays in_force && stays in_force || return 1
	rm /var/lib/tidegate/fill
	works
}

check_containers() {
	"$share/podman.sh" "$(command -v tidegate)"
}

# Not a byte is left.
fill() {
	cat /dev/zero >/var/lib/tidegate/fill 2>/dev/null
	sync
}

# What one needs to know of a failure.
tell() {
	systemctl status --no-pager --full --lines 0 tidegate-daemon.service backup.service
	journalctl --no-pager --output short-monotonic --unit tidegate-daemon.service --lines 40
	dmesg | grep -E 'segfault|BUG|Oops' | tail -n 10
	tidegate status
	cat "$file"
}

prefix=unit_$scheme
"$@"
