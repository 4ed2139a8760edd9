#!/usr/bin/env bash
# Inside a machine with systemd: the life of the package, as users have it.
#
#   install   apt installs the .deb, and its agent runs with the privileges that it needs
#   restarts  a limited service restarts under downloads; its limit is on again each time
#   killed    the agent is killed; the limit holds, and the next agent takes over
#   stopped   the agent is stopped and started
#   hangs     a signal stops the agent; the limit holds, and systemd's watchdog has another agent take over
#   full      the agent's directory is full while it restarts
#   oom       the agent has no memory; the limit holds, and the next agent takes over
#   service   the limited service is killed, has no memory, stops and starts; its limit is on again each time
#   page      tidegate-web.service serves its socket, is killed, and is stopped
#   user      what runs in a user's slice is limited
#   run       in a login session `tidegate run` asks systemd for a scope and the agent for its limit; who is not in the
#             group is told so, and so is who finds no agent. A limit ends with its command, also while no agent runs
#   upgrade   a later version with another default file is unpacked, and configured afterwards, under downloads
#
# The same disk in another boot:
#
#   reboot    limits are in force before the network is up, and hold from the first byte; that of a device is once it is there
#   purge     apt purges it; the host is as it was before
#
# The limited service is web.service, from which a client in the peer's namespace downloads without an end.
set -uo pipefail

here=${BASH_SOURCE%/*}
source "$here/checks.sh"
source "$here/traffic.sh"

checks=(install restarts killed stopped hangs full oom service page user run upgrade)
[ "$word" != reboot ] || checks=(reboot purge)
prefix=$word
# Where these scripts are while the machine boots, and what the host was before.
kept=/usr/local/lib/checks
restarts=20
user=anna

# Files (units are files, too), users, network and programs of a host.
host() {
	# Without logs, caches, and what apt and systemd note when.
	find / -xdev \( -path /run -o -path /tmp -o -path /var/tmp -o -path /var/log -o -path /var/cache \
		-o -path /var/lib/apt -o -path /var/lib/systemd \) -prune -o -print |
		grep -v -E '^/root/(before|after)$|/var/lib/dpkg/[^/]*$' | sort
	find /var/lib/systemd -name '*tidegate*'
	getent passwd
	getent group
	tc qdisc show
	ls -A /sys/fs/bpf
	# Those of systemd come and go with its units.
	bpftool --json prog show |
		jq -r '.[] | select(.type != "cgroup_device") | .name // "" | select(startswith("sd_") | not)'
}

setup() {
	if [ ! -e "$kept/main.sh" ]; then
		mkdir -p "$kept"
		cp "$here"/*.sh "$kept/"
		unit net "Before=network.target" "After=network-pre.target" "Wants=network-pre.target" \
			"DefaultDependencies=no" "[Service]" "Type=oneshot" "RemainAfterExit=yes" \
			"ExecStart=/bin/bash $kept/main.sh network"
		# It restarts more often than systemd allows by default.
		unit web "After=net.service" "StartLimitIntervalSec=0" "[Service]" \
			"ExecStart=/usr/bin/socat -u OPEN:/dev/zero TCP-LISTEN:80,reuseaddr,fork"
		unit client "After=net.service" "[Service]" "ExecStart=/bin/bash $kept/main.sh downloads"
		unit sink "After=net.service" "[Service]" \
			"ExecStart=/bin/ip netns exec peer socat -u TCP-LISTEN:9,reuseaddr,fork OPEN:/dev/null"
		be_patient
		useradd --create-home "$user"
		mkdir -p /var/lib/systemd/linger
		touch "/var/lib/systemd/linger/$user"
		systemctl daemon-reload
		systemctl enable net web client sink
		systemctl start net
		host >/root/before
	fi
}

# A unit, with its sections from the rest of [Unit] on.
unit() {
	{
		printf '[Unit]\n'
		printf '%s\n' "${@:2}"
		printf '[Install]\nWantedBy=multi-user.target\n'
	} >"/etc/systemd/system/$1.service"
}

# At boot, once networks may come up.
network() {
	cp /run/tidegate/agent.json /run/at-network.json
	uptime_s >/run/at-network
	net_up
}

downloads() {
	while :; do
		ip netns exec peer socat -u TCP:10.98.0.1:80 OPEN:/dev/null
		sleep 0.2
	done
}

# The download goes on, within the limit.
works() {
	until_true active && until_true in_force web && flows
}

check_install() {
	apt-get install --yes /root/tidegate-1.deb && systemctl is-enabled tidegate-agent.service && active || return 1
	[ "$(readlink -f /usr/lib/cni/tidegate-cni)" = /usr/bin/tidegate ] || return 1
	echo "# changed" >>/etc/tidegate/limits.toml
	rule web 'unit = "web.service"' >/etc/tidegate/web.toml
	echo "[[limit]" >/etc/tidegate/wrong.toml
	if systemctl reload tidegate-agent; then return 1; fi
	rm /etc/tidegate/wrong.toml
	systemctl reload tidegate-agent && active || return 1
	until_true says web waiting 'no unit `web.service` runs' || return 1
	systemctl start sink web && until_true in_force web && mark && systemctl start client && flows && held
}

check_restarts() {
	local i
	works && mark web || return 1
	for ((i = 0; i < restarts; i++)); do
		systemctl restart web && flows || return 1
	done
	held "$restarts" && in_time web "$restarts" && in_force web
}

# The agent that runs has written its report.
reports() {
	[ "$(jq .pid /run/tidegate/agent.json)" = "$(property MainPID)" ]
}

check_killed() {
	local agent
	agent=$(property MainPID)
	works && mark && systemctl kill --signal KILL tidegate-agent && in_force web && flows &&
		until_true other_agent "$agent" && systemctl restart web && flows && in_force web && held 1
}

check_stopped() {
	works && mark && systemctl stop tidegate-agent && in_force web && flows && ! active &&
		systemctl start tidegate-agent && in_force web && systemctl restart web && flows && held 1 && in_force web
}

check_hangs() {
	local agent code=0 unit=/run/systemd/system/tidegate-agent.service.d
	# As shipped: an emulated machine has another watchdog, which would take too long.
	mkdir -p "$unit"
	printf '[Service]\nWatchdogSec=60s\n' >"$unit/hangs.conf"
	systemctl daemon-reload && systemctl restart tidegate-agent && works && mark web || code=1
	agent=$(property MainPID)
	((code == 0)) && kill -STOP "$agent" && in_force web && flows && until_true other_agent "$agent" && in_force web &&
		flows && held && in_time web 1 || code=1
	rm "$unit/hangs.conf"
	systemctl daemon-reload
	# The next one decides as ever.
	((code == 0)) && systemctl restart web && flows && until_true in_force web
}

check_full() {
	local code=0
	works && mark web && systemctl stop tidegate-agent || return 1
	mount -t tmpfs -o size=256k,mode=755 tmpfs /run/tidegate
	systemctl start tidegate-agent && until_true says web in_force || code=1
	cat /dev/zero >/run/tidegate/fill 2>/dev/null
	# The next one can write nothing, and the limit comes back all the same.
	systemctl restart tidegate-agent && in_force web && flows && ! reports && systemctl restart web && flows &&
		until_true in_force web || code=1
	rm /run/tidegate/fill
	# What it could not write, it writes now.
	((code)) || until_true reports || code=1
	systemctl stop tidegate-agent
	umount /run/tidegate
	systemctl start tidegate-agent
	((code == 0)) && until_true says web in_force && held 1 && in_time web 1
}

# A unit has been killed for want of memory.
was_out_of_memory() {
	journalctl --no-pager --unit "$1" | grep -q 'oom-kill'
}

check_oom() {
	local agent code=0
	works && mark web || return 1
	agent=$(property MainPID)
	systemctl set-property --runtime tidegate-agent MemoryMax=1M
	until_true was_out_of_memory tidegate-agent && in_force web && flows && held || code=1
	systemctl set-property --runtime tidegate-agent MemoryMax=infinity
	((code == 0)) && until_true other_agent "$agent" && in_force web && systemctl restart web && flows &&
		until_true in_force web && held 1 && in_time web 1
}

check_service() {
	local code=0
	works && mark web || return 1
	# It does not restart by itself.
	systemctl kill --signal KILL web && systemctl stop web && systemctl start web && flows || return 1
	systemctl set-property --runtime web MemoryMax=256K
	# Looked at before its memory is given back: for that systemd makes an empty cgroup.
	until_true was_out_of_memory web && until_true says web waiting || code=1
	systemctl set-property --runtime web MemoryMax=infinity
	((code == 0)) && systemctl start web && flows && until_true in_force web && systemctl stop web &&
		until_true says web waiting && systemctl start web && flows && until_true in_force web &&
		held 3 && in_time web 3
}

# An answer of the page.
page() {
	printf 'GET %s HTTP/1.0\r\nhost: localhost\r\n\r\n' "$1" | socat -t 60 - UNIX-CONNECT:/run/tidegate/web.sock
}

page_has() {
	page "$1" 2>/dev/null | grep -q "$2"
}

# Another process of the page than that one runs.
other_page() {
	[ "$(property MainPID tidegate-web)" != 0 ] && [ "$(property MainPID tidegate-web)" != "$1" ]
}

check_page() {
	local main server code=0 serves=(page_has /metrics '^tidegate_limit_in_force{limit="web"} 1$')
	works && systemctl start tidegate-web && until_true "${serves[@]}" || code=1
	main=$(property MainPID tidegate-web)
	server=$(cat "/proc/$main/task/$main/children")
	grep -E '^(Uid|CapEff|CapPrm):' "/proc/${server% }/status"
	grep -q '^CapEff:.0000000000000000$' "/proc/${server% }/status" || code=1
	# What it leaves behind keeps the next one from nothing.
	((code)) || systemctl kill --kill-whom main --signal KILL tidegate-web && until_true other_page "$main" &&
		until_true "${serves[@]}" || code=1
	systemctl stop tidegate-web
	[ "$(property Result tidegate-web)" = success ] && [ ! -e /run/tidegate/web.sock ] && in_force web && ((code == 0))
}

check_user() {
	local code=0 id
	id=$(id -u "$user")
	rule user "user = \"$user\"" >/etc/tidegate/user.toml
	systemctl stop client web
	# At the next boot it starts by itself.
	systemctl start "user@$id.service"
	until_true says user in_force && mark || code=1
	runuser -u "$user" -- env XDG_RUNTIME_DIR="/run/user/$id" systemd-run --user --unit flood \
		socat -u OPEN:/dev/zero TCP:10.98.0.2:9
	((code)) || flows && flows && held || code=1
	# A session of the user's manager comes and goes, and the slice with it.
	systemctl stop "user@$id.service" "user-$id.slice"
	((code)) || until_true says user waiting || code=1
	systemctl start "user@$id.service"
	((code)) || until_true says user in_force || code=1
	rm /etc/tidegate/user.toml
	systemctl start web client
	return "$code"
}

# A command of the user's in a login session: its cgroup is a scope that root owns.
as_login() {
	su --login "$user" --command "$*"
}

# What the command of a session says when it cannot be limited. It is not started.
is_refused() {
	local said
	said=$(as_login "cat /proc/self/cgroup; tidegate run --egress ${rate_bit_s}bit -- touch started" 2>&1) && return 1
	echo "$said"
	[[ $said = *"/session-"*"$1"*"the command was not started"* ]] && [ ! -e "/home/$user/started" ]
}

# The limit of the user's command; none if there is none.
run_limit() {
	tidegate status --json | jq -r '[.limits[] | select(.name | startswith("tidegate-run-"))][0].name // empty'
}

has_run_limit() {
	[ -n "$(run_limit)" ]
}

has_no_run_limit() {
	[ -z "$(run_limit)" ]
}

# Its command sends in the background. Its limit is on from the first byte, in a cgroup below the user's manager.
starts_run() {
	local name
	mark
	as_login "exec tidegate run --stats --json --egress ${rate_bit_s}bit -- \
		socat -u OPEN:/dev/zero TCP:10.98.0.2:9" >/run/run.log 2>&1 &
	until_true has_run_limit && name=$(run_limit) && until_true in_force "$name" && flows && flows && held || return 1
	limit "$name" ".cgroup | contains(\"user@$(id -u "$user").service/\")"
}

check_run() {
	local code=0 agent
	systemctl stop client web
	is_refused "only root and members of group" || code=1
	usermod --append --groups tidegate "$user"
	((code)) || starts_run || code=1
	# It ends, and says what the limit did.
	pkill --exact --uid "$user" socat
	((code)) || until_true has_no_run_limit && grep '^{' /run/run.log | jq -e '.exit_code == 143' || code=1
	# The agent dies first: the limit stays, and the next agent takes it off when the command has ended.
	agent=$(property MainPID)
	((code)) || starts_run && systemctl kill --signal KILL tidegate-agent && has_run_limit && flows && held &&
		until_true other_agent "$agent" && has_run_limit && flows && held || code=1
	pkill --exact --uid "$user" socat
	((code)) || until_true has_no_run_limit || code=1
	systemctl stop tidegate-agent
	((code)) || is_refused "have the agent do it" || code=1
	systemctl start tidegate-agent
	cat /run/run.log
	gpasswd --delete "$user" tidegate
	systemctl start web client
	return "$code"
}

# Says when the limit is not in force, until the file is removed.
watches() {
	while [ -e "$1" ]; do
		in_force web || echo "not in force after $(uptime_s) s" >>"$1"
	done
}

check_upgrade() {
	local watch=/run/watch code=0 agent
	agent=$(property MainPID)
	works && mark || return 1
	: >"$watch"
	watches "$watch" &
	# One that stops half way.
	dpkg --unpack /root/tidegate-2.deb && in_force web && flows && [ "$(property MainPID)" = "$agent" ] &&
		systemctl restart web && flows && until_true in_force web || code=1
	: >"$watch"
	# Nobody answers which of the default files it shall be, and it stays half installed.
	((code)) || ! dpkg --configure --pending && in_force web && flows || code=1
	((code)) || dpkg --force-confold --configure --pending && other_agent "$agent" || code=1
	((code)) || [ "$(tail -n 1 /etc/tidegate/limits.toml)" = "# changed" ] || code=1
	((code)) || in_force web && flows && held 1 || code=1
	cat "$watch"
	[ ! -s "$watch" ] || code=1
	rm "$watch"
	wait
	dpkg-query --show tidegate | grep later && ((code == 0)) || return 1
	# For the next boot: the whole slice, and the service inside. The device is made after the agent is ready.
	{
		rule system 'slice = "system.slice"'
		rule web 'unit = "web.service"'
		rule link 'dev = "tg0"' 100mbit
	} >/etc/tidegate/web.toml
	until_true in_force system && sync
}

stamp() {
	property ActiveEnterTimestampMonotonic "$1"
}

check_reboot() {
	local agent before
	until_true active && until_true test -e /run/at-network || return 1
	agent=$(stamp tidegate-agent.service) before=$(stamp network-pre.target)
	echo "the agent is ready after $agent us, network-pre.target is reached after $before us"
	((0 < agent && agent < before)) || return 1
	jq -e '.limits[] | select(.name == "system" and .state == "in_force")' /run/at-network.json || return 1
	# All that was ever sent by this device.
	mark_s=$(cat /run/at-network) mark_bytes=0
	until_true in_force web && flows && held && in_force system || return 1
	until_true in_force link && mark link && flows && counts link
}

# A limit counts what leaves from the mark on.
counts() {
	local bytes
	read -r bytes _ <<<"$(counted "$1")"
	echo "limit $1 has counted $((bytes - mark_counted_bytes)) bytes since the mark"
	((bytes > mark_counted_bytes))
}

check_purge() {
	works && apt-get purge --yes tidegate || return 1
	hash -r
	host >/root/after && diff /root/before /root/after && ! command -v tidegate
}

"$@"
