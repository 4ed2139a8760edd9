#!/usr/bin/env bash
# Inside a machine with systemd: the life of the .rpm. The machine is Debian's: rpm does not see its packages, so
# dependencies are not looked at.
#
#   install   its agent runs, and limits a service
#   upgrade   the next release, under traffic: the limit holds, another agent runs, a changed file stays
#   remove    no limit, no unit and no file of it stays
set -uo pipefail

here=${BASH_SOURCE%/*}
source "$here/checks.sh"
source "$here/traffic.sh"

checks=(install upgrade remove)
prefix=rpm

setup() {
	:
}

# What may not be left: files, programs in the kernel, units.
left() {
	find / -xdev \( -path /proc -o -path /root -o -path /var/log \) -prune -o -name '*tidegate*' -print
	find /run /sys/fs/bpf -name '*tidegate*' -not -path '/run/checks/*' -not -path '/run/systemd/*'
	systemctl list-units --all --plain --no-legend 'tidegate*'
}

check_install() {
	left >/run/before
	rpm --install --nodeps /root/tidegate-1.rpm && systemctl is-enabled tidegate-agent.service || return 1
	[ "$(readlink -f /usr/libexec/cni/tidegate-cni)" = /usr/bin/tidegate ] || return 1
	# As on every system with rpm, who installs a package starts its services.
	systemctl start tidegate-agent
	rule web 'unit = "web.service"' >/etc/tidegate/web.toml
	echo "# changed" >>/etc/tidegate/limits.toml
	systemctl start web && until_true in_force web && mark web && flows && held
}

check_upgrade() {
	local agent
	agent=$(property MainPID)
	until_true in_force web && mark web && rpm --upgrade --nodeps /root/tidegate-2.rpm || return 1
	in_force web && flows && until_true other_agent "$agent" && in_force web || return 1
	[ "$(tail -n 1 /etc/tidegate/limits.toml)" = "# changed" ] && [ "$(rpm -q --queryformat '%{RELEASE}' tidegate)" = 2 ] &&
		systemctl restart web && flows && until_true in_force web && held 1 && in_time web 1
}

check_remove() {
	rpm --erase tidegate || return 1
	hash -r
	rm -rf /etc/tidegate
	systemctl reset-failed
	left >/run/after
	diff /run/before /run/after && ! command -v tidegate
}

if [ "${1:-}" = run ]; then
	be_patient
	sender_up >"$share/prepare.log" 2>&1
fi
"$@"
