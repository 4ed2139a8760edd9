# What the checks of the package and of containers send, and how they judge it. Read by their scripts, which give the
# rate in `rate_bit_s`.
#
# The host is 10.98.0.1 on tg0. Its peer, in the network namespace `peer`, is 10.98.0.2 and takes all that is sent to
# port 9. Limits are judged by the bytes that have left by tg0.

rate_bit_s=1000000
# What a limit lets through at once, and what a workload may send before its limit is on.
burst_bytes=65536
start_bytes=65536

# The link to the peer. The kernel sends nothing of its own by it: no ARP, with one address at both ends, and no IPv6.
net_up() {
	local both=(address 02:00:00:00:00:98 arp off)
	ip netns add peer
	ip link add tg0 "${both[@]}" type veth peer name tg1 netns peer "${both[@]}"
	echo 1 >/proc/sys/net/ipv6/conf/tg0/disable_ipv6
	ip address add 10.98.0.1/24 dev tg0
	ip -n peer address add 10.98.0.2/24 dev tg1
	ip -n peer link set lo up
	ip -n peer link set tg1 up
	# Each packet is one on the wire, so that those of a limit and of the device can be compared.
	ip link set tg0 up gso_max_segs 1
}

# To load the programs of a limit takes an emulated machine a minute. What is held must not be let go by then.
be_patient() {
	local unit=/etc/systemd/system/tidegate-agent.service.d
	[ -n "$emulated" ] || return 0
	mkdir -p "$unit"
	printf '[Service]\n%s\n' "WatchdogSec=${deadline_s}s" "TimeoutStartSec=${deadline_s}s" ExecStart= \
		"ExecStart=/usr/bin/tidegate agent --deadline ${deadline_s}s /etc/tidegate" >"$unit/emulated.conf"
}

# The peer takes what comes, and web.service, once it is started, sends to it without an end.
sender_up() {
	net_up
	systemd-run --unit sink ip netns exec peer socat -u TCP-LISTEN:9,reuseaddr,fork OPEN:/dev/null
	# It restarts more often than systemd allows by default.
	cat >/run/systemd/system/web.service <<-END
		[Unit]
		StartLimitIntervalSec=0

		[Service]
		ExecStart=/usr/bin/socat -u OPEN:/dev/zero TCP:10.98.0.2:9
		Restart=always
	END
	systemctl daemon-reload
}

uptime_s() {
	cut -d ' ' -f 1 /proc/uptime
}

sent() {
	cat "/sys/class/net/tg0/statistics/tx_${1:-bytes}"
}

arrived() {
	cat /sys/class/net/tg0/statistics/rx_bytes
}

# Bytes and packets that a limit has counted and let through.
counted() {
	tidegate status --json | jq -r "[.limits[] | select(.name == \"$1\").egress]
		| map(.pass_bytes + .mark_bytes + .slow_bytes), map(.pass_packets + .mark_packets + .slow_packets)
		| add // 0" | xargs
}

# From here packets count, and those of a limit, if one is named.
mark_s= mark_bytes= mark_packets= mark_counted_bytes= mark_counted_packets=
mark() {
	stop_traffic
	mark_s=$(uptime_s) mark_bytes=$(sent) mark_packets=$(sent packets)
	[ -z "${1:-}" ] || read -r mark_counted_bytes mark_counted_packets <<<"$(counted "$1")"
	go_on
}

# Between these two nothing leaves by tg0, and no limit counts: what has no route reaches neither.
stop_traffic() {
	ip route add unreachable 10.98.0.2
}

go_on() {
	ip route delete unreachable 10.98.0.2
}

sent_more_than() {
	(($(sent) > $1))
}

# Traffic goes on.
flows() {
	until_true sent_more_than $(($(sent) + burst_bytes))
}

# Since the mark no more has been sent than the limit allows, and what each of a number of starts may send.
held() {
	within $(($(sent) - mark_bytes)) "$mark_s" $((${1:-0} * start_bytes))
}

# So many bytes, since a time, are no more than the limit allows: its rate with 5 %, a burst, and these besides.
within() {
	awk -v bytes="$1" -v from="$2" -v to="$(uptime_s)" -v rate="$rate_bit_s" -v extra="$((burst_bytes + $3))" 'BEGIN {
		may = (to - from) * rate / 8 * 1.05 + extra
		printf "%d bytes passed in %.1f s, at most %d may\n", bytes, to - from, may
		exit bytes > may || bytes == 0
	}'
}

# Since the mark of this limit no more bytes have left without it than each of a number of starts may send. The limit
# and the device count the same bytes of a packet.
in_time() {
	local name=$1 starts=$2 bytes packets
	stop_traffic
	read -r bytes packets <<<"$(counted "$name")"
	bytes=$(($(sent) - mark_bytes - (bytes - mark_counted_bytes)))
	packets=$(($(sent packets) - mark_packets - (packets - mark_counted_packets)))
	go_on
	echo "$bytes bytes in $packets packets left before \`$name\` was on again, in $starts starts"
	((bytes <= starts * start_bytes))
}

# A limit of the store, and one of the agent's report.
limit() {
	tidegate status --json | jq -e ".limits[] | select(.name == \"$1\") | $2" >/dev/null
}

in_force() {
	limit "$1" '.state == "in_force"'
}

# Whether the agent says a state of a limit, and a reason that holds the rest.
says() {
	tidegate status --json | jq -e --arg name "$1" --arg state "$2" --arg why "${3:-}" '.agent.limits[]
		| select(.name == $name and .state == $state and ((.reason // "") | contains($why)))' >/dev/null
}

# A limit of a file.
rule() {
	printf '[[limit]]\nname = "%s"\nscope = { %s }\negress = "%s"\n' "$1" "$2" "${3:-${rate_bit_s}bit}"
	printf '%s\n' "${@:4}"
}

property() {
	systemctl show --value --property "$1" "${2:-tidegate-agent.service}"
}

active() {
	[ "$(property ActiveState)" = active ]
}

# Another agent than that one runs.
other_agent() {
	active && [ "$(property MainPID)" != "$1" ]
}

# What one needs to know of a failure.
tell() {
	cat "$share/prepare.log" 2>/dev/null
	systemctl status --no-pager --full --lines 0 tidegate-agent.service
	journalctl --no-pager --output short-monotonic --unit tidegate-agent.service --lines 60
	systemctl status --no-pager --full --lines 20 web.service
	grep -s . /sys/fs/cgroup/system.slice/web.service/{cgroup.events,cgroup.procs,memory.events}
	dmesg | grep -E 'segfault|BUG|Oops' | tail -n 10
	tidegate status
	cat /etc/tidegate/*.toml
}
